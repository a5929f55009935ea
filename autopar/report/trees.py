"""Where the seconds and bytes of a plan's predictions come from: trees whose parts add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from autopar.cost_models.events import schedule_of
from autopar.cost_models.explain import Part
from autopar.plan.forecast import Forecast, RankForecast
from autopar.plan.plan import Plan

_ROUNDING = 1e-9
ACTIONS = {
    "F": "forward", "B": "backward", "I": "backward, gradients of inputs",
    "W": "backward, gradients of weights", "REDUCE": "sums of gradients", "UPDATE": "updates",
}  # fmt: skip
"""Kinds of actions in words."""


def seconds(name: str, value_s: float, parts: Iterable[Part] = ()) -> Part:
    """A share of time."""
    return Part(name=name, value=value_s, unit="s", parts=tuple(parts))


def _bytes(name: str, value_bytes: float, parts: Iterable[Part] = ()) -> Part:
    return Part(name=name, value=value_bytes, unit="bytes", parts=tuple(parts))


def over(axes: str) -> str:
    """Axes of collectives in words, such as ``pp and dp``."""
    return axes.replace(", ", " and ")


def _named(found: Mapping[str, float], whole_s: float, rest: str, prefix: str = "") -> list[Part]:
    """Parts by name, largest first, and what they leave of the whole."""
    left = whole_s - sum(found.values())
    parts = [seconds(prefix + over(name), value) for name, value in found.items() if value]
    if abs(left) > _ROUNDING * max(whole_s, 1e-12):
        parts.append(seconds(rest, left))
    return sorted(parts, key=lambda part: -part.value)


def time_of_rank(rank: RankForecast) -> Part:
    """Where the step of a pipeline rank goes."""
    parts = [
        seconds("computation", rank.compute_s, _named(rank.kernels, rank.compute_s, "other work")),
        seconds(
            "collectives in line",
            rank.inline_s,
            _named(rank.collectives, rank.inline_s, "what cannot hide beside computation", "over "),
        ),
        seconds("waiting for collectives beside computation", rank.exposed_s),
        seconds("waiting for other stages (bubble)", rank.idle_s),
        seconds("host", rank.host_s),
    ]
    shown = [part for part in parts if part.value > _ROUNDING * rank.step_s]
    return seconds(f"step of pipeline rank {rank.rank}", rank.step_s, shown)


def memory_of_rank(rank: RankForecast) -> Part:
    """What a device of a pipeline rank holds at its high-water mark."""
    kinds = [
        _bytes(kind, size, _before(rank.resident.get(kind, 0), size))
        for kind, size in rank.peak.items()
        if size
    ]
    where = rank.peak_at or "the start of the step"
    parts = [
        _bytes(f"live tensors at {where}", rank.peak_bytes, kinds),
        _bytes("held by the allocator beyond them", rank.reserved_bytes - rank.peak_bytes),
        _bytes("outside of the allocator", rank.context_bytes),
    ]
    shown = [part for part in parts if part.value]
    return _bytes(f"device of pipeline rank {rank.rank}", rank.device_bytes, shown)


def _before(resident: int, size: int) -> list[Part]:
    """What of a kind was there before the step, if that is a part of it."""
    if not 0 < resident < size:
        return []
    return [
        _bytes("there before the step", resident),
        _bytes("made in the step", size - resident),
    ]


def time_of_stage(plan: Plan, forecast: Forecast, stage: int) -> Part:
    """What the actions of a stage take in a step, each as if it were alone on its rank."""
    schedule = schedule_of(plan)
    rank = schedule.stage_ranks[stage]
    seen = Counter(a.kind for a in schedule.actions[rank] if a.stage == stage)
    every, factor = schedule.microbatches_per_update, forecast.timing.factor
    tasks = {(task.kind, task.last): task for task in forecast.timing.tasks if stage in task.stages}
    parts = []
    for kind, number in seen.items():
        last = number // every if (kind, True) in tasks else 0
        for ends, times in ((False, number - last), (True, last)):
            task = tasks.get((kind, ends))
            if task is None or not times or not (task.compute_s or task.inline_s):
                continue
            each = (task.compute_s + task.inline_s) * factor
            name = ACTIONS.get(kind, kind) + (", the last before an update" if ends else "")
            inner = [
                seconds("computation", task.compute_s * factor * times),
                seconds("collectives in line", task.inline_s * factor * times),
            ]
            parts.append(
                seconds(f"{name}, {times:,} x {each:.4g} s", each * times,
                        [part for part in inner if part.value])
            )  # fmt: skip
    total = sum(part.value for part in parts)
    return seconds(f"actions of stage {stage} on pipeline rank {rank}", total, parts)
