"""Make a failing plan small: replicate whatever does not matter (Zeller's delta debugging)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from autopar.plan.build import op_keys
from autopar.plan.parts import ZeroPlan
from autopar.sharding.choices import REPLICATED, Choices, options
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import (
    REPLICATE,
    Placements,
    Shard,
    format_placements,
    parse_placements,
)
from autopar.sharding.sharded import ShardedGraph, shard_graph
from tests.distributed.fuzz import NO_ZERO, Difference, State, run, solo
from tests.distributed.fuzz_models import Subject, subject

MAX_RUNS = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan that differs from one device.

    Attributes:
        subject: The model.
        sharded: The plan.
        want: What one device has.
        thorough: Whether it has to be run thoroughly to fail.
        programs: Whether it has to run as explicit programs.
        zero: What of the ranks hold once.
    """

    subject: Subject
    sharded: ShardedGraph
    want: State
    thorough: bool = False
    programs: bool = False
    zero: ZeroPlan = NO_ZERO

    def fails(self) -> list[Difference]:
        """The differences."""
        return run(
            self.subject,
            self.sharded,
            self.want,
            thorough=self.thorough,
            programs=self.programs,
            zero=self.zero,
        )[0]

    def with_parts(self, choices: tuple[Choices, ...], stored: Mapping[str, Placements]) -> Case:
        """The same with other choices and storage."""
        old = self.sharded
        sharded = shard_graph(old.graph, old.factors, old.mesh, choices, dict(stored))
        return replace(self, sharded=sharded)

    def stored(self) -> dict[str, Placements]:
        """How parameters are held."""
        return {
            item.value.name: self.sharded.inputs[item.value.name].forward
            for item in self.sharded.graph.parameters()
        }


Slot = tuple[str, int, int]  # ("op", index, axis) or ("parameter", index, axis)


def _slots(case: Case) -> list[Slot]:
    """Everything that is not replicated."""
    found: list[Slot] = []
    for index, picked in enumerate(case.sharded.choices):
        found += [("op", index, axis) for axis, c in enumerate(picked) if c != REPLICATED]
    for index, placements in enumerate(case.stored().values()):
        found += [
            ("parameter", index, axis)
            for axis, placement in enumerate(placements)
            if isinstance(placement, Shard)
        ]
    return found


def _without(case: Case, slots: list[Slot]) -> Case:
    choices = [list(picked) for picked in case.sharded.choices]
    stored = {name: list(placements) for name, placements in case.stored().items()}
    names = list(stored)
    for kind, index, axis in slots:
        if kind == "op":
            choices[index][axis] = REPLICATED
        else:
            stored[names[index]][axis] = REPLICATE
    return case.with_parts(
        tuple(tuple(picked) for picked in choices),
        {name: tuple(placements) for name, placements in stored.items()},
    )


def smallest(case: Case) -> Case:
    """The case with everything replicated that is not needed to fail."""
    slots, width, runs = _slots(case), 0, 0
    width = max(1, len(slots) // 2)
    while slots and runs < MAX_RUNS:
        start, shrunk = 0, False
        while start < len(slots) and runs < MAX_RUNS:
            part = slots[start : start + width]
            trial = _without(case, part)
            runs += 1
            if trial.fails():
                case, shrunk = trial, True
                slots = slots[:start] + slots[start + width :]
            else:
                start += width
        if width == 1 and not shrunk:
            break
        width = max(1, width // 2)
    return case


def shrink(case: Case) -> str:
    """A report: what differs in the smallest failing plan, and code that runs it again."""
    small = smallest(case)
    found = small.fails() or case.fails()
    graph = small.sharded.graph
    keys = op_keys(graph)
    ops = {
        keys[index]: tuple(map(str, picked))
        for index, picked in enumerate(small.sharded.choices)
        if any(choice != REPLICATED for choice in picked)
    }
    stored = {
        item.target: format_placements(small.sharded.inputs[item.value.name].forward)
        for item in graph.parameters()
        if any(isinstance(p, Shard) for p in small.sharded.inputs[item.value.name].forward)
    }
    lines = [f"  {item}" for item in found[:4]]
    lines.append("  from tests.distributed.fuzz_shrink import reproduce")
    lines.append(f"  print(*reproduce({small.subject.name!r}, {str(small.sharded.mesh)!r}, {{")
    lines += [f"      {key!r}: {words!r}," for key, words in ops.items()]
    lines.append("  }, {")
    lines += [f"      {fqn!r}: {text!r}," for fqn, text in stored.items()]
    zero = f", zero=({small.zero.stage}, {small.zero.axes})" if small.zero.stage else ""
    lines.append(f"  }}, programs={small.programs}{zero}), sep='\\n')")
    return "\n".join(lines)


def reproduce(
    name: str,
    mesh: str,
    ops: Mapping[str, tuple[str, ...]],
    stored: Mapping[str, str],
    *,
    programs: bool = False,
    zero: tuple[int, tuple[str, ...]] = (0, ()),
) -> list[Difference]:
    """Run a plan as `shrink` reports it.

    Args:
        name: The model.
        mesh: The mesh of sub-axes.
        ops: Choices by op key; all other ops are replicated.
        stored: Placements of parameters by FQN; all others are whole.
        programs: Run explicit programs.
        zero: Stage of ZeRO, and axes of the mesh over which it divides.

    Returns:
        The differences from one device.
    """
    held, axes = subject(name), Mesh.parse(mesh)
    graph, factors = held.traced.graph, held.factors
    choices = []
    for index, (key, node) in enumerate(zip(op_keys(graph), graph.nodes, strict=True)):
        allowed = options(node, factors.rules[index], factors.units[index], graph.spec)
        by_word = {str(choice): choice for choice in allowed}
        words = ops.get(key, ("replicate",) * len(axes.shape))
        choices.append(tuple(by_word[word] for word in words))
    whole = format_placements((REPLICATE,) * len(axes.shape))
    storage = {
        item.value.name: parse_placements(stored.get(item.target, whole))
        for item in graph.parameters()
    }
    sharded = shard_graph(graph, factors, axes, tuple(choices), storage)
    divided = ZeroPlan(stage=zero[0], axes=zero[1])
    return run(held, sharded, solo(held), thorough=True, programs=programs, zero=divided)[0]
