"""Means over split letters, and softmax along a split dim."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.runtime.special.base import SpecialCall, special, working
from autopar.sharding.rules.losses import ELEMENTWISE, VECTORWISE


@special("mean mean.dim")
def mean(call: SpecialCall, source: Tensor) -> Tensor:
    """Sum of the local elements over the global count: Partial."""
    ndim = source.ndim
    given = call.arg(1, "dim") if call.node.op == "aten.mean.dim" else None
    dims = given if isinstance(given, tuple) and given else tuple(range(ndim))
    numbers = [d % ndim for d in dims if isinstance(d, int)]
    keepdim = bool(call.arg(2, "keepdim", False)) if call.node.op == "aten.mean.dim" else False
    dtype = getattr(torch, call.outputs[0].dtype)
    count = math.prod(call.operands[0].shape[d] for d in numbers)
    # Half precision sums in float32, as torch's own mean does.
    total = working(source.to(dtype)).sum(numbers, keepdim=keepdim)
    return (total / count).to(dtype)


@special(" ".join(ELEMENTWISE))
def elementwise_loss(call: SpecialCall, *operands: Tensor) -> Tensor:
    """Mean over all elements of the broadcast operands: local sum over the global count."""
    position = ELEMENTWISE[call.node.op.split(".")[1]]
    count = math.prod(torch.broadcast_shapes(*(spec.shape for spec in call.operands)))
    return call.run_sum(*operands, position=position) / count


@special(" ".join(VECTORWISE))
def vectorwise_loss(call: SpecialCall, *operands: Tensor) -> Tensor:
    """Mean over samples, each a vector along the last dim."""
    position, _ = VECTORWISE[call.node.op.split(".")[1]]
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.operands if spec.ndim != 1))
    return call.run_sum(*operands, position=position) / math.prod(shape[:-1])


@special("softmax.int _softmax log_softmax.int _log_softmax")
def softmax(call: SpecialCall, source: Tensor) -> Tensor:
    """Maximum and sum of exponentials over all parts of the dim."""
    dim = int(call.number(1, "dim", -1)) % source.ndim
    axes = call.axes_of(call.letters_in(0, [dim]))
    dtype = getattr(torch, call.outputs[0].dtype)
    values = working(source.to(dtype))
    highest = call.axes.maximum(values.detach().amax(dim, keepdim=True), axes)
    shifted = values - highest
    exponentials = shifted.exp()
    total = call.axes.total(exponentials.sum(dim, keepdim=True), axes)
    logarithm = "log_softmax" in call.node.op
    return (shifted - total.log() if logarithm else exponentials / total).to(dtype)
