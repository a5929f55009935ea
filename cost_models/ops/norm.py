"""Normalisations: fused kernels, and what the runtime does where statistics are split."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.ops.call import (
    OpCall,
    apply_cast,
    expansion,
    reduce_over,
    working_dtype,
)
from autopar.cost_models.tape.basic import apply, detach, only, reshape, total, view
from autopar.cost_models.tape.tensors import Local, Shape

_MUL, _SUB, _ADD = {1: "g0", 0: "g1"}, {1: "g", 0: ""}, {0: "", 1: ""}


def fused(
    call: OpCall,
    op: str,
    source: Local,
    affine: Sequence[Local],
    statistics: Sequence[tuple[str, Shape]],
    dtype: str,
    *,
    reads: Sequence[Local] = (),
    extra: Sequence[tuple[Shape, str]] = (),
) -> list[Local]:
    """One kernel forward that keeps input and statistics, one backward.

    Args:
        call: The call.
        op: What to call it.
        source: What is normalised.
        affine: Weight and bias, as far as there are any.
        statistics: Name and shape of each.
        dtype: Of the statistics.
        reads: What else both read.
        extra: Shape and dtype of further results.
    """
    tape = call.tape
    made = tape.emit_many(
        op, "norm", (source, *affine, *reads),
        [(source.shape, source.dtype), *((shape, dtype) for _, shape in statistics), *extra],
        names=("value", *(name for name, _ in statistics)), flops=8 * source.numel,
    )  # fmt: skip
    out, kept = made[0], made[1 : 1 + len(statistics)]
    if source.strides is not None and op == "batch_norm":
        out.strides = source.strides

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        wanted = [(x.shape, x.dtype) if x.trains else None for x in (source, *affine)]
        read_again = affine if op == "layer_norm" else affine[:1]
        given = iter(
            tape.emit_many(
                op + "_backward",
                "norm",
                (grad, source, *kept, *read_again, *reads),
                wanted,
                flops=11 * source.numel,
                dtype=source.dtype,
            )
        )
        return [next(given) if item is not None else None for item in wanted]

    tape.record((out,), (source, *affine), backward)
    return made


@expansion("layer_norm native_layer_norm")
def _layer_norm(call: OpCall) -> Sequence[Local]:
    shape = call.arg(1, "normalized_shape", ())
    assert isinstance(shape, tuple)
    source, *affine = call.operands
    first = source.ndim - len(shape)
    axes = call.axes_of(call.letters_of(0, range(first, source.ndim)))
    if axes:
        return _layer_norm_split(call, first, axes)
    rows = (*source.shape[:first], *(1 for _ in shape))
    dtype = call.tape.implementation.statistics_dtype(source.dtype)
    made = fused(call, "layer_norm", source, affine, [("mean", rows), ("rstd", rows)], dtype)
    return made[: len(call.outputs)]


def _layer_norm_split(call: OpCall, first: int, axes: tuple[int, ...]) -> Sequence[Local]:
    tape = call.tape
    source, *affine = call.operands
    dims = range(first, source.ndim)
    values = apply_cast(call, source, working_dtype(source.dtype))
    mean, variance, centred = _moments(call, values, dims, axes)
    scale = _inverse_root(call, variance)
    again = apply(tape, "sub", (values, mean), values.dtype, _SUB)
    del centred
    result = apply(tape, "mul", (again, scale), values.dtype, _MUL)
    for number, tensor in enumerate(affine):
        rule = _MUL if number == 0 else _ADD
        result = apply(tape, "affine", (result, tensor), result.dtype, rule)
    result = apply_cast(call, result, source.dtype)
    return (result,) if len(call.outputs) == 1 else (result, detach(mean), detach(scale))


def _moments(
    call: OpCall, values: Local, dims: Sequence[int], axes: tuple[int, ...]
) -> tuple[Local, Local, Local]:
    """Mean and variance over `dims` of all ranks' parts, and the centred values."""
    tape, dtype = call.tape, values.dtype
    summed = call.total(total(tape, values, tuple(dims), keepdim=True), axes)
    mean = apply(tape, "div", (summed,), dtype, {0: "g"})
    centred = apply(tape, "sub", (values, mean), dtype, _SUB)
    square = apply(tape, "mul", (centred, centred), dtype, _MUL)
    spread = call.total(total(tape, square, tuple(dims), keepdim=True), axes)
    return mean, apply(tape, "div", (spread,), dtype, {0: "g"}), centred


def _inverse_root(call: OpCall, variance: Local) -> Local:
    shifted = apply(call.tape, "add", (variance,), variance.dtype, {0: ""})
    return apply(call.tape, "rsqrt", (shifted,), variance.dtype, {0: "o g a_"})


