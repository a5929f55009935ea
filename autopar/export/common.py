"""Losses that every target has in one way or another, and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autopar.export.facts import Facts, facts_of, parameter_bytes
from autopar.export.layers import Layers, StageLayers, layers_of, recomputed, stage_layers
from autopar.export.result import Loss
from autopar.export.splits import Split, splits_of
from autopar.plan.plan import Plan
from autopar.units import counted


@dataclass(kw_only=True, slots=True)
class Work:
    """What an export reads, and the losses it gathers on the way.

    Attributes:
        facts: Degrees and sizes.
        layers: The repeated layers.
        losses: What could not be said.
        notes: What else a reader needs.
    """

    facts: Facts
    layers: Layers
    losses: list[Loss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.facts.plan

    @property
    def splits(self) -> tuple[Split, ...]:
        """How tensor axes split matrices."""
        return splits_of(self.facts, self.layers)

    @property
    def stages(self) -> StageLayers:
        """Layers of every stage."""
        return stage_layers(self.plan, self.layers)

    def lose(
        self,
        what: str,
        instead: str,
        *,
        extra_bytes: float | None = None,
        extra_s: float | None = None,
    ) -> None:
        """Note a loss; costs of less than nothing count as nothing."""
        self.losses.append(
            Loss(
                what=what,
                instead=instead,
                extra_bytes=None if extra_bytes is None else max(0, round(extra_bytes)),
                extra_s=None if extra_s is None else max(0.0, extra_s),
            )
        )


def begin(plan: Plan) -> Work:
    """Start an export: what no engine but autopar expresses is noted already."""
    work = Work(facts=facts_of(plan), layers=layers_of(plan))
    if plan.overrides:
        names = ", ".join(list(plan.overrides)[:3])
        work.lose(
            f"{counted(len(plan.overrides), 'op')} split otherwise than by the plan's axes "
            f"({names}...)",
            "they follow the rest of the model",
        )
    for axis in work.facts.other:
        factors = ", ".join(dict(plan.order).get(axis, ())) or "nothing"
        work.lose(
            f"axis {axis} of {counted(work.facts.degree([axis]), 'rank')} splits {factors}",
            "left out; its ranks are not used",
        )
    if len(work.facts.tensor) > 1:
        work.lose(
            f"axes {' and '.join(work.facts.tensor)} split tensors by different factors",
            "one tensor-parallel degree stands for them together",
        )
    return work


def whole_bytes(splits: Iterable[Split]) -> int:
    """Bytes more of parameters and gradients that a rank holds if these matrices stay whole."""
    total = 0.0
    for split in splits:
        size = sum(
            parameter_bytes(item)
            for item in split.parameters
            if len(item.shape) > 1 or split.cut.dim == 0
        )
        total += 2 * size * (1 - 1 / split.cut.ways)
    return round(total)


def held_bytes(facts: Facts) -> int:
    """Bytes of the parameters of one pipeline rank, as tensor parallelism splits them."""
    total = sum(parameter_bytes(item) for item in facts.plan.parameters)
    return total // (facts.pipeline * facts.degree(facts.tensor))


def bubble_s(facts: Facts, chunks: int = 1) -> float | None:
    """Seconds that a step gets longer under plain or interleaved 1F1B, predicted.

    The bubble of 1F1B is (p - 1)/(m v) of the time that a rank is busy (arXiv 2104.04473, section
    2.2); the plan's own idle time is what was predicted.

    Args:
        facts: The plan's.
        chunks: Stages per rank that the engine would have.
    """
    forecast = facts.plan.forecast
    if forecast is None:
        return None
    rank = forecast.slowest
    busy = rank.compute_s + rank.inline_s + rank.exposed_s
    idle = max(item.idle_s for item in forecast.ranks)
    return busy * (facts.pipeline - 1) / (facts.microbatches * chunks) - idle


def overlap_s(facts: Facts) -> float | None:
    """Seconds of collectives that run beside computation in the plan: lost if they do not."""
    forecast = facts.plan.forecast
    if forecast is None:
        return None
    rank = forecast.slowest
    return sum(rank.beside.values()) - rank.exposed_s


def lower_schedule(work: Work, known: Sequence[str], instead: str = "1f1b") -> str:
    """The plan's schedule if it is `known`, else `instead` with a loss."""
    pipeline, facts = work.plan.pipeline, work.facts
    if facts.pipeline == 1:
        return instead
    if facts.asynchronous:
        work.lose(
            f"schedule {pipeline.schedule} updates parameters while microbatches are under way",
            f"{instead}, with one update a step",
            extra_s=bubble_s(facts),
        )
        return instead
    if pipeline.schedule in known:
        return pipeline.schedule
    work.lose(
        f"schedule {pipeline.schedule}" + (f" with {counted(pipeline.chunks, 'stage')} a rank"
        if pipeline.chunks > 1 else ""), instead, extra_s=bubble_s(facts),
    )  # fmt: skip
    return instead


def lose_inside(work: Work) -> None:
    """Note the cuts that lie in the midst of layers, or of which that is not known."""
    stages = work.stages
    if stages.inside:
        work.lose(
            f"stages begin in the midst of a layer, at {', '.join(stages.inside[:4])}",
            "each of these layers is whole in the later stage",
        )
    if stages.unknown:
        work.lose(
            f"cuts at {', '.join(stages.unknown[:4])}: the plan file does not say whether a layer "
            "begins there",
            "stages of whole layers",
        )


def again(work: Work) -> str:
    """What all layers compute again: ``none``, ``selective``, ``full``, or ``mixed``."""
    kinds = set(recomputed(work.plan, work.layers))
    if not work.layers.count and work.plan.recompute:
        return "mixed"
    return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "none")


def describe(plan: Plan) -> str:
    """The plan in one line."""
    parts = [f"mesh {plan.device_mesh}", plan.strategy]
    if plan.zero.stage:
        parts.append(f"ZeRO-{plan.zero.stage}")
    if plan.num_stages > 1:
        parts.append(plan.pipeline.schedule)
    if plan.pipeline.microbatches > 1:
        parts.append(counted(plan.pipeline.microbatches, "microbatch"))
    return ", ".join(parts)
