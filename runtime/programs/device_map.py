"""What a graph captured on the CPU would be on CUDA, as far as memory goes.

Some ops are chosen by the device, and some give statistics in another dtype. A torch without CUDA
cannot trace for it (fake CUDA tensors under autograd abort the process), so these are rewritten in
the captured graph:

    attention   ``_scaled_dot_product_flash_attention_for_cpu`` becomes the flash kernel for
                float16 and bfloat16 without a mask and heads of at most 256 features, else the
                memory-efficient one; both save the logarithm of the sum of exponentials as float32
                and the state of the random generator. Of float64 nothing is changed, although CUDA
                has no fused kernel for it. The ops of a mask that is trained,
                for which the CPU has no kernel, become the memory-efficient one, too.
    layer norm, batch norm
                mean and inverse deviation are float32 for float16 and bfloat16; on the CPU they
                have the dtype of the input. (Group norm's have that on both.)
    RMS norm    one fused op that saves the inverse root mean square as float32; a sequence of ops
                on the CPU.

Shapes and dtypes are those of torch 2.13: ``torch/_meta_registrations.py`` (attention),
``torch/_refs/__init__.py`` (layer norm), ``torch/_decomp/decompositions.py`` (batch and RMS norm).
Memory layouts follow the CPU's. The result is for walks, not for running.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime.programs.device_attention import join_attentions
from autopar.runtime.programs.device_norm import join_rms_norms
from autopar.runtime.programs.edit import Editor
from autopar.runtime.programs.program import Joint

aten = torch.ops.aten

_HALF = frozenset({torch.float16, torch.bfloat16})
_FLASH_HEAD = 256
"""Largest head of the flash kernel, see ``sdp_utils.cpp`` in ATen."""
_STATISTICS = frozenset(
    {
        "aten.native_layer_norm.default",
        "aten.native_batch_norm.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten._batch_norm_with_update.default",
        "aten._batch_norm_with_update_functional.default",
    }
)
_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def as_cuda(joint: Joint, names: Mapping[str, str] | None = None) -> Joint:
    """The graph as it would be on CUDA.

    Args:
        joint: Captured on the CPU; not changed.
        names: Operator of each origin, such as ``aten.rms_norm.default``; of those that are not
            known no sequence of ops is joined.
    """
    editor = Editor(joint)
    join_rms_norms(editor, names or {})
    join_attentions(editor, names or {})
    attentions: dict[fx.Node, fx.Node] = {}
    for node in list(editor.graph.nodes):
        target = str(node.target)
        if target in _STATISTICS:
            _widen_statistics(editor, node)
        elif target == _ATTENTION:
            _attend(editor, node, attentions)
        elif target == _ATTENTION_BACKWARD:
            _attend_backward(editor, node, attentions)
    return editor.finish(joint)


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    schema = node.target._schema  # type: ignore[union-attr]
    found = {argument.name: argument.default_value for argument in schema.arguments}
    found |= dict(zip(found, node.args, strict=False))
    return found | dict(node.kwargs)


def _tensor(editor: Editor, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
    return editor.empty(tuple(shape), dtype, like.device)


def _widen_statistics(editor: Editor, node: fx.Node) -> None:
    result, mean, rstd, *rest = node.meta["val"]
    if result.dtype not in _HALF:
        return
    wide = [_tensor(editor, item.shape, torch.float32, result) for item in (mean, rstd)]
    _set(node, (result, *wide, *rest))


def _set(node: fx.Node, value: tuple[Any, ...]) -> None:
    """Change what a call gives, and what its items are."""
    node.meta["val"] = value
    for user in node.users:
        if user.target is operator.getitem:
            user.meta["val"] = value[user.args[1]]  # type: ignore[index]


def _kernel(query: Tensor, mask: Any) -> str | None:
    """Which fused kernel CUDA takes, None for none."""
    if query.dtype == torch.float64:
        return None
    flash = query.dtype in _HALF and mask is None and query.shape[-1] <= _FLASH_HEAD
    return "flash" if flash else "efficient"


def _attend(editor: Editor, node: fx.Node, attentions: dict[fx.Node, fx.Node]) -> None:
    args = _bound(node)
    query, key = args["query"].meta["val"], args["key"].meta["val"]
    out = node.meta["val"][0]
    batch, heads, rows = query.shape[:3]
    q, k, v = args["query"], args["key"], args["value"]
    p, causal, mask, scale = (args[n] for n in ("dropout_p", "is_causal", "attn_mask", "scale"))
    kernel = _kernel(query, mask)
    if kernel == "flash":
        target = aten._scaled_dot_product_flash_attention.default
        call: tuple[Any, ...] = (q, k, v, p, causal, False)
        value: tuple[Any, ...] = (
            out,
            _tensor(editor, (batch, heads, rows), torch.float32, query),
            None,
            None,
            rows,
            key.shape[2],
            _tensor(editor, (2,), torch.uint64, query),
            _tensor(editor, (), torch.uint64, query),
            _tensor(editor, (0,), query.dtype, query),
        )
    elif kernel == "efficient":
        target = aten._scaled_dot_product_efficient_attention.default
        call = (q, k, v, mask, True, p, causal)
        value = (
            out,
            _tensor(editor, (batch, heads, math.ceil(rows / 32) * 32), torch.float32, query),
            _tensor(editor, (), torch.int64, query),
            _tensor(editor, (), torch.int64, query),
        )
    else:
        return
    made = _replace(editor, node, target, call, {"scale": scale})
    _set(made, value)
    attentions[node] = made


def _replace(
    editor: Editor, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> fx.Node:
    """Put another call in the place of one whose items are at the same positions."""
    with editor.graph.inserting_before(node):
        made = editor.graph.call_function(target, args, kwargs)
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
    editor.graph.erase_node(node)
    return made


def _item(editor: Editor, node: fx.Node, index: int) -> fx.Node:
    """An item of a call that gives several values."""
    for user in node.users:
        if user.target is operator.getitem and user.args[1] == index:
            return user
    with editor.graph.inserting_before(node.next):
        made = editor.graph.call_function(operator.getitem, (node, index))
    made.meta = dict(node.meta) | {"val": node.meta["val"][index]}
    return made


def _attend_backward(editor: Editor, node: fx.Node, attentions: Mapping[fx.Node, fx.Node]) -> None:
    args = _bound(node)
    forward = args["logsumexp"].args[0]
    if forward not in attentions.values():
        return
    q, k, v = args["query"], args["key"], args["value"]
    head = (args["grad_out"], q, k, v)
    made = (args["out"], args["logsumexp"])
    p, causal = args["dropout_p"], args["is_causal"]
    if forward.target is aten._scaled_dot_product_flash_attention.default:
        target = aten._scaled_dot_product_flash_attention_backward.default
        rows, columns = q.meta["val"].shape[2], k.meta["val"].shape[2]
        random = (_item(editor, forward, 6), _item(editor, forward, 7))
        call: tuple[Any, ...] = (*head, *made, None, None, rows, columns, p, causal, *random)
    else:
        target = aten._scaled_dot_product_efficient_attention_backward.default
        random = (_item(editor, forward, 2), _item(editor, forward, 3))
        wanted = [True, True, True, False]
        call = (*head, args["attn_mask"], *made, *random, p, wanted, causal)
    _replace(editor, node, target, call, {"scale": args["scale"]})
