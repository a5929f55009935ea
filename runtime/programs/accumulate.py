"""Accumulation: gradients are written into buffers owned by the caller, where they are made.

A program that returns a gradient hands out memory that may be shared (``a + b`` gives both
parameters one tensor) or expanded from one element, so it must never be adopted. Here each
``gradient`` output becomes a ``gradient`` input, a buffer that the program overwrites (first
microbatch) or adds to. Where a gradient is the product of matrices, the product itself writes into
the buffer, which saves a tensor of the parameter's size and its page faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime.programs.edit import Editor, last_uses
from autopar.runtime.programs.program import Program

aten = torch.ops.aten

# A view of the buffer: an op and its arguments after the tensor.
_Step = tuple[Any, tuple[Any, ...]]

# Results equal to their first argument up to the shape.
_RESHAPES = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)
_SAME = frozenset({aten.alias.default, aten.detach.default, aten.clone.default})
# Overwriting and adding forms of products; the adding ones take the accumulator first. The last two
# products start with a summand.
_PRODUCTS: dict[Any, tuple[Any, Any]] = {
    aten.mm.default: (aten.mm.out, aten.addmm_.default),
    aten.bmm.default: (aten.bmm.out, aten.baddbmm_.default),
    aten.addmm.default: (aten.addmm.out, aten.addmm_.default),
    aten.baddbmm.default: (aten.baddbmm.out, aten.baddbmm_.default),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaf:
    """A summand of a gradient, and how it lies in the buffer."""

    node: fx.Node
    steps: tuple[_Step, ...]
    fused: bool


def accumulate(program: Program, *, first: bool, dtype: torch.dtype | None = None) -> Program:
    """Turn ``gradient`` outputs into writes to ``gradient`` inputs.

    Args:
        program: A backward program; not changed.
        first: Overwrite the buffers, whatever they hold; otherwise add to them.
        dtype: Dtype of the buffers; None for each gradient's own.

    Returns:
        The program without ``gradient`` outputs and with one more input per gradient: a contiguous
        buffer of the gradient's shape. A gradient that is a sum is added up in the buffer.
    """
    editor = Editor(program)
    gradients = {slot: node for slot, node in editor.outputs.items() if slot.kind == "gradient"}
    for slot in gradients:
        del editor.outputs[slot]
    editor.sync()
    order = {node: position for position, node in enumerate(editor.graph.nodes)}
    # Only what is read once can be taken apart; to be a gradient counts as being read.
    reads = Counter(gradients.values())
    reads.update({node: len(node.users) for node in editor.graph.nodes})
    once = {node for node, count in reads.items() if count == 1 and node.op == "call_function"}
    for slot, node in gradients.items():
        value = node.meta["val"]
        buffer = editor.add_input(
            slot, editor.empty(tuple(value.shape), dtype or value.dtype, value.device)
        )
        leaves = _leaves(editor, node, buffer, once)
        leaves.sort(key=lambda leaf: order[leaf.node])
        _write_all(editor, buffer, leaves, first)
    return editor.finish(program)


def finish_order(program: Program) -> tuple[str, ...]:
    """Parameters in the order in which their gradients are finished.

    Args:
        program: A program that returns gradients or writes them into buffers.
    """
    order = {node: position for position, node in enumerate(program.graph.nodes)}
    last = last_uses(program.graph)
    finished: dict[str, int] = {}
    for slot, node in program.output_nodes().items():
        if slot.kind == "gradient":
            finished[slot.name] = order[node]
    for slot, node in program.input_nodes().items():
        if slot.kind == "gradient":
            finished[slot.name] = order[last[node]]
    return tuple(sorted(finished, key=lambda name: finished[name]))


def _leaves(
    editor: Editor, root: fx.Node, buffer: fx.Node, once: Collection[fx.Node]
) -> list[_Leaf]:
    """Take a gradient apart into summands; the nodes that only joined them are erased.

    Args:
        editor: Where the gradient is no output any more.
        root: The gradient.
        buffer: Its buffer.
        once: Calls whose value nothing else needs; others stay.
    """
    leaves: list[_Leaf] = []
    pending: list[tuple[fx.Node, tuple[_Step, ...], Tensor]] = [(root, (), buffer.meta["val"])]
    while pending:
        node, steps, target = pending.pop()
        parts: list[tuple[fx.Node, tuple[_Step, ...], Tensor]] = []
        if node in once:
            parts = _parts(editor, node, steps, target)
            # Views that cancel out, such as the transpose of a transpose, are not made.
            parts = [
                (part, () if _same(inner, buffer) else path, inner) for part, path, inner in parts
            ]
        if parts:
            editor.graph.erase_node(node)
            pending += parts
        else:
            plain = node.target in _PRODUCTS and not node.kwargs
            fused = node in once and plain and node.meta["val"].dtype == target.dtype
            leaves.append(_Leaf(node=node, steps=steps, fused=fused))
    return leaves


def _parts(
    editor: Editor, node: fx.Node, steps: tuple[_Step, ...], target: Tensor
) -> list[tuple[fx.Node, tuple[_Step, ...], Tensor]]:
    """What could be written instead of `node`, and where; nothing if `node` has to be."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not isinstance(source.meta["val"], Tensor):
        return []
    if node.target is aten.add.Tensor:
        other = node.args[1]
        plain = isinstance(other, fx.Node) and other is not source and not node.kwargs
        values = [arg.meta["val"] for arg in (source, other) if isinstance(arg, fx.Node)]
        own = node.meta["val"]
        if plain and all(v.shape == own.shape and v.dtype == own.dtype for v in values):
            return [(source, steps, target), (other, steps, target)]  # type: ignore[list-item]
        return []
    step = _inverse(node, tuple(source.meta["val"].shape))
    if step is None:
        return []
    if not step:
        return [(source, steps, target)]
    try:
        inner = editor.evaluate(step[0], target, *step[1])
    except (RuntimeError, ValueError):  # the buffer cannot be viewed like this
        return []
    return [(source, (*steps, step), inner)]


