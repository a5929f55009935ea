"""Batch norms whose batch is split: one device's results, from as few passes as torch needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models.check import Case, agree, on_ranks


class Norms(nn.Module):
    """With and without weights, running statistics, positions, a large mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.second, self.bare = nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6, affine=False)
        self.fleeting = nn.BatchNorm1d(6, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.plain(self.first(x)).relu()
        x = self.bare(self.second(x)).mean((2, 3))
        return self.fleeting(x + 30).sigmoid().square().mean()


def norms() -> Case:
    torch.manual_seed(0)
    return Case(model=Norms(), args=(torch.randn(10, 3, 7, 7) + 2,))


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ("dp=3", "ddp"),
        ("dp=2", "ddp,microbatches=5"),
        ("x=2,y=2", {"batch": "x", "channels": "y"}),
        pytest.param("dp=2", "ddp", marks=pytest.mark.long),
        pytest.param("dp=5", "ddp,zero=2", marks=pytest.mark.long),
        pytest.param("pp=2,dp=2", "ddp,microbatches=2,schedule=zb_h1", marks=pytest.mark.long),
    ],
)
def test_statistics_and_gradients_are_those_of_one_device(mesh: str, constraints: object):
    agree(norms(), mesh, constraints, dtype="float64", steps=3)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def test_a_large_mean_takes_no_digits_from_the_variance():
    # The sum of squares of these has no digit left for a variance of 1.
    torch.manual_seed(0)
    x = torch.randn(64, 4) + 4096
    case = Case(model=Shifted(), args=(x,), loss=lambda y, _: y.square().mean())
    want = x.double().var(0, correction=1)

    def running(compiled) -> Tensor:
        compiled.step(x)
        return compiled.state_dict()["norm.running_var"]

    for have in on_ranks(case, "dp=3", "ddp", running):
        assert torch.allclose(have.double(), 0.9 + 0.1 * want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_low_precision_are_kept_in_float32(dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.randn(64, 4).to(dtype)
    model = Shifted().to(dtype)
    case = Case(model=model, args=(x,), loss=lambda y, x: (y * x.roll(1, 0)).float().sum())
    found = on_ranks(case, "dp=3", "ddp", lambda c: c.gradients(x))
    want = nn.BatchNorm1d(4).double()
    (want(x.double()) * x.double().roll(1, 0)).sum().backward()
    for _, gradients in found:
        have = gradients["norm.weight"]
        assert have.dtype == dtype
        assert torch.allclose(have.double(), want.weight.grad, rtol=0.02, atol=0.1)


def large_nodes(case: Case) -> list[str]:
    """Ops of rank 0's programs that read or write as much as the input, views aside."""

    def body(compiled) -> list[str]:
        engine = compiled.build(case.args, {})
        size, found = case.args[0].numel() // 2, []
        for program in engine.programs():
            for node in program.calls():
                values = [node.meta["val"], *(n.meta["val"] for n in node.all_input_nodes)]
                tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
                if any(t.numel() >= size for t in tensors):
                    found.append(str(node.target))
        return found

    return on_ranks(case, "dp=2", "ddp", body)[0]


def test_passes_over_the_input_are_few():
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    model = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3))
    case = Case(model=model, args=(x,), loss=lambda y, _: y.mean())
    found = large_nodes(case)
    norm = "aten._native_batch_norm_legit_no_training.default"
    # Forward of both; the gradient of the second one's input alone.
    assert found.count("aten.var_mean.correction") == 2
    assert found.count("aten.native_batch_norm_backward.default") == 2
    assert found.count(norm) == 3
    assert found.count("aten.addcmul.default") == 1
    others = {name for name in found if "norm" not in name} - {
        "aten.var_mean.correction", "aten.addcmul.default",
    }  # fmt: skip
    assert not any(word in name for name in others for word in ("sub", "mul", "pow", "rsqrt")), (
        others
    )
