"""Random legal plans: any choice for any op on any axis, and any way to hold a parameter.

They are what a search draws from, and what the fuzz tests run: a plan that is legal must train
what one device trains, however odd it is.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.keys import op_keys
from autopar.plan.microbatch import batch_sizes
from autopar.plan.parts import PipelinePlan, ZeroPlan, check_zero, default_chunks
from autopar.plan.stages import assign_stages
from autopar.schedules.make import SCHEDULES
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


def random_pipeline(
    graph: Graph, factors: Factors, mesh: Mesh, source: random.Random, axis: str = "pp"
) -> PipelinePlan:
    """A pipeline that `graph` can run: any schedule, any cuts, as many microbatches as divide.

    Args:
        graph: The graph.
        factors: Its factors.
        mesh: The user's mesh; without `axis` there is one pipeline rank.
        source: The source of randomness.
        axis: The pipeline's axis.
    """
    ranks = dict(mesh.axes).get(axis, 1)
    schedule = source.choice(list(SCHEDULES)) if ranks > 1 else "1f1b"
    sizes = batch_sizes(graph, factors)
    whole = math.gcd(*sizes) if sizes else 1
    pipeline = PipelinePlan(
        axis=axis if ranks > 1 else "pp",
        schedule=schedule,
        microbatches=source.choice([n for n in range(1, whole + 1) if whole % n == 0]),
        chunks=default_chunks(schedule),
        vertical_sync=SCHEDULES[schedule].vertical_sync and source.random() < 0.5,
    )
    return replace(pipeline, cuts=_random_cuts(graph, factors, ranks * pipeline.chunks, source))


def _random_cuts(
    graph: Graph, factors: Factors, count: int, source: random.Random, tries: int = 8
) -> tuple[str, ...]:
    """Cuts at random places; none, for the best ones, when only those are found to be legal."""
    keys = op_keys(graph)
    for _ in range(tries if count > 1 else 0):
        places = sorted(source.choices(range(len(keys)), k=count - 1))
        cuts = tuple(keys[place] for place in places)
        try:
            assign_stages(graph, factors, count, cuts)
        except PlanError:
            continue  # it parts a buffer from its update
        return cuts
    return ()


def random_zero(
    pipeline: PipelinePlan, data_axes: tuple[str, ...], source: random.Random
) -> ZeroPlan:
    """A ZeRO that may go with `pipeline`.

    Args:
        pipeline: The pipeline.
        data_axes: Axes along which only data is split.
        source: The source of randomness.
    """
    stage = source.randint(0, 3) if data_axes else 0
    if SCHEDULES[pipeline.schedule].asynchronous:
        stage = min(stage, 1)
    axes = tuple(axis for axis in data_axes if source.random() < 0.7) or data_axes[:1]
    zero = ZeroPlan(stage=stage, axes=axes if stage else ())
    check_zero(zero, pipeline, data_axes, (), "zero")
    return zero


def random_recompute(
    graph: Graph, source: random.Random, chance: float | None = None
) -> tuple[str, ...]:
    """Any set of ops to compute again, each by its key.

    Args:
        graph: The graph.
        source: The source of randomness.
        chance: Chance of each op; itself drawn when absent.
    """
    chance = source.random() if chance is None else chance
    return tuple(key for key in op_keys(graph) if source.random() < chance and "[" not in key)


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
