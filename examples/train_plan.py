"""Train a GPT under a plan file, and save the weights: what `node.sh` and `slurm.sbatch` start.

autopar plan examples/train_plan.py:large --cluster 8xH100-SXM -o plan.json
torchrun --nproc-per-node 8 examples/train_plan.py --plan plan.json

The plan file says how many ranks there are and what each holds; this script does not.
"""

from __future__ import annotations

import argparse
import os
from itertools import islice
from typing import Any

import torch
from torch import nn

import autopar
from autopar.runtime.tiny_gpt import GPT, GPTConfig, text_batches

# Sizes of the model, and of the global batch: sequences and tokens of each.
MODELS = {
    "large": (GPTConfig(layers=24, heads=16, width=1024, context=1024), 64, 1024),
    "small": (GPTConfig(layers=2, heads=4, width=64, context=32), 8, 32),
}


def large() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A GPT of 303 million parameters, and one global batch as its inputs."""
    return build("large")


def small() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The same for CPUs: 0.1 million parameters."""
    return build("small")


def build(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The seeded model, and one global batch as its inputs."""
    torch.manual_seed(0)
    config, batch_size, seq_len = MODELS[name]
    return GPT(config), next(text_batches(batch_size, seq_len)), {}


def main() -> None:
    """Train, print the loss, and save what every engine can load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", required=True, help="plan file that `autopar plan` wrote")
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save", default="weights.pt", help="where rank 0 writes the weights")
    options = parser.parse_args()

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))  # torchrun or srun
    model, _, _ = build(options.model)
    compiled = autopar.compile(model, plan=options.plan, optimizer="adamw", lr=3e-4)
    _, batch_size, seq_len = MODELS[options.model]
    for step, batch in enumerate(islice(text_batches(batch_size, seq_len), options.steps), 1):
        loss = compiled.step(*batch)  # the global batch in, the global loss out
        if rank == 0 and (step % 10 == 0 or step == options.steps):
            print(f"step {step:4d}  loss {float(loss):.4f}", flush=True)

    state = compiled.state_dict()  # every rank takes part; the tensors are whole
    if rank == 0:
        torch.save(state, options.save)


if __name__ == "__main__":
    main()
