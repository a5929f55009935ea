"""Named presets: published models with a batch to trace them, built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError
from autopar.presets.config import DecoderConfig

if TYPE_CHECKING:
    from torch import nn

    Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named model.

    Attributes:
        name: Its name, such as ``llama3-70b``.
        family: What it is built by: ``decoder``, ``bert``, ``t5``, ``vit`` or ``resnet``.
        sizes: The sizes; a `DecoderConfig` for decoders, keyword arguments of the family's
            configuration for the others.
        batch: Samples of the batch that it is traced with.
        seq: Tokens of a sample.
        params: Parameters that its source counts, rounded as the source does.
        source: Where the sizes are from.
    """

    name: str
    family: str
    sizes: DecoderConfig | Mapping[str, Any]
    batch: int
    seq: int
    params: float
    source: str


def _gpt(layers: int, hidden: int, heads: int, **more: Any) -> DecoderConfig:
    base: dict[str, Any] = {"vocab": 50257, "fused_qkv": True}
    return DecoderConfig(layers=layers, hidden=hidden, heads=heads, **(base | more))


def _llama(layers: int, hidden: int, heads: int, ffn: int, **more: Any) -> DecoderConfig:
    return DecoderConfig(
        layers=layers, hidden=hidden, heads=heads, ffn=ffn, positions="rope", norm="rms",
        gated=True, bias=False, tied=False, **({"vocab": 32000} | more),
    )  # fmt: skip


def _mpt(layers: int, hidden: int, heads: int) -> DecoderConfig:
    # MPT has norms without bias; 13 features in ten thousand are not worth an option.
    return DecoderConfig(
        layers=layers, hidden=hidden, heads=heads, vocab=50432, positions="alibi", bias=False,
        fused_qkv=True,
    )  # fmt: skip


_GPT3 = "arXiv 2005.14165, table 2.1"
_LLAMA2 = "arXiv 2307.09288"
_LLAMA3 = "arXiv 2407.21783, table 3"
_MEGATRON = "arXiv 2104.04473, table 1"
_V3 = {"vocab": 128256, "kv_heads": 8}

_DECODERS: tuple[tuple[str, DecoderConfig, int, int, float, str], ...] = (
    ("gpt2", _gpt(12, 768, 12, context=1024), 64, 1024, 124e6, "GPT-2 release"),
    ("gpt2-xl", _gpt(48, 1600, 25, context=1024), 64, 1024, 1.56e9, "GPT-2 release"),
    ("gpt3-125m", _gpt(12, 768, 12), 256, 2048, 125e6, _GPT3),
    ("gpt3-350m", _gpt(24, 1024, 16), 256, 2048, 356e6, _GPT3),
    ("gpt3-1.3b", _gpt(24, 2048, 32), 512, 2048, 1.32e9, _GPT3),
    ("gpt3-2.7b", _gpt(32, 2560, 32), 512, 2048, 2.65e9, _GPT3),
    ("gpt3-6.7b", _gpt(32, 4096, 32), 1024, 2048, 6.66e9, _GPT3),
    ("gpt3-13b", _gpt(40, 5120, 40), 1024, 2048, 12.85e9, _GPT3),
    ("gpt3-22b", _gpt(48, 6144, 64, vocab=51200), 1024, 2048, 22e9, "arXiv 2205.05198, table 3"),
    ("gpt3-175b", _gpt(96, 12288, 96, vocab=51200), 1536, 2048, 174.6e9, _GPT3),
    ("mt-nlg-530b", _gpt(105, 20480, 128, vocab=51200), 1920, 2048, 529.6e9, _MEGATRON),
    ("megatron-1t", _gpt(128, 25600, 160, vocab=51200), 3072, 2048, 1008e9, _MEGATRON),
    ("mpt-7b", _mpt(32, 4096, 32), 1024, 2048, 6.65e9, "MosaicML MPT-7B card"),
    ("mpt-30b", _mpt(48, 7168, 64), 512, 8192, 29.96e9, "MosaicML MPT-30B card"),
    ("llama2-7b", _llama(32, 4096, 32, 11008), 1024, 4096, 6.74e9, _LLAMA2),
    ("llama2-13b", _llama(40, 5120, 40, 13824), 1024, 4096, 13.02e9, _LLAMA2),
    ("llama2-70b", _llama(80, 8192, 64, 28672, kv_heads=8), 1024, 4096, 68.98e9, _LLAMA2),
    ("llama3-8b", _llama(32, 4096, 32, 14336, **_V3), 512, 8192, 8.03e9, _LLAMA3),
    ("llama3-70b", _llama(80, 8192, 64, 28672, **_V3), 512, 8192, 70.55e9, _LLAMA3),
    ("llama3-405b", _llama(126, 16384, 128, 53248, **_V3), 2048, 8192, 405.85e9, _LLAMA3),
    (
        "mixtral-8x7b",
        _llama(32, 4096, 32, 14336, kv_heads=8, experts=8, top_k=2),
        1024, 4096, 46.7e9, "arXiv 2401.04088, table 1",
    ),
    (
        "mixtral-8x22b",
        _llama(56, 6144, 48, 16384, kv_heads=8, vocab=32768, experts=8, top_k=2),
        1024, 4096, 140.6e9, "Mixtral-8x22B configuration",
    ),
    (
        "qwen3-30b-a3b",
        _llama(
            48, 2048, 32, 6144, kv_heads=4, head_dim=128, vocab=151936, qk_norm=True,
            experts=128, top_k=8, expert_ffn=768,
        ),
        512, 4096, 30.5e9, "arXiv 2505.09388, table 2",
    ),
    (
        "qwen3-235b-a22b",
        _llama(
            94, 4096, 64, 12288, kv_heads=4, head_dim=128, vocab=151936, qk_norm=True,
            experts=128, top_k=8, expert_ffn=1536,
        ),
        512, 4096, 235.1e9, "arXiv 2505.09388, table 2",
    ),
)  # fmt: skip

