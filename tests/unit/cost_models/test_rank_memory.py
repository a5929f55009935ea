"""Bytes of a rank over a step against a dry run, action by action; a lopsided model exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models.buckets import Bucket
from autopar.cost_models.implementation import CPU, CUDA
from autopar.cost_models.layout import Layout
from autopar.cost_models.memory import RankMemory, rank_memory, static_memory
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.optimizer import OPTIMIZERS, OptimizerMemory
from autopar.cost_models.stages import stage_models
from autopar.errors import InputError
from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.runtime import dryrun
from autopar.runtime.execution import device_mesh
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace
from tests.models.overrides import split_across
from tests.unit.cost_models.models import layout, planned, priced, traced

ADAMW = OPTIMIZERS["adamw"]


def predicted(
    found: Traced, folded: Layout, plan: Plan, rank: int, *, cuda: bool = False,
    moments: bool = True,
) -> RankMemory:  # fmt: skip
    """The memory of a global rank, at its own local shapes."""
    devices = device_mesh(plan.device_mesh, plan.pipeline.axis)
    here = dict(zip(devices.names, devices.coordinate(rank), strict=True))
    placement = folded.place(plan)
    mesh = placement.sharded.mesh
    place = Rank.of(mesh, [here.get(name, 0) for name in mesh.names])

    def position(bucket: Bucket) -> int:
        number = 0
        for axis in bucket.axes:
            number = number * place.grid.sizes[axis] + place.grid.coordinate[axis]
        return number

    models = stage_models(
        placement, plan, found.loss, CUDA if cuda else CPU, coordinate=place.grid.coordinate
    )
    sizes = {
        kind: sum(i.value.spec.size_bytes for i in found.graph.inputs if i.kind == kind)
        for kind in ("input", "constant", "buffer")
    }
    return rank_memory(
        models, plan, here.get(plan.pipeline.axis, 0),
        replace(ADAMW, loop="foreach") if cuda else ADAMW,
        input_bytes=sizes["input"] + sizes["constant"], buffer_bytes=sizes["buffer"],
        gloo=not cuda, positions=position, moments=moments,
    )  # fmt: skip


CASES = [
    ("gpt", "pp=2,dp=2", "ddp,zero=2,microbatches=4,schedule=zb_h1", "float32", False),
    ("gpt", "dp=2", "ddp,recompute=full,zero=3,microbatches=2", "float32", False),
    ("gpt", "pp=2", "ddp,microbatches=4,schedule=zbv", "float32", False),
]
MORE = [
    ("resnet", "pp=2", "ddp,microbatches=4,schedule=1f1b", "float32", False),
    ("deep_gpt", "dp=2", "ddp,recompute=full,zero=3,microbatches=2", "float32", False),
    ("llama", "pp=2", "ddp,recompute=full,microbatches=4,schedule=zb_h1", "float32", False),
    ("gpt", "pp=3", "ddp,microbatches=4,schedule=zbv", "float32", True),
    ("unet", "pp=2", "ddp,microbatches=2,schedule=1f1b", "float32", False),
    ("moe", "pp=3", "ddp,microbatches=2,schedule=1f1b", "float32", False),
    ("gpt", "dp=1", "ddp", "float32", False),
    ("gpt", "dp=2,tp=2", "megatron_sp,recompute=selective", "float32", False),
    ("gpt", "pp=2,tp=2", "megatron,microbatches=4,schedule=zbv", "float32", False),
    ("gpt", "pp=2,tp=2", "megatron_sp,microbatches=4,schedule=interleaved_1f1b,chunks=2",
     "float32", False),
    ("llama", "pp=2,dp=2", "ddp,microbatches=2,zero=1,schedule=1f1b", "float32", False),
    ("resnet", "dp=2", "ddp,recompute=selective,zero=1", "float32", False),
    ("resnet", "pp=2,dp=2", "ddp,microbatches=4,schedule=pipedream", "float32", False),
    ("deep_gpt", "dp=2,tp=2", "megatron_sp,microbatches=2,zero=1", "bfloat16", True),
    ("deep_gpt", "dp=4", "ddp,zero=3,microbatches=2", "bfloat16", True),
    ("gpt", "dp=2", "ddp,zero=2", "float32", True),
    ("deep_gpt", "fsdp=2", "fsdp", "float32", False),
]  # fmt: skip


def check(name: str, mesh: str, constraints: str, dtype: str, cuda: bool) -> None:
    check_plan(name, planned(name, mesh, constraints, dtype), dtype, cuda)


def check_plan(name: str, plan: Plan, dtype: str, cuda: bool) -> None:
    found = traced(name, dtype)
    ranks = [plan.device_mesh.size - 1] if plan.num_stages > 1 else [0]
    dry = dryrun.dry_run(found, plan, ranks, device="cuda" if cuda else "cpu")
    for want in dry.ranks:
        have = predicted(found, layout(name, dtype), plan, want.rank, cuda=cuda)
        # Without notes, kinds of events are looked at instead of events where that is the same.
        quick = predicted(found, layout(name, dtype), plan, want.rank, cuda=cuda, moments=False)
        assert quick == replace(have, moments=())
        assert have.resident_bytes == pytest.approx(want.resident_bytes, abs=8)
        assert have.peak_bytes == pytest.approx(want.peak_bytes, rel=0.02)
        for kind in ("parameters", "gradients", "optimizer"):
            assert have.resident[kind] == want.resident[kind], kind
            assert have.peak[kind] == want.peak[kind], kind
        # What is saved and sent is a boundary for a dry run.
        mine = have.peak["saved"] + have.peak["boundary"]
        theirs = want.peak.get("saved", 0) + want.peak.get("boundary", 0)
        assert mine == pytest.approx(theirs, rel=0.02, abs=2048)
        for one, other in zip(have.moments, want.moments, strict=True):
            assert one.what == other.what
            assert one.live_bytes == pytest.approx(other.live_bytes, rel=0.02, abs=2048), one
            assert one.peak_bytes == pytest.approx(other.peak_bytes, rel=0.02, abs=4096), one


@pytest.mark.parametrize(("name", "mesh", "constraints", "dtype", "cuda"), CASES)
def test_a_step_holds_what_a_dry_run_says(
    name: str, mesh: str, constraints: str, dtype: str, cuda: bool
) -> None:
    check(name, mesh, constraints, dtype, cuda)


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ("dp=2,tp=2", "megatron,zero=2,microbatches=2"),
        pytest.param("dp=2,tp=2", "megatron,zero=1,microbatches=2", marks=pytest.mark.long),
        pytest.param("dp=2,tp=2", "megatron,zero=3", marks=pytest.mark.long),
        pytest.param("pp=2,dp=2,tp=2", "megatron,zero=2,microbatches=4", marks=pytest.mark.long),
    ],
)
def test_what_zero_does_not_divide_is_held_as_a_dry_run_says(mesh: str, constraints: str) -> None:
    plan = split_across(traced("gpt").graph, mesh, constraints, "layer_norm")
    # On CPU ranks the peak is where a reduce-scatter of activations exchanges rows.
    check_plan("gpt", plan, "float32", cuda=True)


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh", "constraints", "dtype", "cuda"), MORE)
def test_more_steps_hold_what_a_dry_run_says(
    name: str, mesh: str, constraints: str, dtype: str, cuda: bool
) -> None:
    check(name, mesh, constraints, dtype, cuda)


@pytest.mark.parametrize(
    ("name", "mesh", "constraints"),
    [
        ("wide_gpt", "dp=2", "ddp,zero=3"),
        pytest.param("wide_gpt", "dp=2", "ddp,zero=1", marks=pytest.mark.long),
        pytest.param("wide_gpt", "dp=2", "ddp,zero=2,microbatches=2", marks=pytest.mark.long),
        pytest.param("wide_gpt", "dp=2,tp=2", "megatron,zero=3", marks=pytest.mark.long),
        pytest.param("resnet", "dp=4", "ddp,zero=3", marks=pytest.mark.long),
    ],
)
def test_buckets_come_and_go_in_every_layer(name: str, mesh: str, constraints: str) -> None:
    """Equal layers are taped once, but their parameters lie in different buckets."""
    plan, found = planned(name, mesh, constraints), traced(name)
    (want,) = dryrun.dry_run(found, plan, [0]).ranks
    have = predicted(found, layout(name), plan, 0)
    assert have.peak_bytes == pytest.approx(want.peak_bytes, abs=8192)


class Lopsided(nn.Module):
    """A tied table that outweighs all else, a frozen layer, a layer in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4096, 16)
        self.body = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
        self.body[0].requires_grad_(False)
        self.narrow = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.out = nn.Linear(16, 4096, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.body(self.table(ids))
        return self.out(self.narrow(h.to(torch.bfloat16)).float())


def lopsided() -> Traced:
    model = Lopsided()
    ids = torch.zeros(4, 8, dtype=torch.int64)

    def loss(z: Tensor, ids: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), ids.flatten())

    return trace(model, (ids,), {}, loss)


