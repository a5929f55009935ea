"""What an expert would try: the named grids of Megatron-LM, FSDP and DeepSpeed.

Data parallelism with ZeRO 0 to 3; Megatron-LM's tensor axis inside of a node with and without
sequence parallelism, pipelines of 1F1B with one or two chunks; stages as even as can be; one policy
of recomputation for all layers.
"""

from __future__ import annotations

import math
import time

from autopar.search.bounds import Bounds
from autopar.search.exact import even_candidate, is_expert
from autopar.search.problem import Outcome, Problem
from autopar.search.result import Certificate, SearchResult


def search(problem: Problem, *, time_limit_s: float = math.inf) -> SearchResult:
    """The best plan of the grids.

    Args:
        problem: The problem.
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
        if (best is not None and bound >= best.step_s) or not math.isfinite(bound):
            break
        if time.monotonic() - begun > time_limit_s:
            complete = False
            break
        for option in range(len(problem.policies)):
            candidate = even_candidate(problem, bounds, points[number], option)
            outcome = problem.outcome(candidate) if candidate is not None else None
            if outcome is not None and outcome.fits:
                found.append(outcome)
                best = outcome if best is None or outcome.step_s < best.step_s else best
    found.sort(key=lambda item: (item.step_s, item.candidate.point))
    return SearchResult(
        best=best,
        alternatives=tuple(item for item in found if item is not best)[:10],
        certificate=Certificate(
            bound_s=0.0,
            space="the grids of Megatron-LM, FSDP and DeepSpeed; no bound on other plans",
            points=len(points),
            pruned={},
            evaluated=problem.evaluated,
            complete=complete,
        ),
        strategy="expert",
        seconds=time.monotonic() - begun,
    )
