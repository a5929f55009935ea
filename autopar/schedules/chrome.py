"""Steps as Chrome traces, which chrome://tracing and ui.perfetto.dev show.

A trace of a measured step is read back, too: it says of which plan it is, and its bars are named
as the schedule's actions are, so that a prediction can be laid beside it. Times are seconds here
and microseconds in files.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autopar.errors import InputError

Stream = Literal["compute", "collective", "message"]
STREAMS: tuple[Stream, ...] = ("compute", "collective", "message")
MOST_BYTES = 2**30
"""No trace is larger, unpacked."""
_FORMAT, _VERSION = "autopar step", 1
_MICRO = 1e6  # microseconds in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Something that takes time.

    Attributes:
        name: What it is: an action as text, such as ``0F3``, or a collective.
        stream: Where it happens.
        start_s: Its start, from the start of the step.
        end_s: Its end.
        details: What else is known of it.
    """

    name: str
    stream: Stream
    start_s: float
    end_s: float
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """A measured step of one rank.

    Attributes:
        rank: The rank.
        pipeline_rank: Its place in its pipeline.
        bars: What it did: its actions in order, and collectives.
    """

    rank: int
    pipeline_rank: int
    bars: tuple[Bar, ...]

    @property
    def actions(self) -> tuple[Bar, ...]:
        """Its actions, in order."""
        return tuple(bar for bar in self.bars if bar.stream != "collective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A measured step of all ranks.

    Attributes:
        choices: Hash of the choices of the plan that ran (`autopar.plan.fingerprint`).
        device: What the ranks computed on.
        step_s: Seconds from the start to the end of the last rank.
        ranks: Each rank.
        plan: The plan that ran, as JSON.
    """

    choices: str
    device: str
    step_s: float
    ranks: tuple[RankStep, ...]
    plan: Mapping[str, Any]

    def save(self, path: str | Path) -> None:
        """Write it as a Chrome trace; packed if the name ends in ``.gz``.

        Raises:
            InputError: If the file cannot be written.
        """
        facts = {
            "format": _FORMAT,
            "version": _VERSION,
            "kind": "measured",
            "choices": self.choices,
            "device": self.device,
            "step_s": self.step_s,
            "ranks": [[step.rank, step.pipeline_rank] for step in self.ranks],
            "plan": self.plan,
        }
        write_trace(path, self._events(), facts)

    def _events(self) -> Iterator[dict[str, Any]]:
        for step in self.ranks:
            name = f"rank {step.rank} (pipeline rank {step.pipeline_rank}), measured"
            yield from process(step.rank, name)
            for bar in step.bars:
                yield bar_event(step.rank, bar)


def process(number: int, name: str) -> Iterator[dict[str, Any]]:
    """Events that name a process and its threads, one for each of `STREAMS`."""
    yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": name}}
    yield {
        "ph": "M", "name": "process_sort_index", "pid": number, "tid": 0,
        "args": {"sort_index": number},
    }  # fmt: skip
    for place, stream in enumerate(STREAMS, 1):
        yield {
            "ph": "M", "name": "thread_name", "pid": number, "tid": place, "args": {"name": stream}
        }  # fmt: skip


def bar_event(process_number: int, bar: Bar) -> dict[str, Any]:
    """A bar as an event of a process."""
    return {
        "ph": "X",
        "name": bar.name,
        "cat": bar.stream,
        "pid": process_number,
        "tid": STREAMS.index(bar.stream) + 1,
        "ts": micro(bar.start_s),
        "dur": micro(bar.duration_s),
        "args": dict(bar.details),
    }


def micro(seconds: float) -> float:
    """Microseconds, as files have them: to a nanosecond."""
    return round(seconds * _MICRO, 3)


def write_trace(
    path: str | Path, events: Iterable[Mapping[str, Any]], facts: Mapping[str, Any]
) -> int:
    """Write a trace, packed if the name of the file ends in ``.gz``.

    Args:
        path: The file.
        events: Its events.
        facts: What it says beside them.

    Returns:
        Number of events.

    Raises:
        InputError: If the file cannot be written.
    """
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    count = 0
    try:
        with _open(path) as file:
            file.write('{"displayTimeUnit":"ms","otherData":' + encode(facts))
            file.write(',"traceEvents":[')
            for event in events:
                file.write((",\n" if count else "\n") + encode(event))
                count += 1
            file.write("\n]}\n")
    except OSError as error:
        raise InputError(
            f"trace {str(path)!r} cannot be written: {error.strerror or error}",
            expected="a file in an existing folder",
        ) from None
    return count


def _open(path: str | Path) -> Any:
    if str(path).endswith(".gz"):
        return gzip.open(path, "wt", encoding="utf-8", compresslevel=5)
    return Path(path).open("w", encoding="utf-8")


def read_recording(path: str | Path) -> Recording:
    """Read a trace that `Recording.save` wrote.

    Raises:
        InputError: If the file is missing, or is no trace of a measured step.
    """
    where = str(path)
    data = _parsed(_text(path), where)
    facts = data.get("otherData")
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise _wrong("is not a trace of a step that autopar measured", where)
    if facts.get("version") != _VERSION:
        what = f"is of version {facts.get('version')!r}; this autopar reads {_VERSION}"
        raise _wrong(what, where)
    if facts.get("kind") != "measured":
        raise _wrong("is of a predicted step, not of a measured one", where)
    try:
        return _recording(data, facts)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _wrong(f"is damaged: {type(error).__name__}: {error}", where) from None


def _recording(data: Mapping[str, Any], facts: Mapping[str, Any]) -> Recording:
    bars: dict[int, list[Bar]] = {int(rank): [] for rank, _ in facts["ranks"]}
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            bars[event["pid"]].append(_bar(event))
    if not bars or not isinstance(facts["plan"], dict):
        raise ValueError("no ranks or no plan in it")
    return Recording(
        choices=str(facts["choices"]),
        device=str(facts["device"]),
        step_s=_number(facts["step_s"]),
        ranks=tuple(
            RankStep(rank=int(rank), pipeline_rank=int(place), bars=tuple(bars[rank]))
            for rank, place in facts["ranks"]
        ),
        plan=facts["plan"],
    )


def _bar(event: Mapping[str, Any]) -> Bar:
    start_s = _number(event["ts"]) / _MICRO
    return Bar(
        name=str(event["name"]),
        stream=STREAMS[STREAMS.index(event["cat"])],
        start_s=start_s,
        end_s=start_s + _number(event["dur"]) / _MICRO,
        details=dict(event["args"]),
    )


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return float(value)


def _text(path: str | Path) -> str:
    try:
        with Path(path).open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rb") if packed else Path(path).open("rb") as file:
            found = file.read(MOST_BYTES + 1)
        if len(found) > MOST_BYTES:
            raise _wrong("is too large", str(path), f"at most {MOST_BYTES:,} bytes")
        return found.decode("utf-8")
    except (OSError, EOFError, ValueError) as error:
        text = getattr(error, "strerror", None) or error
        raise _wrong(f"cannot be read: {text}", str(path)) from None


def _parsed(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"is no JSON: {error}", where) from None
    if not isinstance(found, dict):
        raise _wrong(f"is of type {type(found).__name__}", where, "an object with traceEvents")
    return found


def _wrong(what: str, where: str, expected: str = "") -> InputError:
    return InputError(
        f"trace {what}",
        expected=expected or "a file that compiled.profile(...).save(FILE) wrote",
        where=where,
    )
