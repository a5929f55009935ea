"""Decoder-only language models as their papers describe them, in plain PyTorch.

One module with options instead of a copy per family: GPT (arXiv 2005.14165), OPT (2205.01068),
MPT (ALiBi, 2108.12409), Llama (2302.13971, 2307.09288, 2407.21783), Mixtral (2401.04088) and
Qwen-MoE (2505.09388). Shapes in comments: B batch, S seq, H hidden, N heads, K key heads, D head
features, F inner features, E experts, T tokens (B * S), A assignments (T * top_k).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.presets.config import DecoderConfig


def _norm(config: DecoderConfig, width: int | None = None) -> nn.Module:
    if config.norm == "layer":
        return nn.LayerNorm(width or config.hidden)
    return nn.RMSNorm(width or config.hidden, eps=1e-5)


def _rotate(x: Tensor, base: float = 10000.0) -> Tensor:
    """Rotary positions of ``x`` (B, N, S, D): halves of a head are the pair that turns."""
    half = x.shape[-1] // 2
    places = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
    steps = torch.arange(half, device=x.device, dtype=torch.float32)
    angles = places[:, None] * torch.pow(base, -steps / half)[None, :]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _alibi(heads: int, seq: int, like: Tensor) -> Tensor:
    """Biases (1, N, S, S) that fall with distance, minus infinity for the future."""
    slopes = torch.pow(
        2.0, -8.0 / heads * torch.arange(1, heads + 1, device=like.device, dtype=torch.float32)
    )
    places = torch.arange(seq, device=like.device)
    distance = (places[None, :] - places[:, None]).to(torch.float32)
    bias = slopes[:, None, None] * distance[None, :, :]
    future = (distance > 0)[None, :, :]
    return bias.masked_fill(future, float("-inf")).to(like.dtype)[None]


class Attention(nn.Module):
    """Causal attention; several query heads may share a key head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dropout = config.heads, config.kv_heads, config.dropout
        self.head_dim, self.positions = config.head_dim, config.positions
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        bias = bool(config.qkv_bias)
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = nn.Linear(config.hidden, queries + 2 * keys, bias=bias)
        else:
            self.q = nn.Linear(config.hidden, queries, bias=bias)
            self.k = nn.Linear(config.hidden, keys, bias=bias)
            self.v = nn.Linear(config.hidden, keys, bias=bias)
        self.out = nn.Linear(queries, config.hidden, bias=config.bias)
        self.q_norm = _norm(config, config.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = _norm(config, config.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Mix the tokens of ``x`` (B, S, H)."""
        batch, seq, _ = x.shape
        q, k, v = self._project(x)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        v = v.transpose(1, 2)
        if self.positions == "rope":
            q, k = _rotate(q), _rotate(k)
        alibi = self.positions == "alibi"
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=_alibi(self.heads, seq, q) if alibi else None,
            dropout_p=self.dropout if self.training else 0.0, is_causal=not alibi,
            enable_gqa=self.heads != self.kv_heads,
        )  # fmt: skip
        return self.out(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, S, N, D), keys and values (B, S, K, D)."""
        batch, seq, _ = x.shape
        queries, keys = (
            (batch, seq, self.heads, self.head_dim),
            (batch, seq, self.kv_heads, self.head_dim),
        )
        if not self.fused:
            return self.q(x).view(queries), self.k(x).view(keys), self.v(x).view(keys)
        share = self.heads // self.kv_heads
        parts = self.qkv(x).view(batch, seq, self.kv_heads, share + 2, self.head_dim)
        q, k, v = parts.split([share, 1, 1], dim=3)
        return q.reshape(queries), k.reshape(keys), v.reshape(keys)


class MLP(nn.Module):
    """GELU perceptron, or SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: DecoderConfig, ffn: int) -> None:
        super().__init__()
        self.fused, self.ffn = config.gated and config.fused_gate, ffn
        alone = config.gated and not self.fused
        self.gate = nn.Linear(config.hidden, ffn, bias=config.bias) if alone else None
        self.up = nn.Linear(config.hidden, 2 * ffn if self.fused else ffn, bias=config.bias)
        self.down = nn.Linear(ffn, config.hidden, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the features of ``x`` (B, S, H)."""
        if self.fused:
            gate, up = self.up(x).unflatten(-1, (2, self.ffn)).unbind(-2)
            return self.down(F.silu(gate) * up)
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Top-k routed experts: tokens sorted by expert, one grouped matrix product a projection."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.experts, self.top_k, self.gated = config.experts, config.top_k, config.gated
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        ups = 2 if config.gated else 1
        self.up = nn.Parameter(torch.empty(config.experts, config.hidden, ups * config.expert_ffn))
        self.down = nn.Parameter(torch.empty(config.experts, config.expert_ffn, config.hidden))
        self.shared = MLP(config, config.shared_ffn) if config.shared_ffn else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As Linear: uniform within one over the root of the inputs."""
        for weight in (self.up, self.down):
            bound = weight.shape[1] ** -0.5
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Transform the features of ``x`` (B, S, H)."""
        batch, seq, width = x.shape
        tokens = x.reshape(batch * seq, width)
        odds, chosen = self.router(tokens).softmax(-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        odds = (odds / odds.sum(-1, keepdim=True)).to(x.dtype)
        expert = chosen.reshape(-1)  # (A,)
        order = torch.argsort(expert)
        back = torch.argsort(order)
        counts = torch.histc(expert.float(), bins=self.experts, min=0, max=self.experts - 1)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        mine = tokens.repeat_interleave(self.top_k, dim=0)[order]
        inner = F.grouped_mm(mine, self.up, offs=ends)
        if self.gated:
            gate, up = inner.chunk(2, dim=-1)
            inner = F.silu(gate) * up
        else:
            inner = F.gelu(inner)
        made = F.grouped_mm(inner, self.down, offs=ends)[back] * odds.reshape(-1, 1)
        y = made.view(batch * seq, self.top_k, width).sum(1).view(batch, seq, width)
        return y if self.shared is None else y + self.shared(x)


class Block(nn.Module):
    """Attention and a perceptron or experts, each behind a norm and beside a shortcut."""

    def __init__(self, config: DecoderConfig, sparse: bool) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.attention = Attention(config)
        self.mlp = Experts(config) if sparse else MLP(config, config.ffn)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``x`` of shape (B, S, H)."""
        x = x + self.drop(self.attention(self.attention_norm(x)))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


class Decoder(nn.Module):
    """Predicts the next token."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab, config.hidden)
        learned = config.positions == "learned"
        self.places = nn.Embedding(config.context, config.hidden) if learned else None
        self.blocks = nn.ModuleList(
            Block(config, bool(config.experts) and place >= config.dense_layers)
            for place in range(config.layers)
        )
        self.drop = nn.Dropout(config.dropout)
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token.

        Args:
            tokens: Integers of shape (B, S).
            targets: The next tokens, same shape.

        Returns:
            The loss, a scalar.
        """
        x = self.tokens(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.drop(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
