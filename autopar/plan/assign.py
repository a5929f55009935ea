"""From constraints to one choice per op and mesh axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.graph.ir import Graph, Node
from autopar.plan.stages import input_only
from autopar.plan.strategies import Constraints
from autopar.sharding.choices import (
    GRADIENT,
    REPLICATED,
    Choice,
    Choices,
    options,
    place_call,
)
from autopar.sharding.factors import Factors, Unit
from autopar.sharding.mesh import MICROBATCH, Mesh
from autopar.sharding.placement import PARTIAL, REPLICATE, Pair, Placements, Shard, legal
from autopar.sharding.rule import OpRule
from autopar.units import counted

_ACTIVATIONS_ONLY = frozenset({"seq"})
"""Factors split only where gradients flow: masks and tables are cheaper whole."""


@dataclass(slots=True)
class _State:
    """Placements known so far, by value name."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    from_parameters: set[str] = field(default_factory=set)
    of_inputs: frozenset[str] = frozenset()


def assign(
    graph: Graph,
    factors: Factors,
    mesh: Mesh,
    owner: tuple[str, ...],
    constraints: Constraints,
    whole: frozenset[int] = frozenset(),
) -> tuple[Choices, ...]:
    """Choose for every op and sub-axis what the constraints ask for.

    Args:
        graph: The graph.
        factors: Its factors.
        mesh: The mesh of sub-axes.
        owner: User axis of every sub-axis.
        constraints: What each user axis splits.
        whole: Indexes of nodes that are computed for all microbatches at once.

    Returns:
        One choice per sub-axis for every node.

    Raises:
        PlanError: If an explicit constraint asks for more parts than a factor has.
    """
    in_time = owner[:1] == (MICROBATCH,)
    free = input_only(graph) if in_time else ()
    of_inputs = frozenset(value.name for index in free for value in graph.nodes[index].outputs)
    state = _State(
        of_inputs=of_inputs,
        from_parameters={
            item.value.name
            for item in graph.inputs
            if item.kind in ("parameter", "buffer", "constant")
        },
    )
    orders = tuple(constraints.names(name) for name in owner)
    kept = kept_whole(graph, constraints)
    known: dict[object, tuple[Choices, tuple[Pair, ...]]] = {}
    picked: list[Choices] = []
    for index, (node, rule, units) in enumerate(
        zip(graph.nodes, factors.rules, factors.units, strict=True)
    ):
        operands = node.operands
        # Also of what is made of nothing, such as the numbers of positions.
        only_parameters = state.from_parameters.issuperset(operands)
        differentiable = any(value.spec.requires_grad for value in node.outputs)
        slots = frozenset[int]()
        if kept:
            slots = frozenset(slot for slot, name in enumerate(operands) if name in kept)
        # Alike calls on alike operands choose alike, so depth costs a look-up per op.
        key = (
            id(rule), units, tuple(map(state.pairs.get, operands)),
            only_parameters, differentiable, len(node.outputs), index in whole,
            tuple(name in of_inputs for name in operands), slots,
        )  # fmt: skip
        if key not in known:
            linear = tuple(
                choice for choice in options(node, rule, (), graph.spec) if choice.kind == "linear"
            )
            here = _Call(
                operands, rule, units, differentiable, only_parameters, linear, index in whole,
                slots,
            )  # fmt: skip
            choices = _choose(here, orders, mesh, state, in_time)
            if constraints.explicit:
                _check(node, here.free_units(), choices, owner, constraints, mesh)
            known[key] = (choices, place_call(node, rule, choices).outputs)
        choices, outputs = known[key]
        picked.append(choices)
        state.pairs.update(
            (value.name, pair) for value, pair in zip(node.outputs, outputs, strict=True)
        )
        if only_parameters:
            state.from_parameters.update(value.name for value in node.outputs)
    return tuple(picked)


def kept_whole(graph: Graph, constraints: Constraints) -> frozenset[str]:
    """Names of the parameters that have to stay whole."""
    wanted = [item for item in constraints.placements if item.whole]
    if not wanted:
        return frozenset()
    return frozenset(
        item.value.name
        for item in graph.parameters()
        if any(some.means(item.target) for some in wanted)
    )


@dataclass(frozen=True, slots=True)
class _Call:
    """What the choice of one op depends on."""

    operands: tuple[str, ...]
    rule: OpRule | None
    units: tuple[Unit, ...]
    differentiable: bool
    only_parameters: bool
    linear: tuple[Choice, ...] = ()
    whole: bool = False
    kept: frozenset[int] = frozenset()

    def free_units(self) -> tuple[Unit, ...]:
        """Units that may be split: not those of parameters that have to stay whole."""
        if self.rule is None or not self.kept:
            return self.units
        rule = self.rule
        return tuple(
            unit
            for unit in self.units
            if self.kept.isdisjoint(place.slot for place in rule.letter(unit.letter).operands)
        )


