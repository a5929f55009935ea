"""GPT-3 175B (arXiv 2005.14165, table 2.1) in bfloat16 on the meta device, and smaller ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.runtime.tiny_gpt import GPT, GPTConfig


def build(
    layers: int = 96, width: int = 12288, heads: int = 96, batch: int = 1536
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model and a global batch of sequences of 2,048 tokens."""
    before = torch.get_default_dtype()
    # Not `.bfloat16()`, which fails on fake parameters.
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = GPT(
                GPTConfig(vocabulary=51200, context=2048, layers=layers, heads=heads, width=width)
            )
            tokens = torch.empty(batch, 2048, dtype=torch.int64)
    finally:
        torch.set_default_dtype(before)
    return model, (tokens, tokens), {}


def build_small() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same with a twelfth of the layers and a quarter of the width."""
    return build(layers=8, width=3072, heads=24)
