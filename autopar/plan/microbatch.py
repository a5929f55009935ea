"""Which graphs can be computed microbatch by microbatch, and what that changes.

Microbatches are the first axis of a sharded graph's mesh, an axis in time. A tensor that is
Partial over it is accumulated; what is Shard over it is only there in its own time, so that no
step may gather or exchange along it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.assign import assign
from autopar.plan.keys import op_keys
from autopar.plan.stages import input_only
from autopar.plan.strategies import Constraints
from autopar.sharding.choices import Choices
from autopar.sharding.factors import Factors
from autopar.sharding.mesh import MICROBATCH, Mesh
from autopar.sharding.placement import Pair
from autopar.sharding.reshard import Step, plan_steps
from autopar.sharding.sharded import ShardedGraph, shard_graph
from autopar.units import counted

_HARMLESS = ("slice", "mask", "all_reduce")


def has_time(sharded: ShardedGraph) -> bool:
    """Whether the graph is computed microbatch by microbatch."""
    return sharded.mesh.names[:1] == (MICROBATCH,)


def _steps(have: Pair, want: Pair, gradient: bool) -> Iterator[Step]:
    """Steps along the axis in time of one use, forward and backward."""
    # Even where this axis keeps its placement, a step on another may have to clear the way over it.
    if have.forward != want.forward:
        yield from (s for s in plan_steps(have.forward, want.forward) if 0 in s.axes)
    if gradient and have.gradient != want.gradient:
        yield from (s for s in plan_steps(want.gradient, have.gradient) if 0 in s.axes)


def _uses(sharded: ShardedGraph) -> Iterator[tuple[int, str, Step]]:
    """Node, operand and step of every step along the axis in time."""
    pairs = sharded.pairs()
    # By identity, since alike calls share their pairs, and these are slow to compare.
    known: dict[tuple[int, int, bool], tuple[Step, ...]] = {}
    for index, (node, call) in enumerate(zip(sharded.graph.nodes, sharded.calls, strict=True)):
        for name, want in zip(node.operands, call.operands, strict=True):
            have, trained = pairs[name], sharded.graph.spec(name).requires_grad
            key = (id(have), id(want), trained)
            if key not in known:
                known[key] = tuple(_steps(have, want, trained))
            for step in known[key]:
                yield index, name, step


def choose_in_time(
    graph: Graph, factors: Factors, fine: Mesh, owner: tuple[str, ...], constraints: Constraints
) -> tuple[Choices, ...]:
    """`assign`, with what only depends on inputs computed whole where parts would be gathered.

    Args:
        graph: The graph.
        factors: Its factors.
        fine: Mesh of sub-axes, the axis in time first if there is one.
        owner: User axis of every sub-axis.
        constraints: What each axis splits.
    """
    return place_in_time(graph, factors, fine, owner, constraints).choices


def place_in_time(
    graph: Graph, factors: Factors, fine: Mesh, owner: tuple[str, ...], constraints: Constraints
) -> ShardedGraph:
    """The graph under the choices of `choose_in_time`, parameters stored as they are used."""
    choices = assign(graph, factors, fine, owner, constraints)
    if owner[:1] != (MICROBATCH,):
        return shard_graph(graph, factors, fine, choices)
    free = input_only(graph)
    makers = {value.name: i for i in free for value in graph.nodes[i].outputs}
    whole: set[int] = set()
    while True:
        sharded = shard_graph(graph, factors, fine, choices)
        queue = [
            makers[name]
            for _, name, step in _uses(sharded)
            if step.kind not in _HARMLESS and name in makers and makers[name] not in whole
        ]
        if not queue:
            return sharded
        while queue:
            index = queue.pop()
            if index not in whole:
                whole.add(index)
                queue += [makers[n] for n in graph.nodes[index].operands if n in makers]
        choices = assign(graph, factors, fine, owner, constraints, frozenset(whole))


def microbatch_obstacles(sharded: ShardedGraph) -> list[tuple[str, str]]:
    """Why a graph cannot be computed microbatch by microbatch.

    Args:
        sharded: A graph whose mesh begins with the axis in time.

    Returns:
        Op key and reason of every obstacle, empty if there is none.
    """
    if not has_time(sharded):
        return []
    graph = sharded.graph
    keys = op_keys(graph)
    found: dict[str, str] = {}
    for index, name, step in _uses(sharded):
        if step.kind in _HARMLESS:
            continue
        node = graph.nodes[index]
        shape = list(graph.spec(name).shape)
        why = "needs all samples at once" if step.kind == "all_gather" else "mixes samples"
        if sharded.factors.rules[index] is None:
            why = "has no sharding rule, so that it needs all samples at once"
        text = f"{node.op} {why}: its operand of shape {shape} is split by microbatches"
        found.setdefault(keys[index], f"{text} ({step.text(sharded.mesh.names)})")
    return list(found.items())


def check_microbatches(sharded: ShardedGraph) -> None:
    """Refuse microbatches that divide no batch, or ops that need the whole one.

    Raises:
        PlanError: Names module and op.
    """
    if not has_time(sharded):
        return
    count = sharded.mesh.shape[0]
    check_batch(sharded.graph, sharded.factors, count)
    obstacles = microbatch_obstacles(sharded)
    if obstacles:
        key, why = obstacles[0]
        node = sharded.graph.nodes[op_keys(sharded.graph).index(key)]
        more = f" (and {counted(len(obstacles) - 1, 'more op')})" if len(obstacles) > 1 else ""
        raise PlanError(
            f"the batch cannot be computed in {counted(count, 'microbatch')}: {why}{more}",
            expected="ops that treat samples one by one, or sum over them",
            where=f"module {node.module or '(root)'}, {key} {node.source}".rstrip(),
            fix="plan with microbatches=1",
        )


def batch_sizes(graph: Graph, factors: Factors) -> Counter[int]:
    """How often ops that train have a factor ``batch`` of each size."""
    return Counter(
        unit.size
        for node, units in zip(graph.nodes, factors.units, strict=True)
        if any(value.spec.requires_grad for value in node.outputs)
        for unit in units
        if unit.name in ("batch", "batch.0")
    )


def check_batch(
    graph: Graph, factors: Factors, count: int, where: str = "constraints['microbatches']"
) -> None:
    """Refuse a batch that does not divide into `count` microbatches.

    Raises:
        PlanError: Says which numbers would do.
    """
    sizes = batch_sizes(graph, factors)
    if not sizes:
        raise PlanError(
            f"the batch cannot be computed in {counted(count, 'microbatch')}: "
            "no op of the model treats "
            "samples one by one",
            expected="inputs with a batch dim",
            where=where,
            fix="plan with microbatches=1",
        )
    for size in sorted(sizes, reverse=True):
        if size % count:
            fitting = [n for n in range(size, 0, -1) if size % n == 0]
            near = sorted(fitting, key=lambda n: (abs(n - count), -n))[:2]
            raise PlanError(
                f"global batch {size} does not divide into {counted(count, 'microbatch')}",
                expected=f"a divisor of {size}",
                fix="use " + " or ".join(map(str, near)) + ", or another batch",
                where=where,
            )


def microbatch_notes(sharded: ShardedGraph) -> tuple[str, ...]:
    """What is computed per microbatch though it is a sum over the batch.

    Sums over inputs alone are exact: they are made before the first microbatch.
    """
    if not has_time(sharded):
        return ()
    keys = op_keys(sharded.graph)
    makers = {
        value.name: index
        for index, node in enumerate(sharded.graph.nodes)
        for value in node.outputs
    }
    exact = input_only(sharded.graph)
    found: dict[str, None] = {}
    for index, name, step in _uses(sharded):
        if step.kind == "all_reduce" and makers.get(name) not in exact:
            found[keys[makers.get(name, index)]] = None
    for index, node in enumerate(sharded.graph.nodes):
        rule = sharded.factors.rules[index]
        unit = sharded.choices[index][0].unit
        sums = node.op in STATISTICS and rule is not None and unit is not None
        if sums and rule is not None and unit is not None and rule.letter(unit.letter).special:
            found[keys[index]] = None
    if not found:
        return ()
    nodes = {key: sharded.graph.nodes[index] for index, key in enumerate(keys)}
    shown = [f"{key} {nodes[key].source}".rstrip() for key in list(found)[:3]]
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return (
        f"computed per microbatch: {', '.join(shown)}{more}; what follows from these, the loss "
        "too, is that of gradient accumulation (the mean over microbatches), not of the whole "
        "batch",
    )


STATISTICS = frozenset(
    {"aten._native_batch_norm_legit_functional.default", "aten.batch_norm.default"}
)
"""Ops that sum over the batch inside."""
