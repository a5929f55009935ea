"""Products of matrices."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, apply_cast, expansion
from autopar.cost_models.tape.basic import (
    addmm,
    apply,
    bmm,
    expand,
    matmul_step,
    mm,
    only,
    permute,
    reshape,
    total,
    transpose,
    view,
)
from autopar.cost_models.tape.tape import Tape
from autopar.cost_models.tape.tensors import Local, broadcast, view_strides


def _operands(call: OpCall) -> list[Local]:
    """Operands in the dtype of the product: autocast casts them."""
    if not call.node.context:
        return list(call.operands)
    return [apply_cast(call, x, call.dtype) if x.is_floating else x for x in call.operands]


@expansion("linear")
def _linear(call: OpCall) -> Sequence[Local]:
    source, weight, *rest = _operands(call)
    return (linear(call.tape, source, weight, rest[0] if rest else None),)


def linear(tape: Tape, source: Local, weight: Local, bias: Local | None) -> Local:
    """``... k, n k, n? -> ... n`` as ``at::linear`` does it (aten/src/ATen/native/Linear.cpp)."""
    turned = transpose(tape, weight, 0, 1)
    shape = (*source.shape[:-1], weight.shape[0])
    if bias is not None and source.ndim == 2:
        return addmm(tape, bias, source, turned)
    if bias is not None and source.strides is None and source.ndim > 1:
        rows = view(tape, source, (math.prod(source.shape[:-1]), source.shape[-1]))
        return view(tape, addmm(tape, bias, rows, turned), shape)
    out = matmul(tape, source, turned)
    if bias is None:
        return out
    return apply(tape, "add", (out, bias), out.dtype, {0: "", 1: ""})


@expansion("matmul mm bmm mv dot vdot inner outer ger")
def _matmul(call: OpCall) -> Sequence[Local]:
    left, right = _operands(call)
    tape, base = call.tape, call.base
    if base in ("outer", "ger"):
        column = view(tape, left, (left.numel, 1))
        return (apply(tape, "mul", (column, right), call.dtype, {1: "g0", 0: "g1"}),)
    if base == "inner" and right.ndim > 1:
        right = transpose(tape, right, 0, 1)
    if base == "bmm":
        return (bmm(tape, left, right),)
    out = matmul(tape, left, right)
    return (reshape(tape, out, call.shape),)


def matmul(tape: Tape, left: Local, right: Local) -> Local:
    """Any product, folded into one of matrices or batched (``_matmul_impl``, LinearAlgebra.cpp)."""
    if left.ndim == 1 and right.ndim == 1:
        row = view(tape, left, (1, left.numel))
        return view(tape, mm(tape, row, view(tape, right, (right.numel, 1))), ())
    if left.ndim == 1:
        out = matmul(tape, view(tape, left, (1, left.numel)), right)
        return reshape(tape, out, (*out.shape[:-2], out.shape[-1]))
    if right.ndim == 1:
        out = matmul(tape, left, reshape(tape, right, (right.numel, 1)))
        return view(tape, out, out.shape[:-1])
    if left.ndim == 2 and right.ndim == 2:
        return mm(tape, left, right)
    if _folds(left, right):
        return _folded(tape, left, right)
    if _folds(right, left):
        turned = matmul(tape, _turned(tape, right), _turned(tape, left))
        return _turned(tape, turned)
    return _batched(tape, left, right)


def _folds(wide: Local, narrow: Local) -> bool:
    """Whether the batch of `wide` becomes rows of one product (``should_fold``)."""
    if wide.ndim < 3 or narrow.ndim > 2:
        return False
    if narrow.trains:
        return True
    rows = (math.prod(wide.shape[:-1]), wide.shape[-1])
    return view_strides(wide.shape, wide.strides, rows) is not False


def _turned(tape: Tape, value: Local) -> Local:
    return transpose(tape, value, value.ndim - 2, value.ndim - 1)


def _folded(tape: Tape, left: Local, right: Local) -> Local:
    rows = reshape(tape, left, (math.prod(left.shape[:-1]), left.shape[-1]))
    out = mm(tape, rows, right)
    return view(tape, out, (*left.shape[:-1], right.shape[-1]))


def _batched(tape: Tape, left: Local, right: Local) -> Local:
    batch = broadcast([left.shape[:-2], right.shape[:-2]])
    count = math.prod(batch)
    parts = []
    for side in (left, right):
        wide = expand(tape, side, (*batch, *side.shape[-2:]))
        parts.append(reshape(tape, wide, (count, *side.shape[-2:])))
    out = bmm(tape, *parts)
    return view(tape, out, (*batch, *out.shape[-2:]))


@expansion("addmm addmv baddbmm addbmm addr")
def _summed(call: OpCall) -> Sequence[Local]:
    bias, left, right = _operands(call)
    tape, base = call.tape, call.base
    if base == "addmm":
        return (addmm(tape, bias, left, right),)
    if base == "addr":
        column = view(tape, left, (left.numel, 1))
        product = apply(tape, "mul", (column, right), call.dtype, {1: "g0", 0: "g1"})
    elif base == "addmv":
        product = matmul(tape, left, right)
    else:
        product = bmm(tape, left, right)
        if base == "addbmm":
            product = total(tape, product, (0,))
    out = apply(tape, base, (bias, product), call.dtype, {0: "", 1: ""}, shape=call.shape)
    return (out,)


@expansion("bilinear")
def _bilinear(call: OpCall) -> Sequence[Local]:
    """``... i, ... j, o i j``: one product per output, over rows."""
    first, second, weight, *rest = call.operands
    tape = call.tape
    rows = math.prod(first.shape[:-1])
    outer = apply(
        tape,
        "mul",
        (
            reshape(tape, first, (rows, first.shape[-1], 1)),
            reshape(tape, second, (rows, 1, second.shape[-1])),
        ),
        call.dtype,
        {1: "g0", 0: "g1"},
    )
    flat = reshape(tape, weight, (weight.shape[0], math.prod(weight.shape[1:])))
    out = linear(tape, reshape(tape, outer, (rows, flat.shape[1])), flat, rest[0] if rest else None)
    return (reshape(tape, out, call.shape),)


@expansion("grouped_mm_fallback _grouped_mm")
def _grouped_mm(call: OpCall) -> Sequence[Local]:
    source, weight, *ends = call.operands
    return (grouped_product(call.tape, source, weight, ends, call.dtype),)


def grouped_product(
    tape: Tape, source: Local, weight: Local, ends: Sequence[Local], dtype: str
) -> Local:
    """Rows sorted by group, a matrix per group: ``s k, e k n -> s n``."""
    (rows, k), (groups, _, n) = source.shape, weight.shape
    each = -(-rows // groups)
    sizes = (groups, each, n, k)
    flops = 2 * rows * n * k

    def product(reads: Sequence[Local], like: Local, order: tuple[int, int, int, int]) -> Local:
        out = matmul_step(
            tape, "_grouped_mm", reads, like.shape, reads[0].dtype, order, "grouped_matmul"
        )
        tape.last().flops = flops
        return out

    like = Local((rows, n), dtype, source.memory)
    out = product((source, weight, *ends), like, sizes)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        first = (
            product((grad, weight, *ends), source, (groups, each, k, n)) if source.trains else None
        )
        second = (
            product((source, grad, *ends), weight, (groups, k, n, each)) if weight.trains else None
        )
        return [first, second, *[None] * len(ends)]

    tape.record((out,), (source, weight, *ends), backward)
    return out


@expansion("einsum")
def _einsum(call: OpCall) -> Sequence[Local]:
    """Products from left to right, as ``at::einsum`` without a path does them."""
    equation = call.arg(0, "equation")
    assert isinstance(equation, str)
    operands = _operands(call)
    terms, result = _terms(equation.replace(" ", ""), [x.ndim for x in operands])
    for place, term in enumerate(terms):
        operands[place], terms[place] = _diagonals(operands[place], term)
    counts: dict[str, int] = {}
    for term in terms:
        for letter in term:
            counts[letter] = counts.get(letter, 0) + 1
    left, letters = operands[0], terms[0]
    for right, term in zip(operands[1:], terms[1:], strict=True):
        for letter in set(letters) & set(term):
            counts[letter] -= 1
        summed = [x for x in dict.fromkeys(letters + term)
                  if x not in result and counts[x] == 1]  # fmt: skip
        left, letters = _pair(call.tape, (left, letters), (right, term), summed)
    gone = [place for place, letter in enumerate(letters) if letter not in result]
    if gone:
        left = total(call.tape, left, gone)
        letters = [letter for letter in letters if letter in result]
    out = permute(call.tape, left, [letters.index(letter) for letter in result])
    return (out,)


def _diagonals(value: Local, letters: list[str]) -> tuple[Local, list[str]]:
    """A view of the places where letters that occur twice agree."""
    once = list(dict.fromkeys(letters))
    if len(once) == len(letters):
        return value, letters
    strides = value.full_strides()
    shape = tuple(value.shape[letters.index(x)] for x in once)
    moved = tuple(
        sum(stride for stride, y in zip(strides, letters, strict=True) if y == x) for x in once
    )
    return Local(shape, value.dtype, value.memory, moved), once


def _terms(equation: str, ndims: list[int]) -> tuple[list[list[str]], list[str]]:
    """Letters of every operand and of the result; an ellipsis becomes digits."""
    left, arrow, right = equation.partition("->")
    texts = left.split(",")
    width = max(
        (ndim - len(text) + 3 for text, ndim in zip(texts, ndims, strict=True) if "..." in text),
        default=0,
    )

    def letters(text: str, ndim: int) -> list[str]:
        before, dots, after = text.partition("...")
        batch = ndim - len(before) - len(after) if dots else 0
        return [*before, *(f"{i}" for i in range(width - batch, width)), *after]

    terms = [letters(text, ndim) for text, ndim in zip(texts, ndims, strict=True)]
    if not arrow:
        every = re.findall("[A-Za-z]", left)
        once = sorted(name for name in set(every) if every.count(name) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    return terms, letters(right, len(right) - 3 + width if "..." in right else len(right))


def _pair(
    tape: Tape,
    first: tuple[Local, list[str]],
    second: tuple[Local, list[str]],
    summed: list[str],
) -> tuple[Local, list[str]]:
    """One product of two operands (``sumproduct_pair``): batched, over what both have."""
    (left, a), (right, b) = first, second
    sizes = dict(zip(a, left.shape, strict=True)) | {
        letter: size for letter, size in zip(b, right.shape, strict=True) if size > 1
    }
    shared = [x for x in a if x in b and x not in summed]
    rows = [x for x in a if x not in b and x not in summed]
    columns = [x for x in b if x not in a and x not in summed]
    inner = [x for x in summed if x in a and x in b]
    for letter in [x for x in summed if x not in inner]:
        if letter in a:
            left, a = total(tape, left, (a.index(letter),)), [x for x in a if x != letter]
        else:
            right, b = total(tape, right, (b.index(letter),)), [x for x in b if x != letter]
    if not inner:
        order = [*shared, *rows, *columns]
        parts = [_spread(tape, side, have, order) for side, have in ((left, a), (right, b))]
        return apply(tape, "mul", parts, left.dtype, {1: "g0", 0: "g1"}), order

    def many(letters: list[str]) -> int:
        return math.prod([sizes[x] for x in letters])

    batch, m, n, k = many(shared), many(rows), many(columns), many(inner)
    left = permute(tape, left, [a.index(x) for x in (*shared, *rows, *inner)])
    right = permute(tape, right, [b.index(x) for x in (*shared, *inner, *columns)])
    out = bmm(tape, reshape(tape, left, (batch, m, k)), reshape(tape, right, (batch, k, n)))
    order = [*shared, *rows, *columns]
    return view(tape, out, tuple(sizes[x] for x in order)), order


def _spread(tape: Tape, value: Local, have: list[str], order: list[str]) -> Local:
    """A view of `value` whose dims stand in `order`, 1 where it has none."""
    moved = permute(tape, value, [have.index(x) for x in order if x in have])
    sizes = iter(moved.shape)
    return reshape(tape, moved, tuple(next(sizes) if x in have else 1 for x in order))


@expansion("cdist pairwise_distance cosine_similarity linalg_vecdot linalg_cross")
def _distances(call: OpCall) -> Sequence[Local]:
    """Two operands and a result that are kept."""
    tape, operands = call.tape, call.operands
    out = tape.emit(call.base, "reduction", operands, call.shape, call.dtype)
    tape.last().flops = 3 * max(x.numel for x in operands)
    if call.base == "cdist":
        tape.last().flops = 3 * out.numel * operands[0].shape[-1]

    kept = (out,) if call.base in ("cdist", "cosine_similarity", "pairwise_distance") else ()

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return [
            tape.emit(
                call.base + "_backward", "reduction", (grad, *operands, *kept), x.shape, grad.dtype,
                flops=3 * x.numel,
            )
            if x.trains
            else None
            for x in operands
        ]  # fmt: skip

    tape.record((out,), operands, backward)
    return (out,)
