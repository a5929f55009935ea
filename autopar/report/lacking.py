"""What the predictions of a plan file lack, so that no step can be made of them again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autopar.cost_models.events import event_kinds, schedule_of, schedule_with_messages
from autopar.cost_models.replay import name_of, timing_of
from autopar.errors import AutoparError
from autopar.plan.forecast import Forecast
from autopar.plan.forecast_lint import RUN, is_stale
from autopar.plan.plan import Plan
from autopar.plan.shapes import Fault
from autopar.schedules.actions import SENDS

MOST_ACTIONS = 150_000
"""Actions of a step beyond which predictions are not compared with them."""
_FIX = "`autopar reprice PLAN MODEL -o PLAN` predicts anew"


def lacking(plan: Plan) -> Iterator[Fault]:
    """Actions, messages and changes of memory of which nothing is predicted: warnings.

    Args:
        plan: A plan that has no faults.
    """
    forecast = plan.forecast
    if forecast is None or is_stale(plan):
        return
    actions = 2 * plan.num_stages * plan.pipeline.microbatches
    if actions > MOST_ACTIONS:
        what = f"was not compared with the schedule, which has {actions:,} actions"
        yield Fault(path="$.forecast", what=what, warning=True)
        return
    try:
        yield from _timing(plan, forecast)
        yield from _memory(plan, forecast)
    except AutoparError as error:  # what is said of messages contradicts the schedule
        yield Fault(
            path="$.forecast.timing",
            what=f"does not go with the schedule: {error.what}",
            expected="predictions of what the schedule does",
            fix=_FIX,
            warning=True,
        )


def _gap(path: str, what: str, number: int) -> Fault:
    more = f", and {number - 1:,} more" if number > 1 else ""
    return Fault(
        path=path,
        what=f"lacks {what}{more}: no timeline and no memory over time can be made",
        expected="predictions of all that the schedule does",
        fix=_FIX,
        warning=True,
    )


def _timing(plan: Plan, forecast: Forecast) -> Iterator[Fault]:
    timing, schedule = timing_of(plan), schedule_of(plan)
    every, wanted = schedule.microbatches_per_update, dict[tuple[int, str, bool], None]()
    for actions in schedule.actions:
        done: Counter[tuple[int, str]] = Counter()
        for action in actions:
            if action.kind == "REDUCE":
                continue
            key = (action.stage, action.kind)
            done[key] += 1
            last = action.kind != "UPDATE" and done[key] % every == 0
            wanted[(*key, last)] = None
    missing = [key for key in wanted if key not in timing.tasks]
    if missing:
        stage, kind, last = missing[0]
        words = f"the action {kind} of stage {stage}" + (
            ", the last before an update" if last else ""
        )
        yield _gap("$.forecast.timing.tasks", words, len(missing))
    sent = schedule_with_messages(plan, timing.edges, timing.gradient_edges)
    messages = {
        (action.stage, action.peer, action.kind)
        for actions in sent.actions
        for action in actions
        if action.kind in SENDS
    }
    lost = sorted(key for key in messages if key not in timing.messages)
    if lost:
        words = f"the message {lost[0][2]} from stage {lost[0][0]} to {lost[0][1]}"
        yield _gap("$.forecast.timing.messages", words, len(lost))


def _memory(plan: Plan, forecast: Forecast) -> Iterator[Fault]:
    edges = frozenset(forecast.timing.edges), frozenset(forecast.timing.gradient_edges)
    for rank, walk in enumerate(forecast.memory.ranks):
        found = event_kinds(plan, *edges, rank)
        counts = Counter(found.numbers.tolist())
        wanted: Counter[str] = Counter()
        for place, event in enumerate(found.examples):
            wanted[name_of(event)] += counts[place]
        missing = [
            name for name, times in wanted.items() if _times(walk.events.get(name, "")) < times
        ]
        if missing:
            path = f"$.forecast.memory.ranks[{rank}].events"
            yield _gap(path, f"the event {missing[0]!r}", len(missing))
            return


def _times(runs: str) -> int:
    """How often effects happen, as ``5*16 6`` says it."""
    return sum(int(match["times"] or 1) for match in map(RUN.fullmatch, runs.split()) if match)
