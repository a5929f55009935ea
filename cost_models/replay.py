"""Timelines and memory over time from plan files: exactly what their predictions said.

What reads predictions is here, apart from what makes them (`autopar.cost_models.forecast`): it
needs no cost model, so that commands which only show a plan start in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopar.cost_models.events import Event, rank_events, schedule_of
from autopar.cost_models.live import KINDS
from autopar.cost_models.simulate import Task, Timeline
from autopar.cost_models.timing import Timing
from autopar.errors import PlanError
from autopar.plan.forecast import EffectForecast, Forecast, MemoryForecast
from autopar.plan.forecast_lint import RUN, is_stale
from autopar.plan.plan import Plan

Row = tuple[int, ...]
"""Bytes of each of `KINDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Live bytes over one action.

    Attributes:
        what: The action as text; ``update`` for the optimizer step after the last.
        live: Bytes by kind after it.
        peak: Bytes by kind at its high-water mark.
    """

    what: str
    live: Mapping[str, int]
    peak: Mapping[str, int]

    @property
    def live_bytes(self) -> int:
        """Bytes after it."""
        return sum(self.live.values())

    @property
    def peak_bytes(self) -> int:
        """Most bytes during it."""
        return sum(self.peak.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOverTime:
    """Memory of a pipeline rank over a step.

    Attributes:
        rank: The pipeline rank.
        start: Bytes by kind at the start of the step.
        spans: Its actions in order, those of its timeline, and at the end the optimizer step.
        peak: Bytes by kind at the high-water mark.
        where: The action at that mark, and the op if it is one of a program.
    """

    rank: int
    start: Mapping[str, int]
    spans: tuple[Span, ...]
    peak: Mapping[str, int]
    where: str


def name_of(event: Event) -> str:
    """An event as text, such as ``run 3F``, ``run 3B last``, ``send 3F 4``."""
    peer = f" {event.peer}" if event.peer >= 0 else ""
    return f"{event.kind} {event.stage}{event.what}{peer}" + (" last" if event.last else "")


def kinds_of(row: Row | list[int]) -> dict[str, int]:
    """A row over `KINDS` by kind, without what is 0."""
    return {kind: size for kind, size in zip(KINDS, row, strict=True) if size}


class _Live:
    """Live bytes of the walk, and their high-water marks over all and over an action."""

    def __init__(self, start: Mapping[str, int]) -> None:
        self.rows = _row(start)
        self.top, self.peak, self.where = sum(self.rows), self.rows, ""
        self.high, self.high_rows = self.top, self.rows

    def begin(self) -> None:
        self.high, self.high_rows = sum(self.rows), self.rows

    def look(self, rows: list[int], where: str) -> None:
        total = sum(rows)
        if total > self.high:
            self.high, self.high_rows = total, rows
        if total > self.top:
            self.top, self.peak, self.where = total, rows, where

    def apply(self, effect: EffectForecast, prefix: str) -> None:
        if effect.peak is not None:
            where = prefix + effect.where if effect.where.startswith(":") else effect.where
            self.look(_add(self.rows, effect.peak), where)
        self.rows = _add(self.rows, effect.net)

    def span(self, what: str, after: list[int]) -> Span:
        peak = after if sum(after) > self.high else self.high_rows
        return Span(what=what, live=kinds_of(after), peak=kinds_of(peak))


def _row(sizes: Mapping[str, int]) -> list[int]:
    return [sizes.get(kind, 0) for kind in KINDS]


def _add(row: list[int], sizes: Mapping[str, int]) -> list[int]:
    return [size + sizes.get(kind, 0) for size, kind in zip(row, KINDS, strict=True)]


def replay(memory: MemoryForecast, rank: int, events: tuple[Event, ...]) -> MemoryOverTime:
    """Memory of a pipeline rank over a step.

    Args:
        memory: What it is made from.
        rank: The pipeline rank.
        events: Events of the rank.

    Raises:
        PlanError: If an event is not among those that were noted.
    """
    walk = memory.ranks[rank]
    effects = {name: _occurrences(runs) for name, runs in walk.events.items()}
    live = _Live(walk.start)
    spans: list[Span] = []
    action, text = -1, ""
    after: list[int] | None = None
    for event in events:
        if event.action != action:
            action = event.action
            if event.text:
                if text:
                    spans.append(live.span(text, live.rows))
                live.begin()
                text = event.text
            elif after is None:  # what follows still belongs to the last action's mark
                after = live.rows
        number = next(effects.get(name_of(event), iter(())), None)
        if number is None:
            raise PlanError(
                f"the plan's predictions lack the event {name_of(event)!r}",
                fix="run `autopar reprice` with the model",
                where=f"plan: $.forecast.memory.ranks[{rank}].events",
            )
        prefix = f"{event.stage}{event.what}" if event.kind == "run" else ""
        live.apply(memory.effects[number], prefix)
    after = live.rows if after is None else after
    live.apply(memory.effects[walk.shared], "")
    spans.append(live.span(text, after))
    live.begin()
    live.apply(memory.effects[walk.update], "")
    spans.append(live.span("update", live.rows))
    return MemoryOverTime(
        rank=rank, start=dict(walk.start), spans=tuple(spans), peak=kinds_of(live.peak),
        where=live.where,
    )  # fmt: skip


def _occurrences(runs: str) -> Iterator[int]:
    for run in runs.split(" "):
        match = RUN.fullmatch(run)
        if match is None:
            return
        for _ in range(int(match["times"] or 1)):
            yield int(match["effect"])


def current(plan: Plan) -> Forecast:
    """The forecast of a plan, about the choices that it has now.

    Raises:
        PlanError: If the plan has none, or one of other choices.
    """
    if plan.forecast is None:
        raise PlanError(
            "nothing was predicted of this plan",
            expected="a plan that was made for a cluster",
            fix="run `autopar reprice` with the model and --cluster",
            where="plan: $.forecast",
        )
    if is_stale(plan):
        raise PlanError(
            "the predictions of this plan are of other choices than it has now",
            fix="run `autopar reprice` with the model",
            where="plan: $.forecast.choices",
        )
    return plan.forecast


def memory_over_time(plan: Plan, rank: int) -> MemoryOverTime:
    """Memory of a pipeline rank over a step of a plan: exactly what its prediction said.

    Args:
        plan: A plan with a forecast.
        rank: The pipeline rank.

    Raises:
        PlanError: If there is no such rank, or no forecast, or one of other choices.
    """
    found = current(plan)
    if not 0 <= rank < len(found.memory.ranks):
        raise PlanError(
            f"the plan has no pipeline rank {rank}",
            expected=f"a number from 0 to {len(found.memory.ranks) - 1}",
        )
    edges = frozenset(found.timing.edges), frozenset(found.timing.gradient_edges)
    return replay(found.memory, rank, rank_events(plan, *edges, rank))


def timing_of(plan: Plan) -> Timing:
    """What the simulator was told of a plan.

    Raises:
        PlanError: If the plan has no forecast, or one of other choices.
    """
    found = current(plan).timing
    return Timing(
        tasks={
            (stage, item.kind, item.last): Task(
                compute_s=item.compute_s,
                inline_s=item.inline_s,
                beside_s=item.beside_s,
                parts=item.parts,
                joins=item.joins,
            )
            for item in found.tasks
            for stage in item.stages
        },
        messages={
            (source, target, item.kind): item.seconds_s
            for item in found.messages
            for source, target in item.pairs
        },
        edges=frozenset(found.edges),
        gradient_edges=frozenset(found.gradient_edges),
        slowdown=found.slowdown,
        factor=found.factor,
    )


def timeline_of(plan: Plan) -> Timeline:
    """When everything in a step of a plan happens: exactly what its prediction said.

    Raises:
        PlanError: If the plan has no forecast, or one of other choices, or one that lacks an
            action of its schedule.
    """
    timing, schedule = timing_of(plan), schedule_of(plan)
    try:
        return timing.timeline(schedule)
    except KeyError as error:
        raise PlanError(
            f"the plan's predictions lack {_named(*error.args[0])}",
            expected="predictions of all that the schedule does",
            fix="`autopar reprice PLAN MODEL -o PLAN` predicts anew",
            where="plan: $.forecast.timing",
        ) from None


def _named(stage: int, other: object, last: object) -> str:
    """What `Timing` knows by a key: an action, or a message."""
    if isinstance(last, str):
        return f"the message {last} from stage {stage} to {other}"
    return f"the action {other} of stage {stage}" + (", the last before an update" if last else "")
