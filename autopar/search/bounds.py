"""Lower bounds of what a point takes, from cheap to tight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.messages import Wires
from autopar.schedules.make import SCHEDULES
from autopar.search.candidates import Candidates, Edges, Stages
from autopar.search.chain_bounds import (
    Chain,
    any_bound,
    last_backward,
    least_chain,
    outside,
    stage_bound,
)
from autopar.search.exchange import Exchanged
from autopar.search.planned import planned_s, programs_of
from autopar.search.problem import Outcome
from autopar.search.seconds import durations, kernel_seconds
from autopar.search.space import Point
from autopar.search.stage_cut import Cut, Intervals, cheapest_sum, least_bottleneck, most_even
from autopar.search.states import held_bytes, ranges
from autopar.search.totals import Totals

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SIMULATED = 5000
"""Most forwards of a step that is simulated for a bound."""
LINEAR = 0.98
"""Saved memory of fewer samples is at least this share of what is proportional to samples."""


@dataclass(slots=True)
class Bounds(Candidates):
    """Bounds of the points of a problem; remembers what points share."""

    _totals: dict[object, Totals | None] = field(default_factory=dict)
    _largest: dict[object, Point] = field(default_factory=dict)
    _wholes: dict[object, tuple[float, float]] = field(default_factory=dict)
    _paths: dict[object, float] = field(default_factory=dict)
    _uniform_room: float | None = None
    _extra: dict[object, float] = field(default_factory=dict)
    _edges: dict[Point, Edges | None] = field(default_factory=dict)
    _leans: dict[Point, float] = field(default_factory=dict)
    _longs: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Candidates.__post_init__(self)
        if self.problem.cluster.is_uniform:
            self._uniform_room = self.room(self.problem.device)

    # Level 0: the whole model over the ranks

    def totals(self, point: Point, *, anywhere: bool = False) -> Totals | None:
        """Sums of the table of a point; None if the model cannot be placed so.

        Args:
            point: The point.
            anywhere: Not on its own devices, but on any of the cluster.
        """
        devices = self.devices(point, anywhere=anywhere)
        key = (self.problem.alike(point), tuple(device.name for device in devices))
        if key not in self._totals:
            table = self.fastest_table(point, devices)
            self._totals[key] = (
                None
                if table is None
                else Totals.of(
                    table, self.problem.parameters, self.main, self.problem.software.speed
                )
            )
        return self._totals[key]

    def scaled(self, point: Point, *, lightest: bool = False, limit: float = math.inf) -> float:
        """A bound from the largest microbatch of points alike.

        Kernels of fewer samples, and messages of fewer bytes, are not faster per sample.

        Args:
            point: The point.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
            limit: Where the bound is not below it, it need not be exact.
        """
        key = (point.tensor, point.role)
        largest = self._largest.get(key)
        if largest is None:
            return 0.0
        totals = self.totals(largest, anywhere=True)
        if totals is None:
            return math.inf
        share = self.problem.samples(point) / self.problem.samples(largest)
        return self._cheap(point, totals, share, lightest, limit)

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

    def cheap(self, point: Point, *, lightest: bool = False, limit: float = math.inf) -> float:
        """Seconds that every plan of a point takes at least; infinite if none can fit.

        Args:
            point: The point.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
            limit: Where the bound is not below it, it need not be exact.
        """
        totals = self.totals(point)
        return math.inf if totals is None else self._cheap(point, totals, 1.0, lightest, limit)

    def _cheap(
        self, point: Point, totals: Totals, share: float, lightest: bool, limit: float
    ) -> float:
        found = self._worked_evenly(point, totals, share, lightest, 0.0)
        if limit <= found < math.inf:
            return found
        again = self._again_s(point, totals, share, 3 if lightest else point.zero, limit)
        if again == 0 or math.isinf(again):
            return found + again
        return self._worked_evenly(point, totals, share, lightest, again)

    def _worked_evenly(
        self, point: Point, totals: Totals, share: float, lightest: bool, again_s: float
    ) -> float:
        """Seconds of a step at least if each rank has as much to do as is best."""
        work, late = self._microbatch(point, totals, share, lightest, again_s)
        ranks, microbatches = point.pipeline, point.microbatches
        path = self._path(totals, share, not SCHEDULES[point.schedule].splits_backward)
        took = microbatches * work - late
        crowded = totals.crowded_s(ranks) * share
        found = max(path, took / ranks, microbatches * crowded)
        if point.schedule == "1f1b" and microbatches > ranks:
            found = max(found, (took + (ranks - 1) * path) / ranks)
        elif point.chunks == 1 and ranks > 1:
            # Rank r works M w_r after F_0 .. F_{r-1}: least where all ranks end together.
            lead = totals.slope / microbatches * (work > 0)
            if (point.zero < 2 or lightest) and lead:
                even = took * lead / (1 - (1 - lead) ** ranks) - totals.offset * share
                found = max(found, even)
        return found * self.sharing()

    def _path(self, totals: Totals, share: float, whole: bool) -> float:
        """Seconds of a microbatch through all stages, and back if a backward is one program."""
        key = (id(totals), share, whole)
        if key not in self._paths:
            chain, speed = totals.chain * share, self.problem.software.speed
            back = float(kernel_seconds(chain[1] + chain[2], speed)[0]) if whole else 0.0
            self._paths[key] = float(kernel_seconds(chain[0], speed)[0]) + back
        return self._paths[key]

    def _again_s(
        self, point: Point, totals: Totals, share: float, zero: int, limit: float
    ) -> float:
        """Seconds of a microbatch at least that the device computes again, as memory is short."""
        saved = share * (LINEAR if share < 1 else 1.0)
        room = (self._room(point) - self.held(point, totals, zero)) / saved
        if totals.most_bytes * point.microbatches <= room or self.uneven(point):
            return 0.0
        live = totals.live_at_least(point, share, limit / self.sharing())
        return totals.relief.least_s(live, float(live @ totals.kept_bytes) - room) * share

    def _room(self, point: Point) -> float:
        """Memory for tensors on all ranks of a pipeline."""
        if self._uniform_room is not None:
            return point.pipeline * self._uniform_room
        return sum(map(self.room, self.problem.devices(point)))

    def held(self, point: Point, totals: Totals, zero: int) -> float:
        """Bytes of parameters, gradients and optimizer state of the whole model on a pipeline."""
        weight, trained, state = totals.held
        held = held_bytes(weight, trained, state, zero, point.data)
        # Of one microbatch, gradients come as what forward has saved goes.
        late = trained / (point.data if zero >= 2 else 1) * (point.microbatches == 1)
        return held - late

    def _microbatch(
        self, point: Point, totals: Totals, share: float, lightest: bool, again_s: float
    ) -> tuple[float, float]:
        """Seconds of forward and backward of the whole model, and those that the last one saves.

        The last backward does not wait for the collectives beside it.
        """
        moves = point.zero >= 2 and not lightest
        mesh = (point.mesh, point.zero) if moves else ()
        key = (id(totals), share, mesh, again_s)
        if key not in self._wholes:
            seconds = totals.seconds * share
            if moves:
                each = self.exchange.exchanged(point, totals.trained_each)
                seconds = Exchanged(
                    *(np.array([part.sum()]) for part in (
                        each.scattered, each.gathered, each.summed, each.returned
                    ))
                ).put(seconds)  # fmt: skip
            if again_s:
                seconds = seconds.copy()
                seconds[1, 1] += again_s  # beside collectives, these slow nothing down
            speed = self.problem.software.speed
            forward, backward = durations(seconds, speed)
            alone = kernel_seconds(seconds[1] + seconds[2], speed)
            late = max(0.0, float(backward[0] - alone[0]))
            self._wholes[key] = float(forward[0] + backward[0]), late
        return self._wholes[key]

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
        devices = problem.devices(point)
        planned = [0.0] * point.pipeline
        for stage, rank in enumerate(point.stage_ranks):
            intervals, filled = stages.each[stage], stages.filled[stage]
            k = np.array([cut.chosen[stage]])
            _, saved = intervals.mixed(filled.low[k], filled.high[k], filled.upgraded[k], k)
            held = stages.under_way[stage] * saved
            if stages.waiting[stage]:
                late = intervals.late_mixed(filled.low[k], filled.high[k], filled.upgraded[k], k)
                held = held + stages.waiting[stage] * late
            planned[rank] += float((intervals.static[k] + held)[0])
        found = []
        for rank, key in enumerate(self._extra_keys(point)):
            device = devices[rank]
            over = outcome.rank_over_bytes[rank] / problem.reserved_factor(device)
            found.append(max(0.0, self.room(device) + over - planned[rank]))
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
        if point.schedule != "1f1b":
            known = self.problem.second and self.problem.second.value(("group", point))
            return float(known[0]) if known else self._group_of_fixed(point)
        stages = self.stages(point, None, relaxed=True, lightest=True, limit=limit)
        if stages is None:
            return math.inf
        found = self._any_cut(point, stages, self.chain(point)) * self.sharing()
        return self._known_to(point, stages, found, limit)

    def _group_of_fixed(self, point: Point) -> float:
        """The same of a point with one cut."""
        free = self.plainest(point, lightest=True) or self.fixed(point, None, lightest=True)
        lean = self._lean_quickly(point)
        if free is None:
            return lean * self.sharing()
        found = self._worked(point, *free, self.chain(point))
        return (found if lean >= found else min(found, self.lean(point))) * self.sharing()

    def _known_to(self, point: Point, stages: Stages, found: float, limit: float) -> float:
        """A bound, given that slower candidates than a limit, and long ones, were left out."""
        if math.isinf(found) and math.isfinite(limit) and stages.possible():
            found = limit
        longest = self.longest(point)
        return found if longest is None else min(found, self._long(point, longest))

    def _long(self, point: Point, longest: int) -> float:
        """Seconds of a step at least if a stage has more than so many units."""
        key = (self.problem.alike(point), longest, point.microbatches)
        if key not in self._longs:
            table = self.fastest_table(point, self.devices(point))
            assert table is not None
            start = np.arange(self.problem.units.count - longest)
            sums = ranges(table.seconds[-1], start, start + longest + 1)
            speed = self.problem.software.speed
            work = kernel_seconds(sums[0], speed) + kernel_seconds(sums[1] + sums[2], speed)
            least = float(work.min(initial=np.inf))
            self._longs[key] = point.microbatches * least * self.sharing()
        return self._longs[key]

    def _any_cut(self, point: Point, stages: Stages, chain: Chain) -> float:
        """Seconds that the best cut takes at least, looking at one stage at a time."""
        return least_bottleneck(stages.intervals, self.costs(point, stages, chain))[0]

    def tight(self, point: Point, stages: Stages) -> Cut | None:
        """The cut of the least bound, looking at one stage at a time."""
        costs = self.costs(point, stages, self.chain(point))
        weights = [item.forward_s + item.backward_s for item in stages.filled]
        least, _ = least_bottleneck(stages.intervals, costs)
        return cheapest_sum(stages.intervals, costs, weights, least * (1 + 1e-12))

    def costs(self, point: Point, stages: Stages, chain: Chain) -> list[Floats]:
        """Bounds of a step by each stage and candidate for it."""
        count, whole = point.num_stages, not SCHEDULES[point.schedule].splits_backward
        return [
            stage_bound(item, mine, chain, stage, count)
            if point.schedule == "1f1b"
            else any_bound(item, mine, chain, stage, whole=whole)
            for stage, (mine, item) in enumerate(zip(stages.each, stages.filled, strict=True))
        ]

    def even(self, stages: Stages) -> Cut | None:
        """The most even cut: of other schedules than 1F1B no other is in the space."""
        costs = [item.forward_s + item.backward_s for item in stages.filled]
        return most_even(stages.intervals, costs)

    def cut(
        self, point: Point, limit: float = math.inf, over: tuple[float, ...] | None = None
    ) -> float:
        """Seconds that the best cut of a point takes at least; infinite if none fits.

        Args:
            point: The point.
            limit: Where the bound is not below it, it need not be exact.
            over: Bytes of each pipeline rank that are not in static and saved memory, if known.
        """
        if point.schedule != "1f1b":
            return self._of_fixed(point, limit)
        stages = self.stages(point, over, relaxed=True, limit=limit)
        if stages is None:
            return math.inf
        wires, sharing = self.problem.wires(point), self.sharing()

        def message_s(stage: int, sizes: Floats) -> Floats:
            known = {size: wires.seconds(stage, stage + 1, int(size)) for size in np.unique(sizes)}
            return np.array([known[size] for size in sizes])

        chain = self.chain(point, stages, wires)
        found = least_chain(stages.each, stages.filled, chain, message_s, limit / sharing)
        return self._known_to(point, stages, found * sharing, limit)

    def _of_fixed(self, point: Point, limit: float) -> float:
        """The same of a point with one cut."""
        fixed, sharing = self.plainest(point) or self.fixed(point, None), self.sharing()
        if fixed is None:
            return self.lean(point) * sharing
        stages, cut = fixed
        wires = self.problem.wires(point)
        chain = self.chain(point, stages, wires)
        found = self._worked(point, stages, cut, chain)
        small = point.microbatches * point.num_stages <= SIMULATED
        if small and found < limit / sharing:
            speed, each = self.problem.software.speed, self._programs(point, stages)
            programs = [
                programs_of(mine, item, k, speed)
                for mine, item, k in zip(each, stages.filled, cut.chosen, strict=True)
            ]
            found = max(found, planned_s(point, each, cut, chain, wires, programs))
        lean = self._lean_quickly(point)
        return (found if lean >= found else min(found, self.lean(point))) * sharing

    def _lean_quickly(self, point: Point) -> float:
        """A bound of `lean` from sums over the model."""
        totals = self.totals(point)
        if totals is None or point.chunks > 1:
            return math.inf
        work, late = self._microbatch(point, totals, 1.0, True, totals.lean_s)
        return (point.microbatches * work - late) / point.pipeline

    def lean(self, point: Point) -> float:
        """Seconds of a step of any cut at least if stages keep as little as they can.

        Where the even cut does not fit, that of least memory is the plan of a point whose ranks
        have one stage each.
        """
        group = replace(point, zero=0, data_outside=False)
        if group not in self._leans:
            self._leans[group] = self._lean(group) if point.chunks == 1 else math.inf
        return self._leans[group]

    def _lean(self, point: Point) -> float:
        stages = self.stages(point, None, relaxed=True, lightest=True)
        if stages is None:
            return math.inf
        filled = []
        for mine, item in zip(stages.each, stages.filled, strict=True):
            _, low, high = mine.leanest()
            sums, _ = mine.mixed(low, high, mine.layers, np.arange(len(low)))
            forward, backward = durations(sums, self.problem.software.speed)
            fits = np.isfinite(item.forward_s)
            forward = np.where(fits, forward, np.inf)
            filled.append(replace(item, forward_s=forward, backward_s=backward))
        return self._any_cut(point, replace(stages, filled=filled), self.chain(point))

    def _worked(self, point: Point, stages: Stages, cut: Cut, chain: Chain) -> float:
        """Seconds of a step of given stages, at least: each rank does all programs of its own.

        They begin after what lies before its first stage; where a backward is one program, the last
        of them is that stage's, and what lies before it in backward follows.
        """
        whole = not SCHEDULES[point.schedule].splits_backward
        work = [0.0] * point.pipeline
        ends = [(0.0, 0.0)] * point.pipeline
        places = point.stage_ranks
        for stage in reversed(range(point.num_stages)):
            k, filled = cut.chosen[stage], stages.filled[stage]
            rank, backward = places[stage], float(filled.backward_s[k])
            work[rank] += point.microbatches * (float(filled.forward_s[k]) + backward)
            before, behind = outside(filled, stages.each[stage], chain, stage)
            left = max(0.0, float(behind[k]) - backward) if whole else 0.0
            ends[rank] = float(before[k]), left
        return max(a + b + c for a, (b, c) in zip(work, ends, strict=True))

    def fixed(
        self, point: Point, over: tuple[float, ...] | None, *, lightest: bool = False
    ) -> tuple[Stages, Cut] | None:
        """The one cut of a point of another schedule than 1F1B, and what its stages keep.

        It is the most even one with memory of ZeRO-3 and nothing but static and saved tensors in
        it. What else takes memory makes stages keep less, and so slower, but does not move the cut.

        Args:
            point: The point.
            over: Bytes of each pipeline rank that are not in static and saved memory, if known.
            lightest: Take memory of ZeRO-3, and let nothing move over the data axis.
        """
        group = replace(point, zero=0, data_outside=False)
        if group not in self._edges:
            free = self.stages(group, None, relaxed=False, lightest=True)
            even = None if free is None else self.even(free)
            self._edges[group] = None
            if free is not None and even is not None:
                each = free.intervals
                self._edges[group] = tuple(
                    (int(each.start[k]), int(each.stop[k])) for k in even.chosen
                )
        edges = self._edges[group]
        stages = (
            None
            if edges is None
            else self.stages(point, over, relaxed=False, lightest=lightest, only=edges)
        )
        if stages is None or any(
            math.isinf(item.forward_s[stage]) for stage, item in enumerate(stages.filled)
        ):
            return None
        return stages, Cut(chosen=tuple(range(point.num_stages)), value=0.0)

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
                mine = stages.intervals
                edges = tuple(zip(mine.start.tolist(), mine.stop.tolist(), strict=True))
                found[device.name] = self.intervals(point, table, only=edges)
        return [found[devices[rank].name] for rank in point.stage_ranks]

    def chain(
        self, point: Point, stages: Stages | None = None, wires: Wires | None = None
    ) -> Chain:
        """What bounds need to know of a step."""
        before, after, side = self.fastest(point)
        chain = Chain(microbatches=point.microbatches, before=before, after=after, side=side)
        if stages is None or wires is None or point.pipeline == 1:
            return chain
        intervals, first = stages.intervals, stages.filled[0]
        places = point.stage_ranks
        pairs = sorted(set(pairwise(places)))
        least = 0.0 if side[-1] else intervals.edge_bytes[intervals.start > 0].min()
        hop_s = min(wires.seconds(here, there, int(least)) for here, there in pairs)
        ends = last_backward(first, intervals) - first.alone_s
        usable = (intervals.start == 0) & np.isfinite(first.forward_s)
        end_s = float(ends[usable].min(initial=np.inf)) if self.main[0] else 0.0
        return replace(chain, hop_s=hop_s, end_s=max(0.0, end_s))