_T5 = {"hidden": 1024, "vocab": 32128, "layers": 24}
_OTHERS: tuple[tuple[str, str, dict[str, Any], int, int, float, str], ...] = (
    ("bert-base", "bert", {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 30522},
     256, 512, 109.5e6, "arXiv 1810.04805"),
    ("bert-large", "bert", {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 30522},
     256, 512, 335e6, "arXiv 1810.04805"),
    ("t5-base", "t5", {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 32128},
     128, 512, 222.9e6, "arXiv 1910.10683, section 3.7"),
    ("t5-large", "t5", _T5 | {"heads": 16, "ffn": 4096},
     128, 512, 737.7e6, "arXiv 1910.10683, section 3.7"),
    ("t5-3b", "t5", _T5 | {"heads": 32, "ffn": 16384, "head_dim": 128},
     128, 512, 2.85e9, "arXiv 1910.10683, section 3.7"),
    ("t5-11b", "t5", _T5 | {"heads": 128, "ffn": 65536, "head_dim": 128},
     128, 512, 11.3e9, "arXiv 1910.10683, section 3.7"),
    ("vit-base", "vit", {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "vocab": 1000},
     1024, 224, 86.6e6, "arXiv 2010.11929, table 1"),
    ("vit-large", "vit", {"layers": 24, "hidden": 1024, "heads": 16, "ffn": 4096, "vocab": 1000},
     1024, 224, 304.3e6, "arXiv 2010.11929, table 1"),
    ("vit-huge", "vit",
     {"layers": 32, "hidden": 1280, "heads": 16, "ffn": 5120, "vocab": 1000, "patch": 14},
     1024, 224, 632e6, "arXiv 2010.11929, table 1"),
    ("vit-22b", "vit",
     {"layers": 48, "hidden": 6144, "heads": 48, "ffn": 24576, "vocab": 1000, "patch": 14},
     1024, 224, 21.76e9, "arXiv 2302.05442, table 1; blocks one after the other"),
    ("resnet50", "resnet", {"layers": (3, 4, 6, 3)}, 256, 224, 25.56e6, "arXiv 1512.03385"),
    ("resnet101", "resnet", {"layers": (3, 4, 23, 3)}, 256, 224, 44.55e6, "arXiv 1512.03385"),
    ("wide-resnet50-2", "resnet", {"layers": (3, 4, 6, 3), "widening": 2},
     256, 224, 68.88e6, "arXiv 1605.07146"),
    ("wide-resnet101-2", "resnet", {"layers": (3, 4, 23, 3), "widening": 2},
     256, 224, 126.89e6, "arXiv 1605.07146"),
    ("wide-resnet-13b", "resnet", {"layers": (3, 4, 23, 3), "base": 656, "widening": 2},
     1536, 224, 13.12e9, "after arXiv 2201.12023, table 6: as wide as makes 13 billion"),
)  # fmt: skip


def _all() -> dict[str, Preset]:
    found = [
        Preset(name=name, family="decoder", sizes=sizes, batch=batch, seq=seq, params=params,
               source=source)
        for name, sizes, batch, seq, params, source in _DECODERS
    ] + [
        Preset(name=name, family=family, sizes=sizes, batch=batch, seq=seq, params=params,
               source=source)
        for name, family, sizes, batch, seq, params, source in _OTHERS
    ]  # fmt: skip
    return {preset.name: preset for preset in found}


