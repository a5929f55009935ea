"""Attention whose queries are split under a causal mask, and attention with dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.runtime.special.base import SpecialCall, special
from autopar.runtime.special.random import uniform_of


@special("scaled_dot_product_attention")
def attention(
    call: SpecialCall, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
) -> Tensor:
    """A split query sequence sees the keys up to its global positions."""
    causal = bool(call.arg(5, "is_causal", False))
    dropout = call.number(4, "dropout_p", 0.0)
    given = call.arg(6, "scale")
    scale = float(given) if isinstance(given, (int, float)) else None
    grouped = bool(call.arg(7, "enable_gqa", False))
    if causal:
        seen = call.last_position("s") + 1 if call.global_size("s") > 1 else 1
        key, value = key[..., :seen, :], value[..., :seen, :]
        rows = call.dim_positions(0, query.ndim - 2, query.device)
        mask = rows[:, None] >= torch.arange(key.shape[-2], device=query.device)
    if dropout == 0:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped
        )
    if grouped and query.shape[-3] != key.shape[-3]:
        copies = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(copies, -3) for t in (key, value))
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    weights = torch.ops.aten._safe_softmax.default(scores, -1)
    weights = (weights / (1 - dropout)).where(_keep(call, key.shape[-2], query.device, dropout), 0)
    return weights @ value


def _keep(call: SpecialCall, keys: int, device: torch.device, dropout: float) -> Tensor:
    """Which attention weights stay, by the global index (batch..., head, query, key)."""
    shape = call.outputs[0].shape
    total = call.operands[1].shape[-2]
    dtype = torch.int32 if math.prod(shape[:-1]) * total < 2**31 else torch.int64
    rows = call.global_index(0, device, dims=len(shape) - 1).to(dtype)
    index = rows * total + torch.arange(keys, dtype=dtype, device=device)
    return uniform_of(call, index) >= dropout
