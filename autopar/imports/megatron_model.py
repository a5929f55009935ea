"""The model that Megatron-LM's arguments describe."""

from __future__ import annotations

from typing import Any

from autopar.errors import InputError
from autopar.imports.document import at_line
from autopar.imports.imported import Described
from autopar.imports.script import Flags
from autopar.presets.config import DecoderConfig, Positions
from autopar.units import counted

GPT2_VOCAB, BERT_VOCAB = 50257, 30522
VOCAB_MULTIPLE = 128
_POSITIONS: dict[str, Positions] = {
    "learned_absolute": "learned", "rope": "rope", "rotary": "rope", "alibi": "alibi",
    "none": "none", "yarn": "rope", "mrope": "rope",
}  # fmt: skip
_SIZES = ("--hidden-size", "--num-attention-heads")


def model_of(flags: Flags, program: str) -> Described | None:
    """The model, None if the arguments describe none.

    Args:
        flags: The arguments.
        program: What trains it: ``gpt``, ``bert``, ``t5`` or another.

    Raises:
        InputError: If sizes are missing, or contradict each other.
    """
    layers = flags.number("--num-layers", "--encoder-num-layers", "--num-layers-encoder", least=1)
    decoder_layers = flags.number("--decoder-num-layers", least=1)
    if layers is None:
        return None
    hidden, heads = (flags.number(name, least=1) for name in _SIZES)
    for name, value in zip(_SIZES, (hidden, heads), strict=True):
        if value is None:
            line = next(iter(flags.found.values())).line
            raise InputError(
                f"the arguments have --num-layers and no {name}",
                expected=f"{name} with a whole number",
                where=at_line(flags.where, line),
            )
    assert hidden is not None and heads is not None
    if program in ("mamba", "vlm", "vision"):
        return None
    if program in ("bert", "t5"):
        return _encoder(flags, program, layers, decoder_layers, hidden, heads)
    return Described(
        sizes=_decoder(flags, layers, hidden, heads), name=(f"GPT of {counted(layers, 'layer')}")
    )


def _vocab(flags: Flags, usual: int) -> int:
    padded = flags.number("--pad-vocab-size-to", least=1)
    vocab = flags.number("--vocab-size", "--padded-vocab-size", least=1)
    if padded is not None:
        return padded
    tensor = flags.number("--tensor-model-parallel-size", least=1) or 1
    multiple = flags.number("--make-vocab-size-divisible-by", least=1) or VOCAB_MULTIPLE
    return -(-(vocab or usual) // (multiple * tensor)) * multiple * tensor


def _usual_vocab(flags: Flags) -> int:
    kind = (flags.word("--tokenizer-type") or "").lower()
    name = (flags.word("--tokenizer-model") or "").lower()
    if "llama3" in name or "llama-3" in name or "tiktoken" in kind:
        return 128256
    return 32000 if "llama" in kind or "sentencepiece" in kind else GPT2_VOCAB


def _decoder(flags: Flags, layers: int, hidden: int, heads: int) -> DecoderConfig:
    gated = flags.has("--swiglu")
    ffn = flags.number("--ffn-hidden-size", least=1)
    if ffn is None and gated:
        ffn = int(4 * hidden * 2 / 3 / 64) * 64
    groups = flags.number("--num-query-groups", least=1)
    if flags.has("--multi-query-attention"):
        groups = 1
    if "--group-query-attention" not in flags.found and flags.word("--num-query-groups") is None:
        groups = groups or None
    flags.has("--group-query-attention")
    positions = _positions(flags)
    seq = flags.number("--seq-length", least=1) or 2048
    context = flags.number("--max-position-embeddings", least=1) or seq
    rms = flags.word("--normalization", known=("LayerNorm", "RMSNorm", "layernorm", "rmsnorm"))
    bias = not flags.has("--disable-bias-linear")
    qkv_bias = flags.has("--add-qkv-bias")
    experts = flags.number("--num-experts") or 0
    extra: dict[str, Any] = {"qkv_bias": True} if qkv_bias else {}
    shared = flags.number("--moe-shared-expert-intermediate-size", least=1) or 0
    return DecoderConfig(
        layers=layers, hidden=hidden, heads=heads, vocab=_vocab(flags, _usual_vocab(flags)),
        ffn=ffn or 0, kv_heads=groups or 0, head_dim=flags.number("--kv-channels", least=1) or 0,
        context=max(context, seq), positions=positions,
        norm="rms" if rms is not None and rms.lower() == "rmsnorm" else "layer", gated=gated,
        bias=bias, qk_norm=flags.has("--qk-layernorm"),
        tied=not flags.has("--untie-embeddings-and-output-weights"), experts=experts,
        top_k=(flags.number("--moe-router-topk", "--topk", least=1) or 2) if experts else 0,
        expert_ffn=flags.number("--moe-ffn-hidden-size", least=1) or 0, shared_ffn=shared,
        fused_qkv=True, dropout=_dropout(flags), **extra,
    )  # fmt: skip


def _positions(flags: Flags) -> Positions:
    if flags.has("--use-rotary-position-embeddings"):
        return "rope"
    name = flags.word("--position-embedding-type", known=tuple(_POSITIONS))
    return _POSITIONS[name or "learned_absolute"]


def _dropout(flags: Flags) -> float:
    """Megatron drops a tenth unless told otherwise; one rate is taken for both places."""
    rates = []
    for name in ("--hidden-dropout", "--attention-dropout"):
        word = flags.word(name)
        try:
            rates.append(0.1 if word is None else float(word))
        except ValueError:
            raise flags.wrong(flags.found[name], "a share from 0 to 1") from None
    return max(rates)


def _encoder(
    flags: Flags, program: str, layers: int, decoder_layers: int | None, hidden: int, heads: int
) -> Described:
    if decoder_layers not in (None, layers):
        raise InputError(
            f"an encoder of {layers} and a decoder of {decoder_layers} layers",
            expected="as many of each, or a MODEL beside the file",
            where=at_line(flags.where, flags.found["--decoder-num-layers"].line),
        )
    for name in ("--hidden-dropout", "--attention-dropout", "--decoder-seq-length"):
        flags.word(name)
    sizes = {
        "layers": layers, "hidden": hidden, "heads": heads,
        "ffn": flags.number("--ffn-hidden-size", least=1) or 4 * hidden,
        "vocab": _vocab(flags, BERT_VOCAB),
        "head_dim": flags.number("--kv-channels", least=1) or 0,
    }  # fmt: skip
    if program == "bert":
        context = flags.number("--max-position-embeddings", least=1) or 512
        sizes["context"] = max(context, flags.number("--seq-length", least=1) or 512)
        return Described(kind="bert", sizes=sizes, name=f"BERT of {counted(layers, 'layer')}")
    return Described(kind="t5", sizes=sizes, name=f"T5 of {layers} + {layers} layers")
