"""A plan to have at least: where time runs out before a strategy has found one of its own."""

from __future__ import annotations

from autopar.search.bounds import Bounds
from autopar.search.exact import best_candidate
from autopar.search.problem import Outcome, Problem
from autopar.search.starts import first_bounds, starts


def first_plan(problem: Problem, bounds: Bounds) -> Outcome | None:
    """The plan that the exact search begins with; None if what it begins with does not fit.

    Args:
        problem: The problem.
        bounds: Its bounds.
    """
    for _, point in starts(bounds, first_bounds(bounds)):
        outcome, _ = best_candidate(problem, bounds, point)
        if outcome is not None:
            return outcome
    return None
