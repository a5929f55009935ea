"""Memory over time in a plan file: what each kind of event does to live bytes, and how often.

While a plan is priced, a walk over the memory of a rank (`autopar.cost_models.walk`) notes what
each event does to live bytes over those when it begins. What events of one kind do is the same but
for the first and the last few, so it is written once, with a count. `memory_over_time` walks over
the events of the schedule again, and takes from there what each of them does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.cost_models.evaluate import Evaluator
from autopar.cost_models.events import Event, EventKinds
from autopar.cost_models.live import KINDS, NOTHING, Live
from autopar.cost_models.memory import rank_memory
from autopar.cost_models.replay import Row, kinds_of, name_of
from autopar.cost_models.stages import StageModel
from autopar.cost_models.walk import Walk
from autopar.plan.forecast import EffectForecast, MemoryForecast, WalkForecast
from autopar.plan.plan import Plan

_Effect = tuple[Row, Row | None, str]


class _Noting(Walk):
    """A walk that notes what each event does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.start = list(self.live.rows)
        self.effects: list[tuple[str, _Effect, int]] = []

    def run_kinds(self, events: EventKinds) -> Live:
        """Note each kind once, with how often it is."""
        live = super().run_kinds(events)
        times = np.bincount(events.numbers, minlength=len(events.examples)).tolist()
        for place, count in enumerate(times):
            name, effect, _ = self.effects[place]
            self.effects[place] = name, effect, count
        return live

    def _note(self, name: str, prefix: str, act: Any) -> None:
        live = self.live
        before = list(live.rows)
        live.top, live.where = NOTHING, ""  # so that the mark is that of this event
        act()
        mark: Row | None = None
        place = ""
        if live.top > NOTHING:
            reached = live.peak
            mark = tuple(reached.get(k, 0) - b for k, b in zip(KINDS, before, strict=True))
            place = live.where
            if prefix and place.startswith(f"{prefix}:"):
                place = place[len(prefix) :]
        net = tuple(after - b for after, b in zip(live.rows, before, strict=True))
        self.effects.append((name, (net, mark, place), 1))

    def _step(self, event: Event) -> None:
        prefix = f"{event.stage}{event.what}" if event.kind == "run" else ""
        self._note(name_of(event), prefix, lambda: Walk._step(self, event))

    def _sum_shared(self) -> None:
        self._note("shared", "", lambda: Walk._sum_shared(self))

    def _update_all(self) -> None:
        self._note("update all", "", lambda: Walk._update_all(self))


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
        for name, effect, times in walk.effects:
            number = numbers.setdefault(effect, len(numbers))
            runs = events.setdefault(name, [])
            if runs and runs[-1][0] == number:
                runs[-1][1] += times
            else:
                runs.append([number, times])
        ((shared, _),) = events.pop("shared")
        ((update, _),) = events.pop("update all")
        ranks.append(
            WalkForecast(
                start=kinds_of(walk.start),
                events={name: _text(runs) for name, runs in events.items()},
                shared=shared,
                update=update,
            )
        )
    return MemoryForecast(
        effects=tuple(
            EffectForecast(
                net=kinds_of(net), peak=None if peak is None else kinds_of(peak), where=where
            )
            for net, peak, where in numbers
        ),
        ranks=tuple(ranks),
    )


def _text(runs: list[list[int]]) -> str:
    return " ".join(f"{number}*{times}" if times > 1 else f"{number}" for number, times in runs)
