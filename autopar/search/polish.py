"""Plans of a point beyond those that sums over units suggest: the leanest, and neighbours.

What a stage adds by itself (messages, the peak inside a program) is in no sum. Where memory is so
tight that this decides, or the model so small that there are few plans, plans are evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.search.bounds import Bounds
from autopar.search.candidates import Stages
from autopar.search.problem import Candidate, Outcome, Problem
from autopar.search.space import Point
from autopar.search.stage_cut import Cut, cheapest_sum, least_bottleneck

ROUNDS = 6
"""Times that the leanest cut is looked for again with what evaluation says of memory."""
PLANS, SPARED = 400, 8
"""Neighbours to evaluate: `PLANS` over the number of units, less `SPARED`."""


def leanest(problem: Problem, bounds: Bounds, point: Point) -> Outcome | None:
    """The plan of a point that leaves every rank most room, whether it fits or not.

    Args:
        problem: The problem.
        bounds: Its bounds.
        point: The point.
    """
    stages = bounds.stages(point, None, relaxed=False)
    if stages is None:
        return None
    under_way, chunks = bounds.under_way(point), point.chunks
    places = point.stage_ranks
    rooms = [bounds.room(device) for device in problem.devices(point)]
    # Where there is no room for anything, bytes themselves are compared.
    sizes = rooms if min(rooms) > 0 else [1.0] * len(rooms)
    planned = [
        mine.static + live * mine.leanest()[0]
        for mine, live in zip(stages.each, under_way, strict=True)
    ]
    best: Outcome | None = None
    extra, tried = [0.0] * point.pipeline, set[tuple[int, ...]]()
    for _ in range(ROUNDS):
        needs = [
            (own + extra[rank] / chunks) / (sizes[rank] / chunks)
            for own, rank in zip(planned, places, strict=True)
        ]
        least, _ = least_bottleneck(stages.intervals, needs)
        cut = cheapest_sum(stages.intervals, needs, needs, least * (1 + 1e-12))
        if cut is None or cut.chosen in tried:
            break
        tried.add(cut.chosen)
        outcome = problem.outcome(_lean(point, stages, cut))
        if outcome is None:
            break
        if best is None or outcome.over_bytes < best.over_bytes:
            best = outcome
        if best.fits:
            break
        devices = problem.devices(point)
        for rank, over in enumerate(outcome.rank_over_bytes):
            mine = sum(
                float(own[k])
                for own, k, place in zip(planned, cut.chosen, places, strict=True)
                if place == rank
            )
            held = rooms[rank] + over / problem.reserved_factor(devices[rank])
            extra[rank] = max(extra[rank], held - mine)
    return best


def _lean(point: Point, stages: Stages, cut: Cut) -> Candidate:
    """The plan of a cut that saves least."""
    low, high, upgraded = [], [], []
    for mine, k in zip(stages.each, cut.chosen, strict=True):
        _, others, layers = mine.leanest()
        low.append(int(others[k]))
        high.append(int(layers[k]) if mine.layers[k] else low[-1])
        upgraded.append(int(mine.layers[k]) * (low[-1] != high[-1]))
    return Candidate(
        point=point,
        edges=tuple(int(stages.intervals.start[k]) for k in cut.chosen[1:]),
        low=tuple(low),
        high=tuple(high),
        upgraded=tuple(upgraded),
    )


def polished(problem: Problem, outcome: Outcome) -> Outcome:
    """A plan that is no worse, among those that differ in one edge or what one stage keeps.

    Args:
        problem: The problem.
        outcome: A plan; of one that does not fit, those that need less memory are better.
    """
    left = PLANS // problem.units.count - SPARED
    best, seen, better = outcome, {outcome.candidate}, True
    while better:
        better = False
        for candidate in _neighbours(problem, best.candidate):
            if candidate in seen:
                continue
            if left <= 0:
                return best
            left -= 1
            seen.add(candidate)
            found = problem.outcome(candidate)
            if found is not None and _rank(found) < _rank(best):
                best, better = found, True
                break
    return best


def _rank(outcome: Outcome) -> tuple[int, float]:
    """What is better has less."""
    return max(0, outcome.over_bytes), outcome.step_s


def _neighbours(problem: Problem, candidate: Candidate) -> Iterator[Candidate]:
    """Plans with one edge elsewhere, or another choice for one stage."""
    edges = (0, *candidate.edges, problem.units.count)
    for place in range(1, len(edges) - 1) if problem.edges is None else ():
        for moved in (edges[place] - 1, edges[place] + 1):
            if edges[place - 1] < moved < edges[place + 1]:
                yield replace(candidate, edges=(*edges[1:place], moved, *edges[place + 1 : -1]))
    blocks = np.array(problem.units.block) >= 0
    for stage in range(len(edges) - 1):
        layers = int(blocks[edges[stage] : edges[stage + 1]].sum())
        now = (candidate.low[stage], candidate.high[stage], candidate.upgraded[stage])
        for low, high, count in _choices(now, layers, len(problem.policies)):
            yield replace(
                candidate,
                low=_put(candidate.low, stage, low),
                high=_put(candidate.high, stage, high),
                upgraded=_put(candidate.upgraded, stage, count),
            )


def _choices(
    now: tuple[int, int, int], layers: int, options: int
) -> Iterator[tuple[int, int, int]]:
    low, high, count = now
    if low != high:
        for number in (count + 1, count - 1):
            if 0 < number <= layers:
                yield low, high, number
    for option in reversed(range(options)):
        if (option, option, 0) != now:
            yield option, option, 0
    if low == high:
        for option in reversed(range(options)):
            if option != low and layers:
                yield low, option, 1


def _put(values: tuple[int, ...], place: int, value: int) -> tuple[int, ...]:
    return (*values[:place], value, *values[place + 1 :])
