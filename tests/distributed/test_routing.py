"""Routed experts train what one device trains, and no rank sees another rank's tokens."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.graph.routing import GROUPED
from autopar.plan.build import make_plan
from autopar.presets.config import DecoderConfig
from autopar.presets.decoder import Decoder
from autopar.sharding.mesh import Mesh
from autopar.sharding.reshard import plan_steps
from autopar.sharding.sharded import ShardedGraph
from tests.marks import later
from tests.models.check import Case, agree
from tests.models.families import family

PLANS = (
    ("dp=2", "zero3,microbatches=2"),
    ("dp=2", "ddp"),
    ("dp=2,tp=2", "megatron"),
    ("pp=2", "ddp,microbatches=4,schedule=1f1b"),
    ("dp=4", "ddp,microbatches=1"),
    ("dp=2", "zero1,microbatches=2"),
    ("dp=4", "zero3"),
    ("dp=2,tp=2", "megatron_sp,microbatches=2"),
    ("pp=2,dp=2", "zero1,microbatches=2,schedule=1f1b"),
)
# All kinds meet the plans in the long mode; `test_families` trains others in every run.
EVERY = [
    pytest.param(kind, plan, marks=() if (kind, plan) == ("preset", PLANS[0]) else pytest.mark.long)
    for kind in ("preset", "preset_top_1", "mixtral", "qwen3_moe")
    for plan in PLANS
]


@functools.cache
def preset(top_k: int, shared_ffn: int) -> Case:
    config = DecoderConfig(
        layers=2, hidden=16, heads=2, vocab=32, ffn=16, experts=4, top_k=top_k, gated=True,
        bias=False, norm="rms", positions="rope", shared_ffn=shared_ffn,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Decoder(config).to(torch.bfloat16)
    ids = torch.randint(0, 32, (8, 8))
    return Case(model=model, args=(ids, ids.roll(1, 1)))


def case_of(kind: str) -> Case:
    if kind.startswith("preset"):
        return preset(1, 0) if kind == "preset_top_1" else preset(2, 8)
    return family(kind, experts="grouped_mm")


@pytest.mark.parametrize(("kind", "plan"), EVERY)
def test_exact_in_float64(kind: str, plan: tuple[str, str]):
    mesh, constraints = plan
    report = agree(case_of(kind), mesh, constraints, dtype="float64")
    assert report.worst.error <= 1e-12
    if constraints == "ddp":  # gradients and the loss are summed, nothing else is sent
        assert set(report.traffic) == {"all_reduce"}


def sharded(graph: Graph, mesh: str, constraints: str) -> ShardedGraph:
    return make_plan(graph, Mesh.parse(mesh), constraints)[1]


def moved(found: ShardedGraph) -> Iterator[tuple[str, str, int]]:
    """Value, kind and axis of every step that moves what is no parameter, both ways."""
    pairs = found.pairs()
    stored = {item.value.name for item in found.graph.parameters()}
    for node, call in zip(found.graph.nodes, found.calls, strict=True):
        for name, want in zip(node.operands, call.operands, strict=True):
            have, trained = pairs[name], found.graph.spec(name).requires_grad
            if name in stored:
                continue
            steps = plan_steps(have.forward, want.forward)
            steps += plan_steps(want.gradient, have.gradient) if trained else ()
            yield from ((name, step.kind, axis) for step in steps for axis in step.axes)


@pytest.mark.parametrize("kind", ["preset", *later("mixtral", "qwen3_moe")])
@pytest.mark.parametrize(
    ("mesh", "constraints"), [("dp=4", "ddp"), ("dp=2,tp=2", "megatron"), ("dp=4", "zero3")]
)
def test_tokens_stay_on_their_rank(kind: str, mesh: str, constraints: str):
    graph = case_of(kind).traced.graph
    assert any(node.op == GROUPED for node in graph.nodes)
    data = [place for place, name in enumerate(Mesh.parse(mesh).names) if name == "dp"]
    found = sharded(graph, mesh, constraints)
    kinds = {kind for _, kind, axis in moved(found) if axis in data}
    assert kinds <= {"slice", "mask", "all_reduce"}
    # Nothing larger than counts or a loss is summed over samples on the way.
    summed = {name for name, kind, axis in moved(found) if axis in data and kind == "all_reduce"}
    assert all(graph.spec(name).numel <= 8 for name in summed)


class Balanced(nn.Module):
    """Experts and a loss that balances them; optionally no more rows than a capacity."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(8, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, 8, 8))
        self.capacity = capacity

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        odds = self.router(tokens).softmax(-1)
        weight, chosen = odds.topk(2, dim=-1)
        ids = chosen.reshape(-1)
        ordered, order = ids.sort()
        counts = torch.histc(ids.float(), bins=4, min=0, max=3)
        ends = counts.cumsum(0, dtype=torch.int32)
        made = F.grouped_mm(tokens[order // 2], self.up, offs=ends)
        if self.capacity:
            place = torch.arange(ids.shape[0]) - (ends - counts.int())[ordered]
            made = made * (place < self.capacity)[:, None]
        made = made * weight.reshape(-1)[order][:, None]
        mixed = torch.zeros_like(tokens).index_add(0, order // 2, made)
        return mixed.square().mean() + (counts / ids.shape[0] * odds.mean(0)).sum()


def balanced(capacity: int = 0) -> Case:
    model = Balanced(capacity).to(torch.bfloat16)
    return Case(model=model, args=(torch.randn(4, 3, 8).to(torch.bfloat16),))


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=4", marks=pytest.mark.long)])
def test_counts_of_a_balancing_loss_are_sums_over_all_tokens(mesh: str):
    case = balanced()
    ops = [node.op for node in case.traced.graph.nodes]
    assert GROUPED in ops and "aten.histc.default" in ops
    assert agree(case, mesh, "ddp", dtype="float64").worst.error <= 1e-12
    counts = next(node.name for node in case.traced.graph.nodes if "histc" in node.op)
    steps = moved(sharded(case.traced.graph, mesh, "ddp"))
    assert (counts, "all_reduce", 0) in set(steps)


def test_tokens_dropped_beyond_a_capacity_depend_on_all_tokens():
    case = balanced(capacity=2)
    assert GROUPED not in {node.op for node in case.traced.graph.nodes}
    with pytest.raises(PlanError, match="cannot be computed in 2 microbatches"):
        make_plan(case.traced.graph, Mesh.parse("dp=1"), "ddp,microbatches=2")
    found = sharded(case.traced.graph, "dp=2", "ddp")
    assert any(kind == "all_gather" for _, kind, _ in moved(found))
