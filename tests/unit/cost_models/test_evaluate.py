"""Predictions of whole plans: parts add up, the runtime acts in the order that is priced."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.cli.main import main
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator, Prediction, Software
from autopar.cost_models.explain import memory_tree, time_tree
from autopar.errors import ClusterError, PlanError
from autopar.runtime.comm import Communicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.execute import Executor
from autopar.schedules.actions import Action
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace
from tests.models import gpt3


class Blocks(nn.Module):
    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@functools.cache
def blocks() -> tuple[Blocks, tuple[Tensor], Traced]:
    torch.manual_seed(0)
    model, args = Blocks(), (torch.randn(16, 8, 64),)
    return model, args, trace(model, args, {}, None)


@functools.cache
def evaluator(cluster: str = "1x8xA100") -> Evaluator:
    traced = blocks()[2]
    return Evaluator(traced.graph, traced.loss, ClusterSpec.parse(cluster))


def predict(mesh: str, constraints: str, cluster: str = "1x8xA100") -> Prediction:
    model, args, _ = blocks()
    plan = api.plan(model, None, args, mesh=mesh, constraints=constraints)
    return evaluator(cluster).evaluate(plan)


PLANS = [
    ("dp=1", "ddp"),
    ("dp=4", "ddp"),
    ("dp=4", "zero3,microbatches=2"),
    ("tp=4", {"ffn": "tp"}),
    ("pp=2,dp=2", "ddp,microbatches=4,schedule=1f1b,zero=1"),
    ("pp=2,dp=2", "ddp,microbatches=4,schedule=zbv,zero=2"),
    ("pp=2", "ddp,microbatches=4,schedule=interleaved_1f1b,chunks=2,recompute=full"),
    ("pp=2", "ddp,microbatches=4,schedule=pipedream"),
]


@pytest.mark.parametrize(("mesh", "constraints"), PLANS)
def test_every_second_and_byte_is_explained(mesh, constraints):
    found = predict(mesh, constraints)
    assert found.step_s > 0 and found.fits
    for rank, cost in enumerate(found.ranks):
        for tree in (time_tree(found, rank), memory_tree(found, rank)):
            pending = [tree]
            while pending:
                part = pending.pop()
                if part.parts:
                    total = sum(child.value for child in part.parts)
                    assert total == pytest.approx(part.value, rel=1e-6), part.name
                pending += part.parts
            assert list(tree.lines())
        assert time_tree(found, rank).value == pytest.approx(found.step_s)
        assert memory_tree(found, rank).value == cost.reserve.device_bytes


@pytest.mark.parametrize(("mesh", "constraints"), PLANS)
def test_the_same_plan_costs_the_same(mesh, constraints):
    first, second = predict(mesh, constraints), predict(mesh, constraints)
    assert first.timeline.spans == second.timeline.spans
    assert [r.memory for r in first.ranks] == [r.memory for r in second.ranks]


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ("pp=2", "ddp,microbatches=4,schedule=1f1b"),
        ("pp=2", "ddp,microbatches=4,schedule=zbv"),
        ("pp=2", "ddp,microbatches=4,schedule=interleaved_1f1b,chunks=2"),
        ("pp=2", "ddp,microbatches=4,schedule=pipedream"),
        ("dp=2", "ddp,microbatches=2"),
    ],
)
def test_the_timeline_is_what_the_runtime_does(mesh, constraints, monkeypatch):
    model, args, traced = blocks()
    done: dict[int, list[Action]] = defaultdict(list)
    act = Executor._act

    def noted(self: Executor, action: Action, updates: bool) -> None:
        done[self.comm.rank].append(action)
        act(self, action, updates)

    monkeypatch.setattr(Executor, "_act", noted)

    def body(comm: Communicator) -> None:
        options = CompileOptions(mesh=Mesh.parse(mesh), constraints=constraints)
        CompiledModel(model, comm, options, traced).step(*args)

    run_threads(2, body, timeout_s=60.0)
    found = predict(mesh, constraints)
    for rank, actions in done.items():
        place = rank if found.timeline.schedule.num_ranks > 1 else 0
        assert actions == [event.action for event in found.timeline.events(place)]


@functools.cache
def large() -> tuple[nn.Module, tuple[Tensor, ...], Traced]:
    """A model whose kernels are not all launches."""
    model, args, _ = gpt3.build(layers=4, width=2048, heads=16, batch=16)
    return model, args, trace(model, args, {}, None)


def large_step(
    mesh: str, constraints: str, cluster: ClusterSpec, software: Software | None = None
) -> float:
    model, args, traced = large()
    plan = api.plan(model, None, args, mesh=mesh, constraints=constraints)
    return Evaluator(traced.graph, traced.loss, cluster, software).evaluate(plan).step_s


def test_what_is_faster_takes_less_time():
    clusters = [ClusterSpec.parse(text) for text in ("4xV100", "4xA100", "4xH100")]
    times = [large_step("dp=4", "ddp", cluster) for cluster in clusters]
    assert times == sorted(times, reverse=True) and len(set(times)) == 3
    slow = clusters[1].with_figures({"efficiency.link_share": 0.1}, source="a bad cable")
    assert large_step("dp=4", "ddp", slow) > times[1]


def test_every_constant_of_the_software_counts():
    cluster = ClusterSpec.parse("4xA100")
    base = Software.of(cluster.hardware(0))

    def step(**changed: float) -> float:
        software = dataclasses.replace(base, speed=dataclasses.replace(base.speed, **changed))
        return large_step("pp=2,dp=2", "ddp,microbatches=2", cluster, software)

    usual = step()
    assert step(element_factor=2.0) > usual
    assert step(time_factor=2.0) > usual
    assert step(overlap=0.0) > usual
    assert step(slowdown=base.speed.slowdown + 1) > usual
    assert step(update_passes=2 * base.speed.update_passes) > usual
    assert step(step_s=1.0) == pytest.approx(usual + 1.0)


def test_a_plan_that_does_not_fit_says_what_is_too_large():
    with torch.device("meta"):
        model, ids = gpt3.build_small()[:2]
    with pytest.raises(PlanError) as caught:
        api.plan(model, "4xV100-16", ids, mesh="dp=4", constraints="ddp")
    text = str(caught.value)
    assert "does not fit" in text and "more than its device has" in text
    assert "optimizer" in text and "fix:" in text


def test_a_plan_for_more_devices_than_there_are_is_refused():
    model, args, _ = blocks()
    plan = api.plan(model, None, args, mesh="dp=16", constraints="ddp")
    with pytest.raises((PlanError, ClusterError), match="16"):
        evaluator().evaluate(plan)


def test_the_public_door():
    model, args, _ = blocks()
    plan = api.plan(model, None, args, mesh="dp=4", constraints="ddp")
    found = autopar.evaluate(plan, model, "4xA100", args)
    assert found.step_s == evaluator("4xA100").evaluate(plan).step_s
    assert found.peak_bytes > 0


def test_a_large_plan_is_priced_by_its_distinct_stages():
    loaded = gpt3.build()
    traced = trace(loaded[0], loaded[1], {}, None)
    plan = api.plan(
        loaded[0], None, loaded[1], mesh="pp=8,dp=16,tp=8",
        constraints="megatron,zero=1,microbatches=96,schedule=1f1b",
    )  # fmt: skip
    found = Evaluator(traced.graph, traced.loss, ClusterSpec.parse("128x8xA100")).evaluate(plan)
    # Embedding, layers alone, and head: see tests/bench/bench_evaluate.py for times.
    assert len({id(stage) for stage in found.stages}) == 3
    assert found.fits


@pytest.mark.parametrize(("cluster", "code"), [("4xA100", 0), ("4xV100-16", 1)])
def test_plan_prints_what_it_takes_on_a_cluster(cluster, code, capsys):
    words = ["plan", "tests.models.gpt3:build_small", "--cluster", cluster, "--strategy", "ddp"]
    assert main([*words, "--microbatches", "96"]) == code
    out, err = capsys.readouterr()
    assert "time of a step (predicted)" in out
    assert "memory of a device (predicted)" in out
    assert ("does not fit" in err) == bool(code)
