"""Memory over time in a plan file: what each kind of event does to live bytes, and how often.

While a plan is priced, a walk over the memory of a rank (`autopar.cost_models.walk`) notes what
each event does to live bytes over those when it begins. What events of one kind do is the same but
for the first and the last few, so it is written once, with a count. `memory_over_time` walks over
the events of the schedule again, and takes from there what each of them does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.evaluate import Evaluator
from autopar.cost_models.events import Event, rank_events
from autopar.cost_models.live import KINDS
from autopar.cost_models.memory import rank_memory
from autopar.cost_models.stages import StageModel
from autopar.cost_models.walk import Walk
from autopar.errors import PlanError
from autopar.plan.forecast import EffectForecast, Forecast, MemoryForecast, WalkForecast
from autopar.plan.forecast_lint import RUN, is_stale
from autopar.plan.plan import Plan

Row = tuple[int, ...]
_Effect = tuple[Row, Row | None, str]


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


class _Noting(Walk):
    """A walk that notes what each event does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.start = list(self.live.rows)
        self.effects: list[tuple[str, _Effect]] = []

    def _note(self, name: str, prefix: str, act: Any) -> None:
        live = self.live
        before = list(live.rows)
        live.top, live.where = -1, ""  # so that the mark is that of this event
        act()
        mark: Row | None = None
        place = ""
        if live.top >= 0:
            reached = live.peak
            mark = tuple(reached.get(k, 0) - b for k, b in zip(KINDS, before, strict=True))
            place = live.where
            if prefix and place.startswith(f"{prefix}:"):
                place = place[len(prefix) :]
        net = tuple(after - b for after, b in zip(live.rows, before, strict=True))
        self.effects.append((name, (net, mark, place)))

    def _step(self, event: Event) -> None:
        prefix = f"{event.stage}{event.what}" if event.kind == "run" else ""
        self._note(name_of(event), prefix, lambda: Walk._step(self, event))

    def _sum_shared(self) -> None:
        self._note("shared", "", lambda: Walk._sum_shared(self))

    def _update_all(self) -> None:
        self._note("update all", "", lambda: Walk._update_all(self))


def name_of(event: Event) -> str:
    """An event as text, such as ``run 3F``, ``run 3B last``, ``send 3F 4``."""
    peer = f" {event.peer}" if event.peer >= 0 else ""
    return f"{event.kind} {event.stage}{event.what}{peer}" + (" last" if event.last else "")


def note_memory(evaluator: Evaluator, plan: Plan, models: tuple[StageModel, ...]) -> MemoryForecast:
    """What memory over time is made from, of every pipeline rank.

    Args:
        evaluator: Of the model.
        plan: The plan.
        models: Its stages.
    """
    numbers: dict[_Effect, int] = {}
    ranks = []
    for rank in range(plan.pipeline.ranks(plan.mesh)):
        made: list[_Noting] = []

        def make(*args: Any, made: list[_Noting] = made, **options: Any) -> _Noting:
            made.append(_Noting(*args, **options))
            return made[-1]

        rank_memory(models, plan, rank, make_walk=make, **evaluator.memory_options())
        walk = made[0]
        events: dict[str, list[list[int]]] = {}
        for name, effect in walk.effects:
            number = numbers.setdefault(effect, len(numbers))
            runs = events.setdefault(name, [])
            if runs and runs[-1][0] == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        ((shared, _),) = events.pop("shared")
        ((update, _),) = events.pop("update all")
        ranks.append(
            WalkForecast(
                start=_kinds(walk.start),
                events={name: _text(runs) for name, runs in events.items()},
                shared=shared,
                update=update,
            )
        )
    return MemoryForecast(
        effects=tuple(
            EffectForecast(
                net=_kinds(net), peak=None if peak is None else _kinds(peak), where=where
            )
            for net, peak, where in numbers
        ),
        ranks=tuple(ranks),
    )


def _kinds(row: Row | list[int]) -> dict[str, int]:
    return {kind: size for kind, size in zip(KINDS, row, strict=True) if size}


def _text(runs: list[list[int]]) -> str:
    return " ".join(f"{number}*{times}" if times > 1 else f"{number}" for number, times in runs)


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
        return Span(what=what, live=_kinds(after), peak=_kinds(peak))


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
        rank=rank, start=dict(walk.start), spans=tuple(spans), peak=_kinds(live.peak),
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
