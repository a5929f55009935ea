"""A small byte-level GPT and the English text that ships inside Python.

Plain PyTorch: nothing here knows that it will be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a `GPT`.

    Attributes:
        vocabulary: Number of tokens; bytes by default.
        context: Longest sequence, in tokens.
        layers: Number of blocks.
        heads: Attention heads; divides `width`.
        width: Features per token.
    """

    vocabulary: int = 256
    context: int = 128
    layers: int = 4
    heads: int = 8
    width: int = 256


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a shortcut."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.projection = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape (batch, seq, width)."""
        batch, seq, width = x.shape
        qkv = self.qkv(self.attention_norm(x))
        q, k, v = qkv.view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # batch heads seq dim
        x = x + self.projection(attended.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Predicts the next byte; the embedding doubles as output weight."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # GPT-2's initialisation (Radford et al. 2019, section 2.3).
                residual = name.endswith(("projection.weight", "down.weight"))
                scale = math.sqrt(2 * config.layers) if residual else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte.

        Args:
            tokens: Integers of shape (batch, seq).
            targets: The next tokens, same shape.

        Returns:
            The loss, a scalar.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@cache
def english_bytes() -> Tensor:
    """Half a megabyte of English, Python's own reference manual, as a uint8 tensor."""
    from pydoc_data import topics

    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def text_batches(
    batch_size: int, seq_len: int, *, seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows of `english_bytes`; the same ones for the same seed.

    Yields:
        ``(tokens, targets)``, int64 of shape ``(batch_size, seq_len)``; targets are the next bytes.
    """
    data = english_bytes()
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(seq_len + 1)
    while True:
        starts = torch.randint(len(data) - seq_len, (batch_size, 1), generator=generator)
        rows = data[starts + window].long()
        yield rows[:, :-1], rows[:, 1:]


def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The default `GPT`, seeded, with a batch of 8 sequences of 128 bytes."""
    torch.manual_seed(0)
    return GPT(), next(text_batches(8, 128)), {}
