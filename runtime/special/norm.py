"""Normalisation with statistics over split letters, in two passes for accuracy."""

from __future__ import annotations

import math

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


@special("_native_batch_norm_legit_functional batch_norm instance_norm")
def batch_norm(call: SpecialCall, source: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
    """Statistics over the global batch; new running statistics, equal on all ranks.

    `others` are those of weight, bias, running mean and running variance that are given.
    """
    names = ("weight", "bias", "running_mean", "running_var")
    given = dict(zip(_present(call, 1, names), others, strict=True))
    instance = call.node.op == "aten.instance_norm.default"
    training = bool(call.arg(5, "training", False)) or "running_mean" not in given
    eps = call.number(7, "eps", 1e-5)
    values = working(source)
    per_channel = (1, -1, *(1,) * (source.ndim - 2))
    dims = [d for d in range(source.ndim) if d != 1 and not (instance and d == 0)]
    old = [given[name] for name in names[2:] if name in given]
    if training:
        letters = call.letters_in(0, dims)
        axes = call.axes_of(letters)
        if axes and call.axes.only_in_time(axes):
            return call.run(source, *others)  # the statistics of a microbatch need nobody else
        count = math.prod(call.operands[0].shape[d] for d in dims)
        mean, variance = _moments(call, values, dims, count, axes)
        count //= call.axes.repeats(axes)  # the samples that these statistics were taken of
        momentum = call.number(6, "momentum", 0.1)
        fresh = (mean.detach().flatten(), variance.detach().flatten() * (count / max(count - 1, 1)))
        new = [
            (1 - momentum) * before + momentum * now.to(before.dtype)
            for before, now in zip(old, fresh, strict=False)
        ]
    else:
        mean, variance = (working(tensor).view(per_channel) for tensor in old)
        new = [tensor.clone() for tensor in old]
    scale = torch.rsqrt(variance + eps)
    result = (values - mean) * scale
    if "weight" in given:
        result = result * given["weight"].view(per_channel)
    if "bias" in given:
        result = result + given["bias"].view(per_channel)
    result = result.to(source.dtype)
    if len(call.outputs) == 1:
        return result
    return (result, mean.detach().flatten(), scale.detach().flatten(), *new)


def _present(call: SpecialCall, position: int, names: tuple[str, ...]) -> list[str]:
    """Which of the tensor arguments from `position` on are given."""
    return [name for i, name in enumerate(names) if call.arg(position + i, name) is not None]