def test_lopsided_layers_and_dtypes_are_exact() -> None:
    found, model = lopsided(), Lopsided()
    trained = [p for p in model.parameters() if p.requires_grad]
    folded = Layout.of(found.graph)
    states = replace(ADAMW, moment_dtype="float32")
    for zero in (0, 1, 2, 3):
        plan, _ = make_plan(found.graph, Mesh.parse("dp=4"), f"ddp,zero={zero}")
        [stage] = stage_models(folded.place(plan), plan, found.loss, CPU)
        shares = [
            static_memory(
                stage.parameters, stage.buckets, states, positions=lambda bucket, r=rank: r
            )
            for rank in range(4)
        ]
        whole = {
            "parameters": sum(p.numel() * p.itemsize for p in model.parameters()),
            "gradients": sum(p.numel() * p.itemsize for p in trained),
            "optimizer": 8 * sum(p.numel() for p in trained),
        }
        frozen = whole["parameters"] - whole["gradients"]
        for kind, divided in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
            sizes = [getattr(share, kind) for share in shares]
            if zero < divided:
                assert sizes == [whole[kind]] * 4
            else:
                alone = frozen if kind == "parameters" else 0
                assert sum(size - alone for size in sizes) == whole[kind] - alone
        padding = max(s.parameter_padding + s.gradient_padding for s in shares)
        assert padding <= 2 * 64 * len(trained)
    plan, _ = make_plan(found.graph, Mesh.parse("dp=4"), "ddp,zero=3")
    have = predicted(found, folded, plan, 0)
    [want] = dryrun.dry_run(found, plan, [0]).ranks
    assert have.peak_bytes == pytest.approx(want.peak_bytes, rel=0.002)


def test_mixed_precision_adam_keeps_twelve_bytes_per_parameter() -> None:
    """2 + 2 + 12 bytes per parameter on one rank (arXiv 1910.02054, section 3.1)."""
    plan = planned("gpt", "dp=1", "ddp", "bfloat16")
    [stage] = priced("gpt", plan, CUDA, dtype="bfloat16")
    numel = sum(item.numel for item in stage.parameters)
    held = static_memory(stage.parameters, stage.buckets, OPTIMIZERS["mixed_adamw"])
    assert (held.parameters, held.gradients, held.optimizer) == (2 * numel, 2 * numel, 12 * numel)
    assert OptimizerMemory().state_bytes(10, "float32") == 80
    with pytest.raises(InputError, match="unknown optimizer 'adamv'"):
        OPTIMIZERS["adamv"]
