"""Tiny models of many families. Each function returns ``(model, args, kwargs)``.

`HF` names the Hugging Face families, `OWN` the rest; all return their loss when called.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
VOCAB = 61
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def tokens(batch: int = 2, length: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def _language_model(name: str, layers: int, **more: Any) -> Example:
    import transformers

    config_name = more.pop("config", f"{name}Config")
    config = getattr(transformers, config_name)(**SMALL | {"num_hidden_layers": layers} | more)
    ids = tokens()
    return (
        getattr(transformers, f"{name}ForCausalLM")(config),
        (),
        {"input_ids": ids, "labels": ids},
    )


def gpt2(layers: int = 2, **more: Any) -> Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=layers, n_head=4, n_embd=24, vocab_size=VOCAB, n_positions=32,
        bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    ids = tokens()
    return GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids}


def llama(layers: int = 2, **more: Any) -> Example:
    return _language_model("Llama", layers, num_key_value_heads=2, **more)


def mistral(layers: int = 2) -> Example:
    return _language_model("Mistral", layers, num_key_value_heads=2, sliding_window=4)


def qwen3(layers: int = 2) -> Example:
    return _language_model(
        "Qwen3", layers, num_key_value_heads=2, head_dim=6, tie_word_embeddings=True
    )


def gemma3(layers: int = 3) -> Example:
    kinds = ["full_attention" if place % 3 == 2 else "sliding_attention" for place in range(layers)]
    return _language_model(
        "Gemma3", layers, config="Gemma3TextConfig", num_key_value_heads=2, head_dim=6,
        sliding_window=4, layer_types=kinds,
    )  # fmt: skip


def mixtral(layers: int = 2) -> Example:
    return _language_model(
        "Mixtral", layers, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip


def qwen3_moe(layers: int = 2) -> Example:
    return _language_model(
        "Qwen3Moe", layers, num_key_value_heads=2, head_dim=6, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=20, output_router_logits=True,
    )  # fmt: skip


def bert(layers: int = 2) -> Example:
    from transformers import BertConfig, BertForMaskedLM

    ids = tokens()
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    model = BertForMaskedLM(BertConfig(**SMALL | {"num_hidden_layers": layers}))
    return model, (), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def t5(layers: int = 2) -> Example:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        num_layers=layers, num_decoder_layers=layers, d_model=24, d_kv=6, d_ff=40, num_heads=4,
        vocab_size=VOCAB, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    labels = tokens(seed=1)
    return T5ForConditionalGeneration(config), (), {"input_ids": tokens(), "labels": labels}


def vit(layers: int = 2) -> Example:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        num_hidden_layers=layers, hidden_size=24, intermediate_size=40, num_attention_heads=4,
        image_size=8, patch_size=4, num_labels=5,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 8, 8)
    labels = torch.tensor([1, 3])
    return ViTForImageClassification(config), (), {"pixel_values": pixels, "labels": labels}


def whisper(layers: int = 2) -> Example:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        encoder_layers=layers, decoder_layers=layers, d_model=24, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=40, vocab_size=VOCAB,
        num_mel_bins=6, max_source_positions=8, max_target_positions=16, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    sound = torch.randn(2, 6, 16)
    return (
        WhisperForConditionalGeneration(config),
        (),
        {"input_features": sound, "labels": tokens()},
    )


class Block(nn.Module):
    """A transformer block as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, dim=-1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model whose input and output embeddings are one parameter."""

    def __init__(self, layers: int, width: int, heads: int, vocab: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def gpt(layers: int = 2) -> Example:
    ids = tokens()
    return GPT(layers, 24, 4, VOCAB, 16), (ids,), {"labels": ids}


class Residual(nn.Module):
    """Two convolutions with batch norm, written in place as torchvision does."""

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.act = nn.ReLU(inplace=True)
        self.skip = nn.Sequential()
        if stride != 1 or inner != outer:
            self.skip = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        y += self.skip(x)
        return self.act(y)


class ResNet(nn.Module):
    """An image classifier."""

    def __init__(self, blocks: int = 2, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.wide = nn.Sequential(*(Residual(4, 4) for _ in range(blocks)))
        self.deep = nn.Sequential(Residual(4, 8, 2), *(Residual(8, 8) for _ in range(blocks - 1)))
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.deep(self.wide(self.pool(self.stem(images))))
        scores = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return F.cross_entropy(scores, labels), scores


def resnet(layers: int = 2) -> Example:
    return ResNet(layers), (torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3])), {}


class DenseMoE(nn.Module):
    """Experts as one batched einsum, with a load-balancing loss."""

    def __init__(self, width: int = 12, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        odds = self.router(x).softmax(-1)
        best, chosen = odds.topk(2, dim=-1)
        gate = torch.zeros_like(odds).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        hidden = F.silu(torch.einsum("bsd,edf->bsef", x, self.up))
        y = torch.einsum("bsef,efd,bse->bsd", hidden, self.down, gate)
        balance = (odds.mean((0, 1)) * (gate > 0).float().mean((0, 1))).sum()
        return {"y": y, "loss": (y - x).pow(2).mean() + 0.01 * balance}


def moe() -> Example:
    return DenseMoE(), (torch.randn(2, 5, 12),), {}


class UNet(nn.Module):
    """An encoder and a decoder with long skips."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, width, 3, padding=1)
        self.down2 = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.time = nn.Linear(1, 2 * width)
        self.norm = nn.GroupNorm(2, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first = F.silu(self.down1(x))
        inner = self.norm(self.down2(first)) + self.time(time)[:, :, None, None]
        y = self.out(torch.cat([self.up(F.silu(inner)), first], dim=1))
        return F.mse_loss(y, x.flip(-1))


def unet() -> Example:
    return UNet(), (torch.randn(2, 1, 8, 8), torch.rand(2, 1)), {}


def meta_gpt(layers: int) -> Example:
    """GPT-3 shapes on the meta device."""
    with torch.device("meta"):
        ids = torch.zeros(8, 2048, dtype=torch.long)
        return GPT(layers, 12288, 96, 50257, 2048), (ids,), {"labels": ids}


def meta_llama(layers: int) -> Example:
    """Llama-70B shapes on the meta device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=8192, intermediate_size=28672,
        num_attention_heads=64, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        ids = torch.zeros(4, 4096, dtype=torch.long)
        return LlamaForCausalLM(config), (), {"input_ids": ids, "labels": ids}


HF = {
    function.__name__: function
    for function in (
        gpt2,
        llama,
        mistral,
        qwen3,
        gemma3,
        mixtral,
        qwen3_moe,
        bert,
        t5,
        vit,
        whisper,
    )
}
OWN = {function.__name__: function for function in (gpt, resnet, moe, unet)}
ALL = HF | OWN


def own_loss(result: Any) -> Tensor:
    """The loss in what a model of the zoo returns."""
    if isinstance(result, Tensor):
        return result
    if isinstance(result, tuple):
        return result[0]
    loss = result["loss"]
    assert isinstance(loss, Tensor)
    return loss
