"""The search against trying everything, on small random problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.search.problem import Candidate, Problem
from autopar.search.space import Point
from tests.unit.search.oracles import campaign
from tests.unit.search.problems import traced


@pytest.mark.parametrize("seed", [4, 26])
def test_the_search_finds_what_trying_everything_finds(seed: int):
    tally = campaign([seed], most=60)
    assert not tally.wrong
    assert tally.counts["problems"]
    assert tally.equal == 1


@pytest.mark.parametrize("seed", [28, 42])
def test_constraints_are_kept_and_the_rest_is_the_best(seed: int):
    tally = campaign([seed], most=60, constraints=True)
    assert not tally.wrong
    assert tally.counts["kept"]
    assert tally.equal == 1


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 300])
def test_constraints_of_hundreds_of_problems(
    first: int, record_property: Callable[[str, object], None]
):
    tally = campaign(range(first, first + 40), constraints=True)
    record_property("summary", tally.text())
    assert not tally.wrong
    assert tally.equal >= 0.95


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 235, 5000])
def test_hundreds_of_problems(first: int, record_property: Callable[[str, object], None]):
    tally = campaign(range(first, first + 40))
    record_property("summary", tally.text())
    assert not tally.wrong
    assert tally.equal >= 0.95


@pytest.mark.parametrize("text", ["4x2xA100", "8x1xV100"])
def test_orders_of_axes_that_are_alike_take_the_same(text: str):
    model, cluster = traced("gpt", 4, 0, 8), ClusterSpec.parse(text)
    problem = Problem(model.graph, model.loss, cluster)
    for tensor in (1, 2):
        near = Point(
            pipeline=2, data=4 // tensor, tensor=tensor, microbatches=2, zero=1,
            role="megatron" if tensor > 1 else "",
        )  # fmt: skip
        plan = Candidate(point=near, edges=(2,), low=(2, 2), high=(2, 2), upgraded=(0, 0))
        first = problem.outcome(plan)
        second = problem.outcome(replace(plan, point=replace(near, data_outside=True)))
        assert first is not None and second is not None
        assert problem.orders_alike(near) == (tensor % cluster.groups[0].devices_per_node == 0)
        if problem.orders_alike(near):
            assert first.step_s == pytest.approx(second.step_s, rel=1e-12)
            assert first.rank_over_bytes == second.rank_over_bytes
