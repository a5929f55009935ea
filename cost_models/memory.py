"""Bytes that a rank holds over a training step, by kind.

What a rank holds at all times follows from its parameters: with P bytes of parameters, as much of
gradients and N data-parallel ranks, ZeRO (arXiv 1910.02054, section 5) leaves

    stage   parameters   gradients   optimizer state of S bytes per parameter
    0       P            P           S P
    1       P            P           S P / N
    2       P            P / N       S P / N
    3       P / N        P / N       S P / N

and padding of buckets to equal shards. What comes and goes is a walk over the events of the rank's
schedule with what each program does to live bytes (`autopar.cost_models.tape.liveness`). Bytes are
those of tensors; what an allocator makes of them is in `autopar.cost_models.allocator`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.buckets import Bucket, LocalParameter
from autopar.cost_models.events import Edge, Event, rank_events, schedule_of
from autopar.cost_models.optimizer import OptimizerMemory
from autopar.cost_models.stages import StageModel
from autopar.graph.ir import ITEM_BYTES
from autopar.plan.plan import Plan

KINDS = (
    "parameters", "gradients", "optimizer", "buffers", "inputs", "saved", "boundary", "outputs",
    "collective", "temporary",
)  # fmt: skip
"""What memory is for, as in a dry run."""
Bytes = Counter[str]
_INDEX = {name: place for place, name in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes over one action.

    Attributes:
        what: The action as text.
        peak_bytes: Most that was live during it.
        live_bytes: What is live after it.
    """

    what: str
    peak_bytes: int
    live_bytes: int


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What a stage holds at all times.

    Attributes:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        parameter_padding: Bytes between and behind parameters in buckets.
        gradient_padding: Bytes between and behind gradients in buckets.
        optimizer: Bytes of optimizer state, step counters left out.
        counters: Bytes of step counters.
        largest: Bytes of the largest part of a parameter that is updated at once.
        updated: Bytes of all that is updated.
    """

    parameters: int
    gradients: int
    parameter_padding: int
    gradient_padding: int
    optimizer: int
    counters: int
    largest: int
    updated: int


def static_memory(
    parameters: Iterable[LocalParameter],
    buckets: Sequence[Bucket],
    optimizer: OptimizerMemory,
    *,
    positions: Callable[[Bucket], int] = lambda bucket: 0,
    gradient_bytes: int | None = None,
) -> Static:
    """Parameters, gradients and optimizer state of a stage on a rank.

    Args:
        parameters: All parameters of the stage.
        buckets: Of those that lie in buckets.
        optimizer: What it keeps.
        positions: Place of the rank in the group of a bucket.
        gradient_bytes: Bytes of an element of a gradient; those of the parameter when None.
    """
    found = Counter[str]()
    held = {item.name for bucket in buckets for item in bucket.members}
    largest = 0
    for bucket in buckets:
        item_bytes = ITEM_BYTES[bucket.dtype]
        width = gradient_bytes or item_bytes
        whole = [item.numel for item in bucket.members]
        mine = bucket.cuts(positions(bucket)) if bucket.zero else whole
        kept = sum(mine) if bucket.zero >= 2 else sum(whole)
        length = bucket.numel // (bucket.group if bucket.zero >= 2 else 1)
        found["gradients"] += kept * width
        found["gradient_padding"] += (length - kept) * width
        kept = sum(mine) if bucket.zero == 3 else sum(whole)
        length = bucket.numel // (bucket.group if bucket.zero == 3 else 1)
        found["parameters"] += kept * item_bytes
        if bucket.zero:
            found["parameter_padding"] += (length - kept) * item_bytes
        for numel in mine:
            _update(found, numel, bucket.dtype, numel * item_bytes, optimizer)
            largest = max(largest, numel * item_bytes)
    for item in parameters:
        if item.name in held:
            continue
        found["parameters"] += item.size_bytes
        if item.trainable and item.made_by:
            found["gradients"] += item.numel * (gradient_bytes or ITEM_BYTES[item.dtype])
            _update(found, item.numel, item.dtype, item.size_bytes, optimizer)
            largest = max(largest, item.size_bytes)
    return Static(
        parameters=found["parameters"],
        gradients=found["gradients"],
        parameter_padding=found["parameter_padding"],
        gradient_padding=found["gradient_padding"],
        optimizer=found["optimizer"],
        counters=found["counters"],
        largest=largest,
        updated=found["updated"],
    )


def _update(
    found: Counter[str], numel: int, dtype: str, size: int, optimizer: OptimizerMemory
) -> None:
    found["optimizer"] += optimizer.state_bytes(numel, dtype)
    found["counters"] += optimizer.counter_bytes
    found["updated"] += size


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
    """
    schedule = schedule_of(plan)
    stages = schedule.stages_of(rank)
    mine = {stage: models[stage] for stage in stages}
    held = {
        stage: static_memory(model.parameters, model.buckets, optimizer, positions=positions)
        for stage, model in mine.items()
    }
    resident = _resident(mine, held, schedule.num_microbatches, input_bytes)
    resident["buffers"] += buffer_bytes
    for stage in stages:
        if schedule.delay(stage):
            # Weights of updates before, the last of them only until the next microbatch begins.
            resident["parameters"] += (schedule.delay(stage) + 1) * held[stage].parameters
    edges = stage_edges(models)
    walk = _Walk(
        mine, held, optimizer, resident,
        asynchronous=schedule.updates > 1 or any(schedule.delays),
        delayed=frozenset(stage for stage in stages if schedule.delay(stage)),
        gloo=gloo, moments=moments,
    )  # fmt: skip
    for event in rank_events(plan, *edges, rank):
        walk.step(event)
    walk.finish()
    return RankMemory(
        rank=rank,
        stages=stages,
        resident=resident,
        peak=Counter({k: n for k, n in zip(KINDS, walk.peak, strict=True) if n}),
        where=walk.where,
        moments=tuple(walk.moments),
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


@dataclass(slots=True)
class _Run:
    """A program's summary, as rows over `KINDS`."""

    peak: list[int]
    change: list[int]
    above: int
    net: int
    where: str


def _row(counted: Mapping[str, int]) -> list[int]:
    row = [0] * len(KINDS)
    for name, size in counted.items():
        row[_INDEX[name]] += size
    return row


class _Walk:
    """Live bytes, event by event."""

    def __init__(
        self,
        mine: Mapping[int, StageModel],
        held: Mapping[int, Static],
        optimizer: OptimizerMemory,
        resident: Bytes,
        *,
        asynchronous: bool,
        delayed: frozenset[int],
        gloo: bool,
        moments: bool,
    ) -> None:
        self.mine, self.held, self.optimizer = mine, held, optimizer
        self.asynchronous, self.delayed = asynchronous, delayed
        # Of delayed stages: updates done, the update of the last microbatch begun, and whether that
        # one's weights are kept for nobody else.
        self.updates = dict.fromkeys(delayed, 0)
        self.begun = dict.fromkeys(delayed, -1)
        self.outdated = set(delayed)
        self.gloo, self.notes = gloo, moments
        self.live = _row(resident)
        self.live[_INDEX["outputs"]] = 0  # losses of the step before are gone when it starts
        self.live[_INDEX["temporary"]] = 8  # the seed
        self.total = sum(self.live)
        self.peak, self.top, self.where = list(self.live), self.total, ""
        self.moments: list[Moment] = []
        self.runs: dict[tuple[int, str], _Run] = {}
        self.sizes: dict[tuple[str, int, str, int], int] = {}
        self.action, self.what, self.high = -1, "", 0

    def step(self, event: Event) -> None:
        """Something happens."""
        if self.notes and event.action != self.action:
            self._note()
            self.action, self.what, self.high = event.action, event.text, 0
        if event.kind == "run":
            self._run(event)
        elif event.kind == "reduce":
            self._reduce(event.stage)
        elif event.kind == "update":
            if self.asynchronous:
                self._update(event.stage)
        elif event.kind != "send":
            self._message(event)

    def finish(self) -> None:
        """What follows the actions: the optimizer step, unless they have some."""
        if self.notes:
            self._note()
            self.what, self.high = "update", 0
        for stage in self.held:
            # Gradients of what several stages use are summed over these.
            shared = [p for p in self.mine[stage].parameters if p.users > 1 and p.made_by]
            largest = max((item.size_bytes for item in shared), default=0)
            self._look(self.total + largest, "collective", "sum over stages")
            if not self.asynchronous:
                self._update(stage)
        if self.notes:
            self._note()

    def _update(self, stage: int) -> None:
        static, optimizer = self.held[stage], self.optimizer
        spare = optimizer.temporaries * static.largest
        if optimizer.loop != "single":
            spare = static.updated if optimizer.loop == "foreach" and spare else 0
        if stage in self.delayed:
            # A new version; the oldest stays until the next microbatch begins with another.
            self._look(self.total + static.parameters + spare, "temporary", "update")
            self.updates[stage] += 1
            self._drop_outdated(stage)
        else:
            self._look(self.total + spare, "temporary", "update")
        self._add("gradients", -self._reduced(stage))

    def _note(self) -> None:
        if self.what:
            self.moments.append(
                Moment(what=self.what, peak_bytes=max(self.high, self.total), live_bytes=self.total)
            )

    def _add(self, kind: str, size: int) -> None:
        self.live[_INDEX[kind]] += size
        self.total += size
        self._look(self.total, "", "")

    def _look(self, total: int, kind: str, where: str) -> None:
        self.high = max(self.high, total)
        if total > self.top:
            self.top, self.where = total, where
            self.peak = list(self.live)
            if kind:
                self.peak[_INDEX[kind]] += total - self.total

    def _run(self, event: Event) -> None:
        if event.what == "F" and event.stage in self.delayed:
            self.begun[event.stage] = event.update
            self._drop_outdated(event.stage)
        run = self.runs.get((event.stage, event.what))
        if run is None:
            run = self.runs[event.stage, event.what] = self._program(event)
        total = self.total + run.above
        self.high = max(self.high, total)
        if total > self.top:
            self.top = total
            self.where = f"{event.stage}{event.what}: {run.where}"
            self.peak = [a + b for a, b in zip(self.live, run.peak, strict=True)]
        self.live = [a + b for a, b in zip(self.live, run.change, strict=True)]
        self.total += run.net
        if event.last:
            # Results of reductions under way, or the rows that gloo exchanges.
            started = [
                bucket
                for bucket in self.mine[event.stage].buckets
                if bucket.zero == 1 and bucket.made_by == event.what
            ]
            size = sum(b.size_bytes if self.gloo else b.shard_bytes for b in started)
            if size:
                self._add("collective", size)

    def _drop_outdated(self, stage: int) -> None:
        """Count a version of the weights that only the last microbatch begun still names."""
        now = self.begun[stage] < self.updates[stage]
        if now != (stage in self.outdated):
            self._add("parameters", self.held[stage].parameters * (1 if now else -1))
            self.outdated ^= {stage}

    def _program(self, event: Event) -> _Run:
        summary = self.mine[event.stage].summaries[event.what]
        start, peak, end = map(_row, (summary.start, summary.peak, summary.end))
        # New versions of buffers take the place of the old, which backward may still want.
        versions = self.mine[event.stage].version_bytes
        end[_INDEX["buffers"]] = versions if event.what == "F" else 0
        if event.what == ("W" if "W" in self.mine[event.stage].summaries else "B"):
            start[_INDEX["buffers"]] += versions
            peak[_INDEX["buffers"]] += versions
        peak = [a - b for a, b in zip(peak, start, strict=True)]
        change = [a - b for a, b in zip(end, start, strict=True)]
        return _Run(peak, change, sum(peak), sum(change), summary.where)

    def _reduced(self, stage: int) -> int:
        """Bytes of the shards of gradients that ZeRO-1 makes for an update."""
        return sum(b.shard_bytes for b in self.mine[stage].buckets if b.zero == 1)

    def _reduce(self, stage: int) -> None:
        buckets = [bucket for bucket in self.mine[stage].buckets if bucket.zero == 1]
        for bucket in buckets:
            self._add("gradients", bucket.shard_bytes)
            self._add("collective", -(bucket.size_bytes if self.gloo else bucket.shard_bytes))

    def _message(self, event: Event) -> None:
        key = (event.kind, event.stage, event.what, event.peer)
        size = self.sizes.get(key)
        if size is None:
            size = self.sizes[key] = self._message_bytes(event)
        if size:
            self._add("boundary", size)

    def _message_bytes(self, event: Event) -> int:
        """By how much a message changes live bytes."""
        model, stage, peer = self.mine[event.stage], event.stage, event.peer
        if event.kind == "release":
            return -model.released.get((event.what, peer), 0)
        ahead = event.what == "F"
        ends = (peer, stage) if ahead else (stage, peer)
        items = [
            item
            for item in model.messages
            if (item.source, item.target) == ends and (ahead or item.gradient)
        ]
        if event.kind == "post":
            return sum(item.size_bytes for item in items)
        if ahead:
            return 0
        # Gradients of a value that went to several stages are added up.
        last = {
            item.value: max(other.target for other in model.messages if other.value == item.value)
            for item in items
        }
        return -sum(item.size_bytes for item in items if item.target != last[item.value])