def _choose(
    call: _Call,
    orders: tuple[tuple[str, ...], ...],
    mesh: Mesh,
    state: _State,
    in_time: bool,
) -> Choices:
    """One choice per sub-axis; the first axis is the one in time if `in_time`."""
    choices: list[Choice] = [_over_time(call, orders[0], mesh, state)] if in_time else []
    if call.rule is None:
        return (*choices, *(REPLICATED,) * (len(orders) - len(choices)))
    for axis, names in enumerate(orders):
        if in_time and axis == 0:
            continue
        unit = _pick(call, names, axis, choices, mesh, state)
        if unit is not None:
            choices.append(Choice("split", unit))
        elif "batch" in names and call.only_parameters and call.differentiable:
            # Gradients of ops on parameters (and constants) alone stay Partial on a data axis, so
            # that they are reduced once, in buckets.
            choices.append(GRADIENT)
        else:
            choices.append(REPLICATED)
    return tuple(choices)


def _over_time(call: _Call, names: tuple[str, ...], mesh: Mesh, state: _State) -> Choice:
    """The choice along the axis in time, the first one.

    Nothing can be summed over time in the middle of backward, so what has no batch keeps its
    gradient Partial; and what is a sum already (a loss) stays one as long as ops are linear. Sums
    over inputs alone (a count of tokens) are known beforehand, so that they may be whole.
    """
    if call.whole:
        return REPLICATED
    if call.rule is not None:
        unit = _pick(call, names, 0, [], mesh, state)
        if unit is not None:
            return Choice("split", unit)
        sums = {
            slot
            for slot, name in enumerate(call.operands)
            if name in state.pairs
            and state.pairs[name].forward[0] == PARTIAL
            and name not in state.of_inputs
        }
        sets = call.rule.linear
        fitting = [choice for choice in call.linear if sums and sums <= sets[choice.index]]
        if fitting:
            return min(fitting, key=lambda choice: len(sets[choice.index]))
    return GRADIENT if call.differentiable else REPLICATED


def _matches(unit: Unit, name: str) -> bool:
    return name in (unit.name, unit.base)


def _pick(
    call: _Call,
    names: tuple[str, ...],
    axis: int,
    earlier: list[Choice],
    mesh: Mesh,
    state: _State,
) -> Unit | None:
    """The unit to split along one sub-axis, or None."""
    size = mesh.shape[axis]
    if size == 1:
        return None
    for name in names:
        if name in _ACTIVATIONS_ONLY and not call.differentiable:
            continue
        found = []
        for position, unit in enumerate(call.free_units()):
            if not _matches(unit, name):
                continue
            taken = math.prod(
                mesh.shape[other] for other, choice in enumerate(earlier) if choice.unit == unit
            )
            if unit.size < taken * size:
                continue
            even = unit.size % (taken * size) == 0
            found.append((even, _follows(call, unit, axis, state), -position, unit))
        if found:
            return max(found, key=lambda item: item[:3])[3]
    return None


def _follows(call: _Call, unit: Unit, axis: int, state: _State) -> int:
    """Number of operands that are already split as `unit` wants them along `axis`."""
    assert call.rule is not None
    total = 0
    for place in call.rule.letter(unit.letter).operands:
        pair = state.pairs.get(call.operands[place.slot])
        wanted = Shard(place.dim, place.stride * unit.stride, unit.size)
        total += pair is not None and pair.forward[axis] == wanted
    return total


def _check(
    node: Node,
    units: tuple[Unit, ...],
    choices: Choices,
    owner: tuple[str, ...],
    constraints: Constraints,
    mesh: Mesh,
) -> None:
    """Refuse an explicit split that is wider than its factor."""
    for axis in dict.fromkeys(owner):
        if axis == MICROBATCH:
            continue
        mine = [i for i, name in enumerate(owner) if name == axis]
        degree = math.prod(mesh.shape[i] for i in mine)
        used = math.prod(mesh.shape[i] for i in mine if choices[i].unit is not None)
        if used == degree:
            continue
        for name in constraints.names(axis):
            sizes = [unit.size for unit in units if _matches(unit, name)]
            if sizes and name not in _ACTIVATIONS_ONLY:
                size = math.prod(sizes)
                others = [
                    o for o in dict.fromkeys(owner) if o != axis and name in constraints.names(o)
                ]
                beside = f" beside those of axis {', '.join(map(repr, others))}" if others else ""
                raise PlanError(
                    f"factor {name!r} of size {size} cannot be split over the {degree} ranks of "
                    f"axis {axis!r}{beside}",
                    expected=(
                        f"at most {counted(size, 'rank')} in all, "
                        f"or another factor on axis {axis!r}"
                    ),
                    where=f"module {node.module or '(root)'}, {node.op} {node.source}".rstrip(),
                )


def store_split(
    forward: Placements, shape: tuple[int, ...], axes: tuple[int, ...], mesh: Mesh
) -> Placements:
    """`forward` with the axes of `axes` that are still Replicate splitting the parameter too.

    The first dim that divides evenly is split; else the largest that has enough elements; a
    parameter with fewer elements than ranks stays whole.
    """
    current = list(forward)
    for axis in axes:
        if current[axis] != REPLICATE or mesh.shape[axis] == 1:
            continue
        candidates = []
        for dim, size in enumerate(shape):
            trial = list(current)
            trial[axis] = Shard(dim, 1, size)
            if legal(tuple(trial), shape, mesh.shape) is None:
                parts = math.prod(
                    mesh.shape[i] for i, p in enumerate(trial) if p == Shard(dim, 1, size)
                )
                candidates.append((size % parts == 0, -dim, size, Shard(dim, 1, size)))
        if candidates:
            current[axis] = max(candidates, key=lambda item: item[:3])[3]
    return tuple(current)
