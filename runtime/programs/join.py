"""What finding a group of ops in a captured graph, and joining it to one op, needs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx

from autopar.runtime.programs.edit import Editor


def groups_of(editor: Editor, names: Mapping[str, str], op: str) -> list[list[fx.Node]]:
    """Nodes of every call of an operator, in order.

    Args:
        editor: The graph.
        names: Operator of each origin.
        op: Its name.
    """
    found: dict[str, list[fx.Node]] = {}
    for node in editor.graph.nodes:
        origin = node.meta.get("origin", "")
        if node.op == "call_function" and names.get(origin) == op:
            found.setdefault(origin, []).append(node)
    return list(found.values())


def split_phases(group: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]]:
    """Nodes of forward, and those of backward."""
    forward = [node for node in group if node.meta.get("phase") == "forward"]
    return forward, [node for node in group if node.meta.get("phase") != "forward"]


def own_backward(
    backward: list[fx.Node], given: Collection[fx.Node]
) -> tuple[list[fx.Node], fx.Node] | None:
    """Nodes of a backward, and the one gradient that they take; None if they take other things.

    A sum with a gradient that went round the op, or comes from another one, is none of them.

    Args:
        backward: Nodes of the op's origin, in order.
        given: What of the op's forward, and its operands, they may take.
    """
    dy: fx.Node | None = None
    mine: list[fx.Node] = []
    for node in backward:
        new = [n for n in node.all_input_nodes if n not in given and n not in mine]
        if dy is None and len(new) == 1:
            dy = new[0]
        elif node.target is torch.ops.aten.add.Tensor and new:
            continue
        elif any(source is not dy for source in new):
            return None
        mine.append(node)
    return None if dy is None else (mine, dy)


def leaves(node: fx.Node, group: Collection[fx.Node]) -> bool:
    """Whether a node is used outside of a group."""
    return any(user not in group for user in node.users)


def arriving(nodes: list[fx.Node], known: Collection[fx.Node]) -> list[fx.Node]:
    """What nodes take from outside of those known, each once."""
    found = (source for node in nodes for source in node.all_input_nodes if source not in known)
    return list(dict.fromkeys(found))


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's value."""
    return tuple(node.meta["val"].shape)


def call(
    editor: Editor, place: fx.Node, target: Any, args: tuple[Any, ...], value: tuple[Any, ...]
) -> fx.Node:
    """A call before `place`, with its origin, that gives `value`."""
    with editor.graph.inserting_before(place):
        made = editor.graph.call_function(target, args)
    made.meta = {key: place.meta[key] for key in ("origin", "phase") if key in place.meta}
    made.meta["val"] = value
    return made


def item(editor: Editor, place: fx.Node, source: fx.Node, index: int) -> fx.Node:
    """An item of a call that gives several values."""
    return call(editor, place, operator.getitem, (source, index), source.meta["val"][index])


def put(editor: Editor, old: fx.Node, new: fx.Node) -> None:
    """Let another node stand for one, also as an output."""
    old.replace_all_uses_with(new)
    for slot, node in editor.outputs.items():
        if node is old:
            editor.outputs[slot] = new


def erase(editor: Editor, nodes: list[fx.Node]) -> None:
    """Erase nodes that nothing uses, in their order."""
    for node in reversed(nodes):
        if not node.users:
            editor.graph.erase_node(node)
