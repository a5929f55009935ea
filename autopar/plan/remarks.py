"""What people should know about a plan: ranks that repeat work, statistics that are global."""

from __future__ import annotations

import math

from autopar.graph.ir import Graph
from autopar.plan.stages import Stages
from autopar.plan.strategies import Constraints
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph
from autopar.units import counted

_BATCH_NORMS = frozenset(
    {"aten._native_batch_norm_legit_functional.default", "aten.batch_norm.default"}
)


def remarks(
    sharded: ShardedGraph, mesh: Mesh, owner: tuple[str, ...], constraints: Constraints
) -> tuple[str, ...]:
    """Sentences about a sharded graph.

    Args:
        sharded: The graph and its placements.
        mesh: The user's mesh.
        owner: Axis of `mesh` that each sub-axis of ``sharded.mesh`` belongs to.
        constraints: What each axis should split.
    """
    batch = "each microbatch" if constraints.pipeline.microbatches > 1 else "the global batch"
    return (*_idle(sharded, mesh, owner, constraints), *_statistics(sharded, batch))


def stage_remarks(graph: Graph, stages: Stages) -> tuple[str, ...]:
    """A sentence about every stage, if there are several: its modules, ops and parameters."""
    if stages.count == 1:
        return ()
    found = []
    for stage in range(stages.count):
        own = [
            graph.nodes[i]
            for i in stages.nodes[stage]
            if stages.stage_of[graph.nodes[i].name] == stage
        ]
        names = stages.inputs_of(stage, graph, "parameter")
        elements = sum(graph.spec(name).numel for name in names)
        modules = [node.module for node in own if node.module]
        span = " to ".join(dict.fromkeys((modules[0], modules[-1]))) if modules else "root"
        tied = sum(name in stages.shared for name in names)
        also = f", {tied} of them in other stages too" if tied else ""
        what = f"{span}, {counted(len(own), 'op')}" if own else "no ops"
        found.append(
            f"stage {stage}: {what}, {counted(len(names), 'parameter')} "
            f"of {counted(elements, 'element')}{also}"
        )
    return tuple(found)


def _idle(
    sharded: ShardedGraph, mesh: Mesh, owner: tuple[str, ...], constraints: Constraints
) -> list[str]:
    """Axes, or parts of axes, along which no op is split."""
    used = [
        any(choices[index].unit is not None for choices in sharded.choices)
        for index in range(len(owner))
    ]
    found = []
    for axis, size in mesh.axes:
        mine = [index for index, name in enumerate(owner) if name == axis]
        parts = math.prod(sharded.mesh.shape[index] for index in mine if used[index])
        if parts == size:
            continue
        wanted = constraints.names(axis)
        sizes: dict[str, int] = {}
        for units in sharded.factors.units:
            for unit in units:
                if unit.base in wanted or unit.name in wanted:
                    sizes[unit.name] = max(unit.size, sizes.get(unit.name, 0))
        parts_in_time = constraints.pipeline.microbatches
        later = f" in {counted(parts_in_time, 'microbatch')}" if parts_in_time > 1 else ""
        has = ", ".join(
            f"{name} of size {count}{later if name.startswith('batch') else ''}"
            for name, count in sizes.items()
        )
        reason = f"the model has {has}" if has else f"the model has none of {', '.join(wanted)}"
        if not wanted:
            reason = "nothing is put on it"
        if parts == 1:
            text = (
                f"axis {axis} splits nothing over its "
                f"{counted(size, 'rank')} ({reason}): all do the same"
            )
        else:
            text = (
                f"axis {axis} splits over {parts} of its {size} ranks ({reason}): every "
                f"{size // parts} do the same"
            )
        found.append(text)
    return found


def _statistics(sharded: ShardedGraph, batch: str) -> list[str]:
    """Batch norms whose batch is split."""
    modules = []
    for node, rule, choices in zip(
        sharded.graph.nodes, sharded.factors.rules, sharded.choices, strict=True
    ):
        if node.op in _BATCH_NORMS and rule is not None:
            split = {choice.unit.letter for choice in choices if choice.unit is not None}
            if any(rule.letter(name).special for name in split):
                modules.append(node.module or "the root module")
    if not modules:
        return []
    names = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
    return [f"batch statistics of {names} are those of {batch}"]
