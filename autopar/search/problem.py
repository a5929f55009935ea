"""The problem: a model, a cluster and a space, and what every point of it costs.

Costs are those of `autopar.cost_models.evaluate`, the one door; nothing here has a price of its
own. Points are evaluated with the cuts, and with what every layer computes again, that
`autopar.search.stage_cut` finds best for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.device import Device
from autopar.cost_models.evaluate import (
    Evaluator,
    Prediction,
    Software,
    devices_of,
    fine_mesh_of,
)
from autopar.cost_models.events import schedule_of
from autopar.cost_models.messages import Wires
from autopar.cost_models.pricing import Prices
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.microbatch import STATISTICS, batch_sizes
from autopar.plan.plan import Plan
from autopar.plan.recompute import policy_nodes, resolve_recompute
from autopar.plan.stages import given_keys
from autopar.plan.strategies import ROLES
from autopar.schedules.make import SCHEDULES
from autopar.search.ahead import Ahead
from autopar.search.asked import OPTIONS, Asked
from autopar.search.keep import Whole, asked_edges, handed_on, kept_shardings
from autopar.search.space import MAX_SAMPLES, MAX_TOKENS, Point, Space
from autopar.search.states import Parameters
from autopar.search.tables import UnitTable, unit_table
from autopar.search.units import Units

_SIZED = frozenset(("microbatches", "micro_batch"))
"""What says how large a microbatch is: then no other limit holds."""
REMEMBERED = 16
"""Predictions of single plans that are kept."""
Question = tuple[Any, ...]
"""What a second process may be asked: ``("table", alike, name of the device, weight)``, see
`Problem.table`, or ``("group", point)``, see `autopar.search.bounds.Bounds.group`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A point with its stages.

    Attributes:
        point: The point.
        edges: First unit of every stage but the first.
        low: For every stage the option of all its units.
        high: For every stage the option of its first `upgraded` layers.
        upgraded: For every stage how many layers have `high`.
        overrides: Choices of ops that differ from what the point implies, by op key.
    """

    point: Point
    edges: tuple[int, ...] = ()
    low: tuple[int, ...] = (2,)
    high: tuple[int, ...] = (2,)
    upgraded: tuple[int, ...] = (0,)
    overrides: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A candidate and what it takes.

    Attributes:
        candidate: The candidate.
        step_s: Seconds of a step.
        over_bytes: Bytes beyond the memory of the rank with least room, negative if it fits.
        rank_over_bytes: The same of every pipeline rank.
        peak_bytes: Most bytes of live tensors on any rank.
    """

    candidate: Candidate
    step_s: float
    over_bytes: int
    rank_over_bytes: tuple[int, ...]
    peak_bytes: int

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return self.over_bytes <= 0


@dataclass(slots=True)
class _Known:
    """What has been worked out."""

    tables: dict[object, UnitTable | None] = field(default_factory=dict)
    prices: dict[object, Prices] = field(default_factory=dict)
    wires: dict[object, Wires] = field(default_factory=dict)
    devices: dict[object, tuple[Device, ...]] = field(default_factory=dict)
    outcomes: dict[Candidate, Outcome | None] = field(default_factory=dict)
    predictions: dict[Candidate, Prediction] = field(default_factory=dict)
    evaluated: int = 0


