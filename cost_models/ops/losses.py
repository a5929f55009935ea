"""Losses: whole, over split samples, over split classes, and in one fused kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_models.ops.call import (
    OpCall,
    apply_cast,
    expansion,
    reduce_over,
    working_dtype,
)
from autopar.cost_models.tape.basic import apply, detach, only, reduced_shape, total, view
from autopar.cost_models.tape.tensors import Local, Shape
from autopar.sharding.rules.losses import ELEMENTWISE, MEAN, NONE, SUM, VECTORWISE

_MUL, _SUB, _ADD, _DIV = {1: "g0", 0: "g1"}, {1: "g", 0: ""}, {0: "", 1: ""}, {0: "g1"}
_HALF = ("float16", "bfloat16")
_LOCALISE = 16
"""Pointwise ops on class numbers that find the local ones
(`autopar.runtime.special.base.SpecialCall.localize`)."""


@expansion("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d")
def _cross_entropy(call: OpCall) -> Sequence[Local]:
    reduction = int(call.number(3, "reduction", MEAN))
    logits, target = call.operands[:2]
    normalises = call.base == "cross_entropy_loss"
    if call.tape.implementation.loss == "fused" and normalises and not target.is_floating:
        samples, counted = _fused(call, logits, target)
        return (_reduced(call, samples, counted, reduction),)
    if call.is_split("v"):
        samples, counted = _split_classes(call, logits, target)
        return (_reduced(call, samples, counted, reduction),)
    if not call.special or reduction != MEAN:
        return (_whole(call, logits, target, reduction),)
    summed = _whole(call, logits, target, NONE if logits.dtype in _HALF else SUM)
    if logits.dtype in _HALF:
        wide = apply_cast(call, summed, working_dtype(summed.dtype))
        summed = total(call.tape, wide, range(wide.ndim))
    counted = None
    if not target.is_floating:
        valid = call.tape.pointwise("ne", (target,), "bool")
        counted = call.tape.pointwise("where", (valid,), summed.dtype)
    result = _divided(call, summed, counted)
    return (apply_cast(call, result, call.dtype),)


def _whole(call: OpCall, logits: Local, target: Local, reduction: int) -> Local:
    """Log-probabilities, and what is picked of them."""
    tape = call.tape
    if call.base == "cross_entropy_loss":
        logits = log_softmax(call, logits, 1 if logits.ndim > 1 else 0)
        if target.is_floating:
            return _probabilities(call, logits, target, reduction)
    smoothing = call.number(5, "label_smoothing", 0.0) if call.base[0] == "c" else 0.0
    picked = _picked(call, logits, target, reduction)
    if not smoothing:
        return picked
    rows = total(tape, logits, (1 if logits.ndim > 1 else 0,))
    spread = apply(tape, "neg", (rows,), rows.dtype, {0: "g"})
    if reduction != NONE:
        spread = total(tape, spread, range(spread.ndim))
        spread = apply(tape, "div", (spread,), spread.dtype, {0: "g"})
    parts = [apply(tape, "mul", (x,), x.dtype, {0: "g"}) for x in (picked, spread)]
    return apply(tape, "add", parts, parts[0].dtype, _ADD)


def log_softmax(call: OpCall, source: Local, dim: int, op: str = "_log_softmax") -> Local:
    """A softmax or its logarithm along a dim, whose result is kept."""
    tape = call.tape
    out = tape.emit(op, "softmax", (source,), source.shape, source.dtype, flops=5 * source.numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (
            tape.emit(
                op + "_backward_data", "softmax", (grad, out), source.shape, grad.dtype,
                flops=4 * source.numel,
            ),
        )  # fmt: skip

    tape.record((out,), (source,), backward)
    return out


def _picked(call: OpCall, logits: Local, target: Local, reduction: int) -> Local:
    """``nll_loss``: minus the log-probability of the target."""
    tape = call.tape
    shape = target.shape if reduction == NONE else ()
    weight = call.tensor(2, "weight")
    reads = (logits, target) if weight is None else (logits, target, weight)
    out, count = tape.emit_many(
        "nll_loss", "loss", reads, [(shape, logits.dtype), ((), logits.dtype)],
        names=("value", "total_weight"),
    )  # fmt: skip
    tape.last().read_bytes = target.traffic_bytes + target.numel * logits.itemsize

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        made = tape.emit(
            "nll_loss_backward", "loss", (grad, *reads, count), logits.shape, grad.dtype
        )
        tape.last().read_bytes = target.traffic_bytes + grad.traffic_bytes
        return (made,)

    tape.record((out,), (logits,), backward)
    return out


def _probabilities(call: OpCall, logits: Local, target: Local, reduction: int) -> Local:
    """Targets that are probabilities."""
    tape = call.tape
    product = apply(tape, "mul", (logits, target), logits.dtype, _MUL)
    dims = (1,) if reduction == NONE else range(product.ndim)
    summed = total(tape, product, tuple(dims))
    summed = apply(tape, "neg", (summed,), summed.dtype, {0: "g"})
    if reduction == MEAN:
        summed = apply(tape, "div", (summed,), summed.dtype, {0: "g"})
    return summed


def _split_classes(call: OpCall, logits: Local, target: Local) -> tuple[Local, Local | None]:
    """Cost of every sample and what it counts (`autopar.runtime.special.losses`)."""
    tape = call.tape
    values = apply_cast(call, logits, working_dtype(logits.dtype))
    dtype, dim = values.dtype, 1 if logits.ndim > 1 else 0
    axes = call.axes_of(["v"])
    kept = reduced_shape(values.shape, (dim,), True)
    rows = reduced_shape(values.shape, (dim,), False)
    normaliser = None
    if call.base == "cross_entropy_loss":
        shown = detach(values)
        highest = tape.emit("amax", "reduction", (shown,), kept, dtype, flops=values.numel)
        highest = reduce_over(tape, call.rank, highest, axes)
        shifted = apply(tape, "sub", (values, highest), dtype, _SUB)
        exponentials = apply(tape, "exp", (shifted,), dtype, {0: "go"})
        summed = call.complete(total(tape, exponentials, (dim,)), axes)
        logarithm = apply(tape, "log", (summed,), dtype, {0: "g0"})
        flat = Local(rows, dtype, highest.memory)
        normaliser = apply(tape, "add", (logarithm, flat), dtype, _ADD)
    if target.is_floating:
        share = apply_cast(call, target, dtype)
        product = apply(tape, "mul", (values, share), dtype, _MUL)
        cost = call.complete(total(tape, product, (dim,)), axes)
        if normaliser is not None:
            cost = apply(tape, "sub", (normaliser, cost), dtype, _SUB)
        return cost, None
    valid = tape.pointwise("ne", (target,), "bool")
    index = target
    for _ in range(_LOCALISE):
        index = tape.pointwise("localize", (index,), target.dtype)
    owned = tape.pointwise("bitwise_and", (index,), "bool")
    picked = _gathered(call, values, index, dim, kept, rows)
    picked = call.complete(apply(tape, "where", (owned, picked), dtype, {1: "g0"}), axes)
    counted = tape.pointwise("_to_copy", (valid,), dtype)
    cost = picked
    if normaliser is not None:
        cost = apply(tape, "sub", (normaliser, picked), dtype, _SUB)
    cost = apply(tape, "where", (valid, cost), dtype, {1: "g0"})
    cost = apply(tape, "mul", (counted, cost), dtype, _MUL)
    if normaliser is not None and call.number(5, "label_smoothing", 0.0):
        cost = _smoothed(call, values, normaliser, cost, valid, dim, axes)
    return cost, counted


def _smoothed(
    call: OpCall,
    values: Local,
    normaliser: Local,
    cost: Local,
    valid: Local,
    dim: int,
    axes: tuple[int, ...],
) -> Local:
    tape, dtype = call.tape, values.dtype
    logits = call.complete(total(tape, values, (dim,)), axes)
    spread = apply(tape, "mul", (normaliser,), dtype, {0: "g"})
    spread = apply(tape, "sub", (spread, logits), dtype, _SUB)
    spread = apply(tape, "where", (valid, spread), dtype, {1: "g0"})
    parts = [apply(tape, "mul", (x,), dtype, {0: "g"}) for x in (cost, spread)]
    return apply(tape, "add", parts, dtype, _ADD)


def _gathered(
    call: OpCall, values: Local, index: Local, dim: int, kept: Shape, rows: Shape
) -> Local:
    """One class of every sample; its gradient fills a tensor of zeros."""
    tape = call.tape
    column = Local(kept, index.dtype, index.memory)
    out = tape.emit("gather", "embedding", (values, column), kept, values.dtype)
    tape.last().read_bytes = out.memory.size_bytes + column.traffic_bytes

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        zeros = tape.emit("new_zeros", "elementwise", (), values.shape, grad.dtype)
        return (
            tape.emit("scatter_add", "embedding", (zeros, column, grad), values.shape, grad.dtype),
        )

    tape.record((out,), (values,), backward)
    return view(tape, out, rows)


def _fused(call: OpCall, logits: Local, target: Local) -> tuple[Local, Local | None]:
    """One kernel over the logits each way; their gradient is written over them."""
    tape = call.tape
    dim = 1 if logits.ndim > 1 else 0
    rows = reduced_shape(logits.shape, (dim,), False)
    axes = call.axes_of(["v"])
    losses, normaliser = tape.emit_many(
        "fused_cross_entropy", "loss", (logits, target), [(rows, "float32"), (rows, "float32")],
        names=("value", "logsumexp"), flops=5 * logits.numel, dtype=logits.dtype,
    )  # fmt: skip

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        tape.emit_many(
            "fused_cross_entropy_backward", "loss", (grad, logits, target, normaliser), (),
            flops=4 * logits.numel, dtype=logits.dtype,
        )  # fmt: skip
        tape.last().write_bytes = logits.traffic_bytes
        return (Local(logits.shape, logits.dtype, logits.memory, logits.strides),)

    tape.record((losses,), (logits,), backward)
    valid = tape.pointwise("ne", (target,), "bool")
    counted = tape.pointwise("_to_copy", (valid,), "float32")
    return call.complete(losses, axes), counted


def _reduced(call: OpCall, samples: Local, counted: Local | None, reduction: int) -> Local:
    if reduction == NONE:
        return apply_cast(call, samples, call.dtype)
    summed = total(call.tape, samples, range(samples.ndim))
    if reduction == MEAN:
        summed = _divided(call, summed, counted)
    return apply_cast(call, summed, call.dtype)


def _divided(call: OpCall, summed: Local, counted: Local | None) -> Local:
    """A sum divided by the number of samples of all ranks."""
    tape = call.tape
    if counted is None:
        return apply(tape, "div", (summed,), summed.dtype, {0: "g"})
    count = total(tape, detach(counted), range(counted.ndim))
    rule = call.rule
    letters = [x.name for x in rule.letters if x.name != "v"] if rule is not None else []
    axes = call.axes_of(letters)
    if axes:
        count = reduce_over(tape, call.rank, count, axes)
    return apply(tape, "div", (summed, count), summed.dtype, _DIV)


def _simple(call: OpCall, reduction: int) -> Local:
    """A loss in one kernel that keeps its operands."""
    tape, operands = call.tape, call.operands
    numel = max(x.numel for x in operands)
    shape = call.shape
    if reduction == NONE and not shape:
        shape = max((x.shape for x in operands), key=math.prod)
    out = tape.emit(call.base, "loss", operands, shape, operands[0].dtype, flops=3 * numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return [
            tape.emit(
                call.base + "_backward", "loss", (grad, *operands), x.shape, grad.dtype,
                flops=3 * numel,
            )
            if x.trains
            else None
            for x in operands
        ]  # fmt: skip

    tape.record((out,), operands, backward)
    return out


_POSITIONS = {
    **ELEMENTWISE,
    **{name: position for name, (position, _) in VECTORWISE.items()},
    "multi_margin_loss": 5,
    "multilabel_margin_loss": 2,
    "ctc_loss": 5,
}


@expansion(_POSITIONS)
def _loss(call: OpCall) -> Sequence[Local]:
    reduction = int(call.number(_POSITIONS[call.base], "reduction", MEAN))
    if not call.special:
        return (_simple(call, reduction),)
    half = any(x.dtype in _HALF for x in call.operands)
    result = _simple(call, NONE if half else SUM)
    if half or call.base == "ctc_loss":
        wide = apply_cast(call, result, working_dtype(result.dtype))
        result = total(call.tape, wide, range(wide.ndim))
    result = apply(call.tape, "div", (result,), result.dtype, {0: "g"})
    return (apply_cast(call, result, call.dtype),)
