"""autopar against DistributedDataParallel: 2 ranks, a GPT of ten million parameters.

python -m tests.bench.bench_ddp [--rounds 7] [--steps 3]
"""

from __future__ import annotations

import argparse

import torch
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.runtime.comm import Communicator
from autopar.runtime.launch import LocalRanks
from autopar.runtime.tiny_gpt import GPT, GPTConfig, text_batches
from tests.bench.bench_rounds import Timing, measure, print_report

RANKS = 2
CONFIG = GPTConfig(layers=5, heads=8, width=400)  # 9.8 M parameters
BATCH_SIZE, SEQ_LEN = 8, 128
LEARNING_RATE = 3e-4


def seeded_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG)


def work(comm: Communicator, rounds: int, steps: int) -> Timing:
    """What every rank runs."""
    tokens, targets = next(text_batches(BATCH_SIZE, SEQ_LEN))

    compiled = autopar.compile(
        seeded_gpt(),
        autopar.ClusterSpec.local(comm.world_size),
        example_inputs=(tokens, targets),
        mesh=f"dp={comm.world_size}",
        constraints="ddp",
        optimizer="adamw",
        lr=LEARNING_RATE,
        comm=comm,
    )

    model = DistributedDataParallel(seeded_gpt())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rows = slice(
        comm.rank * BATCH_SIZE // comm.world_size, (comm.rank + 1) * BATCH_SIZE // comm.world_size
    )

    def ours() -> float:
        return float(compiled.step(tokens, targets))

    def peer() -> float:
        optimizer.zero_grad()
        loss = model(tokens[rows], targets[rows])
        loss.backward()
        optimizer.step()
        # DDP leaves the mean over ranks to the user; autopar's loss is the global one.
        mean = comm.all_reduce(loss, tuple(range(comm.world_size))) / comm.world_size
        return float(mean)

    return measure(comm, ours, peer, rounds=rounds, steps=steps)


def theory() -> dict[str, int]:
    """Bytes a rank sends per step: every gradient, and the loss as sum and count."""
    elements = sum(parameter.numel() for parameter in seeded_gpt().parameters()) + 2
    return {"all_reduce": 2 * (RANKS - 1) * 4 * elements // RANKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with LocalRanks(RANKS) as ranks:
        timing = ranks.run(work, options.rounds, options.steps)[0]
    print_report(timing, "DDP", theory())


if __name__ == "__main__":
    main()
