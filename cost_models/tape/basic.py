"""Recorded ops out of which all others are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from autopar.cost_models.tape.tape import Tape
from autopar.cost_models.tape.tensors import (
    Local,
    Shape,
    plain,
    view_strides,
)
from autopar.cost_models.work import KernelKind, Matmul

Derivative = Mapping[int, str]
"""For each operand slot the pointwise ops of its gradient, in the order of slots in which torch
computes them. An op is what it reads: ``g`` the gradient, a digit that operand, ``o`` the result,
``_`` what the op before made, ``a`` what the first one made. ``""`` passes the gradient on."""


def only(grads: Sequence[Local | None]) -> Local:
    """The gradient of an op's only, or first, result."""
    (grad, *_) = grads
    assert grad is not None
    return grad


@lru_cache(maxsize=4096)
def _program(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def apply(
    tape: Tape,
    op: str,
    operands: Sequence[Local],
    dtype: str,
    derivative: Derivative,
    *,
    shape: Shape | None = None,
    kind: KernelKind = "elementwise",
) -> Local:
    """A pointwise op and its gradient.

    Args:
        tape: Where to note it.
        op: What to call it.
        operands: What it reads.
        dtype: Of the result.
        derivative: See `Derivative`; an operand without an entry gets no gradient.
        shape: Of the result, if not the broadcast one.
        kind: What decides its speed.
    """
    out = tape.pointwise(op, operands, dtype, shape=shape, kind=kind)
    if not tape.forward or not any(item.maker is not None for item in operands):
        return out

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        found: list[Local | None] = [None] * len(operands)
        for slot, text in derivative.items():
            if slot < len(operands) and operands[slot].maker is not None:
                found[slot] = _differentiate(tape, op, text, grad, operands, out)
        return found

    tape.record((out,), operands, backward)
    return out


def _differentiate(
    tape: Tape, op: str, text: str, grad: Local, operands: Sequence[Local], out: Local
) -> Local:
    result = first = grad
    for number, word in enumerate(_program(text)):
        reads = []
        for sign in word:
            if sign == "g":
                reads.append(grad)
            elif sign == "o":
                reads.append(out)
            elif sign == "_":
                reads.append(result)
            elif sign == "a":
                reads.append(first)
            else:
                reads.append(operands[int(sign)])
        dtype = grad.dtype if "g" in word or "_" in word or "a" in word else reads[0].dtype
        result = tape.pointwise(op + "_backward", reads, dtype)
        if number == 0:
            first = result
    return result


def cast(tape: Tape, source: Local, dtype: str) -> Local:
    """The same numbers in another dtype."""
    if source.dtype == dtype:
        return source
    return apply(tape, "_to_copy", (source,), dtype, {0: ""})


def view(tape: Tape, source: Local, shape: Shape, strides: Shape | None = None) -> Local:
    """The same elements in the same order as another shape, in the same memory."""
    if shape == source.shape and strides == source.strides:
        return source
    out = Local(shape, source.dtype, source.memory, strides)
    if source.maker is not None:
        tape.record((out,), (source,), lambda grads: (reshaped(tape, only(grads), source.shape),))
    return out


def reshaped(tape: Tape, source: Local, shape: Shape) -> Local:
    """`reshape` without its gradient."""
    if source.shape == shape:
        return source
    strides = view_strides(source.shape, source.strides, shape)
    if strides is False:
        source, strides = cloned(tape, source), None
    return Local(shape, source.dtype, source.memory, strides)  # type: ignore[arg-type]


def cloned(tape: Tape, source: Local) -> Local:
    """A contiguous copy, without its gradient."""
    return tape.emit("clone", "copy", (source,), source.shape, source.dtype)


def reshape(tape: Tape, source: Local, shape: Shape) -> Local:
    """The same elements in the same order as another shape: a view where that is possible."""
    strides = view_strides(source.shape, source.strides, shape)
    if strides is False:
        source, strides = contiguous(tape, source), None
    return view(tape, source, shape, strides)  # type: ignore[arg-type]


def contiguous(tape: Tape, source: Local) -> Local:
    """`source`, copied if it is not contiguous."""
    if source.strides is None:
        return source
    out = cloned(tape, source)
    if source.maker is not None:
        tape.record((out,), (source,), lambda grads: grads)
    return out


def permute(tape: Tape, source: Local, dims: Sequence[int]) -> Local:
    """A view whose dim i is dim ``dims[i]``."""
    if list(dims) == list(range(len(dims))):
        return source
    back = [0] * len(dims)
    for place, dim in enumerate(dims):
        back[dim] = place
    out = permuted(source, dims)
    if source.maker is not None:
        tape.record((out,), (source,), lambda grads: (permuted(only(grads), back),))
    return out


def permuted(source: Local, dims: Sequence[int]) -> Local:
    """`permute` without its gradient."""
    strides = source.full_strides()
    shape = tuple([source.shape[dim] for dim in dims])
    moved = tuple([strides[dim] for dim in dims])
    return Local(shape, source.dtype, source.memory, plain(shape, moved))


def transpose(tape: Tape, source: Local, first: int, second: int) -> Local:
    """A view with two dims exchanged."""
    dims = list(range(source.ndim))
    dims[first], dims[second] = dims[second], dims[first]
    return permute(tape, source, dims)


def expand(tape: Tape, source: Local, shape: Shape) -> Local:
    """A view that repeats dims of size 1, and new ones in front."""
    if shape == source.shape:
        return source
    out = expanded(source, shape)
    tape.record((out,), (source,), lambda grads: grads)  # the tape sums
    return out


def expanded(source: Local, shape: Shape) -> Local:
    """`expand` without its gradient."""
    lead = len(shape) - source.ndim
    own = source.full_strides()
    strides = (0,) * lead + tuple(
        [
            0 if size == 1 and shape[lead + dim] != 1 else own[dim]
            for dim, size in enumerate(source.shape)
        ]
    )
    return Local(shape, source.dtype, source.memory, plain(shape, strides))


def narrow(tape: Tape, source: Local, dim: int, length: int, step: int = 1) -> Local:
    """A view of `length` positions of a dim; which, does not matter here."""
    if length == source.shape[dim] and step == 1:
        return source
    out = narrowed(source, dim, length, step)
    if source.maker is not None:

        def backward(grads: list[Local | None]) -> Sequence[Local | None]:
            (grad,) = grads
            assert grad is not None
            return (tape.emit("slice_backward", "copy", (grad,), source.shape, grad.dtype),)

        tape.record((out,), (source,), backward)
    return out


def narrowed(source: Local, dim: int, length: int, step: int = 1) -> Local:
    """`narrow` without its gradient."""
    shape = (*source.shape[:dim], length, *source.shape[dim + 1 :])
    strides = source.full_strides()
    if step != 1:
        strides = (*strides[:dim], strides[dim] * step, *strides[dim + 1 :])
    return Local(shape, source.dtype, source.memory, plain(shape, strides))


def split(tape: Tape, source: Local, dim: int, sizes: Sequence[int]) -> list[Local]:
    """Views of consecutive pieces of a dim."""
    parts = [narrowed(source, dim, size) for size in sizes]
    if source.maker is not None:

        def backward(grads: list[Local | None]) -> Sequence[Local | None]:
            like = next(grad for grad in grads if grad is not None)
            given = [
                tape.emit("zeros", "elementwise", (), part.shape, like.dtype)
                if grad is None
                else grad
                for grad, part in zip(grads, parts, strict=True)
            ]
            return (joined(tape, given, dim),)

        tape.record(parts, (source,), backward)
    return parts


def joined(tape: Tape, parts: Sequence[Local], dim: int) -> Local:
    """`cat` without its gradient."""
    first = parts[0]
    total = sum([part.shape[dim] for part in parts])
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    return tape.emit("cat", "copy", parts, shape, first.dtype)


def cat(tape: Tape, parts: Sequence[Local], dim: int, dtype: str) -> Local:
    """Pieces joined along a dim, copied."""
    out = joined(tape, parts, dim)
    if out.dtype != dtype:
        out.dtype = dtype

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return [narrowed(grad, dim, part.shape[dim]) for part in parts]

    tape.record((out,), parts, backward)
    return out


def detach(source: Local) -> Local:
    """The same without a gradient."""
    return Local(source.shape, source.dtype, source.memory, source.strides)


def reduced_shape(shape: Shape, dims: Sequence[int], keepdim: bool) -> Shape:
    """Shape after reducing `dims`."""
    if keepdim:
        return tuple([1 if dim in dims else size for dim, size in enumerate(shape)])
    return tuple([size for dim, size in enumerate(shape) if dim not in dims])


def total(
    tape: Tape,
    source: Local,
    dims: Sequence[int],
    *,
    keepdim: bool = False,
    dtype: str | None = None,
    op: str = "sum",
) -> Local:
    """A sum over dims, or a mean: its gradient is one more op."""
    kept = reduced_shape(source.shape, dims, True)
    shape = kept if keepdim else reduced_shape(source.shape, dims, False)
    out = tape.emit(op, "reduction", (source,), shape, dtype or source.dtype, flops=source.numel)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = expanded(reshaped(tape, only(grads), kept), source.shape)
        return (tape.pointwise("div", (grad,), grad.dtype) if op == "mean" else grad,)

    tape.record((out,), (source,), backward)
    return out


def matmul_step(
    tape: Tape,
    op: str,
    reads: Sequence[Local],
    shape: Shape,
    dtype: str,
    sizes: tuple[int, int, int, int],
    kind: KernelKind = "matmul",
) -> Local:
    """A step that multiplies matrices of sizes ``(batch, m, n, k)``."""
    batch, m, n, k = sizes
    out = tape.emit(op, kind, reads, shape, dtype, flops=2 * batch * m * n * k)
    tape.last().detail = Matmul(batch=batch, m=m, n=n, k=k)
    return out


def mm(tape: Tape, left: Local, right: Local) -> Local:
    """``m k, k n -> m n``."""
    (m, k), n = left.shape, right.shape[1]
    out = matmul_step(tape, "mm", (left, right), (m, n), left.dtype, (1, m, n, k))

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        second = first = None
        if right.trains:
            second = _product(tape, "mm", (left, grad), right, (1, k, n, m))
        if left.trains:
            first = _product(tape, "mm", (grad, right), left, (1, m, k, n))
        return first, second

    tape.record((out,), (left, right), backward)
    return out


def bmm(tape: Tape, left: Local, right: Local) -> Local:
    """``b m k, b k n -> b m n``."""
    (batch, m, k), n = left.shape, right.shape[2]
    out = matmul_step(tape, "bmm", (left, right), (batch, m, n), left.dtype, (batch, m, n, k))

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        second = first = None
        if right.trains:
            second = _product(tape, "bmm", (left, grad), right, (batch, k, n, m), contiguous=True)
        if left.trains:
            first = _product(tape, "bmm", (grad, right), left, (batch, m, k, n), contiguous=True)
        return first, second

    tape.record((out,), (left, right), backward)
    return out


def _product(
    tape: Tape,
    op: str,
    reads: Sequence[Local],
    like: Local,
    sizes: tuple[int, int, int, int],
    *,
    contiguous: bool = False,
) -> Local:
    """The gradient of an operand of a product; that of a transposed matrix comes transposed."""
    out = matmul_step(tape, op, reads, like.shape, reads[0].dtype, sizes)
    turned = not contiguous and like.ndim == 2 and like.full_strides()[0] == 1
    if turned and like.shape[0] > 1:
        out.strides = plain(like.shape, (1, like.shape[0]))
    return out


def addmm(tape: Tape, bias: Local, left: Local, right: Local) -> Local:
    """``m k, k n -> m n`` plus a bias that is broadcast to it."""
    (m, k), n = left.shape, right.shape[1]
    out = matmul_step(tape, "addmm", (bias, left, right), (m, n), left.dtype, (1, m, n, k))

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        first = second = None
        if left.trains:
            first = _product(tape, "mm", (grad, right), left, (1, m, k, n))
        if right.trains:
            second = _product(tape, "mm", (left, grad), right, (1, k, n, m))
        return grad if bias.trains else None, first, second

    tape.record((out,), (bias, left, right), backward)
    return out