PRESETS: Mapping[str, Preset] = _all()
"""Every preset by name."""


def find(name: str) -> Preset:
    """The preset called `name`.

    Raises:
        InputError: If there is none; the message names similar ones.
    """
    if name in PRESETS:
        return PRESETS[name]
    raise InputError(f"no preset {name!r}", expected=similar(name))


def similar(name: str) -> str:
    """Presets whose names are like `name`, all when none is: text for errors."""
    close = get_close_matches(name, PRESETS, n=3) or sorted(PRESETS)
    return "such as " + ", ".join(close)


def build(
    preset: Preset | str, *, layers: int | None = None, batch: int | None = None,
    seq: int | None = None,
) -> Example:  # fmt: skip
    """The model on the meta device, in bfloat16, and one call of it.

    Args:
        preset: A preset or its name.
        layers: Blocks instead of the preset's (of a decoder, or of each side of T5; ResNets keep
            theirs).
        batch: Samples of the call.
        seq: Tokens of a sample (pixels a side for images, whose models fix it).

    Returns:
        ``(model, args, kwargs)``; the model returns its loss.
    """
    if isinstance(preset, str):
        preset = find(preset)
    batch, seq = batch or preset.batch, seq or preset.seq
    if isinstance(preset.sizes, DecoderConfig):
        sizes = preset.sizes if layers is None else preset.sizes.with_layers(layers)
        return build_decoder(sizes, batch=batch, seq=seq)
    kwargs = dict(preset.sizes)
    if layers is not None and preset.family != "resnet":
        kwargs["layers"] = layers
    return _BUILDERS[preset.family](kwargs, batch, seq)


def build_decoder(
    config: DecoderConfig, *, batch: int, seq: int, dtype: str = "bfloat16"
) -> Example:
    """A decoder on the meta device, and one call with `batch` samples of `seq` tokens.

    Returns:
        ``(model, args, kwargs)``; the model returns its loss.

    Raises:
        InputError: If the sequence is longer than the learned positions.
    """
    from autopar.presets.decoder import Decoder

    if config.positions == "learned" and seq > config.context:
        raise InputError(
            f"a sample has {seq} tokens, the model {config.context} positions",
            expected=f"at most {config.context}",
        )
    model = _on_meta(lambda: Decoder(config), dtype)
    tokens = _integers(batch, seq)
    return model, (tokens, tokens), {}


def sized(config: DecoderConfig, context: int) -> DecoderConfig:
    """The same model with learned positions for `context` tokens, if it learns positions."""
    return replace(config, context=context) if config.positions == "learned" else config


def _on_meta(make: Callable[[], nn.Module], dtype: str = "bfloat16") -> nn.Module:
    import torch

    before = torch.get_default_dtype()
    # The default, not a later `.bfloat16()`: parameters may be fake tensors, which that refuses.
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("meta"):
            return make()
    finally:
        torch.set_default_dtype(before)


def _integers(*shape: int) -> Any:
    import torch

    return torch.empty(*shape, dtype=torch.int64, device="meta")


def _bert(sizes: dict[str, Any], batch: int, seq: int) -> Example:
    from autopar.presets.encoders import Bert, EncoderConfig

    config = EncoderConfig(**sizes)
    tokens = _integers(batch, seq)
    return _on_meta(lambda: Bert(config)), (tokens, tokens, tokens), {}


def _t5(sizes: dict[str, Any], batch: int, seq: int) -> Example:
    from autopar.presets.encoders import T5, EncoderConfig

    config = EncoderConfig(**sizes)
    tokens = _integers(batch, seq)
    return _on_meta(lambda: T5(config)), (tokens, tokens, tokens), {}


def _images(batch: int, side: int) -> tuple[Any, Any]:
    import torch

    pixels = torch.empty(batch, 3, side, side, dtype=torch.bfloat16, device="meta")
    return pixels, _integers(batch)


def _vit(sizes: dict[str, Any], batch: int, seq: int) -> Example:
    from autopar.presets.encoders import EncoderConfig, ViT

    config = EncoderConfig(**sizes)
    return _on_meta(lambda: ViT(config)), _images(batch, config.image), {}


def _resnet(sizes: dict[str, Any], batch: int, seq: int) -> Example:
    from autopar.presets.resnet import ResNet, ResNetConfig

    config = ResNetConfig(**sizes)
    return _on_meta(lambda: ResNet(config)), _images(batch, config.image), {}


_BUILDERS: Mapping[str, Callable[[dict[str, Any], int, int], Example]] = {
    "bert": _bert,
    "t5": _t5,
    "vit": _vit,
    "resnet": _resnet,
}
