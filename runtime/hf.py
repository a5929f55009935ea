"""Models of Hugging Face configurations: built on the meta device, with a batch for their task.

Only the classes of an installed transformers are used: code that a configuration names
(``auto_map``) is not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autopar.errors import InputError
from autopar.imports.document import at_line, parse_json

DEFAULT_BATCH, DEFAULT_SEQ = 8, 2048
Inputs = dict[str, torch.Tensor]

_TASKS: Mapping[str, tuple[str, ...]] = {
    "AutoModelForCausalLM": ("ForCausalLM", "LMHeadModel"),
    "AutoModelForSeq2SeqLM": ("ForConditionalGeneration",),
    "AutoModelForMaskedLM": ("ForMaskedLM", "ForPreTraining"),
    "AutoModelForSequenceClassification": ("ForSequenceClassification",),
    "AutoModelForTokenClassification": ("ForTokenClassification",),
    "AutoModelForImageClassification": ("ForImageClassification",),
}
"""Auto classes, and how the names of their architectures end."""


def is_config(target: str) -> bool:
    """Whether a MODEL names a configuration file."""
    return target.endswith(".json")


def build(path: str | Path, *, batch: int | None, seq: int | None) -> dict[str, Any]:
    """The model of a ``config.json``, and one call of it.

    Args:
        path: The file; causal, masked and sequence-to-sequence language models, classifiers of
            texts, tokens and images.
        batch: Samples of the call.
        seq: Tokens of each.

    Returns:
        ``model`` (on the meta device, returns an output with a loss), ``args`` and ``kwargs``.

    Raises:
        InputError: If transformers is not installed, or has no such model; names the line.
    """
    document = _read(Path(path))
    transformers = _transformers(document.where)
    kind = document.raw("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"model_type is {kind!r}, which transformers {transformers.__version__} does not have",
            expected='a model type such as "llama", "gpt2", "t5" or "bert"',
            where=at_line(document.where, document.line_of(("model_type",))),
        )
    try:
        config = transformers.CONFIG_MAPPING[kind].from_dict(dict(document.data))
        config.use_cache = False  # a cache in the output is nothing to train on
        auto = _auto_class(transformers, config, document.raw("architectures"))
        if auto is None:
            raise InputError(
                f"architectures is {document.raw('architectures')!r}, a task that is not known",
                expected="an architecture that ends in "
                + ", ".join(end for ends in _TASKS.values() for end in ends),
                where=at_line(document.where, document.line_of(("architectures",))),
            )
        model = _on_meta(getattr(transformers, auto), config)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"transformers cannot build {kind!r} from the file: {type(error).__name__}: {error}",
            where=document.where,
        ) from error
    return {"model": model, "args": (), "kwargs": _inputs(auto, config, batch, seq)}


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InputError(
            f"cannot read {str(path)!r}: {reason}",
            expected="a Hugging Face config.json",
        ) from None
    document = parse_json(text, str(path))
    if "model_type" not in document.data:
        raise InputError(
            f"{str(path)!r} has no model_type",
            expected="a Hugging Face config.json, with model_type and architectures",
            where=str(path),
        )
    return document


def _transformers(where: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError(
            f"{where} is a Hugging Face configuration, and transformers is not installed",
            fix='pip install "autopar[hf]"',
        ) from None
    return transformers


def _auto_class(transformers: Any, config: Any, architectures: object) -> str | None:
    """Name of the auto class that builds a model with a loss."""
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    if isinstance(named, str):
        for auto, ends in _TASKS.items():
            if named.endswith(ends) and type(config) in getattr(transformers, auto)._model_mapping:
                return auto
        if not named.endswith("Model"):
            return None
    order = list(_TASKS)
    if getattr(config, "is_encoder_decoder", False):
        order.insert(0, "AutoModelForSeq2SeqLM")
    elif not getattr(config, "is_decoder", False):  # BERT can be a decoder, and seldom is
        order.insert(0, "AutoModelForMaskedLM")
    for auto in order:
        if type(config) in getattr(transformers, auto)._model_mapping:
            return auto
    return None


def _on_meta(auto: Any, config: Any) -> torch.nn.Module:
    dtype = getattr(config, "dtype", None) or torch.bfloat16
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."))
    with torch.device("meta"):
        model: torch.nn.Module = auto.from_config(config, dtype=dtype)
    return model.train()


def _inputs(auto: str, config: Any, batch: int | None, seq: int | None) -> Inputs:
    """A batch of a task, without values."""
    batch = batch or DEFAULT_BATCH
    longest = getattr(config, "max_position_embeddings", None) or DEFAULT_SEQ
    if seq is not None and isinstance(longest, int) and seq > longest:
        raise InputError(
            f"samples of {seq} tokens, and a model of at most {longest} positions",
            expected=f"at most {longest}",
        )
    seq = seq or min(DEFAULT_SEQ, longest)
    if auto == "AutoModelForImageClassification":
        side = getattr(config, "image_size", 224)
        side = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(config, "num_channels", 3)
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        pixels = torch.empty(batch, channels, *side, dtype=dtype, device="meta")
        return {"pixel_values": pixels, "labels": _whole(batch)}
    one_each = auto.endswith("SequenceClassification")
    labels = _whole(batch) if one_each else _whole(batch, seq)
    return {"input_ids": _whole(batch, seq), "labels": labels}


def _whole(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.int64, device="meta")