@expansion("rms_norm _fused_rms_norm")
def _rms_norm(call: OpCall) -> Sequence[Local]:
    shape = call.arg(1, "normalized_shape", ())
    assert isinstance(shape, tuple)
    tape = call.tape
    source, *affine = call.operands
    first = source.ndim - len(shape)
    dims = tuple(range(first, source.ndim))
    axes = call.axes_of(call.letters_of(0, dims))
    rows = (*source.shape[:first], *(1 for _ in shape))
    if not axes and tape.implementation.fused_rms_norm:
        made = fused(call, "rms_norm", source, affine, [("rstd", rows)], "float32")
        return made[: len(call.outputs)]
    values = apply_cast(call, source, working_dtype(source.dtype))
    dtype = values.dtype
    if axes:
        square = apply(tape, "mul", (values, values), dtype, _MUL)
        square = total(tape, square, dims, keepdim=True)
        square = call.total(apply(tape, "div", (square,), dtype, {0: "g"}), axes)
    else:
        square = apply(tape, "pow", (values,), dtype, {0: "0 _ g_"})
        square = total(tape, square, dims, keepdim=True, op="mean")
    scale = _inverse_root(call, square)
    result = apply(tape, "mul", (values, scale), dtype, _MUL)
    for tensor in affine:
        result = apply(tape, "mul", (result, tensor), dtype, _MUL)
    result = apply_cast(call, result, source.dtype)
    return (result,) if len(call.outputs) == 1 else (result, detach(scale))


