"""The best other plans: of every point the fastest that fits."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable
from dataclasses import replace

from autopar.search.bounds import Bounds
from autopar.search.exact import best_candidate
from autopar.search.problem import Outcome, Problem
from autopar.search.result import SearchResult, others
from autopar.search.starts import first_bounds

LIMIT_S = 5.0
"""Seconds in which more plans are priced than a search needed."""


def runners_up(
    problem: Problem, result: SearchResult, count: int, *, time_limit_s: float = LIMIT_S
) -> tuple[Outcome, ...]:
    """The best other plans that are known; the exact search prices more if it knows too few.

    Args:
        problem: The problem.
        result: A search of it.
        count: How many plans.
        time_limit_s: Stop after so many seconds, with what there is.

    Returns:
        At most one plan of a point, fastest first.
    """
    assert result.best is not None
    known = result.alternatives
    if len(known) < count and result.strategy == "exact" and result.certificate.complete:
        known = _more(problem, result.best, known, count, time.monotonic() + time_limit_s)
    return known[:count]


def _more(
    problem: Problem, best: Outcome, known: Iterable[Outcome], count: int, deadline_s: float
) -> tuple[Outcome, ...]:
    """The same with plans of other points, those of the least bounds first."""
    bounds, found = Bounds(problem), list(known)
    tried = {best.candidate.point, *(item.candidate.point for item in found)}
    left = [(bound, 0, number, group)
            for number, (group, bound) in enumerate(first_bounds(bounds).items())]  # fmt: skip
    heapq.heapify(left)
    order = len(left)
    while left and len(found) < count and time.monotonic() < deadline_s:
        bound, level, _, point = heapq.heappop(left)
        if math.isinf(bound):
            break
        if level == 2:
            outcome, _ = best_candidate(problem, bounds, point)
            found += [] if outcome is None else [outcome]
            continue
        if level == 1:
            following = [(max(bound, bounds.cut(point)), point)]
        else:
            members = tuple(problem.space.members(point))
            following = [
                (max(bound, bounds.cheap(member)), member)
                for member in members
                if member not in tried
                and not (  # the other order of axes takes the same
                    member.data_outside
                    and problem.orders_alike(member)
                    and replace(member, data_outside=False) in members
                )
            ]
        for tighter, other in following:
            heapq.heappush(left, (tighter, level + 1, order := order + 1, other))
    return others(found, best)
