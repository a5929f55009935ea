"""Dynamic programming for cuts, sharding as experts do it.

What the second level of Alpa (arXiv 2201.12023, section 5), DAPPLE (arXiv 2007.01045) and
PipeDream (arXiv 1806.03377) do: how ops are sharded is fixed for each mesh, and a dynamic program
chooses where stages are cut and what their layers compute again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from autopar.search.bounds import Bounds
from autopar.search.exact import best_candidate, is_expert
from autopar.search.problem import Outcome, Problem
from autopar.search.result import Certificate, SearchResult
from autopar.search.space import Point


def search(problem: Problem, *, time_limit_s: float = math.inf) -> SearchResult:
    """The best plan of the expert grids with the best cuts.

    Args:
        problem: The problem.
        time_limit_s: Stop after so many seconds, with what there is.
    """
    return over_grid(
        problem,
        "dp",
        lambda bounds, point: best_candidate(problem, bounds, point)[0],
        time_limit_s,
    )


def over_grid(
    problem: Problem,
    strategy: str,
    best_of: Callable[[Bounds, Point], Outcome | None],
    time_limit_s: float,
) -> SearchResult:
    """The best of the best plans of the points of the expert grids.

    Args:
        problem: The problem.
        strategy: Name of the strategy.
        best_of: The best plan of a point, None if none fits.
        time_limit_s: Stop after so many seconds, with what there is.
    """
    begun = time.monotonic()
    points = [point for point in problem.space.points() if is_expert(point)]
    bounds = Bounds(problem)
    bounds.know_largest(points)
    ordered = sorted((bounds.scaled(point), number) for number, point in enumerate(points))
    found: list[Outcome] = []
    best: Outcome | None = None
    complete = True
    for bound, number in ordered:
        limit = best.step_s if best is not None else math.inf
        if bound >= limit or math.isinf(bound):
            break
        if time.monotonic() - begun > time_limit_s:
            complete = False
            break
        if bounds.cut(points[number], limit) >= limit:
            continue
        outcome = best_of(bounds, points[number])
        if outcome is not None:
            found.append(outcome)
            best = outcome if best is None or outcome.step_s < best.step_s else best
    found.sort(key=lambda item: (item.step_s, item.candidate.point))
    return SearchResult(
        best=best,
        alternatives=tuple(item for item in found if item is not best)[:10],
        certificate=Certificate(
            bound_s=0.0,
            space="the grids of Megatron-LM, FSDP and DeepSpeed with any cut; no bound on others",
            points=len(points),
            pruned={},
            evaluated=problem.evaluated,
            complete=complete,
        ),
        strategy=strategy,
        seconds=time.monotonic() - begun,
    )
