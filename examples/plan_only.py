"""Plan for a cluster you do not have: no process group, no GPU, no memory for the model.

python examples/plan_only.py
"""

from __future__ import annotations

import torch

import autopar
from autopar.report.explain import explain
from autopar.report.show import show
from autopar.runtime.tiny_gpt import GPT, GPTConfig


def main() -> None:
    """Find the best plan of a GPT of 1.3 billion parameters for 64 GPUs."""
    with torch.device("meta"):
        config = GPTConfig(vocabulary=50304, context=2048, layers=24, heads=16, width=2048)
        model = GPT(config)
        tokens = torch.empty(512, 2048, dtype=torch.int64)
    cluster = autopar.ClusterSpec.parse("8x8xH100-SXM")
    found = autopar.search(model, cluster, (tokens, tokens))
    print(show(found.plan, width=100))
    print(explain(found.plan, width=100))
    megatron = autopar.plan(
        model,
        cluster,
        (tokens, tokens),
        mesh="dp=8,tp=8",
        constraints="megatron,microbatches=8,zero=1",
    )
    usual = autopar.evaluate(megatron, model, cluster, (tokens, tokens))
    print(f"a usual plan would take {usual.step_s / found.prediction.step_s:.2f} times as long")


if __name__ == "__main__":
    main()