class Problem:
    """Find the best plan of a model on a cluster.

    Args:
        graph: The canonical graph.
        loss: Name of the loss.
        cluster: The cluster.
        software: How plans are carried out; this package's runtime by default.
        asked: What constraints fix.
        allowed: What points may be beside that, see `Space.value`.
        options: Policies of what layers may compute again, least memory first, if that is free.
        memory_bytes: Memory of every device instead of the cluster's.

    Attributes:
        asked: What constraints fix.
        edges: First unit of every stage but the first, if that is fixed.
        policies: Names of the nodes that backward computes again, by option.

    Raises:
        PlanError: If the model has no loss, or cannot keep what is asked for.
    """

    def __init__(
        self,
        graph: Graph,
        loss: str | None,
        cluster: ClusterSpec,
        *,
        software: Software | None = None,
        asked: Asked | None = None,
        allowed: Mapping[str, tuple[object, ...]] | None = None,
        options: tuple[str, ...] = OPTIONS,
        memory_bytes: int | None = None,
    ) -> None:
        self.graph, self.loss, self.cluster = graph, loss, cluster
        self.software = software or Software.of(cluster.hardware(0))
        self.evaluator = Evaluator(graph, loss, cluster, self.software)
        self.layout = self.evaluator.layout
        self.units = Units.of(self.layout)
        self.memory_bytes = memory_bytes
        self.asked, self.allowed = asked or Asked(), dict(allowed or {})
        self.free_options = options
        self.options, self.policies = self._options(options)
        # Of patterns a stage may leave out what it would only hand on.
        self.again_at_least = self.policies
        if self.asked.recompute:
            self.again_at_least = tuple(own - handed_on(self.units, own) for own in self.policies)
        self.edges = asked_edges(self.units, self.asked)
        self.whole = Whole(self.layout, self.asked.placements)
        self._known = _Known()
        self.space = self._space()
        self.exact_data = not self.space.microbatched
        self.parameters = Parameters.of(graph, self.units, self.software)
        self.device = cluster.hardware(0)
        self.second: Ahead | None = None

    def like(
        self,
        *,
        asked: Asked | None = None,
        cluster: ClusterSpec | None = None,
        memory_bytes: int | None = None,
    ) -> Problem:
        """The same model, where other things are asked for, or on other devices.

        Args:
            asked: What constraints fix; the same by default.
            cluster: The cluster; the same by default, with the same memory.
            memory_bytes: Memory of every device instead of the cluster's.

        Raises:
            PlanError: If the model cannot keep what is asked for.
        """
        if cluster is None and memory_bytes is None:
            memory_bytes = self.memory_bytes
        return Problem(
            self.graph, self.loss, cluster or self.cluster, software=self.software,
            asked=self.asked if asked is None else asked, allowed=self.allowed,
            options=self.free_options, memory_bytes=memory_bytes,
        )  # fmt: skip

    def _options(self, free: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[frozenset[str], ...]]:
        """Names of what layers may compute again, and the nodes that each stands for."""
        if self.asked.recompute:
            again = resolve_recompute(self.graph, self.asked.recompute)
            return self.asked.options, (again,)
        return free, tuple(policy_nodes(self.graph, name) for name in free)

    @contextmanager
    def ahead(self, work: Callable[[Any], object]) -> Iterator[None]:
        """Let a second process answer questions before they are asked, with a function of these."""
        with suppress(OSError):  # no room for one: this process does it all
            self.second = Ahead(work)
        try:
            yield
        finally:
            if self.second is not None:
                self.second.close()
            self.second = None

    def questions(self, points: Iterable[Point]) -> list[Question]:
        """Tables of points that are not known."""
        names = dict.fromkeys(group.hardware.name for group in self.cluster.groups)
        keys = dict.fromkeys(
            (self.alike(point), name, weight)
            for point in points
            for name in names
            for weight in {False, SCHEDULES[point.schedule].splits_backward}
        )
        return [("table", *key) for key in keys if key not in self._known.tables]

    def on(self, cluster: ClusterSpec) -> Problem:
        """The problem on a larger cluster of the same devices, with nothing fixed.

        Tables of seconds and bytes are kept: of seconds, those of collectives over other links may
        differ.
        """
        found = copy.copy(self)
        found.cluster, found.device = cluster, cluster.hardware(0)
        found.evaluator = copy.copy(self.evaluator)
        found.evaluator.cluster = cluster
        found.space = replace(self.space, num_devices=cluster.num_devices, allowed={})
        found.edges, found.whole = None, Whole(self.layout, ())
        found._known, found.second = _Known(tables=self._known.tables), None
        return found

    def _space(self) -> Space:
        sizes = batch_sizes(self.layout.folded, self.layout.factors)
        # Of one sample, or none that is treated like the others, nothing can be divided.
        batch = int(np.gcd.reduce(list(sizes))) if sizes else 1
        names = set(self.layout.factors.names())
        roles = tuple(name for name, factors in ROLES.items() if names.intersection(factors))
        if "seq" not in names:
            roles = tuple(name for name in roles if name != "megatron_sp")
        allowed: dict[str, tuple[object, ...]] = dict(self.allowed)
        for key, values in self.asked.allowed.items():  # what both say is what both have
            allowed[key] = tuple(value for value in values if value in allowed.get(key, values))
        space = Space(
            num_devices=self.cluster.num_devices,
            batch=batch,
            units=self.units.count,
            layers=sum(number >= 0 for number in self.units.block),
            roles=roles,
            tensor_limit=self._tensor_limit(names),
            samples=batch if _SIZED.intersection(allowed) else self._samples(),
            microbatched=self._microbatched(batch),
            allowed=allowed,
        )
        splits, placements = self.asked.splits, self.asked.placements
        if splits or placements:
            allowed["sharding"] = kept_shardings(
                self.evaluator, space, splits, placements, self.whole.plan
            )
        return space

    def _samples(self) -> int:
        """The largest microbatch of a rank that is looked at."""
        layout = self.layout
        tokens = max(
            (
                unit.size
                for node, units in zip(layout.folded.nodes, layout.factors.units, strict=True)
                if any(value.spec.requires_grad for value in node.outputs)
                for unit in units
                if unit.name.partition(".")[0] == "seq"
            ),
            default=1,
        )
        return max(1, min(MAX_SAMPLES, MAX_TOKENS // tokens))

    def _microbatched(self, batch: int) -> bool:
        """Whether the model can be computed in microbatches, and is then the same.

        Statistics of a batch (batch norm) would become those of a microbatch.
        """
        if any(node.op in STATISTICS for node in self.graph.nodes):
            return False
        least = next((n for n in range(2, batch + 1) if batch % n == 0), 1)
        try:
            self.evaluator.place(Point(microbatches=least).plan())
        except PlanError:
            return False
        return True

    def _tensor_limit(self, names: set[str]) -> int:
        """The largest tensor axis: the devices of a node, or those of its fastest domain."""
        return max(group.devices_per_node for group in self.cluster.groups) * 2

    # What is known of a point before it is cut

    def devices(self, point: Point) -> tuple[Device, ...]:
        """The slowest device at every place of the pipeline."""
        if self.cluster.is_uniform:
            return (self.device,) * point.pipeline
        key = (point.mesh, point.pipeline)
        if key not in self._known.devices:
            plan = point.plan()
            self._known.devices[key] = devices_of(self.cluster, plan, schedule_of(plan))
        return self._known.devices[key]

    def device_called(self, name: str) -> Device:
        """The device of the cluster that has a name."""
        return next(g.hardware for g in self.cluster.groups if g.hardware.name == name)

    def capacity_bytes(self, device: Device) -> int:
        """Memory for everything on a device."""
        return device.usable_bytes if self.memory_bytes is None else self.memory_bytes

    def wires(self, point: Point) -> Wires:
        """Seconds of messages between pipeline ranks on the mesh of a point."""
        key = (point.mesh, point.pipeline)
        if key not in self._known.wires:
            self._known.wires[key] = Wires(self.prices(point), "pp")
        return self._known.wires[key]

    def room_bytes(self, device: Device) -> float:
        """Memory for tensors on a device."""
        spare = self.capacity_bytes(device) - self.software.context_bytes
        return spare / self.reserved_factor(device)

    def reserved_factor(self, device: Device) -> float:
        """Bytes of a device that are reserved for a byte of tensors."""
        return 1.0 if device.kind == "cpu" else self.software.reserved_factor

    def samples(self, point: Point) -> int:
        """Samples of a microbatch on the rank with most."""
        return -(-self.space.batch // (point.microbatches * point.data))

    def table(self, point: Point, device: Device, *, weight: bool = False) -> UnitTable | None:
        """Seconds and bytes of all units; None where the model cannot be placed so.

        Args:
            point: The point.
            device: What it runs on.
            weight: Whether what only gradients of parameters wait for is a program of its own, as
                under schedules that split backward; else what it takes may be booked on either.
        """
        key = (self.alike(point), device.name, weight)
        if key not in self._known.tables:
            known = self.second.value(("table", *key)) if self.second is not None else None
            self._known.tables[key] = self._table(*key) if known is None else known[0]
        return self._known.tables[key]

    def orders_alike(self, point: Point) -> bool:
        """Whether it does not matter which of pipeline and data ranks are neighbours.

        Where the tensor axis fills whole nodes, both go from node to node; without tiers, all pairs
        of nodes are alike.
        """
        cluster = self.cluster
        group, link = cluster.groups[0], self.device.link
        inside = not link.spans_nodes or link.domain_devices <= group.devices_per_node
        flat = cluster.is_uniform and not cluster.tiers and inside
        return flat and point.tensor % group.devices_per_node == 0

    def alike(self, point: Point) -> Point:
        """The point of one stage whose table is that of `point`.

        Points of equal local shapes share one. How many data ranks there are counts only for sums
        over the batch inside of the model (batch norm) and for shards of unequal sizes.
        """
        data, microbatches, batch = point.data, point.microbatches, self.space.batch
        # A rank's own samples are cut out of the batch at no cost, those of a microbatch are not.
        alike = not self.exact_data and microbatches > 1
        if alike and batch % (data * microbatches) == 0:
            data, microbatches = 1, data * microbatches
        return Point(data=data, tensor=point.tensor, role=point.role, microbatches=microbatches)

    def prices(self, point: Point) -> Prices:
        """Prices of collectives on the mesh of a point."""
        key = (point.mesh, point.pipeline)
        if key not in self._known.prices:
            self._known.prices[key] = Prices(self.cluster, *fine_mesh_of(point.plan()))
        return self._known.prices[key]

    def _table(self, point: Point, name: str, weight: bool) -> UnitTable | None:
        device = self.device_called(name)
        try:
            plan = self.whole.plan(point)
            placement = self.evaluator.place(plan)
        except PlanError:
            return None
        prices = Prices(self.cluster, *fine_mesh_of(plan))

        def made(policies: tuple[frozenset[str], ...]) -> UnitTable:
            return unit_table(
                self.units, placement, plan, self.loss, policies, device, prices, self.software,
                weight=weight,
            )  # fmt: skip

        table, least = made(self.policies), self.again_at_least
        if least == self.policies:
            return table
        return replace(table, seconds=np.minimum(table.seconds, made(least).seconds))

    # Exact

    def plan(self, candidate: Candidate) -> Plan:
        """The candidate as a plan, without what depends on the model."""
        starts = self.units.starts
        cuts = tuple(starts[edge] for edge in candidate.edges)
        if self.asked.cuts and candidate.edges == self.edges:  # in the words that were given
            cuts = given_keys(self.graph, self.asked.cuts)
        if candidate.overrides:  # these have what has to stay whole, too
            return replace(candidate.point.plan(cuts), overrides=dict(candidate.overrides))
        return self.whole.plan(candidate.point, cuts)

    def options_of(self, candidate: Candidate) -> tuple[int, ...]:
        """Option of every unit."""
        units, found = self.units, []
        edges = (0, *candidate.edges, units.count)
        for stage in range(len(edges) - 1):
            left = candidate.upgraded[stage]
            for unit in range(edges[stage], edges[stage + 1]):
                option = candidate.low[stage]
                if units.block[unit] >= 0 and left > 0:
                    option, left = candidate.high[stage], left - 1
                found.append(option)
        return tuple(found)

    def again(self, candidate: Candidate) -> frozenset[str]:
        """Names of the nodes that backward computes again."""
        units, nodes = self.units, self.graph.nodes
        if self.asked.recompute:
            return self.policies[0]
        found: set[str] = set()
        for unit, option in enumerate(self.options_of(candidate)):
            policy = self.policies[option]
            if policy:
                found.update(nodes[i].name for i in units.nodes[unit] if nodes[i].name in policy)
        return frozenset(found)

    def path_of(self, unit: int) -> str:
        """Module path of a unit that is a copy of a block."""
        member = self.layout.members[self.units.nodes[unit][0]]
        return self.layout.blocks[member.block].paths[member.copy]

    def predict(self, candidate: Candidate) -> Prediction:
        """Everything predicted of a candidate.

        Raises:
            PlanError: If the plan does not fit the model or the cluster.
        """
        known = self._known.predictions
        if candidate not in known:
            found = self.evaluator.evaluate(self.plan(candidate), self.again(candidate))
            if len(known) == REMEMBERED:  # they are large; the oldest goes
                known.pop(next(iter(known)))
            known[candidate] = found
        return known[candidate]

    def outcome(self, candidate: Candidate) -> Outcome | None:
        """What a candidate takes; None if it cannot be carried out."""
        known = self._known.outcomes
        if candidate not in known:
            known[candidate] = self._outcome(candidate)
        return known[candidate]

    def _outcome(self, candidate: Candidate) -> Outcome | None:
        self._known.evaluated += 1
        try:
            found = self.predict(candidate)
        except PlanError:
            return None
        devices = self.devices(candidate.point)
        over = tuple(
            rank.reserve.device_bytes - self.capacity_bytes(devices[rank.rank])
            for rank in found.ranks
        )
        return Outcome(
            candidate=candidate,
            step_s=found.step_s,
            over_bytes=max(over),
            rank_over_bytes=over,
            peak_bytes=found.peak_bytes,
        )

    @property
    def evaluated(self) -> int:
        """How many plans have been evaluated."""
        return self._known.evaluated

    @property
    def outcomes(self) -> list[Outcome]:
        """All plans that have been evaluated and can be carried out."""
        return [outcome for outcome in self._known.outcomes.values() if outcome is not None]
