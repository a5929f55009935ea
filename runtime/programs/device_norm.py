"""The ops of an RMS norm captured on the CPU, joined to the fused op that CUDA has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.runtime.programs.edit import Editor
from autopar.runtime.programs.join import (
    arriving,
    call,
    erase,
    groups_of,
    item,
    leaves,
    own_backward,
    put,
    shape_of,
    split_phases,
)

aten = torch.ops.aten

RMS_NORM = "aten.rms_norm.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    """One norm found in a graph.

    Attributes:
        forward: Its nodes in forward.
        backward: Its nodes in backward.
        x: What is normalised.
        weight: The scale, if there is one.
        y: The result.
        dy: Its gradient, None without a backward.
        dx: The gradient of `x`, if it is asked for.
        dweight: The gradient of `weight`, if it is asked for.
    """

    forward: list[fx.Node]
    backward: list[fx.Node]
    x: fx.Node
    weight: fx.Node | None
    y: fx.Node
    dy: fx.Node | None = None
    dx: fx.Node | None = None
    dweight: fx.Node | None = None


def join_rms_norms(editor: Editor, names: Mapping[str, str]) -> None:
    """Replace every RMS norm whose ops are as expected; the others stay as they are.

    Args:
        editor: The graph.
        names: Operator of each origin.
    """
    for group in groups_of(editor, names, RMS_NORM):
        norm = _understand(group)
        if norm is not None:
            _join(editor, norm)


def _understand(group: list[fx.Node]) -> _Norm | None:
    forward, backward = split_phases(group)
    known = set(forward)
    results = [node for node in forward if leaves(node, set(group))]
    sources = arriving(forward, known)
    if len(results) != 1:
        return None
    shape = shape_of(results[0])
    xs = [node for node in sources if shape_of(node) == shape]
    weights = [node for node in sources if shape_of(node) != shape]
    if len(xs) != 1 or len(weights) > 1:
        return None
    weight = weights[0] if weights else None
    found = _Norm(forward=forward, backward=[], x=xs[0], weight=weight, y=results[0])
    return _with_backward(found, backward) if backward else found


def _with_backward(norm: _Norm, backward: list[fx.Node]) -> _Norm | None:
    """`norm` with what its backward takes and gives; None if that is not understood."""
    given = {*norm.forward, norm.x, *([norm.weight] if norm.weight else [])}
    taken = own_backward(backward, given)
    if taken is None:
        return None
    mine, dy = taken
    ends = [node for node in mine if leaves(node, set(mine))]
    dxs = [node for node in ends if shape_of(node) == shape_of(norm.x)]
    dweights = [node for node in ends if node not in dxs]
    if len(dxs) > 1 or len(dweights) > 1:
        return None
    if dweights and (norm.weight is None or shape_of(dweights[0]) != shape_of(norm.weight)):
        return None
    return _Norm(
        forward=norm.forward, backward=mine, x=norm.x, weight=norm.weight, y=norm.y, dy=dy,
        dx=dxs[0] if dxs else None, dweight=dweights[0] if dweights else None,
    )  # fmt: skip


def _join(editor: Editor, norm: _Norm) -> None:
    x, weight, y = norm.x, norm.weight, norm.y
    shape = shape_of(x)
    dims = list(shape_of(weight)) if weight is not None else [shape[-1]]
    rstd = editor.empty(
        (*shape[: len(shape) - len(dims)], *(1 for _ in dims)), torch.float32,
        x.meta["val"].device,
    )  # fmt: skip
    made = call(
        editor, norm.forward[0], aten._fused_rms_norm.default, (x, dims, weight, None),
        (y.meta["val"], rstd),
    )  # fmt: skip
    items = [item(editor, norm.forward[0], made, index) for index in range(2)]
    if norm.dy is not None:
        ends = (norm.dx, norm.dweight)
        place = next(node for node in norm.backward if norm.dy in node.all_input_nodes)
        done = call(
            editor, place, aten._fused_rms_norm_backward.default,
            (norm.dy, x, dims, items[1], weight, [end is not None for end in ends]),
            tuple(end.meta["val"] if end is not None else None for end in ends),
        )  # fmt: skip
        for index, end in enumerate(ends):
            if end is not None:
                put(editor, end, item(editor, place, done, index))
        erase(editor, norm.backward)
    put(editor, y, items[0])
    erase(editor, norm.forward)
