"""Models that no graph can hold: refused by module, line and way out, and nothing else is said."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, TraceError
from tests.models.cases import hostile
from tests.models.check import Case, agree


def line_of(function: Callable[..., object], mark: str) -> str:
    """``file:line`` of the line of `function` that ends with ``# here: mark``."""
    lines, first = inspect.getsourcelines(function)
    offset = next(i for i, line in enumerate(lines) if f"# here: {mark}" in line)
    return f"{Path(inspect.getsourcefile(function) or '').name}:{first + offset}"


def refused(case: Case, capfd: pytest.CaptureFixture[str]) -> str:
    """The text of the one error of compiling `case`; nothing may be printed."""
    with pytest.raises(TraceError) as caught:
        autopar.compile(
            case.model, example_inputs=case.args, example_kwargs=case.kwargs, loss_fn=case.loss
        )
    said = capfd.readouterr()
    assert said.out == "" and said.err == ""
    assert caught.value.fix and caught.value.where
    return str(caught.value)


@pytest.mark.parametrize("kind", hostile.DATA_DEPENDENT)
def test_control_flow_on_values(kind: str, capfd):
    text = refused(hostile.data_dependent(kind), capfd)
    assert "module 'blocks.1'" in text
    assert line_of(hostile.DATA_DEPENDENT[kind].forward, kind) in text
    assert "torch.where" in text


def test_a_loop_over_visited_experts(capfd):
    text = refused(hostile.visited_experts(), capfd)
    assert "module 'blocks.1'" in text and "grouped" in text
    assert line_of(hostile.VisitedExperts.forward, "visit") in text


def test_control_flow_in_the_loss(capfd):
    def loss(y, x):
        return y.mean() if y.sum() > 0 else y.pow(2).mean()  # here: loss

    text = refused(Case(model=nn.Linear(3, 3), args=(torch.randn(4, 3),), loss=loss), capfd)
    assert line_of(loss, "loss") in text


def test_control_flow_in_a_repeated_layer(capfd):
    torch.manual_seed(0)
    layers = [hostile.Inside(hostile.BranchOnMean()) for _ in range(4)]
    for layer in layers:
        layer.last = nn.Linear(4, 4)
    case = Case(model=nn.Sequential(*layers), args=(torch.randn(4, 4),), loss=hostile.square)
    text = refused(case, capfd)
    assert "blocks.1'" in text and line_of(hostile.BranchOnMean.forward, "if") in text


def test_rows_renormalised_by_a_lookup(capfd):
    text = refused(hostile.renormalised(), capfd)
    assert "'words.weight'" in text and "module 'words'" in text and "max_norm" in text


def test_a_weight_changed_in_forward(capfd):
    text = refused(hostile.nudged(), capfd)
    assert "'inner.weight'" in text and line_of(hostile.Nudged.forward, "nudge") in text


def test_spectral_norm_alone_is_no_reason():
    report = agree(hostile.spectral(), "dp=2,tp=2", "megatron")
    assert {row.name for row in report.rows if row.kind == "buffer"}


def test_flex_attention(capfd):
    class Flexible(nn.Module):
        def forward(self, x):
            from torch.nn.attention.flex_attention import flex_attention

            q = x.unflatten(-1, (2, 16)).transpose(1, 2)
            return flex_attention(q, q, q, score_mod=lambda score, b, h, i, j: score - (i - j))

    model = nn.Sequential(nn.Linear(32, 32), Flexible())
    text = refused(Case(model=model, args=(torch.randn(2, 64, 32),), loss=hostile.square), capfd)
    assert "flex_attention" in text and "module '1'" in text
    assert "scaled_dot_product_attention" in text


@pytest.mark.parametrize("change", ["resize_", "set_"])
def test_storage_changed_in_place(change: str, capfd):
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            y = x.clone()
            y = y.resize_(2, 4) if change == "resize_" else y.set_(x * 2)
            return self.head(y)

    case = Case(model=Changes(), args=(torch.randn(4, 4),), loss=hostile.square)
    assert change in refused(case, capfd)


def test_a_custom_function_that_writes_its_input(capfd):
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return Writes.apply(self.head(x))

    case = Case(model=Root(), args=(torch.randn(4, 4),), loss=hostile.square)
    text = refused(case, capfd)
    assert "Writes" in text and "in place" in text


def test_a_custom_function_that_draws_numbers(capfd):
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + torch.rand_like(x)

        @staticmethod
        def backward(ctx, grad):
            return grad

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return Noise.apply(self.head(x))

    case = Case(model=Root(), args=(torch.randn(4, 4),), loss=hostile.square)
    text = refused(case, capfd)
    assert "Noise" in text and "aten.rand_like" in text and "pass them in" in text


def test_errors_are_one_kind():
    for kind in hostile.DATA_DEPENDENT:
        with pytest.raises(AutoparError):
            _ = hostile.data_dependent(kind).traced