def _same(target: Tensor, buffer: fx.Node) -> bool:
    """Whether a view of a buffer is the buffer, which starts its storage."""
    whole = buffer.meta["val"]
    return target.shape == whole.shape and target.stride() == whole.stride()


def _inverse(node: fx.Node, shape: tuple[int, ...]) -> _Step | tuple[()] | None:
    """The view that undoes a view; empty for one that does nothing, None for other ops."""
    target, args = node.target, node.args
    if target in _SAME:
        return ()
    if target in _RESHAPES:
        return aten.view.default, (list(shape),)
    if target is aten.t.default:
        return aten.t.default, ()
    if target is aten.transpose.int:
        return aten.transpose.int, (args[1], args[2])
    if target is aten.permute.default:
        dims = [int(dim) % len(shape) for dim in args[1]]  # type: ignore[union-attr, arg-type]
        return aten.permute.default, ([dims.index(dim) for dim in range(len(dims))],)
    return None


def _write_all(editor: Editor, buffer: fx.Node, leaves: list[_Leaf], first: bool) -> None:
    """Write summands, given in the order in which they are made, at the places of their making."""
    written: fx.Node | None = None
    before: fx.Node | None = None
    for leaf in leaves:
        node = leaf.node
        if leaf.fused:
            place = node
        elif written is not None and (node is before or node.op == "placeholder"):
            place = written.next
        else:
            place = editor.begin if node.op == "placeholder" else node.next
        target = buffer
        for op, args in leaf.steps:
            target = editor.call(place, op, target, *args, like=node)
        write = _write_product if leaf.fused else _write_tensor
        written, before = write(editor, place, target, node, first and written is None), node


def _write_tensor(
    editor: Editor, place: fx.Node, target: fx.Node, node: fx.Node, overwrite: bool
) -> fx.Node:
    op = aten.copy_.default if overwrite else aten.add_.Tensor
    return editor.call(place, op, target, node, like=node)


def _write_product(
    editor: Editor, place: fx.Node, target: fx.Node, node: fx.Node, overwrite: bool
) -> fx.Node:
    out, add = _PRODUCTS[node.target]
    args = node.args
    if overwrite:
        done = editor.call(place, out, *args, out=target, like=node)
    else:
        if len(args) == 3:
            editor.call(place, aten.add_.Tensor, target, args[0], like=node)
            args = args[1:]
        done = editor.call(place, add, target, *args, like=node)
    editor.graph.erase_node(node)
    return done
