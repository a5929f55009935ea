"""Plans of a 1F1B point one by one, those first that may be fastest, until no other can be better.

Bounds of a point hold for any of its plans, and so are lower than the best of them. What is left
is closed by branching: over stages from the first, over where each ends, over what its layers
compute again. A plan's bound is that of its slowest stage, then that of its simulated step, and in
the end the plan is evaluated.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.search.bounds import SIMULATED, Bounds
from autopar.search.candidates import Stages
from autopar.search.chain_bounds import Chain, least_from_behind, stage_bound
from autopar.search.planned import Tasks, planned_s, programs_of
from autopar.search.problem import Candidate, Outcome, Problem
from autopar.search.seconds import durations, ending_seconds, kernel_seconds
from autopar.search.space import Point
from autopar.search.stage_cut import Cut, Filled, Intervals

Floats = NDArray[np.float64]
Mix = tuple[int, int, int]
Chosen = tuple[tuple[int, int], ...]
LOOKS = 20
"""Branches that are looked at in the time in which a plan is evaluated, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """What is known of a point after its plans have been looked at.

    Attributes:
        best: The fastest plan that was evaluated and fits.
        bound_s: No plan of the point takes less, or less than the limit.
        spent: Plans that could have been evaluated in the time that it took, about.
    """

    best: Outcome | None
    bound_s: float
    spent: int


@dataclass(frozen=True, slots=True, eq=False)
class Variants:
    """An interval as a stage, with everything that its layers may compute again.

    Attributes:
        mixes: Low option, high option, layers that have the latter.
        intervals: The interval once for each of them.
        filled: Its seconds.
        bounds: Seconds of a step at least; infinite for what does not fit.
    """

    mixes: list[Mix]
    intervals: Intervals
    filled: Filled
    bounds: Floats


@dataclass(slots=True)
class Closing:
    """Plans of a point that may be below a limit.

    Attributes:
        bounds: Bounds of the problem.
        point: The point.
        stages: Candidates for its stages.
        chain: What is known of its step.
        costs: Seconds of a step by each stage and candidate for it, at least.
        behind: The same by the stages from each on, if they begin at a unit.
        limit: Seconds; what takes as long is of no interest.
        heap: Bound; less the stages that are fixed; number; candidate and variant of these.
    """

    bounds: Bounds
    point: Point
    stages: Stages
    chain: Chain
    costs: list[Floats]
    behind: list[Floats]
    limit: float
    best: Outcome | None = None
    evaluated: int = 0
    heap: list[tuple[float, int, int, Chosen]] = field(default_factory=list)
    known: dict[tuple[int, int], Variants] = field(default_factory=dict)
    timed: dict[tuple[int, int, int], Tasks] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @property
    def problem(self) -> Problem:
        """What is searched."""
        return self.bounds.problem

    def push(self, bound: float, depth: int, chosen: Chosen) -> None:
        """Note a branch; deeper ones come first among equals."""
        if bound < self.limit:
            heapq.heappush(self.heap, (bound, -depth, next(self.numbers), chosen))

    def look(self, bound: float, depth: int, chosen: Chosen) -> None:
        """Divide a branch, or look at the one plan that it is."""
        count, sharing = self.point.num_stages, self.bounds.sharing()
        if depth > count:
            self.evaluate(chosen)
        elif depth == count:
            self.push(max(bound, self.simulated(chosen) * sharing), depth + 1, chosen)
        else:
            intervals, costs = self.stages.intervals, self.costs[depth]
            unit = int(intervals.stop[chosen[-1][0]]) if chosen else 0
            rest = np.maximum(costs, self.behind[depth + 1][intervals.stop]) * sharing
            for k in np.flatnonzero((intervals.start == unit) & (rest < self.limit)).tolist():
                own = np.maximum(self.variants(depth, k).bounds * sharing, rest[k])
                for v in np.flatnonzero(own < self.limit).tolist():
                    self.push(max(bound, float(own[v])), depth + 1, (*chosen, (k, v)))

    def evaluate(self, chosen: Chosen) -> None:
        """Price a plan."""
        self.evaluated += 1
        found = self.problem.outcome(self.candidate(chosen))
        if found is not None and found.fits:
            if self.best is None or found.step_s < self.best.step_s:
                self.best = found
            self.limit = min(self.limit, found.step_s)

    def variants(self, stage: int, k: int) -> Variants:
        """All that a candidate may compute again as a stage."""
        if (stage, k) not in self.known:
            self.known[stage, k] = self._variants(stage, k)
        return self.known[stage, k]

    def _variants(self, stage: int, k: int) -> Variants:
        problem, point = self.problem, self.point
        mine, speed = self.stages.each[stage], problem.software.speed
        start, stop = int(mine.start[k]), int(mine.stop[k])
        device = problem.devices(point)[point.stage_ranks[stage]]
        table = problem.table(point, device)
        assert table is not None
        mixes = mixes_of(problem, start, stop)
        units = np.arange(start, stop)
        options = np.array([options_of(problem, start, stop, mix) for mix in mixes])
        first = table.seconds[0][..., units].transpose(2, 0, 1)
        more = (table.seconds[options, ..., units] - first).sum(axis=1)
        sums = mine.sums[0, ..., k][..., None] + np.moveaxis(more, 0, -1)
        saved = table.saved_bytes[options, units].sum(axis=1)
        at, none = np.full(len(mixes), k), np.zeros(len(mixes), np.int64)
        full = np.broadcast_to(mine.full_buckets, mine.start.shape)[at]
        intervals = Intervals(
            start=mine.start[at], stop=mine.stop[at], sums=sums[None], saved=saved[None],
            layers=mine.layers[at], alike=mine.alike[at], static=mine.static[at],
            tail_s=mine.tail_s[at], sync_s=mine.sync_s[at], edge_bytes=mine.edge_bytes[at],
            full_buckets=full, num_units=mine.num_units,
        )  # fmt: skip
        forward, backward = durations(sums, speed)
        filled = Filled(
            forward_s=forward, backward_s=backward,
            alone_s=kernel_seconds(sums[1] + sums[2], speed),
            ending_s=ending_seconds(sums[1:], intervals.sync_s, speed, full),
            low=none, high=none, upgraded=np.zeros(len(mixes)),
        )  # fmt: skip
        live = self.bounds.under_way(point)[stage] * saved
        need = intervals.static + live + table.working_bytes[options[:, -1], stop - 1]
        found = stage_bound(filled, intervals, self.chain, stage, point.num_stages)
        fits = need <= self.bounds.room(device) * (1 + 1e-12)
        return Variants(mixes, intervals, filled, np.where(fits, found, np.inf))

    def candidate(self, chosen: Chosen) -> Candidate:
        """The plan of a candidate and a variant for each stage."""
        mixes = [self.variants(s, k).mixes[v] for s, (k, v) in enumerate(chosen)]
        return Candidate(
            point=self.point,
            edges=tuple(int(self.stages.intervals.start[k]) for k, _ in chosen[1:]),
            low=tuple(mix[0] for mix in mixes),
            high=tuple(mix[1] for mix in mixes),
            upgraded=tuple(mix[2] for mix in mixes),
        )

    def simulated(self, chosen: Chosen) -> float:
        """Seconds of the step of a plan, at least."""
        point = self.point
        if point.microbatches * point.num_stages > SIMULATED:
            return 0.0
        mine = [self.variants(s, k) for s, (k, _) in enumerate(chosen)]
        cut = Cut(chosen=tuple(v for _, v in chosen), value=0.0)
        wires = self.problem.wires(point)
        programs = [self.programs(s, k, v) for s, (k, v) in enumerate(chosen)]
        return planned_s(
            point, [item.intervals for item in mine], cut, self.chain, wires, programs
        )  # fmt: skip

    def programs(self, stage: int, k: int, v: int) -> Tasks:
        """What the programs of a stage take, at least."""
        if (stage, k, v) not in self.timed:
            mine = self.variants(stage, k)
            speed = self.problem.software.speed
            self.timed[stage, k, v] = programs_of(mine.intervals, mine.filled, v, speed)
        return self.timed[stage, k, v]


