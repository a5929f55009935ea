"""Normalisation with statistics over split letters: two passes for accuracy, or a fused one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.special.base import AxisIds, SpecialCall, special, working


def _moments(
    call: SpecialCall, values: Tensor, dims: list[int], count: int, axes: AxisIds
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over `dims` (kept) of all ranks' parts, `count` elements."""
    mean = call.axes.total(values.sum(dims, keepdim=True), axes) / count
    centred = values - mean
    return mean, call.axes.total((centred * centred).sum(dims, keepdim=True), axes) / count


@special("layer_norm native_layer_norm")
def layer_norm(call: SpecialCall, source: Tensor, *affine: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Statistics over the global normalised dims."""
    shape = call.arg(1, "normalized_shape", ())
    assert isinstance(shape, tuple)
    first = source.ndim - len(shape)
    dims = list(range(first, source.ndim))
    values = working(source)
    axes = call.axes_of(call.letters_in(0, dims))
    count = math.prod(call.operands[0].shape[first:])
    mean, variance = _moments(call, values, dims, count, axes)
    scale = torch.rsqrt(variance + call.number(4, "eps", 1e-5))
    result = (values - mean) * scale
    for arg, tensor in zip(_present(call, 2, ("weight", "bias")), affine, strict=True):
        result = result * tensor if arg == "weight" else result + tensor
    result = result.to(source.dtype)
    return result if len(call.outputs) == 1 else (result, mean.detach(), scale.detach())


@special("rms_norm _fused_rms_norm")
def rms_norm(
    call: SpecialCall, source: Tensor, weight: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Mean square over the global normalised dims."""
    shape = call.arg(1, "normalized_shape", ())
    assert isinstance(shape, tuple)
    first = source.ndim - len(shape)
    dims = list(range(first, source.ndim))
    values = working(source)
    axes = call.axes_of(call.letters_in(0, dims))
    count = math.prod(call.operands[0].shape[first:])
    square = (values * values).sum(dims, keepdim=True) / count
    # Without an eps torch takes that of the precision it works in, not of the input.
    eps = call.number(3, "eps", torch.finfo(values.dtype).eps)
    scale = torch.rsqrt(call.axes.total(square, axes) + eps)
    result = values * scale if weight is None else values * scale * weight
    result = result.to(source.dtype)
    if len(call.outputs) == 1:
        return result
    # As a result of its own the scale is used alike by all ranks.
    return result, torch.rsqrt(call.axes.complete(square, axes) + eps)


@special("group_norm")
def group_norm(call: SpecialCall, source: Tensor, *affine: Tensor) -> Tensor:
    """Groups held here; statistics over split channels of a group and split positions."""
    groups = call.local_size("g")
    inside = [name for name in call.letters_in(0) if name not in ("n", "g")]
    axes = call.axes_of(inside)
    if not axes:
        result = call.run(source, *affine, num_groups=(1, groups))
        assert isinstance(result, Tensor)
        return result
    values = working(source).unflatten(1, (groups, -1))
    dims = list(range(2, values.ndim))
    count = math.prod(call.global_size(name) for name in inside)
    mean, variance = _moments(call, values, dims, count, axes)
    scaled = (values - mean) * torch.rsqrt(variance + call.number(4, "eps", 1e-5))
    result = scaled.flatten(1, 2)
    for arg, tensor in zip(_present(call, 2, ("weight", "bias")), affine, strict=True):
        vector = tensor.view(-1, *(1,) * (source.ndim - 2))
        result = result * vector if arg == "weight" else result + vector
    return result.to(source.dtype)


class _Synchronised(torch.autograd.Function):
    """A batch norm with given statistics whose gradient goes through these, too.

    As few passes as torch's SyncBatchNorm takes, of ops that every device has: one forward; one
    backward for two sums of each channel, and two for the gradient (there a kernel of its own).
    """

    @staticmethod
    def forward(
        ctx: Any,
        source: Tensor,
        weight: Tensor,
        bias: Tensor,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        total: Callable[[Tensor], Tensor],
        count: int,
    ) -> Tensor:
        ctx.save_for_backward(source, weight, mean, variance)
        ctx.eps, ctx.total, ctx.count = eps, total, count
        return _normalised(source, weight, bias, mean, variance, eps)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        source, weight, mean, variance = ctx.saved_tensors
        if source.numel():
            _, scaled, plain = torch.ops.aten.native_batch_norm_backward(
                gradient, source, weight, mean, variance, None, None, False, ctx.eps,
                [False, True, True],
            )  # fmt: skip
        else:
            scaled, plain = torch.zeros_like(weight), torch.zeros_like(weight)
        if not ctx.needs_input_grad[0]:
            return None, scaled, plain, *[None] * 5
        factor = weight * torch.rsqrt(variance + ctx.eps)
        vectors = ctx.total(torch.stack((scaled, plain))) * (factor / -ctx.count)
        through = _normalised(source, vectors[0], vectors[1], mean, variance, ctx.eps)
        column = factor.view(-1, *(1,) * (source.ndim - 2))
        result = torch.addcmul(through, gradient, column).to(source.dtype)
        return result, scaled, plain, *[None] * 5


def _normalised(
    source: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    result: Tensor = torch.ops.aten._native_batch_norm_legit_no_training(
        source, weight, bias, mean, variance, 0.0, eps
    )[0]
    return result


def _statistics(
    call: SpecialCall, source: Tensor, axes: AxisIds, count: int
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel over `count` elements of all ranks' parts.

    One pass over the part, which may be empty. The variance is put together from deviations: a sum
    of squares would lose digits to a large mean, and costs as many kernels on vectors as the second
    sum over ranks.
    """
    values = working(source.detach())
    if values.numel():
        dims = [dim for dim in range(source.ndim) if dim != 1]
        variance, mean = torch.var_mean(values, dims, correction=0)
        share = values.numel() // len(mean) / count
    else:
        variance = mean = values.new_zeros(source.shape[1])
        share = 0.0
    overall = call.axes.total(mean * share, axes)
    off = mean - overall
    return overall, call.axes.total(torch.addcmul(variance, off, off) * share, axes)


@special("_native_batch_norm_legit_functional batch_norm instance_norm")
def batch_norm(call: SpecialCall, source: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Statistics over the global batch; new running statistics, equal on all ranks.

    `others` are those of weight, bias, running mean and running variance that are given.
    """
    names = ("weight", "bias", "running_mean", "running_var")
    given = dict(zip(_present(call, 1, names), others, strict=True))
    training = bool(call.arg(5, "training", False)) or "running_mean" not in given
    if call.node.op == "aten.instance_norm.default" or not training:
        return _by_parts(call, source, given, training)
    dims = [dim for dim in range(source.ndim) if dim != 1]
    axes = call.axes_of(call.letters_in(0, dims))
    if axes and call.axes.only_in_time(axes):
        return call.run(source, *others)  # the statistics of a microbatch need nobody else
    eps = call.number(7, "eps", 1e-5)
    count = math.prod(call.operands[0].shape[dim] for dim in dims)
    mean, variance = _statistics(call, source, axes, count)
    weight = working(given["weight"]) if "weight" in given else torch.ones_like(mean)
    bias = working(given["bias"]) if "bias" in given else torch.zeros_like(mean)
    result: Tensor = _Synchronised.apply(
        source, weight, bias, mean, variance, eps,
        lambda sums: call.axes.total(sums, axes), count,
    )  # fmt: skip
    if len(call.outputs) == 1:
        return result
    new = _running(call, given, mean, variance, count // call.axes.repeats(axes))
    return (result, mean, torch.rsqrt(variance + eps), *new)


def _running(
    call: SpecialCall, given: dict[str, Tensor], mean: Tensor, variance: Tensor, count: int
) -> list[Tensor]:
    """New running statistics, from those of `count` samples."""
    momentum = call.number(6, "momentum", 0.1)
    old = [given[name] for name in ("running_mean", "running_var") if name in given]
    fresh = (mean, variance * (count / max(count - 1, 1)))
    return [
        torch.lerp(before, now.to(before.dtype), momentum)
        for before, now in zip(old, fresh, strict=False)
    ]


def _by_parts(
    call: SpecialCall, source: Tensor, given: dict[str, Tensor], training: bool
) -> Tensor:
    """Statistics of each instance, or given ones."""
    eps = call.number(7, "eps", 1e-5)
    values = working(source)
    per_channel = (1, -1, *(1,) * (source.ndim - 2))
    if training:
        dims = list(range(2, source.ndim))
        axes = call.axes_of(call.letters_in(0, dims))
        count = math.prod(call.operands[0].shape[d] for d in dims)
        mean, variance = _moments(call, values, dims, count, axes)
    else:
        old = (given["running_mean"], given["running_var"])
        mean, variance = (working(tensor).view(per_channel) for tensor in old)
    scale = torch.rsqrt(variance + eps)
    result = (values - mean) * scale
    if "weight" in given:
        result = result * given["weight"].view(per_channel)
    if "bias" in given:
        result = result + given["bias"].view(per_channel)
    return result.to(source.dtype)


def _present(call: SpecialCall, position: int, names: tuple[str, ...]) -> list[str]:
    """Which of the tensor arguments from `position` on are given."""
    return [name for i, name in enumerate(names) if call.arg(position + i, name) is not None]
