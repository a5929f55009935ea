"""Why not the alternatives: what they change, in words of the plan, in time and in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.plan.forecast import AlternativeForecast, Forecast, RankForecast
from autopar.plan.plan import Plan
from autopar.plan.strategies import ROLES
from autopar.report.trees import over
from autopar.schedules.make import SCHEDULES
from autopar.units import format_bytes, format_seconds

_NUMBERS = {"m": "microbatches", "zero": "ZeRO", "v": "stages per rank"}
_MATTERS = 0.005
"""Changes below this share of a step, or of a device's memory, are not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """Another plan beside this one; everything is predicted.

    Attributes:
        text: The other plan in a few words.
        changes: What is different, such as ``tp 8 -> 4``.
        step_s: Seconds of its step.
        slower: How much longer its step is, as a share; negative if it is faster.
        fits: Whether it fits.
        over_bytes: Bytes beyond the capacity of its fullest rank; None if that is not known.
        more_bytes: Memory of its fullest rank over that of this plan's.
        time: Seconds that it adds, by part of the step.
        memory: Bytes that its fullest rank adds, by kind.
    """

    text: str
    changes: tuple[str, ...]
    step_s: float
    slower: float
    fits: bool
    over_bytes: int | None
    more_bytes: int
    time: Mapping[str, float]
    memory: Mapping[str, int]


def why_not(plan: Plan, forecast: Forecast) -> tuple[WhyNot, ...]:
    """The alternatives of a plan beside it, in their order."""
    return tuple(_beside(plan, forecast, item) for item in forecast.alternatives)


def _beside(plan: Plan, forecast: Forecast, item: AlternativeForecast) -> WhyNot:
    full = forecast.fullest
    return WhyNot(
        text=item.text,
        changes=tuple(_changes(plan, item)),
        step_s=item.step_s,
        slower=item.step_s / forecast.step_s - 1 if forecast.step_s > 0 else 0.0,
        fits=item.fits,
        over_bytes=None if item.capacity_bytes is None else item.over_bytes,
        more_bytes=item.device_bytes - full.device_bytes,
        time=_time(forecast.slowest, item),
        memory=_memory(full, item),
    )


# What is different


def _changes(plan: Plan, item: AlternativeForecast) -> Iterable[str]:
    before, after = dict(plan.mesh), dict(item.mesh)
    found = [
        f"{axis} {before.get(axis, 1)} -> {after.get(axis, 1)}"
        for axis in dict.fromkeys((*after, *before))
        if before.get(axis, 1) != after.get(axis, 1)
    ]
    one, two = _words_of(plan), _words(item)
    for name, value in two.items():
        known = one.get(name, "")
        if value != known:
            found.append(f"{name} {known} -> {value}" if known else f"{name} {value}")
    if item.recompute != "none":
        found.append(f"recomputes {item.recompute}")
    elif plan.recompute:
        found.append("recomputes nothing")
    return found or ["the same but for cuts, recomputation, or single ops"]


def _words_of(plan: Plan) -> dict[str, str]:
    """What `_words` says, of the plan itself."""
    part = plan.pipeline
    found = {"microbatches": str(part.microbatches), "ZeRO": str(plan.zero.stage)}
    factors = {frozenset(factors) for axis, factors in plan.order if axis != "dp" and factors}
    role = next((name for name, split in ROLES.items() if frozenset(split) in factors), "")
    if role:
        found["splits as"] = role
    if plan.num_stages > 1:
        found["schedule"] = part.schedule
        found["stages per rank"] = str(part.chunks)
    return found


def _words(item: AlternativeForecast) -> dict[str, str]:
    """The text of an alternative, word by word, but for its mesh."""
    axes = dict(item.mesh)
    found = {"ZeRO": "0"}
    for word in item.text.split():
        name, equals, value = word.partition("=")
        if equals and name in axes:
            continue
        if equals:
            found[_NUMBERS.get(name, name)] = value
        elif word in SCHEDULES:
            found["schedule"] = word
            found.setdefault("stages per rank", "1")
        else:
            found["splits as"] = word
    return found


# What that costs


def _time(slow: RankForecast, item: AlternativeForecast) -> dict[str, float]:
    """Seconds that an alternative adds, largest change first; they add up to its step's."""
    found = {
        "computation": item.compute_s - slow.compute_s,
        "communication in line": item.inline_s - slow.inline_s,
        "exposed communication": item.exposed_s - slow.exposed_s,
        "bubble": item.idle_s - slow.idle_s,
        "host": item.host_s - slow.host_s,
    }
    return {name: found[name] for name in sorted(found, key=lambda name: -abs(found[name]))}


def _memory(full: RankForecast, item: AlternativeForecast) -> dict[str, int]:
    """Bytes that an alternative adds, largest change first; they add up to its device's."""
    names = dict.fromkeys((*full.peak, *item.peak))
    found = {name: item.peak.get(name, 0) - full.peak.get(name, 0) for name in names}
    beyond = item.device_bytes - sum(item.peak.values())
    found["beyond tensors"] = beyond - (full.device_bytes - full.peak_bytes)
    return {name: found[name] for name in sorted(found, key=lambda name: -abs(found[name]))}


def time_words(item: WhyNot, step_s: float) -> str:
    """What an alternative changes in time, such as ``bubble +1.33 s, computation -905 ms``."""
    parts = [
        f"{over(name)} {signed(format_seconds, value)}"
        for name, value in item.time.items()
        if abs(value) > _MATTERS * step_s
    ]
    return ", ".join(parts)


def memory_words(item: WhyNot, device_bytes: int) -> str:
    """What an alternative changes in memory, such as ``saved -40.7 GB, parameters +21.8 GB``."""
    parts = [
        f"{name} {signed(format_bytes, value)}"
        for name, value in item.memory.items()
        if abs(value) > _MATTERS * device_bytes
    ]
    return ", ".join(parts[:4])


def signed(text: object, value: float) -> str:
    """`value` with its sign, as `text` writes it."""
    assert callable(text)
    return ("+" if value >= 0 else "-") + str(text(abs(value)))
