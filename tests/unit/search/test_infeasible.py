"""What is said where nothing fits, and that odd clusters are planned for."""

from __future__ import annotations

import time

import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.presets.registry import build
from autopar.search import exact
from autopar.search.find import Request, find
from autopar.search.infeasible import explain_infeasible, fewest_devices, least_memory
from autopar.search.problem import Problem
from autopar.trace import trace
from tests.unit.search.problems import traced

QUICK_S = 15.0
"""Seconds of CPU, of a machine that may be several times slower than usual."""


def problem_of(
    family: str, batch: int, cluster: ClusterSpec, *, layers: int = 3, size: int = 2
) -> Problem:
    found = traced(family, layers, size, batch)
    return Problem(found.graph, found.loss, cluster)


def test_a_device_with_hardly_any_memory_is_told_what_it_lacks():
    tiny = ClusterSpec.parse("1x1xH100").with_figures({"memory.memory_gib": 1}, source="a test")
    problem = problem_of("gpt", 2, tiny)
    result = exact.search(problem)
    assert result.best is None and result.certificate.bound_s == float("inf")
    text = str(explain_infeasible(problem, result))
    for part in ("no plan fits 1xH100", "over the memory of a device", "optimizer", "at most"):
        assert part in text


def test_the_least_memory_is_enough_and_too_little_is_refused():
    problem = problem_of("mlp", 2, ClusterSpec.parse("1x2xA100"))
    least = least_memory(problem)
    assert least is not None
    needed = problem.capacity_bytes(problem.device) + least.over_bytes
    problem = problem_of("mlp", 2, ClusterSpec.parse("1x2xA100"))
    problem.memory_bytes = needed
    found = exact.search(problem)
    assert found.best is not None and found.best.fits
    problem = problem_of("mlp", 2, ClusterSpec.parse("1x2xA100"))
    problem.memory_bytes = problem.software.context_bytes + 2**20
    result = exact.search(problem)
    assert result.best is None
    assert "A100" in str(explain_infeasible(problem, result))


def test_more_devices_are_proposed_where_they_help():
    small = ClusterSpec.parse("1x1xA100").with_figures({"memory.memory_gib": 2.7}, source="a test")
    problem = problem_of("gpt", 2, small, layers=4)
    result = exact.search(problem)
    assert result.best is None
    text = str(explain_infeasible(problem, result))
    assert "take 2 devices, the fewest tried that are enough" in text
    assert "per step (predicted); devices with" in text


def test_the_fewest_devices_are_enough_and_one_less_is_not():
    def least_bytes(nodes: int) -> int:
        problem = problem_of("gpt", 4, ClusterSpec.parse(f"{nodes}x1xA100"), layers=4)
        least = least_memory(problem)
        assert least is not None
        return problem.capacity_bytes(problem.device) + least.over_bytes

    needed = {nodes: least_bytes(nodes) for nodes in (1, 2, 3, 4)}
    assert needed[3] < needed[2] < needed[1]
    problem = problem_of("gpt", 4, ClusterSpec.parse("1x1xA100"), layers=4)
    problem.memory_bytes = needed[3]
    found = fewest_devices(problem)
    assert found is not None and found.num_devices == 3


@pytest.mark.parametrize(
    ("family", "batch", "cluster"),
    [
        ("gpt", 8, "1x3xA100"), ("gpt", 8, "1x7xA100"), ("conv", 4, "1x5xA100"),
        ("mlp", 2, "1x6xA100"), ("mlp", 1, "1x4xA100"), ("gpt", 8, "1x3xA100+1x2xV100"),
    ],
)  # fmt: skip
def test_odd_and_unequal_clusters_get_a_plan_that_fits(family: str, batch: int, cluster: str):
    found = exact.search(problem_of(family, batch, ClusterSpec.parse(cluster)), gap=0.05)
    assert found.best is not None and found.best.fits
    point = found.best.candidate.point
    assert point.pipeline * point.data * point.tensor == ClusterSpec.parse(cluster).num_devices
    assert point.data * point.microbatches <= batch


def test_a_cluster_that_no_batch_can_fill_is_explained():
    model = traced("conv", 3, 0, 2)
    with pytest.raises(PlanError, match="97 devices cannot share a global batch of 2"):
        find(model.graph, model.loss, ClusterSpec.parse("97x1xA100"), request=Request())


@pytest.mark.long
def test_why_a_large_model_does_not_fit_is_told_at_once():
    model, args, kwargs = build("llama3-70b")
    found = trace(model, args, kwargs, None)
    problem = Problem(found.graph, found.loss, ClusterSpec.parse("1x1xA100"))
    begun = time.process_time()
    text = str(explain_infeasible(problem, exact.search(problem)))
    assert time.process_time() - begun < QUICK_S
    assert "take 9 devices" in text and "per step (predicted)" in text


def test_nodes_that_alone_are_faster_are_named_within_the_time_limit():
    model, cluster = traced("gpt", 3, 2, 8), ClusterSpec.parse("1x2xA100+1x1xV100")
    notes = find(model.graph, model.loss, cluster).plan.notes
    assert any(note.startswith("2xA100 alone is faster: ") for note in notes)
    notes = find(model.graph, model.loss, cluster, request=Request(time_limit_s=0)).plan.notes
    assert not any("alone" in note for note in notes)
