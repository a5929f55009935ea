"""autopar against DTensor's parallelize_module, Megatron-style: tp=2, a ten-million GPT.

The peer is what a careful user writes by hand: column and row parallel linears, vocabulary-parallel
embedding and loss, local heads.

python -m tests.bench.bench_dtensor [--rounds 7] [--steps 3]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

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


def rows_by_rank(parameter: Tensor, count: int) -> Tensor:
    """Rows (3, heads, head_dim) reordered to (rank, 3, heads / ranks, head_dim).

    A consecutive shard of the fused projection then holds whole heads of q, k and v.
    """
    head_dim = CONFIG.width // CONFIG.heads
    split = parameter.view(3, count, CONFIG.heads // count, head_dim, -1)
    return split.transpose(0, 1).reshape(parameter.shape).contiguous()


def megatron_by_hand(model: GPT, count: int) -> GPT:
    """`model` under tensor parallelism over `count` ranks."""
    mesh = init_device_mesh("cpu", (count,))
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index, block in enumerate(model.blocks):
        assert isinstance(block.qkv, nn.Linear)
        with torch.no_grad():
            for parameter in block.qkv.parameters():
                parameter.copy_(rows_by_rank(parameter, count))
        block.heads //= count
        prefix = f"blocks.{index}"
        plan[f"{prefix}.qkv"] = ColwiseParallel()
        plan[f"{prefix}.projection"] = RowwiseParallel()
        plan[f"{prefix}.up"] = ColwiseParallel()
        plan[f"{prefix}.down"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    model.head.weight = model.tokens.weight
    return model


def local_forward(block: nn.Module, x: Tensor) -> Tensor:
    """`Block.forward` with the reshape that local heads need."""
    batch, seq, _ = x.shape
    qkv = block.qkv(block.attention_norm(x))
    q, k, v = qkv.view(batch, seq, 3, block.heads, -1).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + block.projection(attended.transpose(1, 2).reshape(batch, seq, -1))
    return x + block.down(F.gelu(block.up(block.mlp_norm(x))))


def peer_loss(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
    x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
    for block in model.blocks:
        x = local_forward(block, x)
    logits = model.head(model.norm(x))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def work(comm: Communicator, rounds: int, steps: int) -> Timing:
    """What every rank runs."""
    tokens, targets = next(text_batches(BATCH_SIZE, SEQ_LEN))
    compiled = autopar.compile(
        seeded_gpt(),
        autopar.ClusterSpec.local(comm.world_size),
        example_inputs=(tokens, targets),
        mesh=f"tp={comm.world_size}",
        constraints="megatron",
        optimizer="adamw",
        lr=LEARNING_RATE,
        comm=comm,
    )

    model = megatron_by_hand(seeded_gpt(), comm.world_size)
    # Foreach optimizers refuse groups that mix DTensors with tensors.
    split = [p for p in model.parameters() if isinstance(p, DTensor)]
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = torch.optim.AdamW([{"params": split}, {"params": whole}], lr=LEARNING_RATE)

    def ours() -> float:
        return float(compiled.step(tokens, targets))

    def peer() -> float:
        optimizer.zero_grad()
        with loss_parallel():
            loss = peer_loss(model, tokens, targets)
            loss.backward()
        optimizer.step()
        loss = loss.detach()
        return float(loss.full_tensor() if isinstance(loss, DTensor) else loss)

    return measure(comm, ours, peer, rounds=rounds, steps=steps)


def theory() -> dict[str, int]:
    """Bytes a rank sends per step.

    All-reduced are the activations behind both row-parallel linears of a block and before both
    column-parallel ones in backward, the embedding's result, the gradient before the head, and
    three numbers per token in the cross-entropy (Shoeybi et al. 2019, section 3).
    """
    tokens = BATCH_SIZE * SEQ_LEN
    activations = (4 * CONFIG.layers + 2) * tokens * CONFIG.width
    return {"all_reduce": 2 * (RANKS - 1) * 4 * (activations + 3 * tokens) // RANKS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    with LocalRanks(RANKS) as ranks:
        timing = ranks.run(work, options.rounds, options.steps)[0]
    print_report(timing, "DTensor", theory())


if __name__ == "__main__":
    main()
