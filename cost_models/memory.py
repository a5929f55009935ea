"""Bytes that a rank holds over a training step, by kind.

What is there at all times is in `autopar.cost_models.static`. What comes and goes is a walk over
the events of the rank's schedule with what each program does to live bytes
(`autopar.cost_models.tape.liveness`). Bytes are those of tensors; what an allocator makes of them
is in `autopar.cost_models.allocator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.buckets import Bucket
from autopar.cost_models.events import Edge, event_kinds, rank_events, schedule_of
from autopar.cost_models.live import KINDS, Moment
from autopar.cost_models.optimizer import OptimizerMemory
from autopar.cost_models.stages import StageModel
from autopar.cost_models.static import KnownStatic, Static, static_memory
from autopar.cost_models.walk import Walk, reduced_bytes
from autopar.plan.plan import Plan

__all__ = ["KINDS", "Moment", "RankMemory", "Static", "rank_memory", "stage_edges", "static_memory"]

Bytes = Counter[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What a pipeline rank holds during a step in steady state.

    Attributes:
        rank: The pipeline rank.
        stages: Its stages.
        resident: Bytes by kind before the step, its inputs included.
        peak: Bytes by kind at the high-water mark.
        where: The action at that mark, and the op if it is one of a program.
        moments: Live bytes action by action, if asked for.
    """

    rank: int
    stages: tuple[int, ...]
    resident: Bytes
    peak: Bytes
    where: str
    moments: tuple[Moment, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at one time."""
        return self.peak.total()

    @property
    def resident_bytes(self) -> int:
        """Bytes live before the step."""
        return self.resident.total()


def stage_edges(models: Sequence[StageModel]) -> tuple[frozenset[Edge], frozenset[Edge]]:
    """Pairs of stages with a message, and those whose gradient comes back."""
    messages = [item for model in models for item in model.messages]
    return (
        frozenset((item.source, item.target) for item in messages),
        frozenset((item.source, item.target) for item in messages if item.gradient),
    )


def rank_memory(
    models: Sequence[StageModel],
    plan: Plan,
    rank: int,
    optimizer: OptimizerMemory,
    *,
    input_bytes: int = 0,
    buffer_bytes: int = 0,
    gloo: bool = False,
    positions: Callable[[Bucket], int] = lambda bucket: 0,
    moments: bool = False,
    make_walk: Callable[..., Walk] = Walk,
    known: KnownStatic | None = None,
) -> RankMemory:
    """Walk over the step of a pipeline rank.

    Args:
        models: All stages of the plan.
        plan: The plan.
        rank: The pipeline rank.
        optimizer: What the optimizer keeps.
        input_bytes: Inputs of the step, and constants, that lie on the rank.
        buffer_bytes: Buffers that lie on the rank.
        gloo: Whether collectives need the memory that gloo needs; else NCCL's.
        positions: Place of the rank in the group of a bucket of ZeRO.
        moments: Whether to note live bytes action by action.
        make_walk: Makes the walk; another kind may note more.
        known: What stages hold at all times, of this optimizer and these positions.
    """
    schedule = schedule_of(plan)
    stages = schedule.stages_of(rank)
    mine = {stage: models[stage] for stage in stages}
    known = known or KnownStatic(optimizer, positions)
    held = {stage: known.of(model.parameters, model.buckets) for stage, model in mine.items()}
    resident = _resident(mine, held, schedule.num_microbatches, input_bytes)
    resident["buffers"] += buffer_bytes
    for stage in stages:
        if schedule.delay(stage):
            # Weights of updates before, the last of them only until the next microbatch begins.
            resident["parameters"] += (schedule.delay(stage) + 1) * held[stage].version
    edges = stage_edges(models)
    asynchronous = schedule.updates > 1 or any(schedule.delays)
    if asynchronous:  # what ZeRO-1 has reduced for an update stays until the next
        resident["gradients"] += sum(map(reduced_bytes, mine.values()))
    walk = make_walk(
        mine, held, resident,
        asynchronous=asynchronous,
        delayed=frozenset(stage for stage in stages if schedule.delay(stage)),
        gloo=gloo, moments=moments,
    )  # fmt: skip
    if walk.is_plain:
        live = walk.run_kinds(event_kinds(plan, *edges, rank))
    else:
        live = walk.run(rank_events(plan, *edges, rank))
    return RankMemory(
        rank=rank,
        stages=stages,
        resident=resident,
        peak=Counter(live.peak),
        where=live.where,
        moments=tuple(live.moments),
    )


def _resident(
    models: Mapping[int, StageModel], held: Mapping[int, Static], microbatches: int, inputs: int
) -> Bytes:
    found: Bytes = Counter()
    found["inputs"] = inputs + 8 * microbatches  # numbers of microbatches
    for stage, model in models.items():
        static = held[stage]
        found["parameters"] += static.parameters + static.parameter_padding
        found["gradients"] += static.gradients + static.gradient_padding
        found["optimizer"] += static.optimizer + static.counters
        losses = model.summaries["F"].end["outputs"]
        found["outputs"] += microbatches * losses
        found["inputs"] += losses  # the gradient of a loss
    return +found
