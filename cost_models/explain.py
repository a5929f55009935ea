"""Where each second and byte of a prediction comes from, as a tree whose parts add up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from autopar.cost_models.evaluate import Prediction, RankCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A share of something.

    Attributes:
        name: What it is.
        value: Seconds or bytes.
        unit: Which of them.
        parts: What it consists of; they add up to it. Empty if it is not divided further.
    """

    name: str
    value: float
    unit: Literal["s", "bytes"]
    parts: tuple[Part, ...] = ()

    def lines(self, indent: int = 0) -> Iterator[str]:
        """The tree as text, a line each."""
        shown = format_seconds(self.value) if self.unit == "s" else format_bytes(int(self.value))
        yield f"{'  ' * indent}{self.name}: {shown}"
        for part in self.parts:
            yield from part.lines(indent + 1)


def slowest(prediction: Prediction) -> RankCost:
    """The pipeline rank that waits least for others: what makes it faster makes the step faster."""
    return min(prediction.ranks, key=lambda rank: (rank.time.idle_s, rank.rank))


def fullest(prediction: Prediction) -> RankCost:
    """The pipeline rank with least room."""
    return max(prediction.ranks, key=lambda rank: (rank.over_bytes, -rank.rank))


def time_tree(prediction: Prediction, rank: int | None = None) -> Part:
    """Where the step of a pipeline rank goes; by default of the one that waits least."""
    cost = slowest(prediction) if rank is None else prediction.ranks[rank]
    kernels, inline = defaultdict[str, float](float), defaultdict[str, float](float)
    update = 0.0
    schedule = prediction.timeline.schedule
    seen: Counter[tuple[int, str]] = Counter()
    for action in schedule.actions[cost.rank]:
        stage = prediction.stages[action.stage]
        if action.kind == "UPDATE":
            update += stage.update_kernels_s
            _add(inline, stage.update)
        elif action.kind in stage.programs:
            seen[action.stage, action.kind] += 1
            last = seen[action.stage, action.kind] % schedule.microbatches_per_update == 0
            program = (stage.last if last else stage.programs)[action.kind]
            _add(kernels, program.kernels)
            _add(inline, program.inline)
    split = cost.time
    slowed = split.compute_s - sum(kernels.values()) - update
    hidden = split.inline_s - sum(inline.values())
    compute = _parts(
        {**kernels, "optimizer": update, "slowed by collectives beside it": slowed}, split.compute_s
    )
    waiting = _parts({**inline, "what cannot hide beside computation": hidden}, split.inline_s)
    parts = (
        Part(name="computation", value=split.compute_s, unit="s", parts=compute),
        Part(name="collectives in line", value=split.inline_s, unit="s", parts=waiting),
        Part(name="waiting for collectives beside", value=split.exposed_s, unit="s"),
        Part(name="waiting for other stages", value=split.idle_s, unit="s"),
        Part(name="host", value=prediction.step_s - split.step_s, unit="s"),
    )
    return Part(
        name=f"step of pipeline rank {cost.rank} (predicted)",
        value=prediction.step_s,
        unit="s",
        parts=tuple(part for part in parts if part.value > 0),
    )


def _add(whole: MutableMapping[str, float], part: Mapping[str, float]) -> None:
    for name, value in part.items():
        whole[name] += value


def _parts(found: Mapping[str, float], whole: float) -> tuple[Part, ...]:
    """Largest first; what is nothing but rounding is left out."""
    return tuple(
        Part(name=name, value=value, unit="s")
        for name, value in sorted(found.items(), key=lambda item: -item[1])
        if value > 1e-9 * whole
    )


def memory_tree(prediction: Prediction, rank: int | None = None) -> Part:
    """What a pipeline rank holds at its peak; by default the one with least room."""
    cost = fullest(prediction) if rank is None else prediction.ranks[rank]
    peak = cost.memory.peak
    kinds = [
        Part(name=name, value=size, unit="bytes")
        for name, size in sorted(peak.items(), key=lambda item: -item[1])
        if size
    ]
    tensors = cost.memory.peak_bytes
    reserved = cost.reserve.reserved_bytes - tensors
    parts = [
        Part(
            name=f"live tensors at {cost.memory.where or 'the start of the step'}",
            value=tensors,
            unit="bytes",
            parts=tuple(kinds),
        ),
        Part(name="held by the allocator beyond them", value=reserved, unit="bytes"),
        Part(name="outside of the allocator", value=cost.reserve.context_bytes, unit="bytes"),
    ]
    return Part(
        name=f"device of pipeline rank {cost.rank} (predicted)",
        value=cost.reserve.device_bytes,
        unit="bytes",
        parts=tuple(part for part in parts if part.value),
    )
