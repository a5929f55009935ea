"""What the ops of a program do: views, writes, random draws, effects."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar.runtime.programs import compat, ops

aten = torch.ops.aten

# Views whose schema does not say so.
_HIDDEN_VIEWS = (aten._unsafe_view.default,)
# Ops that write operands although their schema denies it, with the position of the flag that makes
# them do so and of the first of those operands.
_HIDDEN_WRITES = {"aten.native_batch_norm.default": (5, 3), "aten.cudnn_batch_norm.default": (5, 3)}
# Fresh memory that nothing else holds.
_CREATIONS = frozenset(
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_strided.default",
        "empty_like.default",
        "new_empty.default",
        "new_zeros.default",
        "zeros.default",
        "zeros_like.default",
        "full.default",
    )
)


@cache
def is_view(target: Any) -> bool:
    """Whether the result of an op shares memory with an operand (its first)."""
    if target in _HIDDEN_VIEWS:
        return True
    schema = compat.schema_of(target)
    if schema is None or not schema.arguments or not schema.returns:
        return False
    first = schema.arguments[0].alias_info
    result = schema.returns[0].alias_info
    return first is not None and not first.is_write and result is not None


def is_view_node(node: fx.Node) -> bool:
    """Whether `node` is a view, or one of the views that a split gives."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view_node(source)
    return is_view(node.target)


@cache
def _written(target: Any) -> tuple[tuple[int, str, bool], ...]:
    schema = compat.schema_of(target)
    if schema is None:
        return ()
    return tuple(
        (position, argument.name, argument.kwarg_only)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory `node` writes."""
    if node.op != "call_function":
        return []
    if node.target is ops.start_all_reduce_:
        return [node.all_input_nodes[0]]
    found = []
    for position, name, by_name in _written(node.target):
        value = node.kwargs.get(name)
        if value is None and not by_name and position < len(node.args):
            value = node.args[position]
        if isinstance(value, fx.Node):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += [item for item in value if isinstance(item, fx.Node)]
    hidden = _HIDDEN_WRITES.get(str(node.target))
    if hidden and node.args[hidden[0]]:
        found += [arg for arg in node.args[hidden[1] : hidden[1] + 2] if isinstance(arg, fx.Node)]
    return found


def is_random(node: fx.Node) -> bool:
    """Whether running `node` twice may give two results."""
    target = node.target
    if not isinstance(target, compat.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    # Attention is tagged for its dropout, which is usually off.
    for position, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            value = (
                node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
            )
            return value not in (None, 0, 0.0)
    return True


def is_creation(node: fx.Node) -> bool:
    """Whether `node` makes memory that nothing else holds."""
    return str(node.target) in _CREATIONS


def is_collective(node: fx.Node) -> bool:
    """Whether `node` makes ranks meet (starts do, waits do not)."""
    return node.op == "call_function" and ops.is_collective(node.target)


def has_effect(node: fx.Node) -> bool:
    """Whether `node` must run although nothing reads its result.

    A collective must: another rank may read what this one does not.
    """
    return is_collective(node) or node.target is ops.wait or bool(written(node))


def memory_root(node: fx.Node) -> fx.Node:
    """The node that made the memory `node` lies in."""
    while True:
        if node.op != "call_function":
            return node
        if node.target is ops.wait:
            start = node.args[0]
            if isinstance(start, fx.Node) and start.target is ops.start_all_reduce_:
                node = start.all_input_nodes[0]
                continue
            return node
        targets = written(node)
        if targets and node.target is not ops.start_all_reduce_:
            node = targets[0]
        elif is_view_node(node):
            node = node.all_input_nodes[0]
        else:
            return node
