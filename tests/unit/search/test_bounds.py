"""No plan is faster than the bounds of its point."""

from __future__ import annotations

import functools
import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.cluster import ClusterSpec
from autopar.presets.registry import build
from autopar.search import exact
from autopar.search.bounds import Bounds
from autopar.search.exact import even_candidate
from autopar.search.problem import Candidate, Problem
from autopar.search.space import Point
from autopar.search.totals import crowded_s
from autopar.trace import Traced, trace
from tests.unit.search.problems import Remembered, small, traced

LEVELS = ("scaled", "cheap", "group", "cut")
EXACT = 1e-9


@functools.cache
def large(name: str, layers: int, batch: int, seq: int) -> Traced:
    model, args, kwargs = build(name, layers=layers, batch=batch, seq=seq)
    return trace(model, args, kwargs, None)


def problem_of(name: str, cluster: str) -> Problem:
    found = {
        "gpt": lambda: traced("gpt", 4, 1, 8),
        "t5": lambda: traced("t5", 4, 1, 8),
        "conv": lambda: traced("conv", 4, 1, 8),
        "gpt3": lambda: large("gpt3-175b", 16, 64, 2048),
    }[name]()
    return Problem(found.graph, found.loss, ClusterSpec.parse(cluster), memory_bytes=2**60)


def some_plan(problem: Problem, point: Point, rng: random.Random) -> Candidate | None:
    """A plan of a point: even, or of 1F1B any cuts and options."""
    if point.schedule != "1f1b":
        found, _ = exact.best_candidate(problem, Bounds(problem), point)
        return found.candidate if found is not None else None
    if point.pipeline == 1 or rng.random() < 0.5:
        return even_candidate(problem, Bounds(problem), point, rng.randrange(3))
    edges = sorted(rng.sample(range(1, problem.units.count), point.pipeline - 1))
    low = tuple(rng.randrange(3) for _ in range(point.pipeline))
    high = tuple(rng.randrange(3) for _ in range(point.pipeline))
    upgraded = tuple(rng.randrange(4) * (a != b) for a, b in zip(low, high, strict=True))
    return Candidate(point=point, edges=tuple(edges), low=low, high=high, upgraded=upgraded)


def check(problem: Problem, plans: int, seed: int) -> int:
    """Compare bounds with some plans of some points; how many."""
    rng, bounds = random.Random(seed), Bounds(problem)
    points = list(problem.space.points())
    bounds.know_largest(points)
    kinds = sorted({(point.schedule, point.zero) for point in points})
    done = 0
    for number in range(plans):
        kind = kinds[number % len(kinds)]
        point = rng.choice([p for p in points if (p.schedule, p.zero) == kind])
        candidate = some_plan(problem, point, rng)
        outcome = problem.outcome(candidate) if candidate is not None else None
        if outcome is None:
            continue
        done += 1
        for level in LEVELS:
            bound = getattr(bounds, level)(point)
            assert bound <= outcome.step_s * (1 + EXACT), (level, point.text(), candidate)
    return done


@pytest.mark.parametrize(
    ("name", "cluster", "plans"),
    [("gpt", "1x4xA100", 20), ("t5", "4xcpu", 16), ("conv", "2x2xV100", 16)],
)
def test_no_plan_is_faster_than_the_bounds_of_its_point(name: str, cluster: str, plans: int):
    assert check(problem_of(name, cluster), plans, 0) >= plans // 2


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("gpt", "8xcpu"), ("gpt", "1x2xA100+1x2xV100"), ("t5", "2x4xH100"), ("conv", "1x4xA10G"),
        ("gpt3", "8x8xA100"), ("gpt3", "4x8xH100+4x8xA100"),
    ],
)  # fmt: skip
def test_no_plan_of_many_is_faster_than_the_bounds_of_its_point(name: str, cluster: str, seed: int):
    assert check(problem_of(name, cluster), 80, seed) >= 40


@pytest.mark.long
def test_bounds_are_below_the_fastest_plan_that_fits():
    for seed in range(20):
        found = small(seed)
        if found is None or not found.plans:
            continue
        needs = found.needs()
        for memory in (2**60, needs[len(needs) // 2]) if needs else ():
            below(found.problem.with_memory(memory), found, memory)


def below(problem: Remembered, found: object, memory: int) -> None:
    """All bounds of all points of 1F1B are below what is possible."""
    bounds, points = Bounds(problem), list(problem.space.points())
    bounds.know_largest(points)
    for point in points:
        if point.schedule == "1f1b":
            least = found.fastest(point, memory)  # type: ignore[attr-defined]
            for level in LEVELS:
                bound = getattr(bounds, level)(point)
                assert bound <= least * (1 + EXACT) or math.isinf(least), (level, point.text())


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=7), st.integers(1, 3))
def test_the_fullest_rank_does_no_less_than_whole_units_make_it(took: list[float], ranks: int):
    dearest = np.cumsum([0.0, *sorted(took, reverse=True)])
    places = np.array(list(itertools.product(range(ranks), repeat=len(took))))
    loads = np.stack([(places == rank) @ np.array(took) for rank in range(ranks)])
    best = loads.max(axis=0).min()
    assert crowded_s(dearest, ranks) <= best * (1 + EXACT) + EXACT
    if len(set(took)) == 1:
        assert crowded_s(dearest, ranks) == pytest.approx(best)
