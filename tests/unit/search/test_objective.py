"""Fewest devices and least cost against every plan on every part of a cluster."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autopar.cli.main import main
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import InputError, PlanError
from autopar.search.exhaustive import candidates
from autopar.search.find import GAPS, Found, Request, find
from autopar.search.objective import parts_of, price_of
from autopar.search.problem import Problem
from autopar.sharding.mesh import Mesh
from tests.unit.search.problems import traced

Times = list[tuple[ClusterSpec, float]]
USD = 7.2


def model_cluster(memory_gib: float) -> ClusterSpec:
    """Two nodes of two devices,of which the model needs some, by their memory."""
    figures = {"memory.memory_gib": memory_gib}
    cluster = ClusterSpec.parse("2x2xA100").with_figures(figures, source="a test")
    return replace(cluster, groups=(replace(cluster.groups[0], node_usd_per_hour=USD),))


def ask(cluster: ClusterSpec, objective: str, within_s: float | None = None) -> Found:
    model = traced("mlp", 1, 2, 2)
    request = Request(objective=objective, step_within_s=within_s)
    return find(model.graph, model.loss, cluster, request=request)


def all_times(cluster: ClusterSpec) -> Times:
    """The least seconds on every part of a cluster, of all plans that fit."""
    model = traced("mlp", 1, 2, 2)
    found = []
    for part in parts_of(cluster, in_nodes=True):
        problem = Problem(model.graph, model.loss, part)
        plans = (item for point in problem.space.points() for item in candidates(problem, point))
        tried = [problem.outcome(item) for item in plans]
        times = [item.step_s for item in tried if item is not None and item.fits]
        found.append((part, min(times, default=math.inf)))
    return found


@pytest.fixture(
    scope="module",
    params=[
        2.65,
        pytest.param(2.45, marks=pytest.mark.long),
        pytest.param(9, marks=pytest.mark.long),
    ],
)
def times(request: pytest.FixtureRequest) -> tuple[ClusterSpec, Times]:
    cluster = model_cluster(request.param)
    return cluster, all_times(cluster)


def test_parts_are_whole_nodes_and_devices_of_one():
    cluster = ClusterSpec.parse("3x2xA100")
    assert [str(part) for part in parts_of(cluster, in_nodes=False)] == [
        "2xA100", "2x2xA100", "3x2xA100",
    ]  # fmt: skip
    assert str(parts_of(cluster, in_nodes=True)[0]) == "1xA100"
    many = [part.nodes for part in parts_of(ClusterSpec.parse("20x8xA100"), in_nodes=False)]
    assert many == [1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 20]
    unequal = parts_of(ClusterSpec.parse("2xA100+2x2xV100"), in_nodes=False)
    assert {*map(str, unequal)} == {
        "2xA100", "2xV100", "2x2xV100", "2xA100+2xV100", "2xA100+2x2xV100",
    }  # fmt: skip


@pytest.mark.parametrize("share", [None, 1.02, 0.7, 0.5])
def test_no_part_with_fewer_devices_has_a_plan(
    times: tuple[ClusterSpec, Times], share: float | None
):
    cluster, least = times
    smallest = next(time_s for _, time_s in least if time_s < math.inf)
    within_s = math.inf if share is None else share * smallest
    wanted = [(part, time_s) for part, time_s in least if math.inf > time_s <= within_s]
    limit_s = None if share is None else within_s
    if not wanted:
        with pytest.raises(PlanError, match=r"no plan on .* takes at most"):
            ask(cluster, "devices", limit_s)
        return
    part, time_s = wanted[0]
    found = ask(cluster, "devices", limit_s)
    assert found.problem.cluster == part and found.plan.device_mesh.size == part.num_devices
    assert found.prediction.step_s <= min(within_s, time_s / (1 - GAPS["normal"]))
    proof = "(proven: of " if part.num_devices > 1 else "(the smallest part)"
    assert proof in " ".join(found.plan.notes)


def test_no_part_costs_less(times: tuple[ClusterSpec, Times]):
    cluster, least = times
    whole = [(part, time_s) for part, time_s in least if part.devices_per_node == 2]
    best = min(price_of(part) * time_s for part, time_s in whole)
    found = ask(cluster, "cost")
    cost = price_of(found.problem.cluster) * found.prediction.step_s
    assert cost <= best / (1 - GAPS["normal"]) ** 2
    amount = cost / 3600 / 2 * 1e6
    assert f"{amount:.4g} USD per million samples (predicted" in " ".join(found.plan.notes)
    for change in found.changes:  # slower and dearer is none of them
        assert change.step_s is not None and change.step_s < found.prediction.step_s


def test_what_is_no_request_is_refused():
    cluster = model_cluster(9)
    with pytest.raises(InputError, match="one of time, devices, cost"):
        ask(cluster, "gpus")
    with pytest.raises(InputError, match="as short as possible anyway"):
        ask(cluster, "time", 1.0)
    with pytest.raises(InputError, match="more than 0 seconds"):
        ask(cluster, "cost", 0.0)
    model, mesh = traced("mlp", 1, 2, 2), Mesh.parse("dp=4")
    with pytest.raises(InputError, match="says how many devices there are"):
        find(model.graph, model.loss, cluster, mesh=mesh, request=Request(objective="devices"))
    with pytest.raises(PlanError, match="no plan fits"):
        ask(model_cluster(1.2), "devices")
    with pytest.raises(InputError, match="node_usd_per_hour"):
        ask(ClusterSpec.parse("1xA100+1xV100"), "cost")


def test_what_proves_nothing_says_so():
    model, cluster = traced("mlp", 1, 2, 2), model_cluster(2.65)
    for objective, words in (
        ("devices", "not proven: 1 of 1 smaller part"),
        ("cost", "nothing is"),
    ):
        request = Request(objective=objective, strategy="mcmc", time_limit_s=0.2)
        found = find(model.graph, model.loss, cluster, request=request)
        assert words in " ".join(found.plan.notes)


def test_what_costs_nothing_is_as_cheap_everywhere():
    cluster = model_cluster(9)
    free = replace(cluster, groups=(replace(cluster.groups[0], node_usd_per_hour=0.0),))
    found = ask(free, "cost")
    assert found.problem.cluster == free


def test_without_a_price_nodes_are_counted():
    cluster = model_cluster(9)
    free = replace(cluster, groups=(replace(cluster.groups[0], node_usd_per_hour=None),))
    text = " ".join(ask(free, "cost").plan.notes)
    assert "node-hours per million samples (predicted; node-hours, as the cluster file" in text


def test_the_command_wants_a_search_for_an_objective(capsys: pytest.CaptureFixture[str]):
    asked = ["plan", "gpt2", "--cluster", "2xA100", "--objective", "devices"]
    assert main([*asked, "--strategy", "ddp"]) == 2
    assert "--objective is given, and a strategy says how to plan" in capsys.readouterr().err
