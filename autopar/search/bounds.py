"""Lower bounds of what a point takes, from cheap to tight, and the candidates for its stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.device import Device
from autopar.cost_models.evaluate import update_bandwidth
from autopar.cost_models.events import schedule_of
from autopar.cost_models.messages import Wires
from autopar.schedules.actions import BACKWARDS
from autopar.schedules.make import SCHEDULES
from autopar.search.chains import main_units
from autopar.search.exchange import Exchange, Exchanged
from autopar.search.planned import planned_s
from autopar.search.problem import Outcome, Problem
from autopar.search.space import Point
from autopar.search.stage_cut import (
    LONG,
    Chain,
    Cut,
    Filled,
    Intervals,
    any_bound,
    cheapest_sum,
    durations,
    fill_all,
    kernel_seconds,
    last_backward,
    least_bottleneck,
    least_chain,
    stage_bound,
)
from autopar.search.states import held_bytes, ranges
from autopar.search.tables import UnitTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FORWARD = 0.9
"""Slope, over the model's mean, of what forward takes at least beside both, but for an offset."""
SIMULATED = 5000
"""Most forwards of a step that is simulated for a bound."""
LINEAR = 0.98
"""Saved memory of fewer samples is at least this share of what is proportional to samples."""
UNSURE = 0.25
"""Share of the memory that a plan may need beyond static and saved tensors without a surprise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """A table, summed up.

    Attributes:
        seconds: Of the fastest option, shape (phases, parts, 1).
        chain: The same of the units that follow one another in any case.
        slope: Seconds of forward of the first units, over those of forward and backward, at least;
        offset: but for so many seconds.
        saved_bytes: Of the option with least.
        held: Of all weights, of those that are trained, and of optimizer state.
        trained_each: Of each parameter that is trained.
    """

    seconds: Floats
    chain: Floats
    slope: float
    offset: float
    saved_bytes: float
    held: tuple[float, float, float]
    trained_each: Floats


@dataclass(slots=True)
class Bounds:
    """Bounds of the points of a problem; remembers what points share.

    Attributes:
        problem: The problem.
        exchange: What moves over the data axis.
        main: See `main_units`.
    """

    problem: Problem
    exchange: Exchange = field(init=False)
    main: NDArray[np.bool_] = field(init=False)
    _totals: dict[object, _Totals | None] = field(default_factory=dict)
    _largest: dict[object, Point] = field(default_factory=dict)
    _wholes: dict[object, tuple[float, float]] = field(default_factory=dict)
    _uniform_room: float | None = None
    _under_way: dict[object, list[float]] = field(default_factory=dict)
    _extra: dict[object, float] = field(default_factory=dict)
    _chains: dict[object, tuple[tuple[Floats, Floats], Floats, Ints]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.exchange = Exchange(self.problem)
        self.main = main_units(self.problem.units, self.problem.loss)
        if self.problem.cluster.is_uniform:
            self._uniform_room = self.problem.room_bytes(self.problem.device)

    # Level 0: the whole model over the ranks

    def totals(self, point: Point, *, anywhere: bool = False) -> _Totals | None:
        """Sums of the table of a point; None if the model cannot be placed so.

        Args:
            point: The point.
            anywhere: Not on its own devices, but on any of the cluster.
        """
        devices = self._devices(point, anywhere=anywhere)
        key = (self.problem.alike(point), tuple(device.name for device in devices))
        if key not in self._totals:
            table = self._fastest_table(point, devices)
            self._totals[key] = None if table is None else self._sum(table)
        return self._totals[key]

    def _devices(self, point: Point, *, anywhere: bool = False) -> tuple[Device, ...]:
        """The different devices of a point."""
        problem = self.problem
        if problem.cluster.is_uniform:
            return (problem.device,)
        groups = tuple(group.hardware for group in problem.cluster.groups)
        found = groups if anywhere else problem.devices(point)
        return tuple({device.name: device for device in found}.values())

    def _fastest_table(self, point: Point, devices: tuple[Device, ...]) -> UnitTable | None:
        """The table of a point of which every part is on the device that is fastest at it."""
        tables = [self.problem.table(point, device) for device in devices]
        known = [table for table in tables if table is not None]
        if len(known) < 2:
            return known[0] if known else None
        least = np.minimum.reduce([table.seconds for table in known])
        return replace(known[0], seconds=least)

    def _sum(self, table: UnitTable) -> _Totals:
        weight, trained, state = self.problem.parameters.bytes_of(table)
        speed, each = self.problem.software.speed, table.seconds[-1]
        forward, backward = durations(each, speed)
        sums = np.cumsum(each[0] * self.main, axis=-1)
        start, both = kernel_seconds(sums, speed), np.cumsum(forward + backward)
        slope = FORWARD * float(start[-1] / both[-1]) if both[-1] else 0.0
        return _Totals(
            seconds=each.sum(axis=-1, keepdims=True),
            chain=each[..., self.main].sum(axis=-1, keepdims=True),
            slope=slope,
            offset=float(np.max(slope * both - start, initial=0.0)),
            saved_bytes=float(table.saved_bytes.sum(axis=-1).min()),
            held=(float(weight.sum()), float(trained.sum()), float(state.sum())),
            trained_each=trained,
        )

    def scaled(self, point: Point, *, lightest: bool = False) -> float:
        """A bound from the largest microbatch of points alike.

        Kernels of fewer samples, and messages of fewer bytes, are not faster per sample.

        Args:
            point: The point.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
        """
        key = (point.tensor, point.role)
        largest = self._largest.get(key)
        if largest is None:
            return 0.0
        totals = self.totals(largest, anywhere=True)
        if totals is None:
            return math.inf
        share = self.problem.samples(point) / self.problem.samples(largest)
        return self._cheap(point, totals, share, lightest)

    def largest(self, point: Point) -> Point:
        """The point of the largest microbatch that places the model alike, if known."""
        return self._largest.get((point.tensor, point.role), point)

    def know_largest(self, points: list[Point]) -> None:
        """Note the largest microbatch of every way to place the model."""
        for point in points:
            key = (point.tensor, point.role)
            before = self._largest.get(key)
            samples = self.problem.samples(point)
            if before is None or samples > self.problem.samples(before):
                self._largest[key] = point

    def cheap(self, point: Point, *, lightest: bool = False) -> float:
        """Seconds that every plan of a point takes at least; infinite if none can fit.

        Args:
            point: The point.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
        """
        totals = self.totals(point)
        return math.inf if totals is None else self._cheap(point, totals, 1.0, lightest)

    def _cheap(self, point: Point, totals: _Totals, share: float, lightest: bool) -> float:
        saved = totals.saved_bytes * share * (LINEAR if share < 1 else 1.0)
        zero = 3 if lightest else point.zero
        if self.held(point, totals, zero) + saved > self._room(point):
            return math.inf
        work, late = self._microbatch(point, totals, share, lightest)
        ranks, microbatches, speed = point.pipeline, point.microbatches, self.problem.software.speed
        chain = totals.chain * share
        path = float(kernel_seconds(chain[0], speed)[0])  # a microbatch through all stages
        if not SCHEDULES[point.schedule].splits_backward:
            path += float(kernel_seconds(chain[1] + chain[2], speed)[0])
        took = microbatches * work - late
        found = max(path, took / ranks)
        if point.schedule == "1f1b" and microbatches > ranks:
            found = max(found, (took + (ranks - 1) * path) / ranks)
        elif point.chunks == 1 and ranks > 1:
            # Rank r works M w_r after F_0 .. F_{r-1}: least where all ranks end together.
            lead = totals.slope / microbatches * (work > 0)
            if (point.zero < 2 or lightest) and lead:
                even = took * lead / (1 - (1 - lead) ** ranks) - totals.offset * share
                found = max(found, even)
        return found * self.sharing()

    def _room(self, point: Point) -> float:
        """Memory for tensors on all ranks of a pipeline."""
        if self._uniform_room is not None:
            return point.pipeline * self._uniform_room
        return sum(map(self.problem.room_bytes, self.problem.devices(point)))

    def held(self, point: Point, totals: _Totals, zero: int) -> float:
        """Bytes of parameters, gradients and optimizer state of the whole model on a pipeline."""
        weight, trained, state = totals.held
        return held_bytes(weight, trained, state, zero, point.data)

    def _microbatch(
        self, point: Point, totals: _Totals, share: float, lightest: bool
    ) -> tuple[float, float]:
        """Seconds of forward and backward of the whole model, and those that the last one saves.

        The last backward does not wait for the collectives beside it.
        """
        moves = point.zero >= 2 and not lightest
        mesh = (point.mesh, point.zero) if moves else ()
        key = (id(totals), share, mesh)
        if key not in self._wholes:
            seconds = totals.seconds * share
            if moves:
                each = self.exchange.exchanged(point, totals.trained_each)
                seconds = Exchanged(
                    *(np.array([part.sum()]) for part in (
                        each.scattered, each.gathered, each.summed, each.returned
                    ))
                ).put(seconds)  # fmt: skip
            speed = self.problem.software.speed
            forward, backward = durations(seconds, speed)
            alone = kernel_seconds(seconds[1] + seconds[2], speed)
            late = max(0.0, float(backward[0] - alone[0]))
            self._wholes[key] = float(forward[0] + backward[0]), late
        return self._wholes[key]

    def sharing(self) -> float:
        """Least factor on seconds because of ranks that share cores and wait."""
        node = self.problem.cluster.hardware(0).node
        return min(1.0, node.cores / node.devices) if node.cores > 0 else 1.0

    # Candidates for stages

    def intervals(
        self,
        point: Point,
        table: UnitTable,
        longest: int | None = None,
        *,
        lightest: bool = False,
    ) -> Intervals:
        """All stages that a point may have.

        Args:
            point: The point.
            table: Its table.
            longest: Most units of a stage.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
        """
        problem = self.problem
        count, block = problem.units.count, np.array(problem.units.block)
        start, stop = np.triu_indices(count + 1, 1)
        if point.pipeline == 1 and point.chunks == 1:
            start, stop = np.array([0]), np.array([count])
        elif longest is not None:
            near = stop - start <= longest
            start, stop = start[near], stop[near]
        inside = ranges((block >= 0).astype(np.float64), start, stop)
        same = np.zeros(len(start))
        for number in sorted({n for n in problem.units.block if n >= 0}):
            same = np.maximum(same, ranges((block == number).astype(np.float64), start, stop))
        parameters = problem.parameters
        each = parameters.bytes_of(table)
        held, trained, state = (parameters.sums(values, start, stop) for values in each)
        if lightest:
            point = replace(point, zero=3)
        parts = self.exchange.exchanged(point, each[1] if not lightest else np.zeros_like(each[1]))
        moved = Exchanged(
            *(
                parameters.sums(values, start, stop)
                for values in (parts.scattered, parts.gathered, parts.summed, parts.returned)
            )
        )
        speed = problem.software.speed
        updated = trained / (point.data if point.zero else 1)
        bandwidth = max(map(update_bandwidth, self._devices(point)))
        update_s = updated * speed.update_passes / bandwidth
        return Intervals(
            start=start,
            stop=stop,
            sums=moved.put(ranges(table.seconds, start, stop)),
            saved=ranges(table.saved_bytes, start, stop),
            layers=inside,
            alike=same == inside,
            static=held_bytes(held, trained, state, point.zero, point.data),
            tail_s=update_s + moved.returned,
            sync_s=moved.summed,
            edge_bytes=table.edge_bytes[start],
            num_units=count,
        )

    def longest(self, point: Point) -> int | None:
        """Most units of a stage that is worth a look."""
        if point.num_stages == 1:
            return None
        return max(8, math.ceil(LONG * self.problem.units.count / point.num_stages))

    def stages(
        self,
        point: Point,
        over: tuple[float, ...] | None,
        *,
        relaxed: bool,
        lightest: bool = False,
        limit: float = math.inf,
    ) -> Stages | None:
        """Candidates with what fits; None if the model cannot be placed so.

        Args:
            point: The point.
            over: Bytes of each pipeline rank that are not in static and saved memory.
            relaxed: See `fill_all`.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
            limit: Seconds of a step; candidates of slower ones need not be found.
        """
        problem = self.problem
        devices = problem.devices(point)
        places = np.array(schedule_of(point.plan()).stage_ranks)
        under_way = np.array(self.under_way(point))
        room = np.array([problem.room_bytes(device) for device in devices])
        room = (room - np.array(over or (0.0,) * len(devices)))[places] / point.chunks
        by_device: dict[str, Intervals] = {}
        filled: list[Filled] = [_NOTHING] * point.num_stages
        for device in {device.name: device for device in devices}.values():
            table = problem.table(point, device)
            if table is None:
                return None
            intervals = by_device[device.name] = self.intervals(
                point, table, self.longest(point), lightest=lightest
            )
            mine = np.flatnonzero([devices[rank].name == device.name for rank in places])
            looked_at = self._window(point, intervals, mine, limit)
            rows = np.arange(len(mine))
            if looked_at is None:  # chunks of a rank are alike
                keys = np.stack([under_way[mine], room[mine]])
                _, mine_of, rows = np.unique(keys, axis=1, return_index=True, return_inverse=True)
            else:
                mine_of = rows
            made = fill_all(
                intervals, problem.software.speed, under_way[mine][mine_of], room[mine][mine_of],
                relaxed=relaxed, looked_at=looked_at,
            )  # fmt: skip
            for stage, row in zip(mine.tolist(), rows.ravel().tolist(), strict=True):
                filled[stage] = made[row]
        return Stages([by_device[devices[rank].name] for rank in places], filled)

    def _window(
        self, point: Point, intervals: Intervals, stages: Ints, limit: float
    ) -> NDArray[np.bool_] | None:
        """Which candidates a stage of a 1F1B step below a limit may be.

        No rank may work longer than the step, so that neither the stages before nor those behind
        may have to hold too much.
        """
        if math.isinf(limit) or point.schedule != "1f1b" or point.pipeline == 1:
            return None
        most = limit / self.sharing() / point.microbatches * (1 + 1e-9)
        (forward, backward), behind, _ = self._fastest(point)
        before, behind = (forward + backward)[intervals.start], behind[intervals.stop]
        speed = self.problem.software.speed
        plain, last = sum(intervals.plain(speed)), intervals.plain(speed)[1]
        own = plain - (last - intervals.alone(speed)) / point.microbatches <= most
        number = stages[:, None]
        return own & (before <= number * most) & (behind <= (point.pipeline - 1 - number) * most)

    def under_way(self, point: Point) -> list[float]:
        """For every stage the microbatches whose saved memory is live at once, a chunk's share."""
        key = (point.pipeline, point.microbatches, point.schedule, point.chunks)
        if key not in self._under_way:
            self._under_way[key] = self._live(point)
        return self._under_way[key]

    def _live(self, point: Point) -> list[float]:
        ranks, count = point.pipeline, point.microbatches
        if point.schedule == "1f1b":
            return [float(min(ranks - stage, count)) for stage in range(ranks)]
        schedule = schedule_of(point.plan())
        most = []
        for actions in schedule.actions:
            live = peak = 0
            for action in actions:
                live += (action.kind == "F") - (action.kind in BACKWARDS and action.kind != "I")
                peak = max(peak, live)
            most.append(peak)
        return [most[rank] / point.chunks for rank in schedule.stage_ranks]

    # Memory beyond static and saved tensors, as evaluation shows it

    def extra(self, point: Point) -> tuple[float, ...]:
        """What plans alike have needed, for every pipeline rank; 0 if nothing is known."""
        return tuple(self._extra.get(key, 0.0) for key in self._extra_keys(point))

    def _extra_keys(self, point: Point) -> list[object]:
        alike, last = self.problem.alike(point), point.pipeline - 1
        group = (alike, point.zero, point.data, point.chunks, point.schedule)
        return [(group, rank == 0, rank == last) for rank in range(point.pipeline)]

    def learn(self, outcome: Outcome, stages: Stages, cut: Cut) -> tuple[float, ...]:
        """Bytes beyond static and saved memory of a plan, for every pipeline rank.

        Args:
            outcome: The plan, evaluated.
            stages: The candidates from which its stages were taken.
            cut: Their numbers.
        """
        problem, point = self.problem, outcome.candidate.point
        devices, under_way = problem.devices(point), self.under_way(point)
        planned = [0.0] * point.pipeline
        for stage, rank in enumerate(schedule_of(point.plan()).stage_ranks):
            intervals = stages.each[stage]
            k, filled = cut.chosen[stage], stages.filled[stage]
            low, high = intervals.saved[filled.low[k], k], intervals.saved[filled.high[k], k]
            share = filled.upgraded[k] / max(intervals.layers[k], 1.0)
            saved = low + share * (high - low)
            planned[rank] += float(intervals.static[k] + under_way[stage] * saved)
        found = []
        for rank, key in enumerate(self._extra_keys(point)):
            device = devices[rank]
            over = outcome.rank_over_bytes[rank] / problem.reserved_factor(device)
            found.append(max(0.0, problem.room_bytes(device) + over - planned[rank]))
            self._extra[key] = max(self._extra.get(key, 0.0), found[-1])
        return tuple(found)

    # Level 1: the best cut

    def group(self, point: Point, limit: float = math.inf) -> float:
        """A bound that all ZeRO stages, and both orders of the axes, share.

        It takes memory of ZeRO-3, and nothing moves over the data axis.

        Args:
            point: Any of them.
            limit: Where the bound is not below it, it need not be exact.
        """
        stages = self.stages(point, None, relaxed=True, lightest=True, limit=limit)
        if stages is None:
            return math.inf
        found = self._any_cut(point, stages, self._chain(point)) * self.sharing()
        return max(found, limit) if math.isinf(found) and math.isfinite(limit) else found

    def _any_cut(self, point: Point, stages: Stages, chain: Chain) -> float:
        """Seconds that the best cut takes at least, looking at one stage at a time."""
        count, whole = point.num_stages, not SCHEDULES[point.schedule].splits_backward
        costs = [
            stage_bound(item, mine, chain, stage, count)
            if point.schedule == "1f1b"
            else any_bound(item, mine, chain, stage, whole=whole)
            for stage, (mine, item) in enumerate(zip(stages.each, stages.filled, strict=True))
        ]
        return least_bottleneck(stages.intervals, costs)[0]

    def even(self, stages: Stages) -> Cut | None:
        """The most even cut: of other schedules than 1F1B no other is in the space."""
        costs = [item.forward_s + item.backward_s for item in stages.filled]
        least, _ = least_bottleneck(stages.intervals, costs)
        squares = [cost**2 for cost in costs]
        return cheapest_sum(stages.intervals, costs, squares, least * (1 + 1e-12))

    def cut(
        self, point: Point, limit: float = math.inf, over: tuple[float, ...] | None = None
    ) -> float:
        """Seconds that the best cut of a point takes at least; infinite if none fits.

        Args:
            point: The point.
            limit: Where the bound is not below it, it need not be exact.
            over: Bytes of each pipeline rank that are not in static and saved memory, if known.
        """
        stages = self.stages(point, over, relaxed=True, limit=limit)
        if stages is None:
            return math.inf
        wires, sharing = Wires(self.problem.prices(point), "pp"), self.sharing()
        chain = self._chain(point, stages, wires)
        if point.schedule == "1f1b":

            def message_s(stage: int, sizes: Floats) -> Floats:
                known = {
                    size: wires.seconds(stage, stage + 1, int(size)) for size in np.unique(sizes)
                }
                return np.array([known[size] for size in sizes])

            found = least_chain(stages.each, stages.filled, chain, message_s, limit / sharing)
            return found * sharing
        found = self._any_cut(point, stages, chain)
        small = point.microbatches * point.num_stages <= SIMULATED
        if small and found < limit / sharing and math.isfinite(found):
            cut = self._sure_cut(point, stages)
            if cut is not None:
                speed, each = self.problem.software.speed, self._programs(point, stages)
                planned = planned_s(point, each, stages.filled, cut, chain, wires, speed)
                found = max(found, planned)
        return found * sharing

    def _programs(self, point: Point, stages: Stages) -> list[Intervals]:
        """The candidates with the seconds of every program, if backward is split."""
        if not SCHEDULES[point.schedule].splits_backward:
            return stages.each
        found: dict[str, Intervals] = {}
        devices = self.problem.devices(point)
        for device in devices:
            if device.name not in found:
                table = self.problem.table(point, device, weight=True)
                assert table is not None
                found[device.name] = self.intervals(point, table, self.longest(point))
        return [found[devices[rank].name] for rank in schedule_of(point.plan()).stage_ranks]

    def _sure_cut(self, point: Point, stages: Stages) -> Cut | None:
        """The most even cut, if it is one that memory will not change."""
        spare = tuple(
            max(extra, UNSURE * self.problem.room_bytes(device))
            for extra, device in zip(self.extra(point), self.problem.devices(point), strict=True)
        )
        cut, less = self.even(stages), self.stages(point, spare, relaxed=False)
        sure = less is not None and cut is not None and self.even(less) == cut
        return cut if sure else None

    def _chain(
        self, point: Point, stages: Stages | None = None, wires: Wires | None = None
    ) -> Chain:
        """What bounds need to know of a step."""
        before, after, side = self._fastest(point)
        chain = Chain(microbatches=point.microbatches, before=before, after=after, side=side)
        if stages is None or wires is None or point.pipeline == 1:
            return chain
        intervals, first = stages.intervals, stages.filled[0]
        places = schedule_of(point.plan()).stage_ranks
        pairs = sorted(set(pairwise(places)))
        least = 0.0 if side[-1] else intervals.edge_bytes[intervals.start > 0].min()
        hop_s = min(wires.seconds(here, there, int(least)) for here, there in pairs)
        ends = last_backward(first, intervals) - first.alone_s
        usable = (intervals.start == 0) & np.isfinite(first.forward_s)
        end_s = float(ends[usable].min(initial=np.inf)) if self.main[0] else 0.0
        return replace(chain, hop_s=hop_s, end_s=max(0.0, end_s))

    def _fastest(self, point: Point) -> tuple[tuple[Floats, Floats], Floats, Ints]:
        """What units take before others, and with those behind them, and how many are aside."""
        devices = self._devices(point)
        key = (self.problem.alike(point), tuple(device.name for device in devices))
        if key not in self._chains:
            table = self._fastest_table(point, devices)
            assert table is not None
            parts = table.seconds[-1] * self.main
            zero = np.zeros((*parts.shape[:-1], 1))
            prefix = np.concatenate((zero, np.cumsum(parts, axis=-1)), axis=-1)
            rest = np.maximum(prefix[..., -1:] - prefix, 0.0)
            speed = self.problem.software.speed
            before, after = (
                (kernel_seconds(sums[0], speed), kernel_seconds(sums[1] + sums[2], speed))
                for sums in (prefix, rest)
            )
            side = np.concatenate(([0], np.cumsum(~self.main)))
            self._chains[key] = (before, after[0] + after[1], side)
        return self._chains[key]


@dataclass(frozen=True, slots=True)
class Stages:
    """Candidates for the stages of a point.

    Attributes:
        each: For every stage the candidates as they are on its device.
        filled: For every stage what each of them can keep there.
    """

    each: list[Intervals]
    filled: list[Filled]

    @property
    def intervals(self) -> Intervals:
        """The candidates, as far as they do not depend on the device."""
        return self.each[0]


_NOTHING = Filled(
    forward_s=np.zeros(0), backward_s=np.zeros(0), alone_s=np.zeros(0), low=np.zeros(0, np.int64),
    high=np.zeros(0, np.int64), upgraded=np.zeros(0),
)  # fmt: skip
