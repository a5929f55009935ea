"""Convolutions, pooling, interpolation."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, apply_cast, expansion
from autopar.cost_models.tape.basic import only, total
from autopar.cost_models.tape.tensors import Local
from autopar.cost_models.work import Matmul

_CONVOLUTIONS = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
"""


@expansion(_CONVOLUTIONS)
def _convolution(call: OpCall) -> Sequence[Local]:
    """One kernel forward; backward is one op for what is wanted of input, weight and bias."""
    source, weight, *rest = (
        [apply_cast(call, x, call.dtype) for x in call.operands]
        if call.node.context
        else call.operands
    )
    bias = rest[0] if rest else None
    tape = call.tape
    transposed = "transpose" in call.base or (
        call.base == "convolution" and bool(call.arg(6, "transposed", False))
    )
    reads = [source, weight] + ([bias] if bias is not None else [])
    out = tape.emit("convolution", "conv", reads, call.shape, call.dtype)
    # A product per position and weight: of the output, of the input where it is transposed.
    spatial = weight.ndim - 2
    spread = source if transposed else out
    positions = math.prod(spread.shape[-spatial:]) * math.prod(source.shape[: -spatial - 1])
    channels = (out if transposed else source).shape[-spatial - 1]
    groups = max(1, channels // weight.shape[1])
    rows = max(1, weight.shape[0] // groups)
    sizes = Matmul(batch=groups, m=positions, n=rows, k=math.prod(weight.shape[1:]))
    flops = 2 * positions * weight.numel
    step = tape.last()
    step.flops, step.detail = flops, sizes

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        given: list[Local | None] = [None, None, None]
        wanted = [x.trains for x in (source, weight)]
        if any(wanted) or bias is not None:
            made = iter(
                tape.emit_many(
                    "convolution_backward",
                    "conv",
                    (grad, source, weight),
                    [
                        (x.shape, grad.dtype) if x is not None and x.trains else None
                        for x in (source, weight, bias)
                    ],
                    flops=flops * sum(wanted),
                    dtype=grad.dtype,
                )
            )
            step = tape.last()
            step.detail, step.launches = sizes, max(1, sum(wanted))
            for place, item in enumerate((source, weight, bias)):
                if item is not None and item.trains:
                    given[place] = next(made)
        return given[: len(reads)]

    tape.record((out,), reads, backward)
    return (out,)


@expansion("max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d "
           "adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
           "max_pool3d_with_indices")  # fmt: skip
def _max_pool(call: OpCall) -> Sequence[Local]:
    """Keeps its input and where the maxima were."""
    (source,) = call.operands
    tape = call.tape
    window = _window(call, source)
    out, index = tape.emit_many(
        "max_pool", "reduction", (source,), [(call.shape, call.dtype), (call.shape, "int64")],
        names=("value", "indices"), flops=math.prod(call.shape) * window,
    )  # fmt: skip

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (
            tape.emit("max_pool_backward", "copy", (grad, source, index), source.shape, grad.dtype),
        )

    tape.record((out,), (source,), backward)
    return (out, index)[: len(call.outputs)]


def _window(call: OpCall, source: Local) -> int:
    value = call.arg(1, "kernel_size", 1)
    if "adaptive" in call.base or not isinstance(value, (int, tuple)):
        return max(1, source.numel // max(1, math.prod(call.shape)))
    sizes = value if isinstance(value, tuple) else (value,)
    spatial = int(call.base[-2]) if call.base[-1] == "d" and call.base[-2].isdigit() else 1
    numbers = [int(v) for v in sizes if isinstance(v, int)]
    return math.prod(numbers * spatial if len(numbers) == 1 else numbers)


@expansion("avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
           "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d")  # fmt: skip
def _avg_pool(call: OpCall) -> Sequence[Local]:
    """A mean over windows; over everything it is a mean."""
    (source,) = call.operands
    tape = call.tape
    spatial = len(call.shape) - (source.ndim - _spatial(call))
    dims = tuple(range(source.ndim - spatial, source.ndim))
    if "adaptive" in call.base and all(call.shape[d] == 1 for d in dims):
        return (total(tape, source, dims, keepdim=True, op="mean"),)
    out = tape.emit("avg_pool", "reduction", (source,), call.shape, call.dtype, flops=source.numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (
            tape.emit(
                "avg_pool_backward", "copy", (grad, source), source.shape, grad.dtype,
                flops=source.numel,
            ),
        )  # fmt: skip

    tape.record((out,), (source,), backward)
    return (out,)


def _spatial(call: OpCall) -> int:
    return next(int(sign) for sign in reversed(call.base) if sign.isdigit())


_RESIZES = """
upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact1d _upsample_nearest_exact2d
_upsample_nearest_exact3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa im2col col2im
"""


@expansion(_RESIZES)
def _resize(call: OpCall) -> Sequence[Local]:
    """Every result from some neighbours; nothing is kept."""
    source = call.operands[0]
    tape = call.tape
    out = tape.emit(
        call.base, "copy", (source,), call.shape, call.dtype, flops=4 * math.prod(call.shape)
    )

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (
            tape.emit(
                call.base + "_backward", "copy", (grad,), source.shape, grad.dtype,
                flops=4 * grad.numel,
            ),
        )  # fmt: skip

    tape.record((out,), (source,), backward)
    return (out,)


@expansion("grid_sampler grid_sampler_2d")
def _grid_sampler(call: OpCall) -> Sequence[Local]:
    """Keeps both operands."""
    tape, operands = call.tape, call.operands
    out = tape.emit(
        call.base, "embedding", operands, call.shape, call.dtype, flops=8 * math.prod(call.shape)
    )

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        made = tape.emit_many(
            call.base + "_backward", "embedding", (grad, *operands),
            [(x.shape, grad.dtype) for x in operands], flops=8 * grad.numel,
        )  # fmt: skip
        return [x if operand.trains else None for x, operand in zip(made, operands, strict=True)]

    tape.record((out,), operands, backward)
    return (out,)
