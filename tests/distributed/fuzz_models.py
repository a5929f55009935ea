"""Tiny models of six families, traced once in float64 for the plan fuzz.

Sizes are small and mutually odd where the family allows (5 positions, 11 tokens of vocabulary, 3
channels), so that shards are uneven, strided and of unequal meaning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.runtime.float64 import in_float64
from autopar.sharding.factors import Factors, infer_factors
from autopar.trace import Traced, trace

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.first(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, width))
        hidden = F.dropout(F.gelu(self.up(self.second(x))), self.dropout, self.training)
        return x + self.down(hidden)


class GPT(nn.Module):
    """Tied embedding, causal attention, dropout also on the attention weights."""

    def __init__(self, width: int = 8, heads: int = 2, vocab: int = 11, seq: int = 5) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.block = _Block(width, heads, 0.2)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy; some labels are ignored."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def gpt() -> Built:
    """The GPT."""
    ids, labels = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))
    labels[0, :3] = -1
    return GPT(), (ids, labels), {}


def llama() -> Built:
    """Hugging Face Llama with two query heads per key head, and two ignored labels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=8, intermediate_size=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, vocab_size=11, max_position_embeddings=8,
        attention_dropout=0.1,
    )  # fmt: skip
    ids = torch.randint(0, 11, (4, 5))
    labels = ids.clone()
    labels[1, :2] = -100
    return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": labels}


def t5() -> Built:
    """Hugging Face T5: encoder, decoder, cross attention, relative positions, dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=1, num_decoder_layers=1, d_model=6, d_kv=2, d_ff=5, num_heads=3, vocab_size=11,
        relative_attention_num_buckets=6, relative_attention_max_distance=8, dropout_rate=0.1,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 11, (4, 5))
    labels = torch.randint(1, 11, (4, 6))
    labels[2, 4:] = -100
    return T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": labels}


class _Bottleneck(nn.Module):
    def __init__(self, width: int, inner: int, stride: int) -> None:
        super().__init__()
        out = width * stride
        self.reduce = nn.Conv2d(width, inner, 1, bias=False)
        self.window = nn.Conv2d(inner, inner, 3, stride, 1, groups=2, bias=False)
        self.expand = nn.Conv2d(inner, out, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inner, inner, out))
        self.skip = nn.Conv2d(width, out, 1, stride) if stride > 1 else nn.Identity()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.norms[0](self.reduce(x)))
        y = self.act(self.norms[1](self.window(y)))
        y = self.norms[2](self.expand(y))
        y += self.skip(x)
        return self.act(y)


class ResNet(nn.Module):
    """Bottlenecks with grouped convolutions and BatchNorm, pooling and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.blocks = nn.Sequential(_Bottleneck(6, 4, 1), _Bottleneck(6, 6, 2))
        self.head = nn.Linear(12, 5)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy with label smoothing."""
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 2)
        x = F.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1)
        return F.cross_entropy(self.head(x), labels, label_smoothing=0.1)


def resnet() -> Built:
    """The ResNet on images of 8 by 8."""
    return ResNet(), (torch.randn(4, 3, 8, 8), torch.tensor([0, 4, 2, 1])), {}


class MoE(nn.Module):
    """Grouped queries, then top-2 routing over experts as einsums, with a balance loss."""

    def __init__(self, width: int = 6, inner: int = 5, experts: int = 4) -> None:
        super().__init__()
        self.dropout = 0.1
        self.embed = nn.Embedding(11, width, padding_idx=0)
        self.q, self.kv, self.out = nn.Linear(width, 8), nn.Linear(width, 8), nn.Linear(8, width)
        self.norm = nn.RMSNorm(width)
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.3)
        self.head = nn.Linear(width, 11)

    def attention(self, x: Tensor) -> Tensor:
        """Causal attention of four query heads over two key heads."""
        batch, seq, _ = x.shape
        q = self.q(x).view(batch, seq, 4, 2).transpose(1, 2)
        k, v = self.kv(x).view(batch, seq, 2, 2, 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return seen.transpose(1, 2).reshape(batch, seq, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy plus 0.01 times the balance loss."""
        x = self.embed(ids)
        x = self.norm(x + self.out(self.attention(x)))
        scores = self.router(x).softmax(-1)
        best, chosen = scores.topk(2, -1)
        weights = best / best.sum(-1, keepdim=True)
        gates = (F.one_hot(chosen, scores.shape[-1]) * weights.unsqueeze(-1)).sum(-2)
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        y = torch.einsum("bsef,efd,bse->bsd", hidden, self.down, gates)
        balance = ((gates > 0).to(x.dtype).mean((0, 1)) * scores.mean((0, 1))).sum()
        logits = self.head(F.dropout(x + y, self.dropout, self.training))
        return F.cross_entropy(logits.transpose(1, 2), labels) + 0.01 * balance


