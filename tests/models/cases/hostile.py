"""Models that most compilers get wrong without a word, and models that no graph can hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.models.check import Case


def square(y: Tensor, *_: Any) -> Tensor:
    """A loss of the output alone."""
    return y.pow(2).mean()


class Inside(nn.Module):
    """A module two levels down, between two linears."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Identity(), inner])
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class BranchOnMean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:  # here: if
            return x * 2
        return x * 3


class LoopOnItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x.abs().max().item()) + 1):  # here: item
            x = torch.tanh(x)
        return x


class WhileSmall(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.norm() < 10:  # here: while
            x = x * 2 + 1
        return x


class PicksRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x[x.sum(1) > 0].sum(0)  # here: mask


class Checks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert bool((x < 100).all()), "too large"  # here: assert
        return x


class ReadsList(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x.sum(1).argsort().tolist()]  # here: list


DATA_DEPENDENT = {
    "if": BranchOnMean, "item": LoopOnItem, "while": WhileSmall, "mask": PicksRows,
    "assert": Checks, "list": ReadsList,
}  # fmt: skip


def data_dependent(kind: str) -> Case:
    torch.manual_seed(0)
    return Case(model=Inside(DATA_DEPENDENT[kind]()), args=(torch.randn(4, 4),), loss=square)


class VisitedExperts(nn.Module):
    """Experts in a loop over those that got tokens."""

    def __init__(self, width: int = 4, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        result = torch.zeros_like(x)
        used = F.one_hot(chosen, len(self.experts)).sum((0, 1)).nonzero().flatten()
        for index in used.tolist():  # here: visit
            row, place = torch.where(chosen == index)
            made = self.experts[index](x[row]) * weight[row, place, None]
            result = result.index_add(0, row, made)
        return result


def visited_experts() -> Case:
    torch.manual_seed(0)
    return Case(model=Inside(VisitedExperts()), args=(torch.randn(6, 4),), loss=square)


class Cast(torch.autograd.Function):
    """Rounds forward, passes the gradient straight through where the input is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() < 0.8)


class Reverse(torch.autograd.Function):
    """Turns gradients round; a Python number and two tensors, two results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return x.view_as(x), y + 0

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor | None, ...]:
        return -ctx.factor * first, None, second * ctx.factor


class Doubled(torch.autograd.Function):
    """Written with setup_context; its backward gives twice the gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.times = 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ctx.times * grad


class HandWritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.task, self.rival = nn.Linear(5, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = Cast.apply(2 * self.body(x))
        h = Doubled.apply(h)
        turned, same = Reverse.apply(h, 0.3, h)
        return self.task(same), self.rival(turned)


def hand_written_backward() -> Case:
    torch.manual_seed(0)

    def loss(out: tuple[Tensor, Tensor], x: Tensor) -> Tensor:
        first = F.cross_entropy(out[0], x[:, :3].argmax(1))
        return first + F.cross_entropy(out[1], (x[:, 0] > 0).long())

    return Case(model=HandWritten(), args=(torch.randn(6, 5),), loss=loss)


class Teacher(nn.Module):
    """A no_grad teacher, a stop-gradient, and buffers moved by batch statistics in forward."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.student, self.guess = nn.Linear(width, width), nn.Linear(width, width)
        self.teacher = nn.Sequential(nn.Linear(width, 9), nn.Tanh(), nn.Linear(9, width))
        self.teacher.requires_grad_(False)
        self.register_buffer("middle", torch.zeros(width))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            aim = self.teacher(x) - self.middle
            also = self.student(x)
            self.middle.mul_(0.8).add_(0.2 * aim.mean(0))
            self.steps.add_(1)
        made = self.guess(F.silu(self.student(x)))
        return made, aim + also, made.detach() * 2


def teacher() -> Case:
    torch.manual_seed(0)

    def loss(out: tuple[Tensor, ...], x: Tensor) -> Tensor:
        made, aim, still = out
        return (1 - F.cosine_similarity(made, aim, dim=-1)).mean() + (made - still).pow(2).mean()

    return Case(model=Teacher(), args=(torch.randn(6, 6),), loss=loss)


class Padded(nn.Module):
    """Attention over samples of which some, or all, positions are padding."""

    def __init__(self, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        sees = real[:, None, None, :] & real[:, None, :, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        y = self.out(y.transpose(1, 2).reshape(batch, seq, width))
        return y.masked_fill(~real[..., None], 0.0)


def padded_rows(poison: float | None = None) -> Case:
    """With `poison`, one input element of the second sample has that value."""
    torch.manual_seed(0)
    real = torch.ones(4, 5, dtype=torch.bool)
    real[1, 2:], real[2] = False, False
    x = torch.randn(4, 5, 8)
    if poison is not None:
        x[1, 1, 3] = poison

    def loss(y: Tensor, x: Tensor, real: Tensor) -> Tensor:
        return (y.abs().sum(-1) * real).sum() / real.sum()

    return Case(model=Padded(), args=(x, real), loss=loss)


class Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 6, max_norm=1.0)
        self.out = nn.Linear(6, 2)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1))


class Nudged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.99)  # here: nudge
        return self.inner(x)


def renormalised() -> Case:
    torch.manual_seed(0)
    ids = torch.tensor([[0, 1, 2], [2, 3, 4], [7, 7, 7], [8, 9, 0]])
    return Case(model=Renormalised(), args=(ids,), loss=square)


def nudged() -> Case:
    torch.manual_seed(0)
    return Case(model=Nudged(), args=(torch.randn(4, 4),), loss=square)


def spectral() -> Case:
    """Weights rewritten by parametrisations; spectral norm moves buffers in forward."""
    torch.manual_seed(0)
    model = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(6, 8)), nn.ReLU(),
        parametrizations.weight_norm(nn.Linear(8, 6)), nn.Linear(6, 2),
    )  # fmt: skip
    return Case(model=model, args=(torch.randn(4, 6),), loss=square)
