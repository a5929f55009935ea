"""Bounds of single plans, and gaps that are closed with them."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from autopar.search.bounds import Bounds
from autopar.search.closing import close, opened
from autopar.search.problem import Candidate, Outcome
from tests.unit.search.problems import PLENTY, Remembered, Small, small

EXACT = 1e-9


def bounds_of(problem: Remembered, candidate: Candidate) -> tuple[float, float]:
    """Seconds of the step of a plan at least: by its slowest stage, and simulated."""
    bounds = Bounds(problem)
    closing = opened(bounds, candidate.point, math.inf)
    assert closing is not None
    intervals = closing.stages.intervals
    chosen, least = [], 0.0
    edges = (0, *candidate.edges, problem.units.count)
    mixes = zip(candidate.low, candidate.high, candidate.upgraded, strict=True)
    for stage, ((start, stop), mix) in enumerate(zip(pairwise(edges), mixes, strict=True)):
        k = int(((intervals.start == start) & (intervals.stop == stop)).nonzero()[0][0])
        variants = closing.variants(stage, k)
        v = variants.mixes.index(mix)
        chosen.append((k, v))
        alone = max(float(variants.bounds[v]), float(closing.costs[stage][k]) * (1 - EXACT))
        # A bound over what an interval may compute again is below that of each.
        assert alone == variants.bounds[v] or math.isinf(variants.bounds[v])
        least = max(least, alone)
    assert closing.candidate(tuple(chosen)) == candidate
    assert closing.behind[0][0] <= least * (1 + EXACT)
    return least * bounds.sharing(), closing.simulated(tuple(chosen)) * bounds.sharing()


def check(problem: Small, plan: Outcome) -> None:
    """Bounds of a plan hold, and with the very memory that it needs it is not ruled out."""
    tight = problem.problem.with_memory(PLENTY + plan.over_bytes)
    for name, bound in zip(("stages", "simulated"), bounds_of(tight, plan.candidate), strict=True):
        where = f"{name}: {problem.name}, {plan.candidate}, {bound / plan.step_s - 1:.3g} too high"
        assert bound <= plan.step_s * (1 + EXACT), where


def some_plans(problem: Small, count: int, seed: int) -> list[Outcome]:
    """Plans of 1F1B of a problem, at random."""
    every = [candidate for mine in problem.plans.values() for candidate in mine]
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    found = [problem.problem.outcome(candidate) for candidate in chosen]
    return [outcome for outcome in found if outcome is not None]


@pytest.mark.parametrize("seed", [3, 11])
def test_no_plan_is_faster_or_smaller_than_its_bounds(seed: int):
    problem = small(seed, most=60)
    assert problem is not None
    plans = some_plans(problem, 12, seed)
    assert plans
    for plan in plans:
        check(problem, plan)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_plan_of_many_is_faster_or_smaller_than_its_bounds(first: int):
    for seed in range(first, first + 50):
        problem = small(seed)
        if problem is not None:
            for plan in some_plans(problem, 20, seed):
                check(problem, plan)


def test_closing_a_point_finds_its_best_plan():
    problem = small(4, most=60)
    assert problem is not None
    needs = problem.needs()
    memory = needs[len(needs) // 2]
    tight = problem.problem.with_memory(memory)
    closed = 0
    for point in problem.plans:
        found = close(Bounds(tight), point, math.inf, 1000)
        least = problem.fastest(point, memory)
        assert found.bound_s == pytest.approx(least, rel=EXACT)
        assert (found.best.step_s if found.best is not None else math.inf) == least
        closed += found.best is not None
        few = close(Bounds(tight), point, math.inf, 1)
        assert few.bound_s <= least and few.spent <= 2
    assert closed
