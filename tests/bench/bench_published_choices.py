"""What people chose beside what the search chooses, with the predicted cost of both.

python -m tests.bench.bench_published_choices [--only NAME ...]

The published plan keeps its mesh, what its tensor axis splits, ZeRO stage, microbatches and
schedule; cuts and recomputation are chosen for it, so that it is never priced worse than it was.
Both are priced for this package's runtime (fused attention, sequence parallelism, gathers of ZeRO-3
that run ahead), which the authors' software of the time had not. A measured step is that of
the publication, where it says one. Cases of the software of the time are priced with its stack.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Software
from autopar.runtime.loader import load_model
from autopar.search import exact
from autopar.search.problem import Outcome, Problem
from autopar.trace import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A plan that was published.

    Attributes:
        name: What it is called here.
        model: Preset.
        cluster: Cluster.
        source: Where it is from.
        kept: Fields of `autopar.search.space.Point` that it fixes.
        batch: Samples of a step, that of the preset if None.
        seq: Tokens of a sample, those of the preset if None.
        stack: Software by which it is priced.
        half: Whether it computes in float16, on devices that have no bfloat16.
        said: What the source says of its speed.
    """

    name: str
    model: str
    cluster: str
    source: str
    kept: dict[str, Any] = field(default_factory=dict)
    batch: int | None = None
    seq: int | None = None
    stack: str = "autopar"
    half: bool = False
    said: str = "no time published"


def _mesh(pipeline: int, data: int, tensor: int, role: str, **more: Any) -> dict[str, Any]:
    return {"pipeline": pipeline, "data": data, "tensor": tensor, "role": role, **more}


_MEGATRON = "arXiv 2104.04473, table 2: PTD-P"
_TABLE_2 = "149 TFLOP/s per GPU; ZeRO-3 without tensor parallelism 88 (recalled)"
_ALPA = "alpa benchmark/alpa/suite_auto_gpt.py at 14ad84b"
CASES = (
    Published(
        name="gpt3",
        model="gpt3-175b",
        cluster="96x8xA100",
        source=_MEGATRON,
        said=_TABLE_2,
        kept=_mesh(12, 8, 8, "megatron", zero=0),
    ),
    Published(
        name="gpt3-of-2021",
        model="gpt3-175b",
        cluster="96x8xA100",
        source=_MEGATRON,
        said=_TABLE_2,
        kept=_mesh(12, 8, 8, "megatron", zero=0),
        stack="megatron-deepspeed",
    ),
    Published(
        name="1t",
        model="megatron-1t",
        cluster="384x8xA100",
        said="163 TFLOP/s per GPU",
        source="Megatron-LM, table of April 2021",
        kept=_mesh(64, 6, 8, "megatron", zero=0),
    ),
    Published(
        name="llama-long",
        model="llama3-8b",
        cluster="1x8xH100",
        batch=16,
        seq=8192,
        source="torchtitan, train_configs/llama3_8b.toml: FSDP over 8",
        kept=_mesh(1, 8, 1, "", zero=3, microbatches=2),
    ),
    Published(
        name="resnet",
        model="resnet50",
        cluster="1x8xV100-SXM2-16",
        batch=2048,
        half=True,
        source="arXiv 1706.02677: data parallelism, 256 images per GPU",
        kept=_mesh(1, 8, 1, "", zero=0),
    ),
    Published(
        name="alpa-6.7b",
        model="gpt3-6.7b",
        cluster="2x8xV100-SXM2-16",
        batch=1024,
        seq=1024,
        half=True,
        source=_ALPA,
        kept=_mesh(2, 2, 4, "megatron", microbatches=64),
        said="60.0 TFLOP/s per GPU",
    ),
    Published(
        name="alpa-1.3b",
        model="gpt3-1.3b",
        cluster="1x4xV100-SXM2-16",
        batch=1024,
        seq=1024,
        half=True,
        source=_ALPA,
        kept=_mesh(2, 2, 1, "", microbatches=128),
        said="58.2 TFLOP/s per GPU",
    ),
)


def text_of(outcome: Outcome) -> str:
    """A plan and what it takes, in a line."""
    return (
        f"{outcome.candidate.point.text()}: {outcome.step_s:.4g} s,"
        f" {outcome.peak_bytes / 2**30:.1f} GiB live (predicted)"
    )


def compare(case: Published, limit_s: float) -> None:
    """Print both plans of a case."""
    loaded = load_model(case.model, batch=case.batch, seq=case.seq)
    if case.half:
        loaded.model.half()
        for value in (*loaded.args, *loaded.kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point():
                value.data = value.half()
    traced = trace(loaded.model, loaded.args, dict(loaded.kwargs), loaded.loss_fn)
    cluster = ClusterSpec.parse(case.cluster)
    software = Software.of(cluster.hardware(0), stack=case.stack)

    def best(allowed: dict[str, tuple[Any, ...]]) -> exact.SearchResult:
        problem = Problem(traced.graph, traced.loss, cluster, software=software, allowed=allowed)
        return exact.search(problem, gap=0.01, time_limit_s=limit_s)

    found = best({})
    theirs = best({key: (value,) for key, value in case.kept.items()})
    print(f"{case.name}: {case.model} on {case.cluster}, software {case.stack} ({case.source})")
    print(f"  published  {text_of(theirs.best) if theirs.best else 'does not fit'}; {case.said}")
    assert found.best is not None
    print(f"  chosen     {text_of(found.best)}; no plan is faster by more than {found.gap:.1%}")
    if theirs.best is not None:
        print(f"  published over chosen {theirs.best.step_s / found.best.step_s:.3f}")
    for item in found.alternatives[:3]:
        print(f"  next       {text_of(item)}")
    print(flush=True)


def main() -> None:
    """Compare all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--limit-s", type=float, default=60.0)
    options = parser.parse_args()
    for case in CASES:
        if case.name in options.only:
            compare(case, options.limit_s)


if __name__ == "__main__":
    main()
