"""Small models whose costs are known otherwise, traced once, and plans priced for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost_models.implementation import CPU, Implementation
from autopar.cost_models.layout import Layout
from autopar.cost_models.stages import StageModel, stage_models
from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.runtime.tiny_gpt import GPT, GPTConfig
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace
from tests.models import zoo

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class LlamaBlock(nn.Module):
    """Grouped queries, rotary positions, a gated perceptron."""

    def __init__(self, width: int, heads: int, kv_heads: int, inner: int) -> None:
        super().__init__()
        self.size = width // heads
        self.heads, self.kv_heads = heads, kv_heads
        self.before, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (
            nn.Linear(width, kv_heads * self.size, bias=False) for _ in range(2)
        )
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, width = x.shape
        h = self.before(x)
        q, k, v = (
            layer(h).view(batch, seq, -1, self.size).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = (self.rotate(part, cos, sin) for part in (q, k))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, seq, width))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = self.size // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * cos + turned * sin


class Llama(nn.Module):
    """A decoder of such blocks."""

    def __init__(self, layers: int, vocab: int = 211) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, 64)
        self.blocks = nn.ModuleList(LlamaBlock(64, 4, 2, 160) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(64), nn.Linear(64, vocab, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(ids.shape[1]), 10000.0 ** -torch.linspace(0, 1, 8))
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def llama(layers: int = 2) -> Example:
    ids = torch.randint(211, (4, 48), generator=torch.Generator().manual_seed(0))
    return Llama(layers), (ids, ids), {}


def gpt(layers: int = 2, width: int = 64) -> Example:
    ids = torch.zeros(8, 64, dtype=torch.int64)
    config = GPTConfig(vocabulary=211, context=64, layers=layers, heads=4, width=width)
    return GPT(config), (ids, ids), {}


def resnet() -> Example:
    return zoo.ResNet(2), (torch.randn(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)), {}


MODELS: dict[str, Callable[[], Example]] = {
    "gpt": gpt,
    "deep_gpt": functools.partial(gpt, 6),
    "wide_gpt": functools.partial(gpt, 6, 256),  # a layer fills several buckets
    "llama": llama,
    "resnet": resnet,
    "moe": zoo.moe,
    "unet": zoo.unet,
}


@functools.cache
def traced(name: str, dtype: str = "float32") -> Traced:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    return trace(model.to(getattr(torch, dtype)), args, kwargs, None)


@functools.cache
def layout(name: str, dtype: str = "float32") -> Layout:
    return Layout.of(traced(name, dtype).graph)


def planned(name: str, mesh: str, constraints: object, dtype: str = "float32") -> Plan:
    found = traced(name, dtype)
    rules = dict(constraints) if isinstance(constraints, Mapping) else constraints
    plan, _ = make_plan(found.graph, Mesh.parse(mesh), rules, notes=found.notes)  # type: ignore[arg-type]
    return plan


def priced(
    name: str,
    plan: Plan,
    implementation: Implementation = CPU,
    *,
    dtype: str = "float32",
    coordinate: tuple[int, ...] | None = None,
) -> tuple[StageModel, ...]:
    """The stages of a plan of a model of `MODELS`."""
    placement = layout(name, dtype).place(plan)
    loss = traced(name, dtype).loss
    return stage_models(placement, plan, loss, implementation, coordinate=coordinate)
