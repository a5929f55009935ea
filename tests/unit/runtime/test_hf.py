"""Hugging Face configurations as models: by task, on the meta device, with errors by line."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.errors import InputError
from autopar.runtime.loader import LoadedModel, load_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}  # fmt: skip
T5 = {
    "model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_kv": 8,
    "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96, "decoder_start_token_id": 0,
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip


def load(folder: Path, data: object, **sizes: int) -> LoadedModel:
    file = folder / "config.json"
    file.write_text(data if isinstance(data, str) else json.dumps(data, indent=1))
    return load_model(str(file), **sizes)


@pytest.mark.parametrize(
    ("data", "name", "labels"),
    [
        (LLAMA, "LlamaForCausalLM", (4, 16)),
        (T5, "T5ForConditionalGeneration", (4, 16)),
        (BERT, "BertForMaskedLM", (4, 16)),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]},
         "LlamaForSequenceClassification", (4,)),
        (BERT | {"architectures": ["BertModel"]}, "BertForMaskedLM", (4, 16)),
        ({k: v for k, v in LLAMA.items() if k != "architectures"}, "LlamaForCausalLM", (4, 16)),
    ],
)  # fmt: skip
def test_models_by_task(tmp_path, data, name, labels):
    loaded = load(tmp_path, data, batch=4, seq=16)
    assert type(loaded.model).__name__ == name
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in loaded.model.parameters())
    assert loaded.kwargs["input_ids"].shape == (4, 16) and loaded.kwargs["labels"].shape == labels
    assert loaded.model.training


def test_sizes_by_default(tmp_path):
    assert load(tmp_path, LLAMA).kwargs["input_ids"].shape == (8, 64)
    with pytest.raises(InputError, match="at most 64 positions"):
        load(tmp_path, LLAMA, seq=128)


@pytest.mark.parametrize(
    ("data", "message", "line"),
    [
        ('{\n "model_type": "llama",\n}', "no JSON", 3),
        (LLAMA | {"model_type": "lamda2"}, "model_type is 'lamda2'", 2),
        (LLAMA | {"architectures": ["LlamaForMagic"]}, "task that is not known", 3),
        ({"hidden_size": 3}, "no model_type", None),
        (LLAMA | {"hidden_size": "wide"}, "transformers cannot build 'llama'", None),
    ],
)
def test_errors_name_the_line(tmp_path, data, message, line):
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, data)
    assert caught.value.where is not None
    assert caught.value.where.endswith("config.json" + (f":{line}" if line else ""))


def test_code_that_a_configuration_names_is_not_run(tmp_path):
    (tmp_path / "mine.py").write_text("raise SystemExit('it ran')")
    data = LLAMA | {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}}
    assert type(load(tmp_path, data).model).__name__ == "LlamaForCausalLM"


def test_without_transformers(tmp_path, monkeypatch):
    genuine = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'", name=name)
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(InputError, match=r"pip install \"autopar\[hf\]\""):
        load(tmp_path, LLAMA)


@pytest.mark.long
@pytest.mark.parametrize("data", [LLAMA, T5, BERT])
def test_they_are_planned(tmp_path, data):
    loaded = load(tmp_path, data, batch=4, seq=16)
    plan = autopar.plan(
        loaded.model, None, loaded.args, loaded.kwargs, mesh="dp=2,tp=2", constraints="megatron"
    )
    assert plan.parameters and any(word != "whole" for p in plan.parameters for word in p.placement)
