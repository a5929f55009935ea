"""What a plan says of its pipeline ranks: their stages, layers, memory and time."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.plan.fold import numbers_text, runs_of
from autopar.plan.forecast import Forecast, RankForecast
from autopar.plan.plan import Plan
from autopar.report.trees import over
from autopar.schedules.steady import stage_ranks

GROUPS: Mapping[str, tuple[str, ...]] = {
    "parameters": ("parameters", "buffers"),
    "gradients": ("gradients",),
    "optimizer": ("optimizer",),
    "activations": ("saved",),
}
"""Kinds of memory that are shown together; all others are ``temporary``."""
MOST_RUNS = 10
"""Lines of ranks that there should be at most."""
_NOTE = re.compile(r"stage (\d{1,6}): (?:(\S+) to )?(\S+), [\d,]+ ops?, ")
_STAGE = re.compile(r"stage \d{1,6}: ")
_BLOCK = re.compile(r"(?P<name>.*?(?:^|\.))(?P<number>0|[1-9]\d{0,8})(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The part of the model that a stage has.

    Attributes:
        first: Module of its first op; empty if not known.
        last: Module of its last op.
        name: What the layers are called, if it begins and ends in those of one name.
        low: The first layer.
        high: The last one.
        shared: Whether the last one goes on in the next stage.
    """

    first: str
    last: str
    name: str = ""
    low: int = 0
    high: int = -1
    shared: bool = False

    @property
    def text(self) -> str:
        """It in words, such as ``layers.{0..5}``."""
        if self.high >= self.low:
            part = ", the last in part" if self.shared else ""
            return self.name + numbers_text(range(self.low, self.high + 1)) + part
        if not self.first:
            return ""
        return " to ".join(dict.fromkeys((self.first, self.last or "...")))


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksView:
    """Pipeline ranks next to each other that are alike.

    Attributes:
        first: The first of them.
        last: The last of them.
        stages: Their stages; those of one rank first.
        layers: Their layers, in words.
        fullest: The one with least room; None without a forecast.
        least_bytes: Least memory of a device that is in use (predicted).
        most_bytes: Most of it.
        over_bytes: Most bytes beyond the capacity; negative if they fit.
        capacity_bytes: Memory of a device; None if that is not known.
        kinds: Bytes of the fullest of them by kind; ``reserved`` is what the allocator and the
            context hold beyond tensors.
    """

    first: int
    last: int
    stages: tuple[int, ...]
    layers: str
    fullest: int | None = None
    least_bytes: int | None = None
    most_bytes: int | None = None
    over_bytes: int | None = None
    capacity_bytes: int | None = None
    kinds: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeView:
    """A part of the step of a rank.

    Attributes:
        name: What it is.
        kind: ``compute``, ``communication``, ``bubble`` or ``host``.
        seconds_s: Seconds (predicted).
    """

    name: str
    kind: str
    seconds_s: float


# Layers


def is_stage_note(note: str) -> bool:
    """Whether a note says what a stage consists of."""
    return _STAGE.match(note) is not None


def layers(plan: Plan) -> tuple[Layers, ...]:
    """For every stage its layers, as far as cuts and notes tell them."""
    count, cuts = plan.num_stages, plan.pipeline.cuts
    noted = {int(m[1]): (m[2] or m[3], m[3]) for m in map(_NOTE.match, plan.notes) if m}
    ends = []
    for stage in range(count):
        first, last = noted.get(stage, ("", ""))
        if stage and stage <= len(cuts):
            begins = cuts[stage - 1].rpartition("/")[0]
            first, last = begins, last if begins == first else ""
        ends.append((first, last))
    found: list[Layers] = []
    for stage, (first, last) in enumerate(ends):
        low, high = _BLOCK.match(first), _BLOCK.match(last)
        if low is None or high is None or low["name"] != high["name"]:
            whole = low is not None and not (found and found[-1].shared)
            found.append(Layers(first=_block(first) if whole else first, last=last))
            continue
        after = _BLOCK.match(ends[stage + 1][0]) if stage + 1 < count else None
        found.append(
            Layers(
                first=first, last=last, name=low["name"], low=int(low["number"]),
                high=int(high["number"]),
                shared=after is not None and after.groups() == high.groups(),
            )
        )  # fmt: skip
    return tuple(found)


def _block(module: str) -> str:
    """The layer that a module is in."""
    match = _BLOCK.match(module)
    return module if match is None else match["name"] + match["number"]


def _layers_text(parts: Sequence[Sequence[Layers]]) -> str:
    """Layers of alike ranks, those of each rank in the order of its stages."""
    if len(parts) == 1:
        return " + ".join(part.text for part in parts[0] if part.text)
    flat = [part for own in parts for part in own]
    if any(part.high < part.low for part in flat):
        return ""
    counts = [part.high - part.low + 1 for part in parts[0]]
    names = {part.name for part in flat}
    numbers = sorted({n for part in flat for n in range(part.low, part.high + 1)})
    span = f"{names.pop()}{numbers_text(numbers)}: " if len(names) == 1 else ""
    return f"{span}{' + '.join(map(str, counts))} each"


