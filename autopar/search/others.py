"""The best other plans: of every point the fastest that fits."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from itertools import zip_longest

from autopar.search.bounds import Bounds
from autopar.search.exact import TIE, best_candidate
from autopar.search.problem import Outcome, Problem
from autopar.search.result import Interruptible, SearchResult, others
from autopar.search.space import Point
from autopar.search.starts import first_bounds

LIMIT_S = 6.0
"""Seconds in which more plans are priced than a search needed."""
GROUPS, PRICED = 4, 2
"""Groups of points that are looked at together, and plans to price for each that is missing."""


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
        with Interruptible(lambda: True):
            known = _more(problem, result.best, known, count, time_limit_s)
    return known[:count]


def with_others(problem: Problem, result: SearchResult, count: int) -> SearchResult:
    """The result of a search with so many runners-up; one that proves faster is the best, then.

    Args:
        problem: The problem.
        result: A search of it that found a plan.
        count: How many plans are wanted.
    """
    assert result.best is not None
    known = runners_up(problem, result, count)
    if len(known) <= len(result.alternatives):
        return result
    fastest = min((result.best, *known), key=lambda item: item.step_s)
    best = fastest if fastest.step_s < result.best.step_s * (1 - TIE) else result.best
    return replace(result, best=best, alternatives=others((result.best, *known), best))


def _more(
    problem: Problem, best: Outcome, known: Iterable[Outcome], count: int, limit_s: float
) -> tuple[Outcome, ...]:
    """The same with plans of other points: of every mesh the one of the least bound, and so on."""
    begun, bounds, found = time.monotonic(), Bounds(problem), list(known)
    tried = {best.candidate.point, *(item.candidate.point for item in found)}
    enough = count + (PRICED - 1) * (count - len(found))
    for row in zip_longest(*_by_mesh(bounds, tried)):
        tight = sorted(
            (bounds.cut(point), point)
            for point in row
            if point is not None and time.monotonic() < begun + limit_s / 2
        )
        for bound, point in tight:
            if math.isinf(bound) or len(found) >= enough or time.monotonic() > begun + limit_s:
                break
            outcome, _ = best_candidate(problem, bounds, point)
            found += [] if outcome is None else [outcome]
        if len(found) >= count or not tight:
            break
    return others(found, best)


def _by_mesh(bounds: Bounds, tried: Container[Point]) -> list[Iterator[Point]]:
    """Points of every mesh, those of small bounds first; the best mesh first."""
    groups = defaultdict[object, list[Point]](list)
    for _, group in sorted((bound, group) for group, bound in first_bounds(bounds).items()):
        groups[group.pipeline, group.tensor, group.role].append(group)
    return [_near(bounds, mine, tried) for mine in groups.values()]


def _near(bounds: Bounds, groups: list[Point], tried: Container[Point]) -> Iterator[Point]:
    """Points of groups in about the order of their bounds."""
    for first in range(0, len(groups), GROUPS):
        members = [point for group in groups[first : first + GROUPS]
                   for point in _members(bounds.problem, group) if point not in tried]  # fmt: skip
        for bound, point in sorted((bounds.cheap(point), point) for point in members):
            if math.isfinite(bound):
                yield point


def _members(problem: Problem, group: Point) -> Iterator[Point]:
    """Points of a group, one of two that differ in an order of axes that does not matter."""
    members = tuple(problem.space.members(group))
    for point in members:
        twin = replace(point, data_outside=False)
        if point == twin or twin not in members or not problem.orders_alike(point):
            yield point
