"""Cross entropy and negative log likelihood with split samples and split classes.

With logits x, classes c, log normaliser z and class weights w, one sample costs

    class targets y      (1 - s) w[y] (z - x[y]) + s / C * sum_c w[c] (z - x[c])
    probabilities t      sum_c w[c] t'[c] (z - x[c]),   t' = t (1 - s) + s / C

with label smoothing s over C classes. Sums over c are completed over the ranks that share the
classes. A mean divides by the global count of samples, or by the sum of w[y].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.runtime.special.base import AxisIds, SpecialCall, special, working
from autopar.sharding.rules.losses import MEAN, NONE, SUM


@special("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
def cross_entropy(
    call: SpecialCall, logits: Tensor, target: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Loss over the global batch; Partial over split samples, Replicate over split classes."""
    if not call.is_split("v"):
        return _whole_classes(call, logits, target, weight)
    parts = _Classes.of(call, logits)
    if target.is_floating_point():
        samples, counted = _probabilities(parts, target, weight), None
    else:
        samples, counted = _labels(parts, target, weight)
    reduction = int(call.number(3, "reduction", MEAN))
    if reduction == NONE:
        return samples
    if reduction == SUM:
        return samples.sum()
    return samples.sum() / _count(call, counted)


def _whole_classes(
    call: SpecialCall, logits: Tensor, target: Tensor, weight: Tensor | None
) -> Tensor:
    """Only samples are split (and the loss is a mean): local sum over the global count."""
    operands = (logits, target) if weight is None else (logits, target, weight)
    if int(call.number(3, "reduction", MEAN)) != MEAN:
        result = call.run(*operands)
    else:
        total = call.run_sum(*operands, position=3)
        if target.is_floating_point():
            return total / _count(call, None)
        valid = target != int(call.number(4, "ignore_index", -100))
        ones = torch.ones((), dtype=total.dtype, device=logits.device)
        each = ones if weight is None else weight[target.where(valid, 0)]
        counted = working(each).expand(target.shape).where(valid, 0)
        result = total / _count(call, counted)
    assert isinstance(result, Tensor)
    return result


def _count(call: SpecialCall, counted: Tensor | None) -> Tensor:
    """The divisor of a mean: samples (None), or the sum of what each counts, over all ranks."""
    letters = [letter.name for letter in call.rule.letters if letter.name != "v"]
    if counted is None:
        return torch.tensor(float(math.prod(call.global_size(name) for name in letters)))
    return call.axes.complete(counted.detach().sum(), call.axes_of(letters))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Classes:
    """Logits whose classes are split."""

    call: SpecialCall
    logits: Tensor
    normaliser: Tensor  # log of the sum of exponentials, without the class dim
    dim: int
    axes: AxisIds
    smoothing: float

    @classmethod
    def of(cls, call: SpecialCall, logits: Tensor) -> _Classes:
        """Find the normaliser; log probabilities have none."""
        values = working(logits)
        dim = 1 if logits.ndim > 1 else 0
        axes = call.axes_of(["v"])
        if call.node.op == "aten.cross_entropy_loss.default":
            highest = call.axes.maximum(values.detach().amax(dim, keepdim=True), axes)
            total = call.axes.complete((values - highest).exp().sum(dim), axes)
            normaliser = total.log() + highest.squeeze(dim)
            smoothing = call.number(5, "label_smoothing", 0.0)
        else:
            normaliser, smoothing = torch.zeros_like(values.detach().sum(dim)), 0.0
        return cls(
            call=call, logits=values, normaliser=normaliser, dim=dim, axes=axes, smoothing=smoothing
        )

    def over_classes(self, local: Tensor) -> Tensor:
        """Sum over all classes of a tensor with the class dim."""
        return self.call.axes.complete(local.sum(self.dim), self.axes)

    def per_class(self, vector: Tensor) -> Tensor:
        """A vector over the local classes, shaped to broadcast against the logits."""
        trailing = self.logits.ndim - 1 - self.dim
        return working(vector).view(-1, *(1,) * trailing)


def _labels(parts: _Classes, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cost of every sample, and what each counts in a mean."""
    call, axes = parts.call, parts.axes
    valid = target != int(call.number(4, "ignore_index", -100))
    local, owned = call.localize("v", target)
    picked = parts.logits.gather(parts.dim, local.unsqueeze(parts.dim)).squeeze(parts.dim)
    picked = call.axes.complete(picked.where(owned, 0), axes)
    counted = valid.to(picked.dtype)
    if weight is not None:
        counted = call.axes.complete(working(weight)[local].where(owned & valid, 0), axes)
    cost = counted * (parts.normaliser - picked).where(valid, 0)
    if parts.smoothing:
        classes = call.global_size("v")
        if weight is None:
            spread = classes * parts.normaliser - parts.over_classes(parts.logits)
        else:
            each = parts.per_class(weight)
            total = call.axes.complete(each.sum(), axes)
            spread = total * parts.normaliser - parts.over_classes(each * parts.logits)
        spread = spread.where(valid, 0)
        cost = (1 - parts.smoothing) * cost + parts.smoothing / classes * spread
    return cost, counted


def _probabilities(parts: _Classes, target: Tensor, weight: Tensor | None) -> Tensor:
    """Cost of every sample under probabilities (or smoothed labels) per class."""
    classes = parts.call.global_size("v")
    share = working(target) * (1 - parts.smoothing) + parts.smoothing / classes
    if weight is not None:
        share = share * parts.per_class(weight)
    return parts.normaliser * parts.over_classes(share) - parts.over_classes(share * parts.logits)


@special("multi_margin_loss multilabel_margin_loss")
def margin_loss(call: SpecialCall, *operands: Tensor) -> Tensor:
    """Mean over the global samples."""
    position = 5 if call.node.op == "aten.multi_margin_loss.default" else 2
    return call.run_sum(*operands, position=position) / call.global_size("n")


@special("ctc_loss.Tensor")
def ctc_loss(call: SpecialCall, *operands: Tensor) -> Tensor:
    """Mean over the global samples of the loss per target."""
    each = call.run(*operands, reduction=(5, NONE))
    assert isinstance(each, Tensor)
    return (each / operands[3].clamp(min=1)).sum() / call.global_size("n")