# Ranks


def stages_of_ranks(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """For every pipeline rank its stages."""
    part = plan.pipeline
    places = stage_ranks(part.schedule, part.ranks(plan.mesh), part.chunks)
    return tuple(
        tuple(stage for stage, place in enumerate(places) if place == rank)
        for rank in range(part.ranks(plan.mesh))
    )


def ranks(plan: Plan, forecast: Forecast | None, most: int = MOST_RUNS) -> tuple[RanksView, ...]:
    """The pipeline ranks of a plan, those next to each other that are alike together.

    Args:
        plan: The plan.
        forecast: Its predictions.
        most: Lines that there should be at most.
    """
    stages, parts = stages_of_ranks(plan), layers(plan)
    known = {} if forecast is None else {item.rank: item for item in forecast.ranks}
    fullest = None if forecast is None or not forecast.ranks else forecast.fullest.rank

    def key(rank: int) -> tuple[object, ...]:
        own = [parts[stage] for stage in stages[rank]]
        alike = [(p.name, p.high - p.low) if p.high >= p.low else p.text for p in own]
        item = known.get(rank)
        room = None if item is None else (item.device, item.capacity_bytes, item.over_bytes > 0)
        return (*alike, room)

    def alike(one: int, other: int, tolerance: float) -> bool:
        a, b = known.get(one), known.get(other)
        if a is None or b is None:
            return a is b
        largest = max(a.device_bytes, b.device_bytes)
        return abs(a.device_bytes - b.device_bytes) <= tolerance * largest

    runs = runs_of(range(len(stages)), key, alike, most)
    return tuple(_view(run, stages, parts, known, fullest) for run in runs)


def _view(
    run: tuple[int, ...],
    stages: Sequence[tuple[int, ...]],
    parts: Sequence[Layers],
    known: Mapping[int, RankForecast],
    fullest: int | None,
) -> RanksView:
    view = RanksView(
        first=run[0],
        last=run[-1],
        stages=tuple(stage for rank in run for stage in stages[rank]),
        layers=_layers_text([[parts[stage] for stage in stages[rank]] for rank in run]),
    )
    items = [known[rank] for rank in run if rank in known]
    if not items:
        return view
    full = max(items, key=lambda item: (item.rank == fullest, item.over_bytes, -item.rank))
    return RanksView(
        first=view.first,
        last=view.last,
        stages=view.stages,
        layers=view.layers,
        fullest=full.rank,
        least_bytes=min(item.device_bytes for item in items),
        most_bytes=max(item.device_bytes for item in items),
        over_bytes=None if full.capacity_bytes is None else full.over_bytes,
        capacity_bytes=full.capacity_bytes,
        kinds=kinds(full),
    )


def kinds(rank: RankForecast) -> dict[str, int]:
    """Memory of a rank's device by kind, at its high-water mark; the kinds add up to it."""
    group = {kind: name for name, members in GROUPS.items() for kind in members}
    found = dict.fromkeys((*GROUPS, "temporary"), 0)
    for kind, size in rank.peak.items():
        found[group.get(kind, "temporary")] += size
    found["reserved"] = rank.device_bytes - sum(found.values())
    return found


# Time


def time_parts(rank: RankForecast, axis_of_stages: str) -> tuple[TimeView, ...]:
    """Where the step of a rank goes; the parts add up to it.

    Args:
        rank: The rank.
        axis_of_stages: Axis of the pipeline.
    """
    found = [_part("computation", "compute", rank.compute_s)]
    axes = dict(rank.collectives)
    rest = rank.inline_s - sum(axes.values())
    found += [
        _part(f"collectives over {over(axis)}", "communication", s) for axis, s in axes.items()
    ]
    found.append(_part("other collectives in line", "communication", rest))
    beside = " and ".join(map(over, rank.beside)) or "data"
    found.append(_part(f"exposed of those over {beside}", "communication", rank.exposed_s))
    found.append(_part(f"bubble: idle along {axis_of_stages}", "bubble", rank.idle_s))
    found.append(_part("host", "host", rank.host_s))
    return tuple(_known(found, rank.step_s))


def _part(name: str, kind: str, seconds_s: float) -> TimeView:
    return TimeView(name=name, kind=kind, seconds_s=seconds_s)


def _known(found: Iterable[TimeView], whole_s: float) -> Iterable[TimeView]:
    """What is more than rounding."""
    return [part for part in found if abs(part.seconds_s) > 1e-6 * whole_s]