def moe() -> Built:
    """The mixture of experts."""
    return MoE(), (torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4, 5))), {}


class UNet(nn.Module):
    """Down, up, long skips joined by cat, GroupNorm, a time input, squared error."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        c = channels
        self.first = nn.Conv2d(2, c, 3, padding=1)
        self.down = nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.patches = nn.Conv2d(2 * c, 2 * c, 2, 2)
        self.norm = nn.GroupNorm(4, 2 * c)
        self.time = nn.Linear(1, 2 * c)
        self.lift, self.last = nn.ConvTranspose2d(2 * c, c, 2, 2), nn.Conv2d(2 * c, 2, 1)
        self.widen = nn.ConvTranspose2d(2 * c, 2 * c, 2, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Mean squared error against the mirrored input."""
        a = F.silu(self.first(x))
        b = F.silu(self.norm(self.down(a)))
        middle = F.silu(self.patches(b)) + self.time(t)[:, :, None, None]
        b = b + F.avg_pool2d(F.interpolate(self.widen(middle), scale_factor=2.0), 2)
        y = torch.cat([F.silu(self.lift(b)), a], 1)
        return F.mse_loss(self.last(y) + x, x.flip(-1))


def unet() -> Built:
    """The U-Net on images of 8 by 8."""
    return UNet(), (torch.randn(4, 2, 8, 8), torch.rand(4, 1)), {}


BUILDERS: dict[str, Callable[[], Built]] = {
    "gpt": gpt, "llama": llama, "resnet": resnet, "moe": moe, "t5": t5, "unet": unet,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A traced model in float64 with what every plan of it shares.

    Attributes:
        name: Key in `BUILDERS`.
        traced: The trace, patched to float64.
        factors: Factors of its graph.
        tensors: Full parameters, buffers and constants.
        inputs: Full inputs by value name.
    """

    name: str
    traced: Traced
    factors: Factors
    tensors: dict[str, Tensor]
    inputs: dict[str, Tensor]


def build(name: str, dropout: bool = True) -> Built:
    """The model called `name`, seeded, in training mode.

    Args:
        name: Key in `BUILDERS`.
        dropout: Leave dropout on.
    """
    torch.manual_seed(0)
    model, args, kwargs = BUILDERS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    for module in model.modules() if not dropout else ():
        for attribute in ("p", "dropout", "dropout_rate", "attention_dropout"):
            if isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, 0.0)
    return model.train(), args, kwargs


def eager(built: Built) -> dict[str, Tensor | None]:
    """Loss, gradients and buffers of one step in eager torch."""
    model, args, kwargs = built
    result = model(*args, **kwargs)
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward()
    found: dict[str, Tensor | None] = {"loss": loss.detach()}
    found |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {f"buffer {name}": buffer for name, buffer in model.named_buffers()}


def _subject(name: str, dropout: bool, float64: bool) -> Subject:
    model, args, kwargs = build(name, dropout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = trace(model, args, kwargs)
    traced = in_float64(plain) if float64 else plain
    leaves = plain.flatten_inputs(args, kwargs)
    names = [item.value.name for item in traced.graph.inputs if item.kind == "input"]
    return Subject(
        name=name,
        traced=traced,
        factors=infer_factors(traced.graph),
        tensors={**traced.parameters, **traced.buffers, **traced.constants},
        inputs={
            key: leaf.double() if float64 and leaf.is_floating_point() else leaf
            for key, leaf in zip(names, leaves, strict=True)
        },
    )


@cache
def subject(name: str) -> Subject:
    """The model called `name`, traced once per session."""
    return _subject(name, dropout=True, float64=True)


def whole(name: str) -> Subject:
    """The model as its author wrote it: in float32, without dropout."""
    return _subject(name, dropout=False, float64=False)
