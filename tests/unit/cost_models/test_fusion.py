"""What a compiler fuses, and what it rather computes again than keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost_models.implementation import CUDA
from autopar.cost_models.stages import StageModel
from autopar.cost_models.work import total_flops
from tests.unit.cost_models.models import planned, priced

COMPILED = replace(CUDA, compiled=True)
AGAIN = replace(COMPILED, recompute_fused=True)
MODELS = ["gpt", "llama", "resnet"]


def stage(name: str, how: object, constraints: str = "ddp") -> StageModel:
    [found] = priced(name, planned(name, "dp=2", constraints), how)  # type: ignore[arg-type]
    return found


def moved(model: StageModel) -> int:
    kernels = model.work.kernels
    return sum(kernel.count * (kernel.read_bytes + kernel.write_bytes) for kernel in kernels)


@pytest.mark.parametrize("name", MODELS)
def test_fused_kernels_do_the_same_with_fewer_bytes(name: str) -> None:
    plain, fused = stage(name, CUDA), stage(name, COMPILED)
    launches = [sum(k.count * k.launches for k in m.work.kernels) for m in (plain, fused)]
    assert launches[1] < 0.7 * launches[0]
    assert moved(fused) < 0.9 * moved(plain)
    assert total_flops(fused.work.kernels) == total_flops(plain.work.kernels)
    for kind in ("matmul", "attention", "conv"):
        mine, theirs = (
            sorted((k.flops, k.read_bytes, k.count) for k in m.work.kernels if k.kind == kind)
            for m in (fused, plain)
        )
        assert mine == theirs
    assert fused.work.saved == plain.work.saved


@pytest.mark.parametrize("name", MODELS)
def test_fused_results_may_be_computed_again(name: str) -> None:
    kept, again = stage(name, COMPILED), stage(name, AGAIN)
    saved = [model.summaries["F"].end["saved"] for model in (kept, again)]
    assert saved[1] <= saved[0]
    if name != "resnet":
        assert saved[1] < 0.95 * saved[0]
    phases = {kernel.phase for kernel in again.work.kernels}
    assert "recompute" in phases
    products = [
        sum(k.flops * k.count for k in m.work.kernels if k.kind in ("matmul", "attention", "conv"))
        for m in (kept, again)
    ]
    assert products[0] == products[1]


def test_gathered_values_may_be_gathered_again() -> None:
    plan = planned("gpt", "tp=2", "megatron_sp")
    [kept] = priced("gpt", plan, CUDA)
    [again] = priced("gpt", plan, replace(CUDA, regather=True))
    assert again.summaries["F"].end["saved"] < kept.summaries["F"].end["saved"]
    gathers = [
        sum(move.count for move in model.work.moves if move.kind == "all_gather")
        for model in (kept, again)
    ]
    assert gathers[1] > gathers[0]
