"""Cost networks against brute force and an integer program."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from autopar.search.dual import descend, dual
from autopar.search.eliminate import eliminate, elimination_order
from autopar.search.network import Network, NetworkBuilder, priced, supported
from autopar.search.solve import solve

SHAPES = ("tree", "cycle", "grid", "dense", "loose")


def edges_of(shape: str, count: int, random: np.random.Generator) -> list[tuple[int, int]]:
    if shape == "tree":
        return [(int(random.integers(i)), i) for i in range(1, count)]
    if shape == "cycle":
        return [(i, (i + 1) % count) for i in range(count)]
    if shape == "grid":
        across = [(i, i + 1) for i in range(count - 1) if i % 2 == 0]
        return across + [(i, i + 2) for i in range(count - 2)]
    if shape == "dense":
        return list(itertools.combinations(range(count), 2))
    return [(0, 1)] if count > 1 else []


def network_of(
    shape: str, seed: int, *, count: int, states: int, forbidden: float = 0.0
) -> Network:
    random = np.random.default_rng(seed)
    build = NetworkBuilder()

    def costs(*size: int) -> np.ndarray:
        found = np.round(random.normal(size=size), 2)
        return np.where(random.random(size) < forbidden, math.inf, found)

    sizes = random.integers(1, states + 1, count)
    for number, size in enumerate(sizes):
        build.variable(str(number), costs(size))
    for first, second in edges_of(shape, count, random):
        build.add_edge(first, second, costs(sizes[first], sizes[second]))
    build.add_constant(float(np.round(random.normal(), 2)))
    return build.build()


def least(network: Network) -> float:
    every = itertools.product(*map(range, network.sizes))
    return min(network.value(assignment) for assignment in every)


@st.composite
def networks(draw: st.DrawFn) -> Network:
    return network_of(
        draw(st.sampled_from(SHAPES)),
        draw(st.integers(0, 2**31)),
        count=draw(st.integers(1, 6)),
        states=draw(st.integers(1, 4)),
        forbidden=draw(st.sampled_from((0.0, 0.0, 0.3, 0.6))),
    )


def close(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= 1e-9 * max(1.0, abs(one))


@settings(max_examples=150, deadline=None)
@given(networks())
def test_solutions_are_those_of_brute_force(network: Network) -> None:
    best = least(network)
    found = eliminate(network)
    assert found.fits
    assert close(found.value, best)
    answer = solve(network, cells=1)  # nothing fits: the dual and the descent alone
    assert answer.bound <= best + 1e-9
    assert answer.value >= best - 1e-9
    if answer.exact:
        assert close(answer.value, best)
    for result in (found, answer):
        if math.isfinite(result.value):
            assert close(network.value(result.assignment), result.value)


@settings(max_examples=150, deadline=None)
@given(networks())
def test_bounds_hold_and_no_better_state_is_dropped(network: Network) -> None:
    best = least(network)
    found = dual(network, sweeps=10)
    assert found.bound <= best + 1e-9 or best == found.bound
    if not math.isfinite(best):
        assert not found.assignment
        return
    assert found.value >= best - 1e-9
    if found.value > best + 1e-6:  # then the best assignment must still be there
        left = network.kept(found.states)
        assert close(least(left), best)
    known = dual(network, sweeps=10, upper=best)
    assert known.bound <= best + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from((0.0, 0.2)))
def test_bounds_of_trees_are_tight(seed: int, forbidden: float) -> None:
    network = network_of("tree", seed, count=9, states=5, forbidden=forbidden)
    best = eliminate(network).value
    found = dual(network, sweeps=1)
    if math.isfinite(best):
        assert close(found.bound, best)
        assert close(found.value, best)
        assert found.closed


@settings(max_examples=80, deadline=None)
@given(networks())
def test_margins_bound_what_has_a_state(network: Network) -> None:
    found = dual(network, sweeps=2, upper=math.inf)
    if not math.isfinite(least(network)) or found.closed:
        return
    for variable, (states, margins) in enumerate(zip(found.states, found.margins, strict=True)):
        for state, margin in zip(states, margins, strict=True):
            keep = [np.arange(size) for size in network.sizes]
            keep[variable] = np.array([state])
            if math.isfinite(margin):
                assert margin <= least(network.kept(keep)) + 1e-9


def by_integer_program(network: Network) -> float:
    """The least value by HiGHS: a share of every state and pair, consistent with each other."""
    starts = np.cumsum([0, *network.sizes])
    costs = [*network.unary]
    rows: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    signs: list[np.ndarray] = []
    ends: list[float] = []

    def equation(plus: np.ndarray, minus: np.ndarray, right: float) -> None:
        rows.append(np.full(len(plus) + len(minus), len(ends)))
        columns.append(np.concatenate([plus, minus]))
        signs.append(np.concatenate([np.ones(len(plus)), -np.ones(len(minus))]))
        ends.append(right)

    none = np.array([], dtype=np.int64)
    for start, size in zip(starts, network.sizes, strict=False):
        equation(np.arange(start, start + size), none, 1.0)
    total = int(starts[-1])
    for edge in network.edges:
        height, width = edge.costs.shape
        cells = total + np.arange(height * width).reshape(height, width)
        total += height * width
        costs.append(edge.costs.ravel())
        for row in range(height):
            equation(cells[row], np.array([starts[edge.first] + row]), 0.0)
        for column in range(width):
            equation(cells[:, column], np.array([starts[edge.second] + column]), 0.0)
    prices = np.concatenate(costs)
    matrix = coo_array(
        (np.concatenate(signs), (np.concatenate(rows), np.concatenate(columns))),
        shape=(len(ends), total),
    ).tocsr()
    allowed = np.isfinite(prices)
    found = milp(
        np.where(allowed, prices, 0.0),
        constraints=LinearConstraint(matrix, ends, ends),
        bounds=Bounds(0, allowed.astype(float)),
        integrality=np.arange(total) < starts[-1],
    )
    return network.constant + float(found.fun) if found.success else math.inf


@pytest.mark.parametrize("shape", ["tree", "cycle", "grid", "dense"])
def test_middle_sized_networks_agree_with_an_integer_program(shape: str) -> None:
    count = 7 if shape == "dense" else 20
    network = network_of(shape, 5, count=count, states=6, forbidden=0.1)
    answer = solve(network)
    assert answer.exact
    assert close(answer.value, by_integer_program(network))


def test_fixing_and_elimination_meet() -> None:
    """Many states, small treewidth, too large to eliminate at once."""
    network = network_of("grid", 1, count=24, states=60)
    whole = eliminate(network)
    found = dual(network)
    assert found.bound <= whole.value + 1e-9
    assert found.bound >= whole.value - 0.2 * abs(whole.value)
    assert sum(map(len, found.states)) < sum(network.sizes)
    answer = solve(network)
    assert answer.exact
    assert close(answer.value, whole.value)


def test_what_does_not_fit_is_said() -> None:
    network = network_of("dense", 3, count=9, states=5)
    order = elimination_order(network)
    assert not eliminate(network, cells=order.largest - 1).fits
    assert eliminate(network, cells=order.largest).fits
    answer = solve(network, cells=10)
    assert answer.bound <= eliminate(network).value <= answer.value
    assert answer == solve(network, cells=10)


def test_infeasible_networks_are_a_value() -> None:
    build = NetworkBuilder()
    one, other = build.variable("one", [0.0, math.inf]), build.variable("other", [1.0, 2.0])
    build.add_edge(one, other, [[math.inf, math.inf], [0.0, 0.0]])
    network = build.build()
    assert supported(network) is None
    answer = solve(network)
    assert (answer.assignment, answer.value, answer.exact) == ((), math.inf, True)
    assert eliminate(network).value == math.inf


def test_parallel_edges_add_up_and_loops_are_states() -> None:
    build = NetworkBuilder()
    one, other = build.variable("one", [0.0, 0.0]), build.variable("other", [0.0, 0.0])
    build.add_edge(one, other, [[0.0, 3.0], [2.0, 5.0]])
    build.add_edge(other, one, [[1.0, 0.0], [0.0, 0.0]])
    build.add_edge(one, one, [[7.0, 9.0], [9.0, 0.0]])
    network = build.build()
    assert len(network.edges) == 1
    assert network.edges[0].costs.tolist() == [[1.0, 3.0], [2.0, 5.0]]
    assert network.unary[one].tolist() == [7.0, 0.0]
    assert solve(network).value == 2.0


def test_bytes_have_a_price() -> None:
    build = NetworkBuilder()
    one = build.variable("one", [1.0, 2.0])
    network = build.build()
    assert priced(network, {one: [8, 0]}, 0.0) is network
    assert solve(priced(network, {one: [8, 0]}, 0.5)).assignment == (1,)
    assert solve(priced(network, {one: [8, 0]}, 0.1)).assignment == (0,)


def test_descents_never_climb() -> None:
    network = network_of("grid", 2, count=12, states=5)
    start = tuple(0 for _ in network.sizes)
    assert network.value(descend(network, start)) <= network.value(start)
