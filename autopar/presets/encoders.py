"""BERT (arXiv 1810.04805), T5 (1910.10683) and ViT (2010.11929) in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes of a `Bert`, `T5` or `ViT`.

    Attributes:
        layers: Blocks; of the encoder and again of the decoder for T5.
        hidden: Features per token.
        heads: Attention heads.
        ffn: Inner features of the perceptron.
        vocab: Tokens, or classes of images.
        head_dim: Features of a head; ``hidden // heads`` by default.
        context: Learned positions (BERT).
        image: Pixels a side (ViT).
        patch: Pixels a side of one token (ViT).
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    context: int = 512
    image: int = 224
    patch: int = 16


class _Attention(nn.Module):
    def __init__(self, config: EncoderConfig, *, bias: bool, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = config.heads, causal
        self.head_dim = config.head_dim or config.hidden // config.heads
        inner = self.heads * self.head_dim
        self.q = nn.Linear(config.hidden, inner, bias=bias)
        self.k = nn.Linear(config.hidden, inner, bias=bias)
        self.v = nn.Linear(config.hidden, inner, bias=bias)
        self.out = nn.Linear(inner, config.hidden, bias=bias)

    def forward(self, x: Tensor, source: Tensor, bias: Tensor | None = None) -> Tensor:
        """Mix `source` (B, S2, H) into ``x`` (B, S1, H)."""
        split = (self.heads, self.head_dim)
        q = self.q(x).unflatten(-1, split).transpose(1, 2)
        k = self.k(source).unflatten(-1, split).transpose(1, 2)
        v = self.v(source).unflatten(-1, split).transpose(1, 2)
        causal = self.causal and bias is None
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    def __init__(self, config: EncoderConfig, *, bias: bool) -> None:
        super().__init__()
        self.smooth = bias  # T5 has neither biases nor GELU
        self.up = nn.Linear(config.hidden, config.ffn, bias=bias)
        self.down = nn.Linear(config.ffn, config.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) if self.smooth else F.relu(self.up(x)))


class _BertBlock(nn.Module):
    """Norms after the shortcuts, as BERT has them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = _Attention(config, bias=True)
        self.attention_norm, self.mlp_norm = (
            nn.LayerNorm(config.hidden),
            nn.LayerNorm(config.hidden),
        )
        self.mlp = _MLP(config, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, x))
        return self.mlp_norm(x + self.mlp(x))


class Bert(nn.Module):
    """Masked language model with BERT's head; the pooler of sentence pairs is left out."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.places = nn.Embedding(config.context, config.hidden)
        self.kinds = nn.Embedding(2, config.hidden)
        self.norm = nn.LayerNorm(config.hidden)
        self.blocks = nn.ModuleList(_BertBlock(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.head_norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, kinds: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy; targets of -100 do not count. All of shape (batch, seq)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.tokens(tokens) + self.places(places) + self.kinds(kinds))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.head_norm(F.gelu(self.transform(x))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _T5Block(nn.Module):
    def __init__(self, config: EncoderConfig, *, decoder: bool) -> None:
        super().__init__()
        self.attention = _Attention(config, bias=False)
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.cross = _Attention(config, bias=False) if decoder else None
        self.cross_norm = nn.RMSNorm(config.hidden) if decoder else None
        self.mlp, self.mlp_norm = _MLP(config, bias=False), nn.RMSNorm(config.hidden)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y, bias)
        if self.cross is not None and self.cross_norm is not None and memory is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class _RelativeBias(nn.Module):
    """T5's biases by bucketed distance, one table for all blocks of a stack."""

    def __init__(self, heads: int, *, causal: bool, buckets: int = 32, furthest: int = 128) -> None:
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.causal, self.buckets, self.furthest = causal, buckets, furthest

    def forward(self, seq: int, like: Tensor) -> Tensor:
        """Biases of shape (1, heads, seq, seq)."""
        places = torch.arange(seq, device=like.device)
        distance = places[None, :] - places[:, None]
        buckets = self.buckets if self.causal else self.buckets // 2
        far = (-distance).clamp(min=0) if self.causal else distance.abs()
        exact = buckets // 2
        scale = (buckets - exact) / torch.log(torch.tensor(self.furthest / exact)).item()
        log = exact + (torch.log(far.clamp(min=1).float() / exact) * scale).to(torch.int64)
        bucket = torch.where(far < exact, far, log.clamp(max=buckets - 1))
        if not self.causal:
            bucket = bucket + (distance > 0).to(torch.int64) * buckets
        bias = self.table(bucket).permute(2, 0, 1)
        if self.causal:
            bias = bias.masked_fill((distance > 0)[None], float("-inf"))
        return bias[None]


class T5(nn.Module):
    """Encoder and decoder of T5 v1.0: ReLU, tied embeddings, no biases."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.width = config.hidden
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        self.encoder_bias = _RelativeBias(config.heads, causal=False)
        self.decoder_bias = _RelativeBias(config.heads, causal=True)
        self.encoder = nn.ModuleList(_T5Block(config, decoder=False) for _ in range(config.layers))
        self.decoder = nn.ModuleList(_T5Block(config, decoder=True) for _ in range(config.layers))
        self.encoder_norm, self.decoder_norm = (nn.RMSNorm(config.hidden) for _ in range(2))

    def forward(self, tokens: Tensor, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of `targets` given the tokens and the `outputs` before them.

        Args:
            tokens: Integers of shape (batch, seq).
            outputs: What the decoder reads, of shape (batch, other seq).
            targets: What it shall write, same shape.

        Returns:
            The loss, a scalar.
        """
        memory = self.tokens(tokens)
        bias = self.encoder_bias(tokens.shape[1], memory)
        for block in self.encoder:
            memory = block(memory, bias)
        memory = self.encoder_norm(memory)
        x = self.tokens(outputs)
        bias = self.decoder_bias(outputs.shape[1], x)
        for block in self.decoder:
            x = block(x, bias, memory)
        scaled = self.decoder_norm(x) * self.width**-0.5
        logits = F.linear(scaled, self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class _ViTBlock(nn.Module):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (
            nn.LayerNorm(config.hidden),
            nn.LayerNorm(config.hidden),
        )
        self.attention, self.mlp = _Attention(config, bias=True), _MLP(config, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    """Vision transformer with a class token."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.hidden, config.patch, config.patch)
        count = (config.image // config.patch) ** 2
        self.first = nn.Parameter(torch.empty(1, 1, config.hidden))
        self.places = nn.Parameter(torch.empty(1, count + 1, config.hidden))
        self.blocks = nn.ModuleList(_ViTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal values for the parameters that are in no module of their own."""
        nn.init.normal_(self.first, std=0.02)
        nn.init.normal_(self.places, std=0.02)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy over images (batch, 3, side, side) with labels (batch,)."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]), labels)
