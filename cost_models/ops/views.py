"""Ops that look at the same memory otherwise, or copy it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, expansion
from autopar.cost_models.tape.basic import (
    apply,
    cat,
    contiguous,
    expand,
    narrow,
    only,
    permute,
    reshape,
    split,
    view,
)
from autopar.cost_models.tape.tensors import Local, Shape, plain
from autopar.graph.views import permutation, split_dim

_RESHAPES = """
view _unsafe_view reshape flatten unflatten view_as reshape_as squeeze unsqueeze ravel
"""
_PERMUTES = "permute transpose t numpy_T mT movedim swapaxes swapdims"


@expansion(_RESHAPES)
def _reshape(call: OpCall) -> Sequence[Local]:
    return (reshape(call.tape, call.operands[0], call.shape),)


@expansion(_PERMUTES)
def _permute(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    return (permute(call.tape, source, permutation(call.node, source.ndim)),)


@expansion("expand expand_as broadcast_to")
def _expand(call: OpCall) -> Sequence[Local]:
    return (expand(call.tape, call.operands[0], call.shape),)


@expansion("slice")
def _slice(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    dim = int(call.number(1, "dim", 0)) % source.ndim
    return (narrow(call.tape, source, dim, call.shape[dim], int(call.number(4, "step", 1))),)


@expansion("select narrow")
def _select(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    dim = int(call.number(1, "dim", 0)) % source.ndim
    length = 1 if call.base == "select" else call.shape[dim]
    row = narrow(call.tape, source, dim, length)
    return (reshape(call.tape, row, call.shape),)


@expansion("split_with_sizes split chunk tensor_split unbind")
def _split(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    dim = split_dim(call.node, call.specs[0], ())
    if call.base == "unbind":
        parts = split(call.tape, source, dim, [1] * source.shape[dim])
        return [reshape(call.tape, part, call.shape) for part in parts]
    return split(call.tape, source, dim, [shape[dim] for shape, _ in call.outputs])


@expansion("split_with_sizes_copy")
def _split_copy(call: OpCall) -> Sequence[Local]:
    return [contiguous(call.tape, part) for part in _split(call)]


@expansion("cat concat")
def _cat(call: OpCall) -> Sequence[Local]:
    parts = [part for part in call.operands if part.shape != (0,)]
    dim = int(call.number(1, "dim", 0)) % max(parts[0].ndim, 1)
    return (cat(call.tape, parts, dim, call.dtype),)


@expansion("stack")
def _stack(call: OpCall) -> Sequence[Local]:
    ndim = len(call.shape)
    dim = int(call.number(1, "dim", 0)) % ndim
    rows = [
        view(call.tape, part, (*part.shape[:dim], 1, *part.shape[dim:]), _unsqueezed(part, dim))
        for part in call.operands
    ]
    return (cat(call.tape, rows, dim, call.dtype),)


def _unsqueezed(part: Local, dim: int) -> Shape | None:
    if part.strides is None:
        return None
    shape = (*part.shape[:dim], 1, *part.shape[dim:])
    return plain(shape, (*part.strides[:dim], 1, *part.strides[dim:]))


_COPIES = """
repeat tile flip roll constant_pad_nd tril triu diag_embed unfold_copy pixel_shuffle
pixel_unshuffle channel_shuffle slice_scatter select_scatter trace linalg_diagonal
repeat_interleave
"""
_PADS = """
reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
replication_pad3d
"""


@expansion(_PADS)
def _padded(call: OpCall) -> Sequence[Local]:
    return copied(call, call.operands)


@expansion("pad")
def _pad(call: OpCall) -> Sequence[Local]:
    constant = call.arg(2, "mode", "constant") in ("constant", "circular")
    return copied(call, () if constant else call.operands)


@expansion(_COPIES)
def _copied(call: OpCall) -> Sequence[Local]:
    return copied(call)


def copied(call: OpCall, kept: Sequence[Local] = ()) -> Sequence[Local]:
    """A copy in other places; so is its gradient, for which `kept` is read."""
    tape, operands = call.tape, call.operands
    out = tape.emit(call.base, "copy", operands, call.shape, call.dtype)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return [
            tape.emit(call.base + "_backward", "copy", (grad, *kept), operand.shape, grad.dtype)
            if operand.trains
            else None
            for operand in operands
        ]

    tape.record((out,), operands, backward)
    return (out,)


@expansion("diagonal unfold")
def _strided(call: OpCall) -> Sequence[Local]:
    """A view along some diagonal or of windows; its gradient fills a whole tensor."""
    (source,) = call.operands
    tape = call.tape
    # Of its strides only that they are not contiguous matters.
    strides = tuple(2 * stride for stride in source.full_strides())
    shown = (*strides[: len(call.shape)], *(1,) * (len(call.shape) - len(strides)))
    out = Local(call.shape, call.dtype, source.memory, plain(call.shape, shown))

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (tape.emit(call.base + "_backward", "copy", (grad,), source.shape, grad.dtype),)

    tape.record((out,), (source,), backward)
    return (out,)


@expansion("meshgrid")
def _meshgrid(call: OpCall) -> Sequence[Local]:
    found = []
    for place, operand in enumerate(call.operands):
        shape = call.outputs[place][0]
        lead = [1] * len(shape)
        sizes = [dim for dim, size in enumerate(shape) if size == operand.numel]
        if sizes:
            lead[min(sizes, key=lambda dim: abs(dim - place))] = operand.numel
        row = reshape(call.tape, operand, tuple(lead))
        found.append(expand(call.tape, row, shape))
    return found


@expansion("diff")
def _diff(call: OpCall) -> Sequence[Local]:
    """Differences of neighbours: what is joined first, then one subtraction."""
    tape = call.tape
    source = call.operands[0]
    dim = int(call.number(2, "dim", -1)) % source.ndim
    if len(call.operands) > 1:
        source = cat(tape, call.operands, dim, call.dtype)
    ends = [narrow(tape, source, dim, call.shape[dim]) for _ in range(2)]
    return (apply(tape, "sub", ends, call.dtype, {1: "g", 0: ""}, shape=call.shape),)


@expansion("affine_grid_generator one_hot")
def _made(call: OpCall) -> Sequence[Local]:
    numel = math.prod(call.shape)
    return (
        call.tape.emit(
            call.base, "elementwise", call.operands, call.shape, call.dtype, flops=numel
        ),
    )
