"""autopar against what a careful user writes by hand, on a GPT of twenty million parameters.

Peers: DistributedDataParallel; FSDP2's fully_shard of every block and the root; the pipelines of
torch.distributed.pipelining, with the same stages and microbatches. Both sides take turns in the
same processes, with equal weights, batches and AdamW, and their losses must agree.

python -m tests.bench.bench_programs [--peers ddp fsdp 1f1b interleaved] [--ranks 2 4]
    [--rounds 5] [--steps 2]
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.runtime.comm import Communicator
from autopar.runtime.launch import LocalRanks
from autopar.runtime.tiny_gpt import GPT, GPTConfig, text_batches
from tests.bench.bench_rounds import Step, Timing, measure, over_ranks

CONFIG = GPTConfig(layers=8, heads=8, width=448)  # 19.5 M parameters
BATCH_SIZE, SEQ_LEN, MICROBATCHES = 8, 128, 8
LEARNING_RATE = 3e-4
# Both sides add up in float32, in different orders, and twenty updates make more of it.
LOSS_TOLERANCE = 1e-3


def seeded_gpt(*, tied: bool = True) -> GPT:
    """The model; pipelines of torch have no tied weights."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    if not tied:
        model.head.weight = nn.Parameter(model.tokens.weight.detach().clone())
    return model


def one_batch() -> tuple[Tensor, Tensor]:
    """The batch that every step trains on."""
    tokens, targets = next(text_batches(BATCH_SIZE, SEQ_LEN))
    return tokens.contiguous(), targets.contiguous()


def autopar_step(comm: Communicator, model: GPT, mesh: str, constraints: str) -> Step:
    """A training step of autopar."""
    tokens, targets = one_batch()
    compiled = autopar.compile(
        model,
        autopar.ClusterSpec.local(comm.world_size),
        example_inputs=(tokens, targets),
        mesh=mesh,
        constraints=constraints,
        optimizer="adamw",
        lr=LEARNING_RATE,
        comm=comm,
    )
    return lambda: float(compiled.step(tokens, targets))


def data_parallel_step(comm: Communicator, model: nn.Module) -> Step:
    """A training step of a wrapped model that is given its rank's samples."""
    tokens, targets = (part.chunk(comm.world_size)[comm.rank] for part in one_batch())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        # The mean over ranks is left to the user; autopar's loss is the global one.
        mean = comm.all_reduce(loss.detach(), tuple(range(comm.world_size))) / comm.world_size
        return float(mean)

    return step


def ddp(comm: Communicator) -> tuple[Step, Step]:
    """DistributedDataParallel with its defaults."""
    ours = autopar_step(comm, seeded_gpt(), f"dp={comm.world_size}", "ddp")
    return ours, data_parallel_step(comm, DistributedDataParallel(seeded_gpt()))


def fsdp(comm: Communicator) -> tuple[Step, Step]:
    """FSDP2: blocks and root are sharded and gathered again in backward."""
    ours = autopar_step(comm, seeded_gpt(), f"dp={comm.world_size}", "zero3")
    mesh = init_device_mesh("cpu", (comm.world_size,))
    model = seeded_gpt()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return ours, data_parallel_step(comm, model)


class Stage(nn.Module):
    """A run of blocks, with the embeddings before the first and the head behind the last."""

    def __init__(self, model: GPT, index: int, count: int) -> None:
        super().__init__()
        share = CONFIG.layers // count
        self.first, self.last = index == 0, index == count - 1
        self.blocks = model.blocks[index * share : (index + 1) * share]
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """From tokens or activations to activations or logits."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipeline(comm: Communicator, chunks: int) -> tuple[Step, Step]:
    """A pipeline of torch.distributed.pipelining with `chunks` stages per rank."""
    ranks = comm.world_size
    count = ranks * chunks
    cuts = "+".join(f"blocks.{CONFIG.layers // count * index}" for index in range(1, count))
    name = "1f1b" if chunks == 1 else f"interleaved_1f1b,chunks={chunks}"
    ours = autopar_step(
        comm,
        seeded_gpt(tied=False),
        f"pp={ranks}",
        f"ddp,microbatches={MICROBATCHES},schedule={name},cuts={cuts}",
    )
    model = seeded_gpt(tied=False)
    device = torch.device("cpu")
    tokens, targets = one_batch()
    held = range(comm.rank, count, ranks)
    modules = [Stage(model, index, count) for index in held]
    stages = [
        PipelineStage(module, index, count, device)
        for index, module in zip(held, modules, strict=True)
    ]
    schedule = (
        Schedule1F1B(stages[0], MICROBATCHES, loss_fn=_loss)
        if chunks == 1
        else ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=_loss)
    )
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    first, last = modules[0].first, modules[-1].last

    def peer() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = (tokens,) if first else ()
        if last:
            schedule.step(*given, target=targets, losses=losses)
        else:
            schedule.step(*given)
        optimizer.step()
        # Autopar tells every rank the loss; here only the last one knows it.
        return float(torch.stack(losses).detach().mean()) if last else math.nan

    return ours, peer


PEERS: dict[str, Callable[[Communicator], tuple[Step, Step]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "1f1b": lambda comm: pipeline(comm, 1),
    "interleaved": lambda comm: pipeline(comm, 2),
}


def work(comm: Communicator, peer: str, rounds: int, steps: int) -> Timing:
    """What every rank runs."""
    ours, theirs = PEERS[peer](comm)
    return measure(comm, ours, theirs, rounds=rounds, steps=steps)


def row(peer: str, ranks: int, timing: Timing) -> str:
    """A line of the table."""
    sent = ", ".join(f"{kind} {size:,}" for kind, size in timing.traffic.items())
    ours, theirs = (1e3 * statistics.median(t) for t in (timing.ours_s, timing.peer_s))
    return (
        f"{peer:<12} {ranks:>5} {timing.ratio:>8.3f} {timing.min_ratio:>8.3f} "
        f"{timing.cpu_ratio:>8.3f} {ours:>8.0f} {theirs:>8.0f} {timing.worst_loss:>9.1e}  {sent}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'peer':<12} {'ranks':>5} {'median':>8} {'min':>8} {'cpu':>8} {'ours ms':>8} "
        f"{'peer ms':>8} {'loss':>9}  bytes sent by all ranks per step"
    )
    for ranks in options.ranks:
        with LocalRanks(ranks, threads=1) as pool:
            for peer in options.peers:
                found = pool.run(work, peer, options.rounds, options.steps)
                timing = over_ranks(found)
                print(row(peer, ranks, timing), flush=True)
                assert timing.worst_loss < LOSS_TOLERANCE, f"losses of {peer} do not agree"
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"ratios are autopar / peer; load averages {load}")


if __name__ == "__main__":
    main()
