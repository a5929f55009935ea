"""Scaled dot product attention."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family

HINTS = {
    "b": ("batch", 5),
    "h": ("heads", 5),
    "g": ("kv_heads", 5),
    "r": ("group", 5),
    "s": ("seq", 5),
    "t": ("seq", 4),
    "d": ("head_dim", 5),
    "e": ("head_dim", 5),
}


@family("aten.scaled_dot_product_attention.default")
def _attention(call: Call) -> OpRule:
    """``b h s d, b h t d, b h t e, b h s t? -> b h s e``.

    Grouped queries: query heads are ``(g r)`` with g key heads, as `enable_gqa` repeats each key
    head r times in place. A causal mask counts from the first query, so a split `s` is special.
    """
    query, key = call.operands[0], call.operands[1]
    causal = bool(call.arg(5, "is_causal", False))
    dropout = call.arg(4, "dropout_p", 0.0)
    mask = call.slot(3, "attn_mask")
    batch = call.outputs[0].ndim - 2
    outer: list[Entry] = list(["b", *(f"b{i}" for i in range(1, batch))][:batch])
    inner: list[Entry] = list(outer)
    sizes = {}
    if batch >= 2:
        heads, kv_heads = query.shape[-3], key.shape[-3]
        outer[-1] = inner[-1] = "h"
        if call.arg(7, "enable_gqa", False) and kv_heads != heads:
            outer[-1], inner[-1] = ("g", "r"), "g"
            sizes = {"g": kv_heads, "r": heads // kv_heads}
    s = "s~" if causal else "s"

    def lead(entries: list[Entry], ndim: int) -> list[Entry]:
        return entries[len(entries) - (ndim - 2) :]

    operands: dict[int, list[Entry]] = {
        0: [*lead(outer, query.ndim), s, "d!"],
        1: [*lead(inner, key.ndim), "t!", "d!"],
        2: [*lead(inner, call.operands[2].ndim), "t!", "e"],
    }
    if mask is not None:
        ndim = call.operands[mask].ndim
        full: list[Entry] = [*outer, s, "t!"]
        operands[mask] = full[len(full) - ndim :]
    return call.build(
        operands,
        [[*outer, s, "e"]],
        sizes=sizes,
        linear=[{2}],
        special=isinstance(dropout, (int, float)) and dropout > 0,
        hints=HINTS,
    )
