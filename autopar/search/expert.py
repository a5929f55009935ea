"""What an expert would try: the named grids of Megatron-LM, FSDP and DeepSpeed.

Data parallelism with ZeRO 0 to 3; Megatron-LM's tensor axis inside of a node with and without
sequence parallelism, pipelines of 1F1B with one or two chunks; stages as even as can be; one policy
of recomputation for all layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

from autopar.search.bounds import Bounds
from autopar.search.exact import as_asked, even_candidate
from autopar.search.first import first_plan
from autopar.search.problem import Outcome, Problem
from autopar.search.result import Certificate, Interruptible, SearchResult, others
from autopar.search.space import Point
from autopar.search.starts import is_expert


def search(problem: Problem, *, time_limit_s: float = math.inf) -> SearchResult:
    """The best plan of the grids.

    Args:
        problem: The problem.
        time_limit_s: Stop after so many seconds, with what there is.
    """

    def even(bounds: Bounds, point: Point, limit: float) -> Iterator[Outcome]:
        for option in range(len(problem.policies)):
            candidate = even_candidate(problem, bounds, point, option)
            outcome = problem.outcome(candidate) if candidate is not None else None
            if outcome is not None and outcome.fits:
                yield outcome

    return over_grid(problem, "expert", "", even, time_limit_s)


def over_grid(
    problem: Problem,
    strategy: str,
    space: str,
    plans_of: Callable[[Bounds, Point, float], Iterable[Outcome]],
    time_limit_s: float,
) -> SearchResult:
    """The best of the plans of the points of the expert grids.

    Args:
        problem: The problem.
        strategy: Name of the strategy.
        space: What plans are looked at, in words.
        plans_of: Plans of a point that fit; those that take longer than the seconds that it is
            given need not be among them.
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
    with Interruptible(lambda: best is not None) as walk:
        for bound, number in ordered:
            limit = best.step_s if best is not None else math.inf
            if bound >= limit or math.isinf(bound):
                break
            if time.monotonic() - begun > time_limit_s:
                complete = False
                break
            for outcome in plans_of(bounds, points[number], limit):
                found.append(outcome)
                best = outcome if best is None or outcome.step_s < best.step_s else best
                if time.monotonic() - begun > time_limit_s:
                    break
    complete = complete and not walk.interrupted
    if best is None and not complete:
        best = first_plan(problem, bounds)
    return SearchResult(
        best=best,
        alternatives=others(found, best) if best is not None else (),
        certificate=Certificate(
            bound_s=0.0,
            space=as_asked(
                problem,
                f"the grids of Megatron-LM, FSDP and DeepSpeed{space}; no bound on other plans",
            ),
            points=len(points),
            pruned={},
            evaluated=problem.evaluated,
            complete=complete,
        ),
        strategy=strategy,
        seconds=time.monotonic() - begun,
    )
