"""Lower bounds of what a point takes, from cheap to tight, and the candidates for its stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.device import Device
from autopar.cost_models.evaluate import Wires, update_bandwidth
from autopar.cost_models.events import schedule_of
from autopar.cost_models.simulate import Task, simulate
from autopar.schedules.actions import BACKWARDS, Action
from autopar.schedules.make import SCHEDULES
from autopar.search.exchange import Exchange, Exchanged
from autopar.search.problem import Outcome, Problem
from autopar.search.space import Point
from autopar.search.stage_cut import (
    LONG,
    Chain,
    Cut,
    Filled,
    Intervals,
    after_backward,
    cheapest_sum,
    durations,
    fill_all,
    least_bottleneck,
    least_chain,
    stage_bound,
)
from autopar.search.states import held_bytes, ranges
from autopar.search.tables import UnitTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FORWARD = 0.9
"""Share of a model's forward of which any part of it has at least that much, beside backward."""
SIMULATED = 5000
"""Most forwards of a step that is simulated for a bound."""
LINEAR = 0.98
"""Saved memory of fewer samples is at least this share of what is proportional to samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Totals:
    """A table, summed up.

    Attributes:
        seconds: Of the fastest option, shape (phases, parts, 1).
        saved_bytes: Of the option with least.
        held: Of all weights, of those that are trained, and of optimizer state.
        trained_each: Of each parameter that is trained.
    """

    seconds: Floats
    saved_bytes: float
    held: tuple[float, float, float]
    trained_each: Floats


@dataclass(slots=True)
class Bounds:
    """Bounds of the points of a problem; remembers what points share.

    Attributes:
        problem: The problem.
        exchange: What moves over the data axis.
    """

    problem: Problem
    exchange: Exchange = field(init=False)
    _totals: dict[object, _Totals | None] = field(default_factory=dict)
    _largest: dict[object, Point] = field(default_factory=dict)
    _wholes: dict[object, tuple[float, float]] = field(default_factory=dict)
    _uniform_room: float | None = None
    _under_way: dict[object, list[float]] = field(default_factory=dict)
    _extra: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.exchange = Exchange(self.problem)
        if self.problem.cluster.is_uniform:
            self._uniform_room = self.problem.room_bytes(self.problem.device)

    # Level 0: the whole model over the ranks

    def fast(self, point: Point) -> Device:
        """The fastest of the devices of a point."""
        if self.problem.cluster.is_uniform:
            return self.problem.device
        return max(self.problem.devices(point), key=lambda item: item.peak("bf16"))

    def totals(self, point: Point) -> _Totals | None:
        """Sums of the table of a point; None if the model cannot be placed so."""
        device = self.fast(point)
        key = (self.problem.alike(point), device.name)
        if key not in self._totals:
            table = self.problem.table(point, device)
            self._totals[key] = None if table is None else self._sum(table)
        return self._totals[key]

    def _sum(self, table: UnitTable) -> _Totals:
        weight, trained, state = self.problem.parameters.bytes_of(table)
        return _Totals(
            seconds=table.seconds[-1].sum(axis=-1, keepdims=True),
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
        totals = self.totals(largest)
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
        forward, backward = self._microbatch(point, totals, share, lightest)
        took, ranks, microbatches = forward + backward, point.pipeline, point.microbatches
        if point.schedule == "1f1b" and microbatches > ranks:
            return took * (microbatches + ranks - 1) / ranks * self.sharing()
        if point.chunks == 1 and ranks > 1:
            # Rank r works M w_r after F_0 .. F_{r-1}: least where all ranks end together.
            lead = FORWARD * forward / took / microbatches
            return (
                max(took, took * lead * microbatches / (1 - (1 - lead) ** ranks)) * self.sharing()
            )
        return max(took, took * microbatches / ranks) * self.sharing()

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
        """Seconds of forward and of backward of the whole model."""
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
            forward, backward = durations(seconds, self.problem.software.speed)
            self._wholes[key] = float(forward[0]), float(backward[0])
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
        update_s = updated * speed.update_passes / update_bandwidth(self.fast(point))
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
        return Stages(by_device[devices[0].name], filled)

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
        forward, backward = self._fastest(point)
        done = forward + backward
        before, behind = done[intervals.start], done[-1] - done[intervals.stop]
        own = done[intervals.stop] - before <= most
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
        intervals, planned = stages.intervals, [0.0] * point.pipeline
        for stage, rank in enumerate(schedule_of(point.plan()).stage_ranks):
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
        intervals, count = stages.intervals, point.num_stages
        if point.schedule == "1f1b":
            chain = Chain(microbatches=point.microbatches, fastest=self._fastest(point))
            costs = [
                stage_bound(item, intervals, chain, stage, count)
                for stage, item in enumerate(stages.filled)
            ]
            found = least_bottleneck(intervals, costs)[0] * self.sharing()
            return max(found, limit) if math.isinf(found) and math.isfinite(limit) else found
        cut = self.even(stages)
        return math.inf if cut is None else self._worked(point, stages, cut) * self.sharing()

    def even(self, stages: Stages) -> Cut | None:
        """The most even cut: of other schedules than 1F1B no other is in the space."""
        costs = [item.forward_s + item.backward_s for item in stages.filled]
        least, _ = least_bottleneck(stages.intervals, costs)
        squares = [cost**2 for cost in costs]
        return cheapest_sum(stages.intervals, costs, squares, least * (1 + 1e-12))

    def _worked(self, point: Point, stages: Stages, cut: Cut) -> float:
        """Seconds that stages take at least.

        For every rank what lies before its first stage, all its programs, and what lies behind the
        last backward of that stage.
        """
        places = schedule_of(point.plan()).stage_ranks
        chosen = list(enumerate(cut.chosen))
        forward = [float(stages.filled[s].forward_s[k]) for s, k in chosen]
        backward = [float(stages.filled[s].backward_s[k]) for s, k in chosen]
        whole = not SCHEDULES[point.schedule].splits_backward
        best = 0.0
        for rank in range(point.pipeline):
            mine = [stage for stage, place in enumerate(places) if place == rank]
            work = point.microbatches * sum(forward[s] + backward[s] for s in mine)
            after = sum(backward[: mine[0]]) if whole else 0.0
            best = max(best, sum(forward[: mine[0]]) + work + after)
        return best

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

        def message_s(stage: int, sizes: Floats) -> Floats:
            known = {size: wires.seconds(stage, stage + 1, int(size)) for size in np.unique(sizes)}
            return np.array([known[size] for size in sizes])

        if point.schedule == "1f1b":
            hop_s = 0.0
            if point.pipeline > 1:
                least = stages.intervals.edge_bytes[stages.intervals.start > 0].min()
                hop_s = min(
                    wires.seconds(stage, stage + 1, int(least))
                    for stage in range(point.pipeline - 1)
                )
            ends = after_backward(stages.filled[0], stages.intervals)
            usable = (stages.intervals.start == 0) & np.isfinite(stages.filled[0].forward_s)
            chain = Chain(
                microbatches=point.microbatches, fastest=self._fastest(point), hop_s=hop_s,
                end_s=float(ends[usable].min(initial=np.inf)),
            )  # fmt: skip
            found = least_chain(stages.intervals, stages.filled, chain, message_s, limit / sharing)
            return found * sharing
        cut = self.even(stages)
        if cut is None:
            return math.inf
        if point.microbatches * point.num_stages > SIMULATED:
            return self._worked(point, stages, cut) * sharing
        return self._planned(point, stages, cut, wires) * sharing

    def _planned(self, point: Point, stages: Stages, cut: Cut, wires: Wires) -> float:
        """Seconds of a step of given stages: simulated, without what only a tape of each tells."""
        schedule = schedule_of(point.plan())
        chosen = list(enumerate(cut.chosen))
        tasks: dict[tuple[str, int], Task] = {}
        for stage, k in chosen:
            forward = float(stages.filled[stage].forward_s[k])
            backward = float(stages.filled[stage].backward_s[k])
            late = float(after_backward(stages.filled[stage], stages.intervals)[k])
            parts = stages.intervals.sums[-1, 1:3, 0:2, k].sum(axis=1)
            share = parts[1] / parts.sum() if parts.sum() else 0.0
            tasks["F", stage] = Task(compute_s=forward)
            tasks["B", stage] = Task(compute_s=backward)
            tasks["I", stage] = Task(compute_s=backward * (1 - share))
            tasks["W", stage] = Task(compute_s=backward * share)
            tasks["REDUCE", stage] = Task()
            tasks["UPDATE", stage] = Task(compute_s=late)
        sizes = [float(stages.intervals.edge_bytes[k]) for _, k in chosen]
        known: dict[tuple[int, int], float] = {}

        def transfer_s(action: Action) -> float:
            assert action.peer is not None
            pair = (action.stage, action.peer)
            if pair not in known:
                places = schedule.stage_ranks
                size = int(sizes[max(pair)])
                known[pair] = wires.seconds(places[action.stage], places[action.peer], size)
            return known[pair]

        return simulate(
            schedule, lambda action: tasks[action.kind, action.stage], transfer_s
        ).step_s

    def _fastest(self, point: Point) -> tuple[Floats, Floats]:
        """Prefix sums of what forward and backward of units take at least."""
        table = self.problem.table(point, self.fast(point))
        assert table is not None
        overlap = self.problem.software.speed.overlap
        parts = table.seconds[-1]
        each = parts[:, 0] + parts[:, 1] + (1 - overlap) * parts[:, 2]
        forward, backward = each[0], each[1] + each[2]
        return (
            np.concatenate(([0.0], np.cumsum(forward))),
            np.concatenate(([0.0], np.cumsum(backward))),
        )


@dataclass(frozen=True, slots=True)
class Stages:
    """Candidates for the stages of a point.

    Attributes:
        intervals: The candidates.
        filled: For every stage what each of them can keep there.
    """

    intervals: Intervals
    filled: list[Filled]


_NOTHING = Filled(
    forward_s=np.zeros(0), backward_s=np.zeros(0), low=np.zeros(0, np.int64),
    high=np.zeros(0, np.int64), upgraded=np.zeros(0),
)  # fmt: skip
