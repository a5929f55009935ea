"""Train a GPT on English text, on as many ranks as there are.

python examples/train_gpt.py                       one device
autopar run -n 4 examples/train_gpt.py             four local ranks, dp=2 x tp=2
torchrun --nproc-per-node 4 examples/train_gpt.py  the same
"""

from __future__ import annotations

import argparse
import os
from itertools import islice

import torch

import autopar
from autopar.runtime.tiny_gpt import GPT, text_batches


def main() -> None:
    """Train and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    options = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    tensor_parallel = 2 if world_size % 2 == 0 else 1
    torch.manual_seed(0)
    compiled = autopar.compile(
        GPT(),
        autopar.ClusterSpec.local(world_size),
        mesh=f"dp={world_size // tensor_parallel},tp={tensor_parallel}",
        constraints="megatron",
        optimizer="adamw",
        lr=3e-4,
    )
    for step, (tokens, targets) in enumerate(
        islice(text_batches(options.batch_size, options.seq_len), options.steps), 1
    ):
        loss = compiled.step(tokens, targets)  # the global batch in, the global loss out
        if step % 10 == 0 and os.environ.get("RANK", "0") == "0":
            print(f"step {step:4d}  loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
