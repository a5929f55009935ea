"""Hugging Face families (tiny, random, no downloads) on batches of four, and their plans."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import zoo
from tests.models.check import Case

FAMILIES = (
    "gpt2", "llama", "mistral", "qwen3", "gemma3", "bert", "bert_classes", "t5", "vit", "mixtral",
    "qwen3_moe", "whisper", "resnet",
)  # fmt: skip
EXACT_PLANS = (
    ("dp=4", "ddp"),
    ("tp=4", "megatron"),
    ("tp=2,dp=2", "megatron"),
    ("tp=2", "megatron_sp"),
)
EAGER_PLANS = (("dp=4", "ddp"), ("tp=2,dp=2", "megatron"))


def _bert_classes() -> zoo.Example:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(**zoo.SMALL | {"num_hidden_layers": 2, "num_labels": 3})
    labels = torch.tensor([0, 2])
    model = BertForSequenceClassification(config)
    return model, (), {"input_ids": zoo.tokens(), "labels": labels}


def _of_four(value: Any) -> Any:
    """Two samples, and two more that differ from them."""
    if not isinstance(value, Tensor) or value.shape[0] != 2:
        return value
    return torch.cat([value, value.flip(-1)])


def _without_dropout(model: nn.Module) -> bool:
    """Set every dropout to zero; returns whether there was one."""
    found = False
    for module in model.modules():
        for name, value in vars(module).items():
            drops = "drop" in name or (name == "p" and isinstance(module, nn.Dropout))
            if drops and isinstance(value, float) and value > 0:
                setattr(module, name, 0.0)
                found = True
    return found


@functools.cache
def family(
    name: str, *, dropout: bool = True, attention: str | None = None, experts: str | None = None
) -> Case:
    """A member of the family `name`; made and traced once per process, so leave it as it is.

    Args:
        name: One of `FAMILIES`.
        dropout: Keep the dropout of the default configuration.
        attention: Implementation of attention, as transformers calls it.
        experts: Implementation of experts, as transformers calls it.
    """
    torch.manual_seed(0)
    model, args, kwargs = _bert_classes() if name == "bert_classes" else zoo.ALL[name]()
    if attention is not None:
        model.set_attn_implementation(attention)
    if experts is not None:
        model.set_experts_implementation(experts)
    model.train()
    if not dropout:
        _without_dropout(model)
    return Case(
        model=model,
        args=tuple(_of_four(value) for value in args),
        kwargs={key: _of_four(value) for key, value in kwargs.items()},
    )


@functools.cache
def has_dropout(name: str) -> bool:
    """Whether the family's default configuration drops anything."""
    model = _bert_classes()[0] if name == "bert_classes" else zoo.ALL[name]()[0]
    return _without_dropout(model)
