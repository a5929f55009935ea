"""A byte-level GPT for the command line: ``autopar plan examples/gpt.py:build --mesh dp=2,tp=2``.

The model itself is plain PyTorch: see `autopar.runtime.tiny_gpt`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.runtime.tiny_gpt import GPT, GPTConfig, text_batches

BATCH_SIZE, SEQ_LEN = 8, 128


def build(config: GPTConfig | None = None) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A seeded GPT, and one global batch as its inputs."""
    torch.manual_seed(0)
    return GPT(config), next(text_batches(BATCH_SIZE, SEQ_LEN)), {}


def build_ten_million() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same with about ten million parameters, as the benchmarks use it."""
    return build(GPTConfig(layers=5, heads=8, width=400))
