"""Random legal plans: any choice for any op on any axis, and any way to hold a parameter.

They are what a search draws from, and what the fuzz tests run: a plan that is legal must train
what one device trains, however odd it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autopar.graph.ir import Graph
from autopar.sharding.choices import Choice, Choices, fits, options, place_call
from autopar.sharding.factors import Factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import REPLICATE, Pair, Placement, Placements, Shard, legal

Prefer = Callable[[int, Choices], bool]
"""Given the index of an op and its choices so far: whether the last of them is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How a plan is drawn.

    Attributes:
        follow: Chance that an op takes a choice under which its first operand need not move.
        eager: Chance that an op takes a choice the caller prefers, when it has one.
        stored: Chance that a parameter is held in another way than its uses suggest.
    """

    follow: float = 0.3
    eager: float = 0.5
    stored: float = 0.5


@dataclass(slots=True)
class _Drawing:
    """State while one plan is drawn."""

    graph: Graph
    factors: Factors
    sizes: tuple[int, ...]
    random: random.Random
    habits: Habits
    prefer: Prefer
    forward: dict[str, Placements] = field(default_factory=dict)

    def node(self, index: int) -> Choices:
        """Choices of one op, axis by axis."""
        node, rule = self.graph.nodes[index], self.factors.rules[index]
        allowed = options(node, rule, self.factors.units[index], self.graph.spec)
        picked: Choices = ()
        for axis in range(len(self.sizes)):
            free = [c for c in allowed if fits((*picked, c), self.sizes[: axis + 1])]
            picked = (*picked, self._pick(index, picked, free))
        call = place_call(node, rule, picked)
        for value, pair in zip(node.outputs, call.outputs, strict=True):
            self.forward[value.name] = pair.forward
        return picked

    def _pick(self, index: int, picked: Choices, free: Sequence[Choice]) -> Choice:
        wanted = [choice for choice in free if self.prefer(index, (*picked, choice))]
        axis = len(picked)
        if wanted and self.random.random() < self.habits.eager:
            return self.random.choice(wanted)
        node = self.graph.nodes[index]
        if node.operands and self.random.random() < self.habits.follow:
            have = self.forward.get(node.operands[0])
            rule = self.factors.rules[index]
            same = [
                choice
                for choice in free
                if have is not None
                and place_call(node, rule, (choice,)).operands[0].forward[0] == have[axis]
            ]
            if same:
                return self.random.choice(same)
        return self.random.choice(free)


def random_choices(
    graph: Graph,
    factors: Factors,
    mesh: Mesh,
    source: random.Random,
    habits: Habits | None = None,
    prefer: Prefer = lambda index, picked: False,
) -> tuple[Choices, ...]:
    """A legal choice for every op and mesh axis.

    Args:
        graph: The graph.
        factors: Its factors.
        mesh: The mesh.
        source: The source of randomness.
        habits: How to draw.
        prefer: Which choices are wanted more than others.

    Returns:
        One choice per axis for every node.
    """
    state = _Drawing(graph, factors, mesh.shape, source, habits or Habits(), prefer)
    return tuple(state.node(index) for index in range(len(graph.nodes)))


def random_storage(
    graph: Graph, factors: Factors, mesh: Mesh, source: random.Random, chance: float = 0.5
) -> dict[str, Placements]:
    """Random placements for some parameters: whole, split by dim, or split by inner factor.

    Args:
        graph: The graph.
        factors: Its factors.
        mesh: The mesh.
        source: The source of randomness.
        chance: Chance that a parameter is in the result; the others follow their uses.

    Returns:
        Placements by value name, as `shard_graph` takes them.
    """
    found: dict[str, Placements] = {}
    for item in graph.parameters():
        if source.random() >= chance:
            continue
        name, shape = item.value.name, item.value.spec.shape
        placements: list[Placement] = [REPLICATE] * len(mesh.shape)
        for axis in range(len(mesh.shape)):
            trial = list(placements)
            trial[axis] = source.choice(_shards(factors, name, shape))
            if legal(tuple(trial), shape, mesh.shape) is None:
                placements = trial
        found[name] = tuple(placements)
    return found


def _shards(factors: Factors, name: str, shape: tuple[int, ...]) -> list[Placement]:
    found: list[Placement] = [REPLICATE]
    for dim, size in enumerate(shape):
        found += [Shard(dim, 1, size)] if size > 1 else []
        for _, stride, part in factors.dims(name, dim):
            found.append(Shard(dim, stride, part))
    return found


def check_legal(graph: Graph, factors: Factors, mesh: Mesh, choices: Sequence[Choices]) -> None:
    """Assert that every placement that `choices` imply can hold its tensor."""

    def check(name: str, pair: Pair, op: str) -> None:
        for placements in (pair.forward, pair.gradient):
            reason = legal(placements, graph.spec(name).shape, mesh.shape)
            assert reason is None, f"{op}: {name}: {reason}"

    for node, rule, picked in zip(graph.nodes, factors.rules, choices, strict=True):
        call = place_call(node, rule, picked)
        for name, pair in zip(node.operands, call.operands, strict=True):
            check(name, pair, node.op)
        for value, pair in zip(node.outputs, call.outputs, strict=True):
            check(value.name, pair, node.op)
