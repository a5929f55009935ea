"""What need not be computed: views that undo each other, arithmetic on single integers.

Autograd transposes a weight back and forth, and the keys and salts of random ops are many integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime.programs import compat, kinds
from autopar.runtime.programs.dce import eliminate_dead

aten = torch.ops.aten

_LITERALS = (aten.full.default, aten.scalar_tensor.default)
# Results larger than this are computed twice rather than kept.
_MAX_SHARED_BYTES = 1024


def simplify(graph: fx.Graph) -> None:
    """Shorten chains of views, fold integers known beforehand, share equal small results; in place.

    Only integers are folded: they are the same on every device. Results are shared within forward
    and within backward, but not between them, which would keep them for longer.
    """
    _shorten(graph)
    _fold(graph)
    _share(graph)
    eliminate_dead(graph)


def _shorten(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target is aten.t.default:
            source: Any = node.args[0]
            if source.target is aten.t.default:
                node.replace_all_uses_with(source.args[0])
        elif node.target is aten.view.default:
            source = node.args[0]
            while source.target is aten.view.default and _views(source.args[0], node):
                source = source.args[0]
                node.args = (source, node.args[1])
            if _same_layout(source, node):
                node.replace_all_uses_with(source)


def _same_layout(first: fx.Node, second: fx.Node) -> bool:
    a, b = first.meta["val"], second.meta["val"]
    return a.shape == b.shape and a.stride() == b.stride()


def _views(base: Any, node: fx.Node) -> bool:
    """Whether the view `node` can be taken of `base` with the same result."""
    value = base.meta["val"]
    try:
        viewed = value.view(node.meta["val"].shape)
    except RuntimeError:  # strides that only the detour gives
        return False
    return viewed.stride() == node.meta["val"].stride()


def _small(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(node.target, compat.OpOverload):
        return False
    if value.numel() * value.element_size() > _MAX_SHARED_BYTES:
        return False
    return not (kinds.is_random(node) or kinds.has_effect(node))


def _fold(graph: fx.Graph) -> None:
    known: dict[fx.Node, Tensor] = {}
    for node in graph.nodes:
        if not _small(node) or any(source not in known for source in node.all_input_nodes):
            continue
        value = node.meta["val"]
        if value.ndim or value.is_floating_point() or value.is_complex():
            continue
        args = fx.map_arg(node.args, known.__getitem__)
        kwargs = fx.map_arg(node.kwargs, known.__getitem__)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        known[node] = node.target(*args, **kwargs)
    for node, number in known.items():
        if node.target in _LITERALS or all(user in known for user in node.users):
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            made = graph.call_function(
                aten.full.default,
                ([], number.item()),
                {"dtype": value.dtype, "device": value.device},
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)


def _share(graph: fx.Graph) -> None:
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if not _small(node):
            continue
        key = (node.target, _key(node.args), _key(node.kwargs), node.meta.get("phase"))
        same = first.setdefault(key, node)
        if same is not node:
            node.replace_all_uses_with(same)


def _key(arg: Any) -> Any:
    """Arguments in a form whose equality tells 1 from True and 1.0, and 0.0 from -0.0."""
    if isinstance(arg, fx.Node):
        return arg
    if isinstance(arg, tuple | list):
        return tuple(map(_key, arg))
    if isinstance(arg, dict):
        return tuple((key, _key(value)) for key, value in arg.items())
    return (type(arg), repr(arg))
