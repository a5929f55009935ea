"""Plan for a cluster you do not have: no process group, no GPU, no memory for the model.

python examples/plan_only.py
"""

from __future__ import annotations

import torch

import autopar
from autopar.cost_models.explain import memory_tree, time_tree
from autopar.runtime.tiny_gpt import GPT, GPTConfig


def main() -> None:
    """Plan a GPT of 1.3 billion parameters for 64 GPUs."""
    with torch.device("meta"):
        config = GPTConfig(vocabulary=50304, context=2048, layers=24, heads=16, width=2048)
        model = GPT(config)
        tokens = torch.empty(512, 2048, dtype=torch.int64)
    cluster = autopar.ClusterSpec.parse("8x8xH100-SXM")
    plan = autopar.plan(
        model,
        cluster,
        (tokens, tokens),
        mesh="dp=8,tp=8",
        constraints="megatron,microbatches=8,zero=1",
    )
    print(plan.summary())
    found = autopar.evaluate(plan, model, cluster, (tokens, tokens))
    print(*time_tree(found).lines(), *memory_tree(found).lines(), sep="\n")


if __name__ == "__main__":
    main()
