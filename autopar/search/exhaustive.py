"""Try everything: every point, every cut, every mix of what layers compute again. An oracle."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import combinations, pairwise, product

from autopar.search.bounds import Bounds
from autopar.search.closing import mixes_of
from autopar.search.exact import best_candidate, describe_space
from autopar.search.first import first_plan
from autopar.search.problem import Candidate, Outcome, Problem
from autopar.search.result import Certificate, Interruptible, SearchResult, others
from autopar.search.space import Point


def search(problem: Problem, *, time_limit_s: float = math.inf) -> SearchResult:
    """Find the best plan by evaluating all of them.

    Args:
        problem: A small problem.
        time_limit_s: Stop after so many seconds, with what there is.
    """
    begun = time.monotonic()
    best: Outcome | None = None
    if math.isfinite(time_limit_s):  # something to have when time is up
        best = first_plan(problem, Bounds(problem))
    complete, points = True, 0
    with Interruptible(lambda: best is not None) as walk:
        for point in problem.space.points():
            points += 1
            if not complete:
                continue
            for candidate in candidates(problem, point):
                if time.monotonic() - begun > time_limit_s:
                    complete = False
                    break
                outcome = problem.outcome(candidate)
                if outcome is not None and outcome.fits:
                    best = outcome if best is None or outcome.step_s < best.step_s else best
    complete = complete and not walk.interrupted
    bound = best.step_s if best is not None else math.inf
    return SearchResult(
        best=best,
        alternatives=others(problem.outcomes, best) if best is not None else (),
        certificate=Certificate(
            bound_s=bound if complete else 0.0,
            space=describe_space(problem),
            points=points,
            pruned={},
            evaluated=problem.evaluated,
            complete=complete,
        ),
        strategy="exhaustive",
        seconds=time.monotonic() - begun,
    )


def candidates(problem: Problem, point: Point) -> Iterator[Candidate]:
    """All plans of a point."""
    if point.schedule != "1f1b":
        outcome, _ = best_candidate(problem, Bounds(problem), point)
        if outcome is not None:
            yield outcome.candidate
        return
    places = range(1, problem.units.count) if problem.edges is None else problem.edges
    for edges in combinations(places, point.pipeline - 1):
        bounds = (0, *edges, problem.units.count)
        mixes = [mixes_of(problem, low, high) for low, high in pairwise(bounds)]
        for mix in product(*mixes):
            yield Candidate(
                point=point,
                edges=edges,
                low=tuple(item[0] for item in mix),
                high=tuple(item[1] for item in mix),
                upgraded=tuple(item[2] for item in mix),
            )