def opened(bounds: Bounds, point: Point, limit: float) -> Closing | None:
    """A point, ready to be closed; None if the model cannot be placed so.

    Args:
        bounds: Bounds of the problem.
        point: A point of 1F1B.
        limit: See `close`.
    """
    stages = bounds.stages(point, None, relaxed=True)
    if stages is None:
        return None
    chain = bounds.chain(point, stages, bounds.problem.wires(point))
    costs = bounds.costs(point, stages, chain)
    behind = least_from_behind(stages.intervals, costs)
    return Closing(bounds, point, stages, chain, costs, behind, limit)


def close(
    bounds: Bounds,
    point: Point,
    limit: float,
    plans: int,
    stopped: Callable[[], bool] = lambda: False,
) -> Closed:
    """Evaluate plans of a point until none that is left can be faster than them or a limit.

    Args:
        bounds: Bounds of the problem.
        point: A point of 1F1B.
        limit: Seconds; plans that take as long are of no interest.
        plans: Most plans to evaluate, or what takes about as long.
        stopped: Whether to stop at once.
    """
    closing = opened(bounds, point, limit)
    if closing is None:
        return Closed(best=None, bound_s=math.inf, spent=0)
    closing.push(float(closing.behind[0][0]) * bounds.sharing(), 0, ())
    looks = spent = 0
    while closing.heap and spent < plans and not stopped():
        bound, depth, _, chosen = heapq.heappop(closing.heap)
        if bound >= closing.limit:  # and so is all that is left
            closing.heap.clear()
            break
        closing.look(bound, -depth, chosen)
        looks += 1
        spent = closing.evaluated + looks // LOOKS
    left = closing.heap[0][0] if closing.heap else math.inf
    bound_s = min(left, closing.limit)
    return Closed(best=closing.best, bound_s=bound_s, spent=spent)


def options_of(problem: Problem, start: int, stop: int, mix: Mix) -> list[int]:
    """Option of every unit of a stage."""
    low, high, left = mix
    found = []
    for unit in range(start, stop):
        upgraded = problem.units.block[unit] >= 0 and left > 0
        left -= upgraded
        found.append(high if upgraded else low)
    return found


def mixes_of(problem: Problem, start: int, stop: int) -> list[Mix]:
    """All (low, high, upgraded) of a stage that differ in what is computed again."""
    layers = sum(problem.units.block[unit] >= 0 for unit in range(start, stop))
    options = range(len(problem.policies))
    mixes = [(option, option, 0) for option in options]
    mixes += [
        (low, high, count)
        for low, high in product(options, options)
        if low != high
        for count in range(1, layers + 1)
    ]
    again = [
        [_computed_again(problem, unit, option) for option in options]
        for unit in range(start, stop)
    ]
    found: dict[object, Mix] = {}
    for mix in mixes:
        chosen = options_of(problem, start, stop, mix)
        names = [each[option] for each, option in zip(again, chosen, strict=True)]
        found.setdefault(tuple(names), mix)
    return list(found.values())


def _computed_again(problem: Problem, unit: int, option: int) -> frozenset[str]:
    """Names of the nodes of a unit that backward computes again."""
    nodes = problem.graph.nodes
    names = {nodes[index].name for index in problem.units.nodes[unit]}
    return frozenset(names & problem.policies[option])
