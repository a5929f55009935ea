"""Train a small, randomly initialised Hugging Face Llama on English text.

Needs ``pip install "autopar[hf]"``. The model is used as it comes; grouped-query attention,
rotary embeddings and the mask construction are found in its graph.

    autopar verify examples/hf_llama.py:build --mesh dp=2,tp=2 --strategy megatron
    autopar run -n 4 examples/hf_llama.py
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime.tiny_gpt import text_batches

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ModuleNotFoundError:
    raise SystemExit('hf_llama.py needs transformers: pip install "autopar[hf]"') from None

BATCH_SIZE, SEQ_LEN = 8, 64


def build() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A seeded Llama of 0.4 M parameters, and one global batch as its inputs."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=SEQ_LEN,
        use_cache=False,  # a cache in the output is nothing to train on
    )
    return LlamaForCausalLM(config), (), inputs(next(text_batches(BATCH_SIZE, SEQ_LEN))[0])


def inputs(tokens: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments of the model; it shifts the labels itself."""
    return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    tensor_parallel = 2 if world_size % 2 == 0 else 1
    model, _, _ = build()
    compiled = autopar.compile(
        model,
        autopar.ClusterSpec.local(world_size),
        mesh=f"dp={world_size // tensor_parallel},tp={tensor_parallel}",
        constraints="megatron",
        optimizer="adamw",
        lr=3e-3,
    )
    for step, (tokens, _) in enumerate(islice(text_batches(BATCH_SIZE, SEQ_LEN), options.steps), 1):
        loss = compiled.step(**inputs(tokens))
        if step % 10 == 0 and os.environ.get("RANK", "0") == "0":
            print(f"step {step:4d}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
