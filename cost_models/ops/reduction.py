"""Reductions, scans, sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_models.ops.call import (
    OpCall,
    apply_cast,
    expansion,
    mean_of,
    reduce_over,
    working_dtype,
)
from autopar.cost_models.ops.losses import log_softmax
from autopar.cost_models.tape.basic import apply, detach, only, reduced_shape, total
from autopar.cost_models.tape.tensors import Local


def _keepdim(call: OpCall, position: int = 2) -> bool:
    return bool(call.arg(position, "keepdim", False))


@expansion("sum nansum")
def _sum(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    dims = range(source.ndim) if call.node.op == "aten.sum.default" else call.dims(1, "dim")
    keepdim = len(call.shape) == source.ndim
    if call.base == "nansum":
        source = apply(call.tape, "where", (source,), source.dtype, {0: "0 g_"})
    return (total(call.tape, source, tuple(dims), keepdim=keepdim, dtype=call.dtype),)


@expansion("mean")
def _mean(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    dims = tuple(range(source.ndim))
    if call.node.op == "aten.mean.dim":
        dims = call.dims(1, "dim")
    keepdim = len(call.shape) == source.ndim
    source = apply_cast(call, source, call.dtype)
    if not call.special:
        return (total(call.tape, source, dims, keepdim=keepdim, op="mean"),)
    if len(dims) == source.ndim and not keepdim:
        return (apply_cast(call, mean_of(call, source), call.dtype),)
    wide = apply_cast(call, source, working_dtype(source.dtype))
    summed = total(call.tape, wide, dims, keepdim=keepdim)
    out = apply(call.tape, "div", (summed,), summed.dtype, {0: "g"})
    return (apply_cast(call, out, call.dtype),)


_KEEPING = """
amax amin prod std norm linalg_vector_norm linalg_norm frobenius_norm logsumexp nanmean var
"""
_INPUT_ONLY = frozenset(("var", "var_mean", "nanmean"))
"""Reductions whose gradient needs no result."""


@expansion(_KEEPING)
def _keeping(call: OpCall) -> Sequence[Local]:
    """Gradient from the operand and the result."""
    (source,) = call.operands
    tape = call.tape
    out = tape.emit(
        call.base, "reduction", (source,), call.shape, call.dtype, flops=2 * source.numel
    )

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        reads = (grad, source) if call.base in _INPUT_ONLY else (grad, source, out)
        return (
            tape.emit(
                call.base + "_backward", "elementwise", reads, source.shape, grad.dtype,
                flops=3 * source.numel,
            ),
        )  # fmt: skip

    tape.record((out,), (source,), backward)
    return (out,)


@expansion("var_mean std_mean")
def _moments(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    tape = call.tape
    made = tape.emit_many(call.base, "reduction", (source,), call.outputs, flops=4 * source.numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        reads = [source, *(grad for grad in grads if grad is not None)]
        if call.base not in _INPUT_ONLY:
            reads.append(made[0])
        return (
            tape.emit(
                call.base + "_backward", "elementwise", reads, source.shape, source.dtype,
                flops=4 * source.numel,
            ),
        )  # fmt: skip

    tape.record(made, (source,), backward)
    return made


_FLAT = """
any all argmax argmin count_nonzero histc bincount bucketize searchsorted argsort
"""


@expansion(_FLAT)
def _untrained(call: OpCall) -> Sequence[Local]:
    """No gradient."""
    source = max(call.operands, key=lambda x: x.numel)
    return (
        call.tape.emit(
            call.base, "reduction", call.operands, call.shape, call.dtype, flops=source.numel
        ),
    )


_PICKING = """
max min median nanmedian kthvalue mode sort topk cummax cummin aminmax
"""


@expansion(_PICKING)
def _picking(call: OpCall) -> Sequence[Local]:
    """Values and where they were; gradients are put back there."""
    tape = call.tape
    source = call.operands[0]
    results = list(call.outputs)
    sorts = call.base in ("sort", "topk", "median", "kthvalue", "mode")
    flops = source.numel * (max(1, math.ceil(math.log2(max(source.numel, 2)))) if sorts else 1)
    made = tape.emit_many(call.base, "reduction", (source,), results, flops=flops)
    index = [x for x in made if not x.is_floating] or [source, *made]
    if call.base in ("cummax", "cummin"):
        index.append(source)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        reads = [grad for grad in grads if grad is not None]
        zeros = tape.emit("zeros", "elementwise", (), source.shape, source.dtype)
        return (
            tape.emit("scatter", "embedding", (zeros, *index, *reads), source.shape, source.dtype),
        )

    tape.record(made, (source,), backward)
    return made


_SCANS = {"cumsum": False, "cumprod": True, "logcumsumexp": True}


@expansion(_SCANS)
def _scan(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    tape, keeps = call.tape, _SCANS[call.base]
    out = tape.emit(call.base, "reduction", (source,), call.shape, call.dtype, flops=source.numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        reads = (grad, source, out) if keeps else (grad,)
        return (
            tape.emit(
                call.base + "_backward", "reduction", reads, source.shape, grad.dtype,
                flops=source.numel,
            ),
        )  # fmt: skip

    tape.record((out,), (source,), backward)
    return (out,)


@expansion("softmax _softmax log_softmax _log_softmax")
def _softmax(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    dim = int(call.number(1, "dim", -1)) % max(source.ndim, 1)
    axes = call.axes_of(call.letters_of(0, [dim]))
    source = apply_cast(call, source, call.dtype)
    logarithm = "log" in call.base
    if not axes:
        op = "_log_softmax" if logarithm else "_softmax"
        return (log_softmax(call, source, dim, op),)
    tape = call.tape
    values = apply_cast(call, source, working_dtype(source.dtype))
    dtype = values.dtype
    kept = reduced_shape(values.shape, (dim,), True)
    highest = tape.emit("amax", "reduction", (detach(values),), kept, dtype)
    highest = reduce_over(tape, call.rank, highest, axes)
    shifted = apply(tape, "sub", (values, highest), dtype, {1: "g", 0: ""})
    exponentials = apply(tape, "exp", (shifted,), dtype, {0: "go"})
    summed = call.total(total(tape, exponentials, (dim,), keepdim=True), axes)
    if logarithm:
        summed = apply(tape, "log", (summed,), dtype, {0: "g0"})
        out = apply(tape, "sub", (shifted, summed), dtype, {1: "g", 0: ""})
    else:
        out = apply(tape, "div", (exponentials, summed), dtype, {1: "g 01 _1 a_", 0: "g1"})
    return (apply_cast(call, out, call.dtype),)
