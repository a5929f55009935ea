"""Cuts of a list of costs, against every way to cut it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.plan.cuts import BORDER_SLACK, SLACK, balance, least_bound


def parts_of(costs: list[int], cuts: tuple[int, ...]) -> list[int]:
    ends = (0, *cuts, len(costs))
    return [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]


def largest(costs: list[int], places: list[int], parts: int) -> int:
    """Least cost of the largest part, over all ways."""
    ways = itertools.combinations(places, parts - 1)
    return min(max(parts_of(costs, cuts)) for cuts in ways)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int], int]:
    costs = draw(st.lists(st.integers(0, 9), min_size=2, max_size=9))
    places = list(range(1, len(costs)))
    allowed = sorted(draw(st.sets(st.sampled_from(places), min_size=1)))
    preferred = sorted(draw(st.sets(st.sampled_from(places))))
    parts = draw(st.integers(2, len(allowed) + 1))
    crossing = draw(st.lists(st.integers(0, 3), min_size=len(costs), max_size=len(costs)))
    return costs, crossing, allowed, preferred, parts


@settings(max_examples=400, deadline=None)
@given(problems())
def test_the_least_bound_is_least(problem):
    costs, _, allowed, _, parts = problem
    prefix = [0, *itertools.accumulate(costs)]
    assert least_bound(prefix, allowed, parts) == largest(costs, allowed, parts)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_cuts_are_the_best_of_all(problem):
    costs, crossing, allowed, preferred, parts = problem
    bound, points = largest(costs, allowed, parts), allowed
    good = [place for place in preferred if place in allowed]
    if len(good) >= parts - 1 and largest(costs, good, parts) <= BORDER_SLACK * bound:
        bound, points = largest(costs, good, parts), good

    def price(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        sizes = parts_of(costs, cuts)
        return sum(crossing[c] for c in cuts), sum(n * n for n in sizes), cuts

    ways = [
        cuts
        for cuts in itertools.combinations(points, parts - 1)
        if max(parts_of(costs, cuts)) <= int(bound * SLACK)
    ]
    assert balance(costs, crossing, allowed, preferred, parts) == min(map(price, ways))[2]


@pytest.mark.parametrize(("layers", "parts"), [(96, 8), (48, 64), (7, 3)])
def test_equal_layers_are_spread_evenly(layers: int, parts: int):
    costs = [5, 1, 4] * layers
    border = list(range(3, len(costs), 3)) if layers >= parts else []
    cuts = balance(costs, [8] * len(costs), list(range(1, len(costs))), border, parts)
    sizes = parts_of(costs, cuts)
    assert len(sizes) == parts and min(sizes) > 0
    if border:
        assert set(cuts) <= set(border)
        assert max(sizes) == 10 * -(-layers // parts)
