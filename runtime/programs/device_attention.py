"""Attention with a mask that is trained, captured on the CPU as ops, joined to CUDA's kernel.

The CPU's fused kernel gives no gradient of a mask, so that its ops are captured one by one. CUDA's
memory-efficient kernel gives it (``_scaled_dot_product_efficient_attention_backward``, whose mask
of one sample gets a gradient of every sample first).
"""

from __future__ import annotations

import math
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

ATTENTION = "aten.scaled_dot_product_attention.default"
_SOFTMAX = frozenset((aten._safe_softmax.default, aten._softmax.default))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    """One attention found in a graph.

    Attributes:
        forward: Its nodes in forward.
        backward: Its nodes in backward.
        operands: Query, key, value and mask.
        out: The result.
        dy: Its gradient, None without a backward.
        gradients: Those of the operands, None of what has none.
    """

    forward: list[fx.Node]
    backward: list[fx.Node]
    operands: tuple[fx.Node, fx.Node, fx.Node, fx.Node]
    out: fx.Node
    dy: fx.Node | None
    gradients: tuple[fx.Node | None, ...]


def join_attentions(editor: Editor, names: Mapping[str, str]) -> None:
    """Replace every attention whose ops are as expected; the others stay as they are.

    Args:
        editor: The graph.
        names: Operator of each origin.
    """
    for group in groups_of(editor, names, ATTENTION):
        found = _understand(group)
        if found is not None:
            _join(editor, found)


def _understand(group: list[fx.Node]) -> _Attention | None:
    forward, backward = split_phases(group)
    products = [node for node in forward if node.target is aten.bmm.default]
    results = [node for node in forward if leaves(node, set(group))]
    if len(products) != 2 or len(results) != 1:
        return None
    softmax = [node for node in forward if node.target in _SOFTMAX]
    sources = arriving(forward, set(forward))
    if len(softmax) != 1 or len(sources) != 4:
        return None
    scored = _reached(products[0], forward)
    masks = [node for node in _reached(softmax[0], forward) if node not in scored]
    values = [node for node in sources if node not in (*scored, *masks)]
    if (len(scored), len(masks), len(values)) != (2, 1, 1):
        return None
    query, key = scored
    if query.meta["val"].dtype == torch.float64:  # no kernel takes it
        return None
    operands = query, key, values[0], masks[0]
    ends = _gradients(backward, {*forward, *operands}, operands)
    if backward and ends is None:
        return None
    mine, dy, gradients = ends or ([], None, (None,) * 4)
    return _Attention(
        forward=forward, backward=mine, operands=operands, out=results[0], dy=dy,
        gradients=gradients,
    )  # fmt: skip


def _reached(node: fx.Node, group: list[fx.Node]) -> list[fx.Node]:
    """What a node of a group is computed from, outside of the group."""
    mine, found, left = set(group), dict[fx.Node, None](), [node]
    while left:
        for source in left.pop().all_input_nodes[::-1]:
            if source in mine:
                left.append(source)
            else:
                found[source] = None
    return list(found)


def _gradients(
    backward: list[fx.Node], given: set[fx.Node], operands: tuple[fx.Node, ...]
) -> tuple[list[fx.Node], fx.Node, tuple[fx.Node | None, ...]] | None:
    """Nodes of a backward, the gradient that it takes and those that it gives; None if unclear."""
    taken = own_backward(backward, given)
    if taken is None:
        return None
    mine, dy = taken
    ends = [node for node in mine if leaves(node, set(mine))]
    gradients = list[fx.Node | None]()
    for operand in operands:
        mate = next((end for end in ends if shape_of(end) == shape_of(operand)), None)
        gradients.append(mate)
        if mate is not None:
            ends.remove(mate)
    return None if ends else (mine, dy, tuple(gradients))


def _join(editor: Editor, found: _Attention) -> None:
    query, key, _, mask = found.operands
    batch, heads, rows = shape_of(query)[:3]
    device, place = query.meta["val"].device, found.forward[0]

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return editor.empty(shape, dtype, device)

    saved = tensor((batch, heads, math.ceil(rows / 32) * 32), torch.float32)
    seed, offset = (tensor((), torch.int64) for _ in range(2))
    made = call(
        editor, place, aten._scaled_dot_product_efficient_attention.default,
        (*found.operands, True), (found.out.meta["val"], saved, seed, offset),
    )  # fmt: skip
    items = [item(editor, place, made, index) for index in range(4)]
    if found.dy is not None:
        place = next(node for node in found.backward if found.dy in node.all_input_nodes)
        wanted = [end is not None for end in found.gradients]
        whole = (batch, heads, rows, shape_of(key)[2])
        values = [end.meta["val"] if end is not None else None for end in found.gradients]
        if wanted[3]:
            values[3] = tensor(whole, mask.meta["val"].dtype)
        done = call(
            editor, place, aten._scaled_dot_product_efficient_attention_backward.default,
            (found.dy, *found.operands, *items, 0.0, wanted), tuple(values),
        )  # fmt: skip
        for index, end in enumerate(found.gradients):
            if end is None:
                continue
            gradient = item(editor, place, done, index)
            if shape_of(gradient) != shape_of(end):  # of every sample, and the mask has one
                dims = [dim for dim in range(4) if shape_of(end)[dim] != whole[dim]]
                gradient = call(
                    editor, place, aten.sum.dim_IntList, (gradient, dims, True), end.meta["val"]
                )
            put(editor, end, gradient)
        erase(editor, found.backward)
    put(editor, found.out, items[0])
    erase(editor, found.forward)
