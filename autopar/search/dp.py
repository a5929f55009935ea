"""Dynamic programming for cuts, sharding as experts do it.

What the second level of Alpa (arXiv 2201.12023, section 5), DAPPLE (arXiv 2007.01045) and
PipeDream (arXiv 1806.03377) do: how ops are sharded is fixed for each mesh, and a dynamic program
chooses where stages are cut and what their layers compute again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from autopar.search.bounds import Bounds
from autopar.search.exact import best_candidate
from autopar.search.expert import over_grid
from autopar.search.problem import Outcome, Problem
from autopar.search.result import SearchResult
from autopar.search.space import Point


def search(problem: Problem, *, time_limit_s: float = math.inf) -> SearchResult:
    """The best plan of the expert grids with the best cuts.

    Args:
        problem: The problem.
        time_limit_s: Stop after so many seconds, with what there is.
    """
    return best_cuts(
        problem,
        "dp",
        lambda bounds, point: best_candidate(problem, bounds, point)[0],
        time_limit_s,
    )


def best_cuts(
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

    def plans_of(bounds: Bounds, point: Point, limit: float) -> Iterator[Outcome]:
        if bounds.cut(point, limit) < limit:
            outcome = best_of(bounds, point)
            if outcome is not None:
                yield outcome

    return over_grid(problem, strategy, " with any cut", plans_of, time_limit_s)
