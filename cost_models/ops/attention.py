"""Scaled dot product attention: fused kernels, torch's composite, and Megatron's three kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, apply_cast, expansion, working_dtype
from autopar.cost_models.ops.contraction import matmul
from autopar.cost_models.ops.random import keep_mask, where_kept
from autopar.cost_models.tape.basic import (
    apply,
    contiguous,
    expand,
    matmul_step,
    narrow,
    only,
    reshape,
    transpose,
    view,
)
from autopar.cost_models.tape.tape import Tape
from autopar.cost_models.tape.tensors import Local, Shape, plain, pointwise_strides
from autopar.cost_models.work import Attention

EFFICIENT_ROWS = 32
"""The memory-efficient kernel rounds rows of its statistics up to a multiple of this."""


@expansion("scaled_dot_product_attention")
def _attention(call: OpCall) -> Sequence[Local]:
    query, key, value, *rest = _cast(call)
    mask = rest[0] if rest else None
    how = call.tape.implementation
    dropout = call.number(4, "dropout_p", 0.0)
    causal = bool(call.arg(5, "is_causal", False))
    grouped = bool(call.arg(7, "enable_gqa", False)) and query.shape[-3:-2] != key.shape[-3:-2]
    kernel = how.attention_kernel(query.dtype, query.shape[-1], mask is not None)
    by_hand = dropout > 0 and how.dropout == "counter"
    if kernel == "cpu" or by_hand:
        return (_as_the_runtime(call, (query, key, value), mask, dropout, causal, grouped),)
    parts = (query, key, value)
    if kernel == "unfused":
        return (_unfused(call, parts, mask, dropout, causal),)
    return (fused(call, kernel, parts, mask, dropout, causal),)


def _cast(call: OpCall) -> list[Local]:
    if not call.node.context:
        return list(call.operands)
    return [apply_cast(call, x, call.dtype) if x.is_floating else x for x in call.operands]


def _as_the_runtime(
    call: OpCall,
    parts: tuple[Local, Local, Local],
    mask: Local | None,
    dropout: float,
    causal: bool,
    grouped: bool,
) -> Local:
    """What `autopar.runtime.special.attention` and a CPU do."""
    tape = call.tape
    query, key, value = parts
    if call.special and causal:
        seen = _last_row(call) + 1
        key, value = (narrow(tape, x, x.ndim - 2, seen) for x in (key, value))
        rows = tape.emit("arange", "elementwise", (), (query.shape[-2], 1), "int64")
        columns = tape.emit("arange", "elementwise", (), (seen,), "int64")
        mask = tape.pointwise("ge", (rows, columns), "bool")
        causal = False
    if dropout > 0:
        return _dropped(call, (query, key, value), mask, dropout, grouped)
    plain_call = query.ndim == 4 and query.shape[-1] == value.shape[-1]
    trained = mask is not None and mask.trains
    if plain_call and not trained and _unit_stride(query, key, value):
        if mask is not None and mask.dtype == "bool":
            mask = _as_numbers(tape, mask, query.dtype)
        return fused(call, "cpu", (query, key, value), mask, 0.0, causal)
    return _composite(call, (query, key, value), mask, causal, grouped)


def _unit_stride(*values: Local) -> bool:
    return all(value.full_strides()[-1] == 1 for value in values)


def _last_row(call: OpCall) -> int:
    """The last query position of this rank, among those of all ranks."""
    grid, choices = call.rank.grid, call.choices
    rule = call.rule
    size = next((x.size for x in rule.letters if x.name == "s"), 1) if rule is not None else 1
    last = size - 1
    for unit in dict.fromkeys(choice.unit for choice in choices if choice.unit is not None):
        if unit.letter == "s":
            axes = tuple(axis for axis, choice in enumerate(choices) if choice.unit == unit)
            start, length = grid.extent(unit.size, axes)
            place = last // unit.stride % unit.size
            last += (start + length - 1 - place) * unit.stride
    return last


def _as_numbers(tape: Tape, mask: Local, dtype: str) -> Local:
    """A mask of truths as one of zeros and minus infinity."""
    return tape.pointwise("where", (mask,), dtype)


def _sizes(
    parts: tuple[Local, Local, Local], causal: bool, dropout: float, kernel: str
) -> Attention:
    query, key, value = parts
    return Attention(
        batch=math.prod(query.shape[:-3]),
        heads=query.shape[-3] if query.ndim > 2 else 1,
        kv_heads=key.shape[-3] if key.ndim > 2 else 1,
        seq_q=query.shape[-2],
        seq_k=key.shape[-2],
        head_dim=query.shape[-1],
        value_dim=value.shape[-1],
        causal=causal,
        dropout=dropout > 0,
        fused=kernel != "unfused",
    )


def _by_rows(shape: Shape) -> Shape | None:
    """Strides of ``b h s d`` that lies in memory as ``b s h d``."""
    if len(shape) != 4:
        return None
    batch, heads, rows, width = shape
    return plain((batch, heads, rows, width), (heads * rows * width, width, heads * width, 1))


def _like(value: Local, shape: Shape) -> Shape | None:
    """Strides of a tensor that lies as `value` does."""
    return pointwise_strides((value,), shape) if value.shape == shape else _by_rows(shape)


def fused(
    call: OpCall,
    kernel: str,
    parts: tuple[Local, Local, Local],
    mask: Local | None,
    dropout: float,
    causal: bool,
) -> Local:
    """One kernel forward, one backward; the log of the sum of exponentials is kept."""
    tape = call.tape
    query, key, value = parts
    sizes = _sizes(parts, causal, dropout, kernel)
    shape = (*query.shape[:-1], value.shape[-1])
    rows = query.shape[-2]
    statistics = working_dtype(query.dtype) if kernel == "cpu" else "float32"
    extra: list[tuple[Shape, str]] = []
    if kernel == "efficient":
        rows = -(-rows // EFFICIENT_ROWS) * EFFICIENT_ROWS
        extra = [((), "int64"), ((), "int64")]
    elif kernel == "flash":
        extra = [((2,), "int64"), ((), "int64")]
    reads = [query, key, value] + ([mask] if mask is not None else [])
    out, lse, *state = tape.emit_many(
        "attention", "attention", reads,
        [(shape, query.dtype), ((*query.shape[:-2], rows), statistics), *extra],
        names=("value", "logsumexp", "seed", "offset"),
        strides=(_by_rows(shape) if kernel == "efficient" else _like(query, shape),),
        flops=_forward_flops(sizes),
    )  # fmt: skip
    tape.last().detail = sizes

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        results = [(x.shape, x.dtype) for x in (query, key, value)]
        made = tape.emit_many(
            "attention_backward", "attention", (grad, *reads, out, lse, *state), results,
            strides=[
                _like(x, x.shape) if kernel == "flash" else _by_rows(x.shape)
                for x in (query, key, value)
            ],
            flops=_backward_flops(sizes),
        )  # fmt: skip
        tape.last().detail = sizes
        return [x if part.trains else None for x, part in zip(made, parts, strict=True)]

    tape.record((out,), (query, key, value), backward)
    return out


def _forward_flops(sizes: Attention) -> int:
    """Scores and weighted values; a causal mask is not taken off (torch counts so too)."""
    each = sizes.batch * sizes.heads * sizes.seq_q * sizes.seq_k
    return 2 * each * (sizes.head_dim + sizes.value_dim)


def _backward_flops(sizes: Attention) -> int:
    """Five products: the scores again, and gradients of values, probabilities, queries, keys."""
    each = sizes.batch * sizes.heads * sizes.seq_q * sizes.seq_k
    return 2 * each * (3 * sizes.head_dim + 2 * sizes.value_dim)


def _composite(
    call: OpCall,
    parts: tuple[Local, Local, Local],
    mask: Local | None,
    causal: bool,
    grouped: bool,
) -> Local:
    """``_scaled_dot_product_attention_math`` (aten/src/ATen/native/transformers/attention.cpp)."""
    tape = call.tape
    dtype = working_dtype(parts[0].dtype)
    query, key, value = (apply_cast(call, x, dtype) for x in parts)
    query = apply(tape, "mul", (query,), dtype, {0: "g"})
    if causal:
        ones = tape.emit("ones", "elementwise", (), (query.shape[-2], key.shape[-2]), "bool")
        mask = tape.pointwise("tril", (ones,), "bool")
    if mask is not None and mask.dtype == "bool":
        mask = _as_numbers(tape, mask, dtype)
    elif mask is not None:
        mask = apply_cast(call, mask, dtype)
    if grouped:
        key, value = (_repeated(tape, x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    turned = apply(tape, "mul", (transpose(tape, key, key.ndim - 2, key.ndim - 1),), dtype,
                   {0: "g"})  # fmt: skip
    scores = matmul(tape, query, turned)
    if mask is not None:
        scores = apply(tape, "add", (scores, mask), dtype, {0: "", 1: ""})
    weights = safe_softmax(tape, scores)
    return apply_cast(call, matmul(tape, weights, value), parts[0].dtype)


def safe_softmax(tape: Tape, scores: Local) -> Local:
    """Softmax of the last dim in which rows of minus infinity give zeros; the result is kept."""
    return _softmax(tape, scores, (scores,), "_safe_softmax")


def _repeated(tape: Tape, value: Local, copies: int) -> Local:
    """Each head `copies` times in place."""
    lead, (heads, *rest) = value.shape[:-3], value.shape[-3:]
    row = reshape(tape, value, (*lead, heads, 1, *rest))
    wide = contiguous(tape, expand(tape, row, (*lead, heads, copies, *rest)))
    return view(tape, wide, (*lead, heads * copies, *rest))


def _dropped(
    call: OpCall,
    parts: tuple[Local, Local, Local],
    mask: Local | None,
    dropout: float,
    grouped: bool,
) -> Local:
    """Attention with dropout as `autopar.runtime.special.attention` does it."""
    tape = call.tape
    query, key, value = parts
    dtype = query.dtype
    if grouped:
        key, value = (_repeated(tape, x, query.shape[-3] // x.shape[-3]) for x in (key, value))
    scaled = apply(tape, "mul", (query,), dtype, {0: "g"})
    scores = matmul(tape, scaled, transpose(tape, key, key.ndim - 2, key.ndim - 1))
    if mask is not None and mask.dtype == "bool":
        mask = tape.pointwise("bitwise_not", (mask,), "bool")
        scores = apply(tape, "masked_fill", (scores, mask), dtype, {0: "g1"})
    elif mask is not None:
        scores = apply(tape, "add", (scores, mask), dtype, {0: "", 1: ""})
    weights = safe_softmax(tape, scores)
    weights = apply(tape, "div", (weights,), dtype, {0: "g"})
    weights = where_kept(tape, weights, keep_mask(tape, weights.shape, call))
    return matmul(tape, weights, value)


def _unfused(
    call: OpCall,
    parts: tuple[Local, Local, Local],
    mask: Local | None,
    dropout: float,
    causal: bool,
) -> Local:
    """Scores, a fused scale-mask-softmax, dropout, weighted values.

    Kept: queries, keys, values, probabilities, the mask of dropout and what it left: the
    ``5 a s / h`` of arXiv 2205.05198, section 4.1.
    """
    tape = call.tape
    query, key, value = parts
    sizes = _sizes(parts, causal, dropout, "unfused")
    batch = sizes.batch * sizes.heads
    shape = (*query.shape[:-1], key.shape[-2])
    forward = (batch, sizes.seq_q, sizes.seq_k, sizes.head_dim)
    scores = _scores(tape, query, key, shape, forward)
    softmax_reads = [scores] + ([mask] if mask is not None else [])
    weights = _softmax(tape, scores, softmax_reads)
    if dropout > 0:
        kept = keep_mask(tape, weights.shape, call)
        weights = where_kept(tape, weights, kept, "score_dropout")
    result = (*query.shape[:-1], value.shape[-1])
    out = matmul_step(
        tape, "bmm", (weights, value), result, query.dtype,
        (batch, sizes.seq_q, sizes.value_dim, sizes.seq_k),
    )  # fmt: skip

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        second = first = None
        if value.trains:
            second = matmul_step(
                tape, "bmm", (weights, grad), value.shape, grad.dtype,
                (batch, sizes.seq_k, sizes.value_dim, sizes.seq_q),
            )  # fmt: skip
        if weights.trains:
            first = matmul_step(
                tape, "bmm", (grad, value), weights.shape, grad.dtype,
                (batch, sizes.seq_q, sizes.seq_k, sizes.value_dim),
            )  # fmt: skip
        return first, second

    tape.record((out,), (weights, value), backward)
    return out


def _scores(
    tape: Tape, query: Local, key: Local, shape: Shape, sizes: tuple[int, int, int, int]
) -> Local:
    batch, rows, columns, width = sizes
    out = matmul_step(tape, "baddbmm", (query, key), shape, query.dtype, sizes)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        first = second = None
        if query.trains:
            first = matmul_step(
                tape, "bmm", (grad, key), query.shape, grad.dtype, (batch, rows, width, columns)
            )
        if key.trains:
            second = matmul_step(
                tape, "bmm", (grad, query), key.shape, grad.dtype, (batch, columns, width, rows)
            )
        return first, second

    tape.record((out,), (query, key), backward)
    return out


def _softmax(
    tape: Tape, scores: Local, reads: Sequence[Local], op: str = "masked_softmax"
) -> Local:
    numel = scores.numel
    out = tape.emit(op, "softmax", reads, scores.shape, scores.dtype, flops=5 * numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        reads = (grad, out)
        shape = scores.shape
        return (tape.emit(op + "_backward", "softmax", reads, shape, grad.dtype, flops=4 * numel),)

    tape.record((out,), (scores,), backward)
    return out
