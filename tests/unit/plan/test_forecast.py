"""Forecasts: a plan file makes the very timeline and memory again that its prediction had."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator
from autopar.cost_models.forecast import (
    cluster_of,
    describe_cluster,
    forecast_of,
)
from autopar.cost_models.live import KINDS
from autopar.cost_models.memory import rank_memory
from autopar.cost_models.replay import memory_over_time, timeline_of
from autopar.cost_models.stages import stage_models
from autopar.errors import PlanError
from autopar.plan.build import make_plan
from autopar.plan.codec import read_plan
from autopar.plan.parts import ZeroPlan
from autopar.plan.plan import Plan
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace


class Blocks(nn.Module):
    """Blocks with messages between them, perhaps the last with the weights of the first."""

    def __init__(self, width: int = 16, depth: int = 4, *, tied: bool) -> None:
        super().__init__()
        self.tied = tied
        self.first = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return (x @ self.first.weight if self.tied else x).square().mean()


@functools.cache
def traced(tied: bool) -> Traced:
    torch.manual_seed(0)
    return trace(Blocks(tied=tied), (torch.randn(16, 4, 16),), {}, None)


@functools.cache
def evaluator(cluster: str, tied: bool = True) -> Evaluator:
    found = traced(tied)
    return Evaluator(found.graph, found.loss, ClusterSpec.parse(cluster))


@functools.cache
def forecast(mesh: str, constraints: str, cluster: str = "1x8xA100") -> Plan:
    tied = may_be_tied(constraints)
    plan, _ = make_plan(traced(tied).graph, Mesh.parse(mesh), constraints)
    return replace(plan, forecast=forecast_of(evaluator(cluster, tied), plan)[0])


def may_be_tied(constraints: str) -> bool:
    """Stages that update at different times cannot share weights."""
    return "pipedream" not in constraints


PLANS = [
    ("dp=1", "ddp"),
    ("dp=4", "zero3,microbatches=2"),
    ("dp=2,tp=2", "megatron,recompute=full"),
    ("pp=2,dp=2", "ddp,microbatches=4,schedule=1f1b,zero=1"),
    ("pp=2", "ddp,microbatches=4,schedule=interleaved_1f1b,chunks=2"),
    ("pp=2,dp=2", "ddp,microbatches=4,schedule=zb_h1,zero=2"),
    ("pp=2", "ddp,microbatches=8,schedule=zbv"),
    ("pp=2,dp=2", "ddp,microbatches=4,schedule=pipedream,zero=1"),
]


@pytest.mark.parametrize(("mesh", "constraints"), PLANS)
@pytest.mark.parametrize("cluster", ["1x8xA100", "8xcpu"])
def test_the_file_makes_the_same_timeline_and_memory(mesh, constraints, cluster):
    held = evaluator(cluster, may_be_tied(constraints))
    plan = Plan.from_json(forecast(mesh, constraints, cluster).to_json())
    found = held.evaluate(plan)
    timeline = timeline_of(plan)
    assert timeline == found.timeline
    for rank in range(timeline.schedule.num_ranks):
        assert timeline.events(rank) == found.timeline.events(rank)
    models = stage_models(held.place(plan), plan, held.loss, held.software.implementation)
    for cost in found.ranks:
        memory = rank_memory(models, plan, cost.rank, moments=True, **held.memory_options())
        over_time = memory_over_time(plan, cost.rank)
        assert over_time.peak == {k: memory.peak[k] for k in KINDS if memory.peak[k]}
        assert over_time.where == memory.where
        assert [(m.what, m.peak_bytes, m.live_bytes) for m in memory.moments] == [
            (span.what, span.peak_bytes, span.live_bytes) for span in over_time.spans
        ]
        actions = [str(event.action) for event in timeline.events(cost.rank)]
        assert [span.what for span in over_time.spans] == [*actions, "update"]


@pytest.mark.parametrize(("mesh", "constraints"), PLANS)
def test_ranks_say_what_was_predicted(mesh, constraints):
    plan = forecast(mesh, constraints)
    held = evaluator("1x8xA100", may_be_tied(constraints))
    told, found = plan.forecast, held.evaluate(plan)
    assert told is not None
    assert (told.step_s, told.fits) == (found.step_s, found.fits)
    assert (told.global_batch_size, told.sequence_length) == (16, None)
    for rank, cost in zip(told.ranks, found.ranks, strict=True):
        assert rank.step_s == pytest.approx(found.step_s, rel=1e-12)
        assert sum(rank.kernels.values()) == pytest.approx(rank.compute_s, rel=1e-6)
        assert sum(rank.collectives.values()) == pytest.approx(rank.inline_s, rel=1e-6)
        assert rank.peak_bytes == cost.memory.peak_bytes
        assert rank.device_bytes == cost.reserve.device_bytes
        assert rank.over_bytes == cost.over_bytes
    assert read_plan(plan.to_json()) == (plan, [])


def test_a_plan_edited_by_hand_is_told_so():
    plan = forecast("pp=2,dp=2", "ddp,microbatches=4,schedule=1f1b,zero=1")
    edited = Plan.from_json(replace(plan, zero=ZeroPlan()).to_json())
    faults = read_plan(edited.to_json())[1]
    assert [(f.path, f.warning) for f in faults] == [("$.forecast.choices", True)]
    for ask in (timeline_of, lambda plan: memory_over_time(plan, 0)):
        with pytest.raises(PlanError, match="other choices"):
            ask(edited)
        with pytest.raises(PlanError, match="nothing was predicted"):
            ask(replace(plan, forecast=None))
    with pytest.raises(PlanError, match="no pipeline rank 2"):
        memory_over_time(plan, 2)


def test_what_was_taken_from_a_forecast_is_missed_by_name():
    plan = forecast("pp=2,dp=2", "ddp,microbatches=4,schedule=1f1b,zero=1")
    held = json.loads(plan.to_json())
    del held["forecast"]["timing"]["tasks"][0]
    del held["forecast"]["memory"]["ranks"][1]["events"]["run 1B"]
    broken = Plan.from_json(json.dumps(held))
    with pytest.raises(PlanError, match="lack the action"):
        timeline_of(broken)
    with pytest.raises(PlanError, match="lack the event 'run 1B'"):
        memory_over_time(broken, 1)


@pytest.mark.parametrize(
    "text", ["8x8xH100-SXM", "4xcpu", "2x8xA100-80-SXM+1x4xV100-SXM2-16", "16x8xB200-SXM"]
)
def test_clusters_survive(text):
    cluster = ClusterSpec.parse(text)
    told = describe_cluster(cluster)
    assert cluster_of(told) == cluster
    assert described_again(told.fingerprint, cluster)
    figures = {"efficiency.matmul_share": 0.5}
    other = cluster.with_figures(figures, source="a guess")
    assert cluster_of(describe_cluster(other)) == other
    assert not described_again(told.fingerprint, other)


def described_again(fingerprint: str, cluster: ClusterSpec) -> bool:
    return describe_cluster(cluster).fingerprint == fingerprint


def test_the_cost_model_is_known_again():
    first = forecast("dp=1", "ddp").forecast
    again, _ = forecast_of(evaluator("1x8xA100"), forecast("dp=1", "ddp"))
    other = forecast("dp=1", "ddp", "8xcpu").forecast
    assert first is not None and other is not None
    assert first.cost_model == again.cost_model != other.cost_model
