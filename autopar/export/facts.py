"""What a plan does, in the words that all engines share: degrees, batch sizes, precision."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.plan.plan import ParameterPlan, Plan
from autopar.plan.strategies import prime_factors
from autopar.schedules.make import SCHEDULES

TENSOR = frozenset({"heads", "kv_heads", "group", "ffn", "vocab"})
"""Factors that tensor parallelism splits (Megatron-LM, arXiv 1909.08053)."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_INPUT = re.compile(r"(\w+)\[([\d, ]*)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Degrees and sizes of a plan.

    Attributes:
        plan: The plan.
        ranks: All ranks.
        pipeline: Pipeline ranks.
        data: Axes that split the batch.
        context: Axes that split the sequence and nothing else.
        tensor: Axes that split heads, the feed-forward dim or the vocabulary.
        experts: Axes that split experts; those of `data` among them split the batch elsewhere.
        other: Axes that split something else, or nothing.
        sequence: Whether tensor axes split the sequence where they split nothing else.
        zero: ZeRO stage; 3 where parameters are stored split.
        zero_axes: Data axes over which it divides.
        dtype: Dtype of most parameters.
        batch_size: Samples of a step, over all ranks; None if the inputs do not say it.
        seq_len: Tokens of a sample; None likewise.
    """

    plan: Plan
    ranks: int
    pipeline: int
    data: tuple[str, ...]
    context: tuple[str, ...]
    tensor: tuple[str, ...]
    experts: tuple[str, ...]
    other: tuple[str, ...]
    sequence: bool
    zero: int
    zero_axes: tuple[str, ...]
    dtype: str
    batch_size: int | None
    seq_len: int | None

    def degree(self, axes: Iterable[str]) -> int:
        """Ranks along axes together."""
        sizes = dict(self.plan.mesh)
        return math.prod(sizes[axis] for axis in axes)

    @property
    def data_degree(self) -> int:
        """Ranks among which the batch is divided."""
        return self.degree(self.data)

    @property
    def microbatches(self) -> int:
        """Parts in time of a rank's batch."""
        return self.plan.pipeline.microbatches

    @property
    def micro_batch_size(self) -> int | None:
        """Samples that a rank computes at a time; None if not known, or no whole number."""
        parts = self.data_degree * self.microbatches
        if self.batch_size is None or self.batch_size % parts:
            return None
        return self.batch_size // parts

    @property
    def asynchronous(self) -> bool:
        """Whether the schedule updates parameters while older microbatches are under way."""
        return SCHEDULES[self.plan.pipeline.schedule].asynchronous


def parameter_bytes(item: ParameterPlan) -> int:
    """Bytes of a whole parameter."""
    return math.prod(item.shape) * _ITEM_BYTES.get(item.dtype, 4)


def facts_of(plan: Plan) -> Facts:
    """Degrees and sizes of `plan`."""
    order = dict(plan.order)
    axes = [(name, order.get(name, ())) for name, _ in plan.tensor_axes]
    data = tuple(name for name, factors in axes if "batch" in factors)
    context = tuple(name for name, factors in axes if factors and set(factors) == {"seq"})
    tensor = tuple(
        name for name, factors in axes if name not in data and TENSOR.intersection(factors)
    )
    experts = tuple(
        name
        for name, factors in axes
        if "experts" in factors and name not in tensor and name not in context
    )
    known = {*data, *context, *tensor, *experts}
    stored = tuple(axis for axis in plan.storage if axis in data)
    batch_size, seq_len = _sizes(plan)
    return Facts(
        plan=plan,
        ranks=plan.device_mesh.size,
        pipeline=plan.pipeline.ranks(plan.mesh),
        data=data,
        context=context,
        tensor=tensor,
        experts=experts,
        other=tuple(name for name, _ in axes if name not in known),
        sequence=any("seq" in order[name] for name in tensor),
        zero=3 if stored else plan.zero.stage,
        zero_axes=stored or plan.zero.axes,
        dtype=_dtype(plan),
        batch_size=batch_size,
        seq_len=seq_len,
    )


def _dtype(plan: Plan) -> str:
    counts = Counter[str]()
    for item in plan.parameters:
        counts[item.dtype] += math.prod(item.shape)
    return counts.most_common(1)[0][0] if counts else "float32"


def _sizes(plan: Plan) -> tuple[int | None, int | None]:
    """Batch size and sequence length: what is predicted for, or what the first input has."""
    if plan.forecast is not None:
        return plan.forecast.global_batch_size, plan.forecast.sequence_length
    for _, text in plan.inputs:
        match = _INPUT.fullmatch(text)
        if match is not None and match[2].strip():
            dims = [int(part) for part in match[2].split(",")]
            tokens = match[1].startswith("int") and len(dims) == 2
            return dims[0], dims[1] if tokens else None
    return None, None


def word_axes(plan: Plan) -> list[tuple[str, int]]:
    """Axis and size that each word of a parameter's placement is about."""
    return [
        (name, prime) for name, size in plan.tensor_axes for prime in prime_factors(size) or [1]
    ]
