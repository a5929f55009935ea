"""Cuts and recomputation of all stages as one integer linear program.

As in the planners that hand the whole choice to a solver (Checkmate, arXiv 1910.02653; Alpa's first
level): a binary variable for every stage, interval of units and mix of what its layers compute
again; the intervals of a plan are a path through the model. The program minimises
``sum(w) + (M - 1) max(w)`` over the seconds w of the stages, the time of a pipeline of M
microbatches whose messages take none. Sharding is as experts do it (`autopar.search.dp`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import numpy as np

from autopar.search.bounds import Bounds
from autopar.search.candidates import Stages
from autopar.search.dp import best_cuts
from autopar.search.exact import best_candidate
from autopar.search.problem import Candidate, Outcome, Problem
from autopar.search.result import SearchResult
from autopar.search.seconds import durations
from autopar.search.space import Point
from autopar.search.stage_cut import Intervals

ROUNDS = 4
"""Times that the program is solved with what evaluation says of memory."""
SHARES = 8
"""Mixes of two options are tried in steps of at least one layer in so many."""
SOLVE_S = 20.0
"""Seconds of the solver for one program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a stage may be.

    Attributes:
        stage: Its number.
        start: First unit.
        stop: Unit behind its last.
        mix: Options of all its units, and of so many of its layers, and their number.
        seconds: Of a microbatch.
    """

    stage: int
    start: int
    stop: int
    mix: tuple[int, int, int]
    seconds: float


def search(problem: Problem, *, time_limit_s: float = math.inf) -> SearchResult:
    """The best plan of the expert grids, the cuts of each point by an integer program.

    Args:
        problem: The problem.
        time_limit_s: Stop after so many seconds, with what there is.
    """
    return best_cuts(
        problem, "ilp", lambda bounds, point: _best(problem, bounds, point), time_limit_s
    )


def _best(problem: Problem, bounds: Bounds, point: Point) -> Outcome | None:
    if point.schedule != "1f1b" or point.pipeline == 1:  # nothing to cut, or only one way
        return best_candidate(problem, bounds, point)[0]
    extra = bounds.extra(point)
    for _ in range(ROUNDS):
        stages = bounds.stages(point, extra, relaxed=False)
        if stages is None:
            return None
        chosen = least(columns(problem, bounds, point, stages, extra), point.microbatches)
        if chosen is None:
            return None
        outcome = problem.outcome(
            Candidate(
                point=point,
                edges=tuple(column.start for column in chosen[1:]),
                low=tuple(column.mix[0] for column in chosen),
                high=tuple(column.mix[1] for column in chosen),
                upgraded=tuple(column.mix[2] for column in chosen),
            )
        )
        if outcome is None or outcome.fits:
            return outcome
        extra = tuple(
            known + max(0.0, over / problem.reserved_factor(device))
            for known, over, device in zip(
                extra, outcome.rank_over_bytes, problem.devices(point), strict=True
            )
        )
    return None


def columns(
    problem: Problem, bounds: Bounds, point: Point, stages: Stages, extra: tuple[float, ...]
) -> list[Column]:
    """All stages that fit.

    Args:
        problem: The problem.
        bounds: Its bounds.
        point: A point of 1F1B.
        stages: The candidates for its stages.
        extra: Bytes of each rank that are not in static and saved memory.
    """
    under_way, devices = bounds.under_way(point), problem.devices(point)
    found = []
    for stage, rank in enumerate(point.stage_ranks):
        mine = stages.each[stage]
        room = bounds.room(devices[rank])
        for mix_of in _mixes(len(problem.policies), int(mine.layers.max())):
            found += _columns(mine, stage, mix_of, under_way[stage], room, extra[rank], problem)
    return found


def _mixes(options: int, layers: int) -> list[tuple[int, int, int]]:
    found = [(option, option, 0) for option in range(options)]
    step = max(1, -(-layers // SHARES))
    for low, high in product(range(options), repeat=2):
        if low != high:
            found += [(low, high, count) for count in range(step, layers + 1, step)]
    return found


def _columns(
    mine: Intervals,
    stage: int,
    mix: tuple[int, int, int],
    under_way: float,
    room: float,
    extra: float,
    problem: Problem,
) -> list[Column]:
    low, high, count = mix
    k = np.arange(len(mine.start))
    sums, saved = mine.mixed(
        np.full(k.shape, low), np.full(k.shape, high), np.minimum(count, mine.layers), k
    )
    working = 0.0 if mine.working is None else mine.working[[low, high]].min(axis=0)
    beside = np.maximum(extra, working)
    fits = (mine.static + under_way * saved + beside <= room) & (mine.layers >= count)
    if low != high:
        fits &= mine.alike
    forward, backward = durations(sums, problem.software.speed)
    return [
        Column(
            stage=stage,
            start=int(mine.start[k]),
            stop=int(mine.stop[k]),
            mix=mix,
            seconds=float(forward[k] + backward[k]),
        )
        for k in np.flatnonzero(fits).tolist()
    ]


def least(
    found: list[Column], microbatches: int, *, sum_weight: float = 1.0
) -> tuple[Column, ...] | None:
    """The stages of the least ``sum_weight * sum(w) + (M - 1) max(w)``; None if none fit.

    Args:
        found: What stages may be.
        microbatches: M.
        sum_weight: Weight of the sum.
    """
    from ortools.linear_solver import pywraplp

    solver = pywraplp.Solver.CreateSolver("SCIP")
    solver.SetTimeLimit(int(SOLVE_S * 1000))
    stages = 1 + max((column.stage for column in found), default=0)
    units = max((column.stop for column in found), default=0)
    unit_s = max((column.seconds for column in found), default=1.0) or 1.0
    slowest = solver.NumVar(0, solver.infinity(), "")
    slowest_of = [solver.Constraint(0, solver.infinity()) for _ in range(stages)]
    for row in slowest_of:
        row.SetCoefficient(slowest, 1)
    border: dict[tuple[int, int], pywraplp.Constraint] = {}
    for stage in range(stages + 1):
        for unit in range(units + 1):
            # One path leaves the first border and reaches the last.
            ends = int((stage, unit) == (stages, units)) - int((stage, unit) == (0, 0))
            border[stage, unit] = solver.Constraint(ends, ends)
    goal = solver.Objective()
    goal.SetCoefficient(slowest, float(microbatches - 1))
    taken = defaultdict[int, list[tuple[object, Column]]](list)
    for column in found:
        variable = solver.BoolVar("")
        border[column.stage, column.start].SetCoefficient(variable, -1)
        border[column.stage + 1, column.stop].SetCoefficient(variable, 1)
        slowest_of[column.stage].SetCoefficient(variable, -column.seconds / unit_s)
        goal.SetCoefficient(variable, sum_weight * column.seconds / unit_s)
        taken[column.stage].append((variable, column))
    goal.SetMinimization()
    if not found or solver.Solve() not in (solver.OPTIMAL, solver.FEASIBLE):
        return None
    return tuple(
        next(column for variable, column in taken[stage] if variable.solution_value() > 0.5)  # type: ignore[attr-defined]
        for stage in range(stages)
    )
