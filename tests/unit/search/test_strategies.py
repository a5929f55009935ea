"""Strategies beside the exact one: what they find, and that they find it again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.presets.registry import build
from autopar.search import exact, ilp
from autopar.search.bounds import Bounds
from autopar.search.find import STRATEGIES, Request, find
from autopar.search.finish import shortfall_notes
from autopar.search.others import runners_up
from autopar.search.problem import Problem
from autopar.search.space import Point
from autopar.search.stage_cut import cheapest_sum, least_bottleneck
from autopar.sharding.mesh import Mesh
from autopar.trace import trace
from tests.unit.search.problems import traced

SMALL = (
    ("gpt", 2, 2, 4, "1x2xA100"),
    ("llama", 2, 1, 4, "1x4xA100"),
    ("t5", 2, 1, 4, "2x2xL4"),
    ("mlp", 2, 2, 8, "4xcpu"),
)


def problem_of(family: str, layers: int, size: int, batch: int, cluster: str) -> Problem:
    found = traced(family, layers, size, batch)
    return Problem(found.graph, found.loss, ClusterSpec.parse(cluster))


@pytest.mark.parametrize("strategy", ["mcmc", "rl"])
def test_drawing_plans_finds_good_ones_and_the_same_again(strategy: str):
    family, layers, size, batch, cluster = SMALL[0]
    truth = exact.search(problem_of(family, layers, size, batch, cluster)).best
    found = [
        STRATEGIES[strategy](problem_of(family, layers, size, batch, cluster), Request(seed=3))
        for _ in range(2)
    ]
    assert found[0].best == found[1].best
    assert truth is not None and found[0].best is not None
    assert found[0].best.step_s <= 1.05 * truth.step_s


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["mcmc", "rl"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case[0])
def test_drawing_plans_comes_close_on_small_problems(
    strategy: str, case: tuple[str, int, int, int, str]
):
    truth = exact.search(problem_of(*case)).best
    for seed in range(2):
        found = STRATEGIES[strategy](problem_of(*case), Request(seed=seed))
        assert truth is not None and found.best is not None
        assert found.best.step_s <= 1.05 * truth.step_s


@pytest.mark.parametrize(
    "strategy",
    ["dp", *(pytest.param(name, marks=pytest.mark.long) for name in ("ilp", "expert"))],
)
def test_better_cuts_of_expert_grids_lie_between_experts_and_the_exact_search(strategy: str):
    case = ("gpt", 2, 2, 4, "1x4xA10G")
    best = exact.search(problem_of(*case)).best
    found = STRATEGIES[strategy](problem_of(*case), Request())
    expert = STRATEGIES["expert"](problem_of(*case), Request()).best
    assert best is not None and found.best is not None and expert is not None
    assert best.step_s <= found.best.step_s * (1 + 1e-9)
    assert found.best.fits
    assert found.certificate.bound_s == 0.0
    if strategy == "dp":
        assert found.best.step_s <= expert.step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_integer_program_agrees_with_intervals(seed: int):
    rng = random.Random(seed)
    problem = problem_of("gpt", 3, 2, 8, "1x3xA100")
    point = Point(pipeline=3, microbatches=8)
    problem.memory_bytes = problem.software.context_bytes + rng.choice((2**28, 2**29, 2**40))
    bounds = Bounds(problem)
    none = (0.0,) * 3
    stages = bounds.stages(point, none, relaxed=False)
    assert stages is not None
    weights = [item.forward_s + item.backward_s for item in stages.filled]
    bottleneck, _ = least_bottleneck(stages.intervals, weights)
    columns = ilp.columns(problem, bounds, point, stages, none)
    slowest = ilp.least(columns, 2, sum_weight=0.0)
    if math.isinf(bottleneck):
        assert slowest is None
        return
    assert slowest is not None
    assert max(column.seconds for column in slowest) == pytest.approx(bottleneck, rel=1e-6)
    within = [column for column in columns if column.seconds <= bottleneck * (1 + 1e-9)]
    chosen = ilp.least(within, 1)
    cut = cheapest_sum(stages.intervals, weights, weights, bottleneck * (1 + 1e-9))
    assert chosen is not None and cut is not None
    assert sum(column.seconds for column in chosen) == pytest.approx(cut.value, rel=1e-6)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_without_any_time_there_is_a_plan_and_an_honest_gap(strategy: str):
    problem = problem_of("mlp", 2, 0, 2, "2xcpu")
    found = STRATEGIES[strategy](problem, Request(time_limit_s=0.0))
    assert found.best is not None and found.best.fits and not found.certificate.complete
    best = exact.search(problem.like()).best
    assert best is not None and found.certificate.bound_s <= best.step_s * (1 + 1e-9)
    assert 0 < found.gap <= 1 and found.best.step_s <= 1.5 * best.step_s


@pytest.mark.parametrize("strategy", ["expert", "dp", "ilp"])
def test_what_lies_outside_of_a_grid_is_told_with_the_grid(strategy: str):
    found, cluster = traced("mlp", 2, 0, 2), ClusterSpec.parse("2xcpu")
    with pytest.raises(PlanError, match="no plan on 2xcpu with mesh pp=2, schedule=zbv") as caught:
        find(found.graph, found.loss, cluster, constraints={"schedule": "zbv"},
             mesh=Mesh.parse("pp=2"), request=Request(strategy=strategy))  # fmt: skip
    assert "interleaved_1f1b with 2 chunks" in str(caught.value) and "exact" in str(caught.value)


def test_a_gap_above_the_goal_is_told_with_its_reason():
    result = exact.search(problem_of("mlp", 2, 0, 2, "2xcpu"))
    assert result.best is not None and not shortfall_notes(result, 0.01, 60.0)

    def told(goal: float, seconds: float = 1.0, **more: object) -> str:
        more = {"bound_s": 0.95 * result.best.step_s, **more}
        proof = replace(result.certificate, **more)
        other = replace(result, certificate=proof, seconds=seconds)
        return " ".join(shortfall_notes(other, goal, 60.0))

    assert not told(0.05) and not told(0.01, complete=False, bound_s=0.0)
    assert "within 5 % of the best, not within 0.5 %" in told(0.005)
    assert "no tighter bound" in told(0.01, seconds=70.0)
    assert "interrupted" in told(0.01, complete=False)
    assert "limit of 60 s was reached; --time-limit 180" in told(0.01, 61.0, complete=False)


def test_runners_up_are_the_plans_of_other_points_as_far_as_there_are():
    """As many as are asked for; of all points that have a plan, if that many are."""
    problem = problem_of("mlp", 2, 0, 2, "2xcpu")
    everything = STRATEGIES["exhaustive"](problem.like(), Request())
    result = exact.search(problem)
    assert result.best is not None and everything.best is not None
    few = runners_up(problem, result, 3)
    assert len(few) == 3 and runners_up(problem, result, 0) == ()
    assert [item.step_s for item in few] == sorted(item.step_s for item in few)
    fastest = {item.candidate.point: item.step_s
               for item in (everything.best, *everything.alternatives)}  # fmt: skip
    best = result.best.candidate.point
    every = {item.candidate.point: item.step_s
             for item in runners_up(problem, result, 1000, time_limit_s=60)}  # fmt: skip
    assert len(every) > len(result.alternatives) and best not in every
    twins = {point for point in fastest if point.data_outside and problem.orders_alike(point)}
    assert {*every, best} == {*fastest} - twins
    assert all(every[point] >= fastest[point] * (1 - 1e-9) for point in every)


@pytest.mark.long
def test_gaps_on_gpt3(record_property: Callable[[str, object], None]):
    model, args, kwargs = build("gpt3-175b")
    found = trace(model, args, kwargs, None)
    cluster = ClusterSpec.parse("128x8xA100")
    lines = []
    best = exact.search(Problem(found.graph, found.loss, cluster), gap=0.01).best
    assert best is not None
    for name in ("expert", "dp", "mcmc", "rl"):
        request = Request(time_limit_s=120.0)
        result = STRATEGIES[name](Problem(found.graph, found.loss, cluster), request)
        assert result.best is not None
        assert best.step_s * (1 - 0.01) <= result.best.step_s
        lines.append(
            f"{name} {result.best.step_s / best.step_s - 1:+.2%} in {result.seconds:.0f} s"
        )
    record_property("summary", f"exact {best.step_s:.4g} s; " + "; ".join(lines))


@pytest.mark.parametrize(
    "strategy",
    ["exact", "mcmc", *(pytest.param(name, marks=pytest.mark.long)
                        for name in ("rl", "expert", "dp", "ilp", "exhaustive"))],
)  # fmt: skip
def test_ctrl_c_ends_with_the_best_so_far(strategy: str, monkeypatch: pytest.MonkeyPatch):
    problem = problem_of("mlp", 2, 2, 8, "4xcpu")
    price, priced = problem.outcome, []

    def outcome(candidate):
        priced.append(price(candidate))
        if len(priced) > 3 and any(item is not None and item.fits for item in priced[:-1]):
            raise KeyboardInterrupt
        return priced[-1]

    monkeypatch.setattr(problem, "outcome", outcome)
    found = STRATEGIES[strategy](problem, Request())
    assert not found.certificate.complete
    assert found.best is not None and found.best in priced and found.best.fits
