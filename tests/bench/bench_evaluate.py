"""How long a plan of GPT-3 175B on 1,024 ranks takes to price, after tracing.

python -m tests.bench.bench_evaluate
"""

from __future__ import annotations

import statistics
import time

from autopar import api
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator
from autopar.trace import trace
from tests.models import gpt3

ROUNDS = 20


def main() -> None:
    """Print milliseconds of the first and of later evaluations."""
    model, args, _ = gpt3.build()
    traced = trace(model, args, {}, None)
    for schedule in ("1f1b", "interleaved_1f1b,chunks=2"):
        constraints = f"megatron,zero=1,microbatches=96,schedule={schedule}"
        plan = api.plan(model, None, args, mesh="pp=8,dp=16,tp=8", constraints=constraints)
        evaluator = Evaluator(traced.graph, traced.loss, ClusterSpec.parse("128x8xA100"))
        times = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            evaluator.evaluate(plan)
            times.append((time.perf_counter() - began) * 1e3)
        rest = statistics.median(times[1:])
        print(f"{schedule:28} first {times[0]:6.1f} ms, then {rest:6.1f} ms (median of {ROUNDS})")


if __name__ == "__main__":
    main()
