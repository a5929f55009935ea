"""Ops whose arguments count positions of a split letter: slices, triangles, groups."""

from __future__ import annotations

from torch import Tensor

from autopar.runtime.special.base import SpecialCall, special
from autopar.sharding.rules.views import slice_start


@special("slice.Tensor")
def slice_(call: SpecialCall, source: Tensor) -> Tensor:
    """The same block, or the same phase, of a dim whose inner (outer) letter is split."""
    dim = int(call.number(1, "dim", 0)) % source.ndim
    size, length = call.operands[0].shape[dim], call.outputs[0].shape[dim]
    start, step = slice_start(call.arg(2, "start"), size), int(call.number(4, "step", 1))
    local = call.local_size("p")
    if step > 1:
        index = [slice(None)] * dim + [slice(start, None, step)]
        return source[tuple(index)]
    return source.narrow(dim, start // length * local, local)


@special("tril triu")
def triangle(call: SpecialCall, source: Tensor) -> Tensor:
    """Keep what lies on one side of a diagonal of the global matrix."""
    rows = call.dim_positions(0, source.ndim - 2, source.device)[:, None]
    columns = call.dim_positions(0, source.ndim - 1, source.device)[None]
    offset = int(call.number(1, "diagonal", 0))
    lower = call.node.op == "aten.tril.default"
    keep = columns - rows <= offset if lower else columns - rows >= offset
    return source.where(keep, 0)


@special("transformers.grouped_mm_fallback.default _grouped_mm")
def grouped_mm(call: SpecialCall, source: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Tokens held here: every expert's end is the number of them before its global end."""
    tokens = call.positions("s", source.device)
    local = (tokens[None] < ends[:, None]).sum(1).to(ends.dtype)
    result = call.run(source, weight, local)
    assert isinstance(result, Tensor)
    return result


@special(
    "conv1d conv2d conv3d conv1d.padding conv2d.padding conv3d.padding "
    "conv_transpose1d conv_transpose2d.input conv_transpose3d.input convolution"
)
def convolution(call: SpecialCall, *operands: Tensor) -> Tensor:
    """Only the groups held here."""
    position = 8 if call.node.op == "aten.convolution.default" else 6
    result = call.run(*operands, groups=(position, call.local_size("g")))
    assert isinstance(result, Tensor)
    return result
