"""Six small models whose plans are chosen by a search and run beside those of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.presets.config import DecoderConfig
from autopar.presets.decoder import Decoder
from autopar.presets.encoders import T5, Bert, EncoderConfig, ViT
from autopar.trace import Traced, trace
from tests.bench.prediction_plans import gpt, resnet

Example = tuple[nn.Module, tuple[Any, ...]]
BATCH_SIZE = 8


def _tokens(length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (BATCH_SIZE, length))


def llama() -> Example:
    """A decoder with rotary positions and grouped queries."""
    config = DecoderConfig(
        layers=6, hidden=256, heads=8, kv_heads=4, vocab=1000, ffn=768, positions="rope",
        norm="rms", gated=True, bias=False, context=128,
    )  # fmt: skip
    tokens = _tokens(128)
    return Decoder(config), (tokens, tokens)


def bert() -> Example:
    """An encoder."""
    config = EncoderConfig(layers=6, hidden=256, heads=8, ffn=1024, vocab=1000, context=128)
    tokens = _tokens(128)
    return Bert(config), (tokens, tokens % 2, tokens)


def t5() -> Example:
    """An encoder and a decoder."""
    config = EncoderConfig(layers=3, hidden=256, heads=8, ffn=1024, vocab=1000)
    tokens = _tokens(64)
    return T5(config), (tokens, tokens, tokens)


def vit() -> Example:
    """Patches of images."""
    config = EncoderConfig(layers=6, hidden=256, heads=8, ffn=1024, vocab=100, image=128)
    return ViT(config), (torch.randn(BATCH_SIZE, 3, 128, 128), torch.arange(BATCH_SIZE))


MODELS: dict[str, Callable[[], Example]] = {
    "gpt": gpt, "llama": llama, "bert": bert, "t5": t5, "vit": vit, "resnet": resnet,
}  # fmt: skip


def build(name: str) -> Example:
    """One of `MODELS`, with the same weights and inputs every time."""
    torch.manual_seed(0)
    return MODELS[name]()


@functools.cache
def traced_model(name: str) -> Traced:
    """The trace of one of `MODELS`, made once in a process."""
    model, inputs = build(name)
    return trace(model, inputs, {}, None)
