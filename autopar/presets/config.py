"""Sizes of transformer language models, and the parameters they have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autopar.errors import InputError

Positions = Literal["learned", "rope", "alibi", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder-only language model: GPT, OPT, MPT, Llama, Mixtral, Qwen-MoE.

    Attributes:
        layers: Number of blocks.
        hidden: Features per token.
        heads: Query heads of an attention.
        vocab: Tokens of the vocabulary.
        ffn: Inner features of a dense perceptron; ``4 * hidden`` by default.
        kv_heads: Key and value heads; those of the queries by default.
        head_dim: Features of a head; ``hidden // heads`` by default.
        context: Learned positions, the longest sequence.
        positions: What tells places apart.
        norm: ``layer`` (with bias) or ``rms``.
        gated: Whether the perceptron is SwiGLU (two projections up) instead of GELU.
        bias: Whether the projections have biases.
        qkv_bias: Whether queries, keys and values have biases; as `bias` by default.
        qk_norm: Whether queries and keys are normalised per head (Qwen-3).
        tied: Whether the embedding is the output weight too.
        experts: Experts of a sparse perceptron; 0 when it is dense.
        top_k: Experts a token visits.
        expert_ffn: Inner features of an expert; `ffn` by default.
        shared_ffn: Inner features of the expert that all tokens visit; 0 for none.
        dense_layers: Blocks at the start that stay dense.
        fused_qkv: Whether queries, keys and values are one projection (GPT-2, MPT, Megatron-LM).
        fused_gate: Whether both projections up of SwiGLU are one (Megatron-LM).
        dropout: Share of features, and of attention probabilities, dropped in training.
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    ffn: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    context: int = 2048
    positions: Positions = "learned"
    norm: Literal["layer", "rms"] = "layer"
    gated: bool = False
    bias: bool = True
    qkv_bias: bool | None = None
    qk_norm: bool = False
    tied: bool = True
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    fused_qkv: bool = False
    fused_gate: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        filled = {
            "ffn": 4 * self.hidden,
            "kv_heads": self.heads,
            "head_dim": self.hidden // self.heads if self.heads > 0 else 0,
            "qkv_bias": self.bias,
            "expert_ffn": self.ffn or 4 * self.hidden,
        }
        for name, value in filled.items():
            if getattr(self, name) in (0, None):
                object.__setattr__(self, name, value)
        for name in ("layers", "hidden", "heads", "vocab", "ffn", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}", expected="at least 1")
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.heads} heads share {self.kv_heads} key heads", expected="a divisor"
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise InputError(
                f"a token visits {self.top_k} of {self.experts} experts",
                expected=f"1 to {self.experts}",
            )

    def with_layers(self, layers: int) -> DecoderConfig:
        """The same model with another number of blocks."""
        return replace(self, layers=layers, dense_layers=min(self.dense_layers, layers))

    @property
    def norm_params(self) -> int:
        """Parameters of one norm over `hidden`."""
        return self.hidden * (2 if self.norm == "layer" else 1)

    @property
    def attention_params(self) -> int:
        """Parameters of one attention, without its norm."""
        heads, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        weights = self.hidden * (heads + 2 * keys) + heads * self.hidden
        biases = (heads + 2 * keys if self.qkv_bias else 0) + (self.hidden if self.bias else 0)
        return weights + biases + (2 * self.head_dim if self.qk_norm else 0)

    def mlp_params(self, ffn: int) -> int:
        """Parameters of one perceptron with `ffn` inner features."""
        ups = 2 if self.gated else 1
        return (ups + 1) * self.hidden * ffn + (ups * ffn + self.hidden if self.bias else 0)

    def block_params(self, sparse: bool) -> int:
        """Parameters of one block, dense or of experts."""
        found = 2 * self.norm_params + self.attention_params
        if not sparse:
            return found + self.mlp_params(self.ffn)
        ups = 2 if self.gated else 1
        found += self.hidden * self.experts  # the router
        found += self.experts * (ups + 1) * self.hidden * self.expert_ffn
        if self.shared_ffn:
            found += self.mlp_params(self.shared_ffn)
        return found

    @property
    def outer_params(self) -> int:
        """Parameters outside of the blocks: embeddings, the last norm, the head."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        places = self.context * self.hidden if self.positions == "learned" else 0
        return embeddings + places + self.norm_params

    def params(self) -> int:
        """Parameters of the model."""
        sparse = self.layers - self.dense_layers if self.experts else 0
        return (
            self.outer_params
            + sparse * self.block_params(True)
            + (self.layers - sparse) * self.block_params(False)
        )
