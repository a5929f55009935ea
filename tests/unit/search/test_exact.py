"""The search against trying everything, on small random problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from autopar.search import exact, exhaustive
from autopar.search.bounds import Bounds
from autopar.search.problem import Problem
from tests.unit.search.problems import PLENTY, Small, small

EQUAL = 1e-9
PROBLEMS = 300


def memories(problem: Small) -> list[int]:
    """Plenty, less, the least that any plan needs, and a byte less than that."""
    needs = problem.needs()
    if not needs:
        return [PLENTY]
    tight = [needs[int(len(needs) * share)] for share in (0.6, 0.25)]
    return [PLENTY, *tight, needs[0], needs[0] - 1]


def unpruned(problem: Problem) -> float:
    """Seconds of the best of the best plans of all points."""
    bounds = Bounds(problem)
    found = [exact.best_candidate(problem, bounds, point)[0] for point in problem.space.points()]
    return min((item.step_s for item in found if item is not None), default=math.inf)


def compared(problem: Small, memory_bytes: int) -> Counter[str]:
    """What holds of a search with so much memory."""
    here = problem.problem.with_memory(memory_bytes)
    found = exact.search(here)
    truth = exhaustive.search(problem.problem.with_memory(memory_bytes))
    counts = Counter(problems=1)
    where = f"{problem.name}, {memory_bytes} bytes"
    if found.best is None or truth.best is None:
        assert found.best is truth.best, where
        counts["infeasible"] = 1
        counts["equal"] = 1
        return counts
    assert found.best.fits, where
    assert found.certificate.bound_s <= truth.best.step_s * (1 + EQUAL), where
    assert found.best.step_s >= truth.best.step_s * (1 - EQUAL), where
    assert found.best.step_s * (1 - found.gap) <= truth.best.step_s * (1 + EQUAL), where
    counts["equal"] = found.best.step_s <= truth.best.step_s * (1 + EQUAL)
    again = exact.search(problem.problem.with_memory(memory_bytes))
    assert again.best == found.best, where
    assert again.certificate.bound_s == found.certificate.bound_s, where
    everything = unpruned(problem.problem.with_memory(memory_bytes))
    counts["unpruned is better"] = everything < found.best.step_s * (1 - EQUAL)
    counts["proven"] = found.gap <= EQUAL
    return counts


@pytest.mark.parametrize("seed", [4, 6, 26])
def test_the_search_finds_what_trying_everything_finds(seed: int):
    problem = small(seed, most=60)
    assert problem is not None
    counts = sum((compared(problem, memory) for memory in memories(problem)), Counter[str]())
    assert counts["equal"] == counts["problems"]
    assert not counts["unpruned is better"]


@pytest.mark.long
def test_hundreds_of_problems(record_property: Callable[[str, object], None]):
    counts, seed = Counter[str](), 0
    while counts["problems"] < PROBLEMS:
        problem = small(seed)
        seed += 1
        if problem is None or not problem.plans:
            continue
        for memory in memories(problem):
            counts += compared(problem, memory)
            counts += Counter({problem.name.split()[1]: 1})
    record_property("summary", ", ".join(f"{count} {name}" for name, count in counts.items()))
    assert counts["equal"] >= 0.95 * counts["problems"]
    assert counts["unpruned is better"] <= 0.01 * counts["problems"]
