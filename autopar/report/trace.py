"""The predicted step of a plan as a Chrome trace, and as text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.replay import MemoryOverTime, current, memory_over_time, timeline_of
from autopar.cost_models.simulate import Timeline
from autopar.plan.forecast import Forecast
from autopar.plan.plan import Plan
from autopar.report.terminal import clean
from autopar.schedules.actions import RECEIVES, SENDS, Action
from autopar.schedules.chrome import Bar, bar_event, micro, process
from autopar.units import counted, format_bytes, format_seconds

_THREAD = {"compute": 1, "collective": 2, "message": 3}
_ORDER = {"M": 0, "X": 1, "C": 1, "s": 2, "f": 3}
"""Of events at one time: an arrow needs the bars that it joins."""
MOST_ROWS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The predicted step of a plan.

    Attributes:
        plan: The plan.
        forecast: What was predicted of it.
        timeline: When everything happens.
    """

    plan: Plan
    forecast: Forecast
    timeline: Timeline

    @classmethod
    def of(cls, plan: Plan) -> Step:
        """The step of a plan.

        Raises:
            PlanError: If nothing was predicted of it, or of other choices.
        """
        return cls(plan=plan, forecast=current(plan), timeline=timeline_of(plan))

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return self.timeline.schedule.num_ranks

    @property
    def alike(self) -> int:
        """Ranks at each place of the pipeline; they all do the same."""
        return self.plan.device_mesh.size // self.num_ranks

    def memory(self, rank: int) -> MemoryOverTime:
        """Memory of a pipeline rank over the step."""
        return memory_over_time(self.plan, rank)

    def moments(self, rank: int) -> Iterator[tuple[float, float, Mapping[str, int], Any]]:
        """Memory of a pipeline rank: start and end of a span in seconds, its peak and its end.

        The optimizer step happens in the ``UPDATE`` actions at the end, if there are any.
        """
        spans = self.memory(rank).spans
        times = self.timeline.spans[rank]
        actions = self.timeline.schedule.actions[rank]
        tail = len(actions)
        while tail and actions[tail - 1].kind == "UPDATE":
            tail -= 1
        for span, (start, end) in zip(spans, times[:tail], strict=False):
            yield start, end, span.peak, span.live
        start = times[tail][0] if tail < len(times) else (times[-1][1] if times else 0.0)
        yield start, times[-1][1] if times else 0.0, spans[-1].peak, spans[-1].live


def trace_events(step: Step, ranks: Collection[int]) -> Iterator[dict[str, Any]]:
    """Events of a Chrome trace: a process for each pipeline rank.

    Args:
        step: The step.
        ranks: Pipeline ranks.

    Yields:
        Events: names first, then in the order of their times.
    """
    events: list[dict[str, Any]] = []
    for rank in sorted(ranks):
        stages = ", ".join(map(str, step.timeline.schedule.stages_of(rank)))
        alike = f", {counted(step.alike, 'rank')} alike" if step.alike > 1 else ""
        events += process(rank, f"pipeline rank {rank}: stages {stages}{alike} (predicted)")
        events += (bar_event(rank, bar) for bar in bars(step, rank))
        events += _counters(step, rank)
    events += _arrows(step, ranks)
    yield from sorted(events, key=lambda event: (event.get("ts", -1.0), _ORDER[event["ph"]]))


def bars(step: Step, rank: int) -> Iterator[Bar]:
    """Everything that takes time on a pipeline rank: its actions in order, then collectives."""
    for event in step.timeline.events(rank):
        action = event.action
        details: dict[str, Any] = {"stage": action.stage, "microbatch": action.microbatch}
        if action.peer is not None:
            details["peer"] = action.peer
        yield Bar(
            name=str(action), stream=event.stream, start_s=event.start_s, end_s=event.end_s,
            details=details,
        )  # fmt: skip
    for event in step.timeline.beside[rank]:
        yield Bar(
            name=f"{event.action} collectives", stream=event.stream, start_s=event.start_s,
            end_s=event.end_s, details={"action": str(event.action)},
        )  # fmt: skip
    host_s = step.forecast.ranks[rank].host_s
    if host_s > 0:
        end = step.timeline.step_s
        yield Bar(name="host", stream="compute", start_s=end, end_s=end + host_s)


def _counters(step: Step, rank: int) -> Iterator[dict[str, Any]]:
    """Memory by kind: at the high-water mark while something runs, then what it leaves."""
    kinds = sorted(
        {kind for _, _, peak, live in step.moments(rank) for row in (peak, live) for kind in row}
    )
    last: Any = None
    for start, end, peak, live in step.moments(rank):
        for at, row in ((start, peak), (end, live)):
            if row != last:
                last = row
                yield {
                    "ph": "C", "name": "memory in bytes (predicted)", "pid": rank, "tid": 0,
                    "ts": micro(at), "args": {kind: row.get(kind, 0) for kind in kinds},
                }  # fmt: skip


def _arrows(step: Step, ranks: Collection[int]) -> Iterator[dict[str, Any]]:
    """From every send to its receive, if both ends are shown."""
    sent: dict[Action, tuple[int, float]] = {}
    got: dict[Action, tuple[int, float]] = {}
    for rank in ranks:
        for event in step.timeline.events(rank):
            if event.action.kind in SENDS:
                sent[event.action] = rank, event.start_s
            elif event.action.kind in RECEIVES:
                got[event.action.counterpart] = rank, event.end_s
    number = 0
    for action, (source, at) in sent.items():
        if action not in got:
            continue
        number += 1
        target, then = got[action]
        both = {"name": "message", "cat": "message", "id": number, "tid": _THREAD["message"]}
        yield {"ph": "s", "pid": source, "ts": micro(at), **both}
        yield {"ph": "f", "bp": "e", "pid": target, "ts": micro(then), **both}


def facts(step: Step) -> dict[str, Any]:
    """What a trace says beside its events."""
    return {
        "format": "autopar step",
        "version": 1,
        "kind": "predicted",
        "choices": step.forecast.choices,
        "cluster": step.forecast.cluster.text,
        "step_s": step.forecast.step_s,
    }


def summary(step: Step) -> list[str]:
    """The step in a few lines."""
    forecast, timeline = step.forecast, step.timeline
    bubble = timeline.bubble_fraction
    alike = f", {counted(step.alike, 'rank')} alike at each" if step.alike > 1 else ""
    lines = [
        f"step      {format_seconds(forecast.step_s)} (predicted) on "
        f"{clean(forecast.cluster.text)}",
        f"pipeline  {counted(step.num_ranks, 'rank')}{alike}, schedule {timeline.schedule.name}, "
        f"{counted(timeline.schedule.num_microbatches, 'microbatch')}, "
        f"{bubble:.1%} idle (predicted)",
        "",
        f"{'pipeline rank':>13} {'compute':>10} {'in line':>10} {'exposed':>10} {'idle':>10} "
        f"{'peak memory':>12}  all predicted",
    ]
    count = step.num_ranks
    half = MOST_ROWS // 2
    shown = [*range(count)] if count <= MOST_ROWS else [*range(half), *range(count - half, count)]
    before = -1
    for rank in shown:
        if rank != before + 1:
            lines.append(f"{'...':>13} {rank - before - 1} more")
        before = rank
        split, found = timeline.splits[rank], forecast.ranks[rank]
        times = (split.compute_s, split.inline_s, split.exposed_s, split.idle_s)
        cells = " ".join(f"{format_seconds(value):>10}" for value in times)
        lines.append(f"{rank:>13} {cells} {format_bytes(found.device_bytes):>12}")
    return lines
