"""From constraints to one choice per op and mesh axis."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.errors import PlanError
from autopar.graph.ir import Graph, Node
from autopar.plan.strategies import Constraints
from autopar.sharding.choices import (
    GRADIENT,
    REPLICATED,
    Choice,
    Choices,
    place_call,
)
from autopar.sharding.factors import Factors, Unit
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import REPLICATE, Pair, Placements, Shard, legal

_ACTIVATIONS_ONLY = frozenset({"seq"})
"""Factors split only where gradients flow: masks and tables are cheaper whole."""


@dataclass(slots=True)
class _State:
    """Placements known so far, by value name."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    from_parameters: set[str] = field(default_factory=set)


def assign(
    graph: Graph, factors: Factors, mesh: Mesh, owner: tuple[str, ...], constraints: Constraints
) -> tuple[Choices, ...]:
    """Choose for every op and sub-axis what the constraints ask for.

    Args:
        graph: The graph.
        factors: Its factors.
        mesh: The mesh of sub-axes.
        owner: User axis of every sub-axis.
        constraints: What each user axis splits.

    Returns:
        One choice per sub-axis for every node.

    Raises:
        PlanError: If an explicit constraint asks for more parts than a factor has.
    """
    state = _State(from_parameters={item.value.name for item in graph.parameters()})
    orders = tuple(constraints.names(name) for name in owner)
    picked: list[Choices] = []
    for node, rule, units in zip(graph.nodes, factors.rules, factors.units, strict=True):
        choices: list[Choice] = []
        if rule is None:
            choices = [REPLICATED] * len(orders)
        else:
            for axis, names in enumerate(orders):
                unit = _pick(node, units, names, axis, choices, mesh, state, factors)
                choices.append(Choice("split", unit) if unit else _rest(node, names, state))
            if constraints.explicit:
                _check(node, units, tuple(choices), owner, constraints, mesh)
        picked.append(tuple(choices))
        call = place_call(node, rule, picked[-1])
        state.pairs.update(
            (value.name, pair) for value, pair in zip(node.outputs, call.outputs, strict=True)
        )
        if node.operands and all(name in state.from_parameters for name in node.operands):
            state.from_parameters.update(value.name for value in node.outputs)
    return tuple(picked)


def _rest(node: Node, names: tuple[str, ...], state: _State) -> Choice:
    """What an op without a wanted factor does.

    On a data axis, ops on parameters alone let gradients stay Partial, so that they are reduced
    once, in buckets.
    """
    if "batch" in names and node.operands and any(v.spec.requires_grad for v in node.outputs):
        if all(name in state.from_parameters for name in node.operands):
            return GRADIENT
    return REPLICATED


def _matches(unit: Unit, name: str) -> bool:
    return name in (unit.name, unit.base)


def _pick(
    node: Node,
    units: tuple[Unit, ...],
    names: tuple[str, ...],
    axis: int,
    earlier: list[Choice],
    mesh: Mesh,
    state: _State,
    factors: Factors,
) -> Unit | None:
    """The unit to split along one sub-axis, or None."""
    size = mesh.shape[axis]
    if size == 1:
        return None
    differentiable = any(value.spec.requires_grad for value in node.outputs)
    for name in names:
        if name in _ACTIVATIONS_ONLY and not differentiable:
            continue
        found = []
        for position, unit in enumerate(units):
            if not _matches(unit, name):
                continue
            taken = math.prod(
                mesh.shape[other] for other, choice in enumerate(earlier) if choice.unit == unit
            )
            if unit.size < taken * size:
                continue
            even = unit.size % (taken * size) == 0
            found.append((even, _follows(node, unit, axis, state, factors), -position, unit))
        if found:
            return max(found, key=lambda item: item[:3])[3]
    return None


def _follows(node: Node, unit: Unit, axis: int, state: _State, factors: Factors) -> int:
    """Bytes of operands that are already split as `unit` wants them along `axis`."""
    total = 0
    for name, place in _operand_shards(node, unit, factors):
        pair = state.pairs.get(name)
        if pair is not None and pair.forward[axis] == place:
            total += 1
    return total


def _operand_shards(node: Node, unit: Unit, factors: Factors) -> list[tuple[str, Shard]]:
    rule = factors.rules[_index(node, factors)]
    assert rule is not None
    operands = node.operands
    return [
        (operands[place.slot], Shard(place.dim, place.stride * unit.stride, unit.size))
        for place in rule.letter(unit.letter).operands
    ]


def _index(node: Node, factors: Factors) -> int:
    return factors.positions[node.name]


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
        mine = [i for i, name in enumerate(owner) if name == axis]
        degree = math.prod(mesh.shape[i] for i in mine)
        used = math.prod(mesh.shape[i] for i in mine if choices[i].unit is not None)
        if used == degree:
            continue
        for name in constraints.names(axis):
            sizes = [unit.size for unit in units if _matches(unit, name)]
            if sizes and name not in _ACTIVATIONS_ONLY:
                raise PlanError(
                    f"factor {name!r} of size {math.prod(sizes)} cannot be split over the "
                    f"{degree} ranks of axis {axis!r}",
                    expected=f"at most {math.prod(sizes)} ranks on axis {axis!r}, or another "
                    "factor on it",
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