@expansion("group_norm")
def _group_norm(call: OpCall) -> Sequence[Local]:
    source, *affine = call.operands
    inside = [name for name in call.letters_of(0) if name not in ("n", "g")]
    axes = call.axes_of(inside)
    groups = int(call.number(1, "num_groups", 1)) // max(call.rank.group(call.axes_of("g")), 1)
    groups = max(groups, 1)
    if not axes:
        rows = (source.shape[0], groups)
        statistics = [("mean", rows), ("rstd", rows)]
        return fused(call, "group_norm", source, affine, statistics, source.dtype)[:1]
    tape = call.tape
    values = apply_cast(call, source, working_dtype(source.dtype))
    wide = reshape(
        tape, values, (source.shape[0], groups, source.shape[1] // groups, *source.shape[2:])
    )
    mean, variance, _ = _moments(call, wide, tuple(range(2, wide.ndim)), axes)
    centred = apply(tape, "sub", (wide, mean), wide.dtype, _SUB)
    scale = _inverse_root(call, variance)
    result = reshape(tape, apply(tape, "mul", (centred, scale), wide.dtype, _MUL), source.shape)
    for number, tensor in enumerate(affine):
        column = view(tape, tensor, (tensor.numel, *(1,) * (source.ndim - 2)))
        rule = _MUL if number == 0 else _ADD
        result = apply(tape, "affine", (result, column), result.dtype, rule)
    return (apply_cast(call, result, source.dtype),)


@expansion("_native_batch_norm_legit_functional batch_norm instance_norm")
def _batch_norm(call: OpCall) -> Sequence[Local]:
    source = call.operands[0]
    given = [call.tensor(place, "") for place in range(1, 5)]
    affine = [x for x in given[:2] if x is not None]
    running = [x for x in given[2:] if x is not None]
    training = bool(call.arg(5, "training", False)) or not running
    channels: Shape = (source.shape[1],)
    instance = call.base == "instance_norm"
    dims = [d for d in range(source.ndim) if d != 1 and not (instance and d == 0)]
    axes = call.axes_of(call.letters_of(0, dims)) if training else ()
    there = tuple(axis for axis in axes if axis != call.rank.time)
    if there and instance:
        return _instance_norm_split(call, affine, dims, axes)
    if there:
        return _batch_norm_split(call, affine, running, axes)
    rows = (source.shape[0] * channels[0],) if instance else channels
    dtype = call.tape.implementation.statistics_dtype(source.dtype)
    extra = [(x.shape, x.dtype) for x in running] if len(call.outputs) > 1 else []
    statistics = [("mean", rows), ("rstd", rows)] if training else []
    made = fused(call, "batch_norm", source, affine, statistics, dtype, reads=running, extra=extra)
    return made[: len(call.outputs)]


def _instance_norm_split(
    call: OpCall, affine: Sequence[Local], dims: Sequence[int], axes: tuple[int, ...]
) -> Sequence[Local]:
    """Statistics of each instance over all ranks."""
    tape = call.tape
    source = call.operands[0]
    values = apply_cast(call, source, working_dtype(source.dtype))
    mean, variance, _ = _moments(call, values, dims, axes)
    scale = _inverse_root(call, variance)
    centred = apply(tape, "sub", (values, mean), values.dtype, _SUB)
    result = apply(tape, "mul", (centred, scale), values.dtype, _MUL)
    for number, tensor in enumerate(affine):
        column = view(tape, tensor, (1, tensor.numel, *(1,) * (source.ndim - 2)))
        rule = _MUL if number == 0 else _ADD
        result = apply(tape, "affine", (result, column), result.dtype, rule)
    return (apply_cast(call, result, source.dtype),)


def _batch_norm_split(
    call: OpCall, affine: Sequence[Local], running: Sequence[Local], axes: tuple[int, ...]
) -> Sequence[Local]:
    """Statistics over all ranks (`autopar.runtime.special.norm.batch_norm`)."""
    tape = call.tape
    source = call.operands[0]
    mean, variance = _channel_moments(call, source, axes)
    new = []
    for before, now in zip(running, (mean, variance), strict=False):
        fresh = now if now is mean else tape.pointwise("mul", (now,), now.dtype)
        new.append(tape.pointwise("lerp", (before, fresh), before.dtype))
    out = _normalised(call, source, affine, (mean, variance))

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return _synchronised_backward(call, grad, affine, (mean, variance), axes)

    tape.record((out,), (source, *affine), backward)
    return (out,) if len(call.outputs) == 1 else (out, mean, variance, *new)


def _channel_moments(call: OpCall, source: Local, axes: tuple[int, ...]) -> tuple[Local, Local]:
    """Mean and variance of each channel of all ranks' parts: one pass, two sums of vectors."""
    tape, dtype = call.tape, working_dtype(source.dtype)
    values = detach(source)
    if dtype != source.dtype:
        values = tape.pointwise("_to_copy", (values,), dtype)
    result = ((source.shape[1],), dtype)
    variance, mean = tape.emit_many(
        "var_mean", "reduction", (values,), [result, result], flops=4 * source.numel
    )
    share = tape.pointwise("mul", (mean,), dtype)
    overall = reduce_over(tape, call.rank, share, axes)
    off = tape.pointwise("sub", (mean, overall), dtype)
    spread = tape.pointwise("addcmul", (variance, off, off), dtype)
    share = tape.pointwise("mul", (spread,), dtype)
    return overall, reduce_over(tape, call.rank, share, axes)


def _normalised(
    call: OpCall, source: Local, affine: Sequence[Local], statistics: Sequence[Local]
) -> Local:
    (out,) = call.tape.emit_many(
        "batch_norm", "norm", (source, *affine, *statistics), [(source.shape, source.dtype)],
        flops=8 * source.numel,
    )  # fmt: skip
    if source.strides is not None:
        out.strides = source.strides
    return out


def _synchronised_backward(
    call: OpCall,
    grad: Local,
    affine: Sequence[Local],
    statistics: Sequence[Local],
    axes: tuple[int, ...],
) -> list[Local | None]:
    """Two sums of each channel in a pass, summed over ranks at once; then the gradient in two."""
    tape, source = call.tape, call.operands[0]
    dtype, channels = statistics[0].dtype, source.shape[1]
    result = ((channels,), dtype)
    sums = tape.emit_many(
        "batch_norm_backward", "norm", (grad, source, *affine[:1], *statistics), [result, result],
        flops=6 * source.numel,
    )  # fmt: skip
    found: list[Local | None] = [None, *sums[: len(affine)]]
    if not source.trains:
        return found
    factor = statistics[1]
    for op in ("add", "rsqrt"):
        factor = tape.pointwise(op, (factor,), dtype)
    factor = tape.pointwise("mul", (factor, *affine[:1]), dtype)
    pair = tape.emit("stack", "copy", sums, (2, channels), dtype)
    pair = reduce_over(tape, call.rank, pair, axes)
    pair = tape.pointwise("mul", (pair, tape.pointwise("div", (factor,), dtype)), dtype)
    through = _normalised(call, source, (pair,), statistics)
    column = Local((1, channels, *(1,) * (source.ndim - 2)), dtype, factor.memory)
    made = tape.pointwise("addcmul", (through, grad, column), dtype)
    if made.dtype != source.dtype:
        made = tape.pointwise("_to_copy", (made,), source.dtype)
    found[0] = made
    return found


@expansion("_weight_norm")
def _weight_norm(call: OpCall) -> Sequence[Local]:
    """``v * g / norm(v)``."""
    direction, length = call.operands
    tape = call.tape
    dim = int(call.number(2, "dim", 0)) % direction.ndim
    rows = tuple(size if d == dim else 1 for d, size in enumerate(direction.shape))
    out, norm = tape.emit_many(
        "weight_norm", "norm", (direction, length),
        [(direction.shape, direction.dtype), (rows, direction.dtype)], names=("value", "norm"),
    )  # fmt: skip

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return tape.emit_many(
            "weight_norm_backward", "norm", (grad, direction, length, norm),
            [(direction.shape, direction.dtype), (length.shape, length.dtype)],
        )  # fmt: skip

    tape.record((out,), (direction, length), backward)
    return (out,)
