"""Floating point operations against torch's own count, and over all ranks against one device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from autopar.cost_models.flops import count_call
from autopar.cost_models.implementation import CPU
from autopar.cost_models.layout import Layout
from autopar.cost_models.stages import stage_models
from autopar.cost_models.work import Kernel, total_flops
from autopar.graph.ir import Node, Ref, TensorSpec, Value
from autopar.graph.routing import GROUPED
from autopar.plan.build import make_plan
from autopar.presets.config import DecoderConfig
from autopar.presets.decoder import Decoder
from autopar.sharding.mesh import Mesh
from autopar.trace import trace
from tests.models import zoo
from tests.unit.cost_models.models import MODELS, layout, planned, priced

PRODUCTS = ("matmul", "grouped_matmul", "conv", "attention")


def attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


# Torch counts the fused kernels of CUDA, not that of the CPU.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}


def products(kernels: tuple[Kernel, ...]) -> int:
    return total_flops(kernel for kernel in kernels if kernel.kind in PRODUCTS)


@pytest.mark.parametrize("name", ["gpt", "llama", "resnet", "moe", "unet"])
def test_forward_and_backward_count_as_torch_counts_them(name: str) -> None:
    model, args, kwargs = MODELS[name]()
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with counter:
        zoo.own_loss(model(*args, **kwargs)).backward()
    [stage] = priced(name, planned(name, "dp=1", "ddp"))
    assert products(stage.work.kernels) == counter.get_total_flops()


def test_only_wanted_gradients_count() -> None:
    """Of ``y = x w`` with a frozen weight, or an input that needs no gradient."""

    def phases(x: bool, w: bool) -> list[str]:
        specs = {
            "x": TensorSpec((4, 8), "float32", x),
            "w": TensorSpec((8, 2), "float32", w),
            "y": TensorSpec((4, 2), "float32", x or w),
        }
        call = Node(
            name="y", op="aten.mm.default", args=(Ref("x"), Ref("w")), kwargs=(),
            outputs=(Value("y", specs["y"]),),
        )  # fmt: skip
        kernels = count_call(call, specs.__getitem__)
        assert all(kernel.flops == 2 * 4 * 8 * 2 for kernel in kernels)
        return [kernel.phase for kernel in kernels]

    assert phases(True, True) == ["forward", "input_gradient", "input_gradient"]
    assert phases(False, True) == phases(True, False) == ["forward", "input_gradient"]
    assert phases(False, False) == ["forward"]


@pytest.mark.parametrize(
    ("name", "mesh", "constraints"),
    [
        ("gpt", "dp=2,tp=2", "megatron"),
        ("gpt", "tp=3", "megatron"),  # 211 classes, 4 heads and 256 features do not divide
        ("llama", "dp=2,tp=2", "megatron_sp"),
        ("resnet", "dp=4", "ddp"),
    ],
)
def test_ranks_share_the_work_of_one_device(name: str, mesh: str, constraints: str) -> None:
    one = products(priced(name, planned(name, "dp=1", "ddp"))[0].work.kernels)
    plan = planned(name, mesh, constraints)
    axes = map(range, layout(name).place(plan).sharded.mesh.shape)
    shares = [
        products(priced(name, plan, coordinate=place)[0].work.kernels)
        for place in itertools.product(*axes)
    ]
    if mesh == "tp=3":  # 4 heads on 3 ranks: one has two, and so has its share of attention
        assert max(shares) > min(shares)
    assert sum(shares) == one
    assert max(shares) == products(priced(name, plan)[0].work.kernels)


def test_grouped_products_count_every_row_once() -> None:
    specs = {
        "x": TensorSpec((12, 8), "float32", True),
        "w": TensorSpec((4, 8, 16), "float32", True),
        "ends": TensorSpec((4,), "int32"),
        "y": TensorSpec((12, 16), "float32", True),
    }
    call = Node(
        name="y", op="aten._grouped_mm.default", args=(Ref("x"), Ref("w"), Ref("ends")),
        kwargs=(), outputs=(Value("y", specs["y"]),),
    )  # fmt: skip
    kernels = count_call(call, specs.__getitem__)
    assert [kernel.flops for kernel in kernels] == [2 * 12 * 8 * 16] * 3
    assert {kernel.kind for kernel in kernels} == {"grouped_matmul"}


def test_routed_rows_are_gathered_only_where_they_do_not_stay_sorted() -> None:
    specs = {
        "x": TensorSpec((6, 8), "float32", True),
        "w": TensorSpec((4, 8, 16), "float32", True),
        "ids": TensorSpec((12,), "int64"),
        "y": TensorSpec((12, 16), "float32", True),
    }

    def kernels(arrives: bool, stays: bool) -> tuple[Kernel, ...]:
        args = (Ref("x"), Ref("w"), Ref("ids"), 2, "aten._grouped_mm.default", arrives, stays)
        if arrives:
            args = (*args[:3], 1, *args[4:])
            specs["x"] = TensorSpec((12, 8), "float32", True)
        call = Node(name="y", op=GROUPED, args=args, kwargs=(), outputs=(Value("y", specs["y"]),))
        return count_call(call, specs.__getitem__)

    def moved(found: tuple[Kernel, ...]) -> int:
        return sum(kernel.kind == "embedding" for kernel in found)

    apart, first, inner = kernels(False, False), kernels(False, True), kernels(True, True)
    for found in (apart, first, inner):
        assert products(found) == 3 * 2 * 12 * 8 * 16
    assert (moved(apart), moved(first), moved(inner)) == (5, 3, 0)  # one writes the inverse


def test_experts_work_on_the_tokens_of_their_rank() -> None:
    config = DecoderConfig(
        layers=1, hidden=16, heads=2, vocab=32, ffn=32, experts=4, top_k=2, gated=True, bias=False,
        norm="rms", positions="rope", tied=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16)
        ids = torch.zeros(4, 8, dtype=torch.int64)
    found = trace(model, (ids, ids))
    place = Layout.of(found.graph).place

    def work(mesh: str, constraints: str) -> tuple[int, int]:
        plan, _ = make_plan(found.graph, Mesh.parse(mesh), constraints)
        [stage] = stage_models(place(plan), plan, found.loss, CPU)
        kernels = stage.work.kernels
        grouped = total_flops(kernel for kernel in kernels if kernel.kind == "grouped_matmul")
        plain = total_flops(kernel for kernel in kernels if kernel.kind == "matmul")
        return grouped, plain

    tokens, visited = 4 * 8, config.top_k * 3 * 16 * 32
    others = config.attention_params + 16 * config.experts + 16 * config.vocab
    assert work("dp=1", "ddp") == (6 * tokens * visited, 6 * tokens * others)
    for mesh, constraints, share in (("dp=4", "ddp", 4), ("dp=2", "ddp,microbatches=2", 4)):
        want = (6 * tokens * visited // share, 6 * tokens * others // share)
        assert work(mesh, constraints) == want
    assert work("dp=2,tp=2", "megatron")[0] == 6 * tokens * visited // 4
