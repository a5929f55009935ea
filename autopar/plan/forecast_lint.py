"""What is wrong with the predictions of a plan file: they fit its choices, or are stale."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.plan.fingerprint import choices_digest
from autopar.plan.forecast import Forecast
from autopar.plan.plan import Plan
from autopar.plan.shapes import Fault, Trail, path_of, shown
from autopar.units import counted

EVENT = re.compile(
    r"(?P<kind>run|post|take|send|release|reduce|update)"
    r"( (?P<stage>\d{1,6})(?P<what>[A-Z]?)( (?P<peer>\d{1,6}))?)(?P<last> last)?"
)
"""An event of a walk over memory, as text."""
RUN = re.compile(r"(?P<effect>\d{1,9})(\*(?P<times>\d{1,9}))?")
"""Number of an effect, and how often it happens in a row."""
_ROUNDING = 1e-6
_ANEW = "`autopar reprice` predicts anew"
STALE = "was made for other choices than the file has now"


def is_stale(plan: Plan) -> bool:
    """Whether a plan's choices are no longer those that its predictions are about."""
    return plan.forecast is not None and plan.forecast.choices != choices_digest(plan)


def check_forecast(values: Mapping[str, Any]) -> Iterator[Fault]:
    """Faults of predictions, if all else of the plan is right.

    Args:
        values: The fields of the plan by name.
    """
    forecast: Forecast | None = values["forecast"]
    if forecast is None:
        return
    plan = Plan(**values)
    root: Trail = ((), "forecast")
    if is_stale(plan):
        yield Fault(
            path=path_of((root, "choices")),
            what=STALE,
            expected="predictions of these choices",
            fix=_ANEW,
            warning=True,
        )
    elif len(forecast.ranks) != (count := plan.pipeline.ranks(plan.mesh)):
        what = f"has {counted(len(forecast.ranks), 'rank')}"
        yield Fault(path=path_of((root, "ranks")), what=what, expected=f"{count} pipeline ranks")
    elif len(forecast.memory.ranks) != count:
        path = path_of(((root, "memory"), "ranks"))
        what = f"has {counted(len(forecast.memory.ranks), 'rank')}"
        yield Fault(path=path, what=what, expected=f"{count} pipeline ranks")
    if not forecast.ranks:
        path = path_of((root, "ranks"))
        yield Fault(path=path, what="is empty", expected="an entry for every pipeline rank")
    yield from _rank_faults(forecast, (root, "ranks"))
    yield from _memory_faults(forecast, (root, "memory"))


def _rank_faults(forecast: Forecast, root: Trail) -> Iterator[Fault]:
    """Seconds that are negative by more than rounding, bytes that contradict each other."""
    for index, rank in enumerate(forecast.ranks):
        for name, parts in (("kernels", rank.kernels), ("collectives", rank.collectives)):
            for part, value in parts.items():
                if value < -_ROUNDING * forecast.step_s:
                    path = path_of((((root, index), name), part))
                    expected = "seconds from 0, or a rounding error below it"
                    yield Fault(path=path, what=f"is {shown(value)}", expected=expected, fix=_ANEW)
        if rank.peak_bytes > rank.allocated_bytes or rank.allocated_bytes > rank.reserved_bytes:
            what = (
                f"holds {rank.peak_bytes:,} bytes at its mark, {rank.allocated_bytes:,} allocated, "
                f"{rank.reserved_bytes:,} reserved"
            )
            yield Fault(
                path=path_of((root, index)),
                what=what,
                expected="each at least the one before",
                fix=_ANEW,
                warning=True,
            )


def _memory_faults(forecast: Forecast, root: Trail) -> Iterator[Fault]:
    count = len(forecast.memory.effects)
    known = f"numbers of effects below {count}, such as 5*16 6"
    for index, rank in enumerate(forecast.memory.ranks):
        trail = ((root, "ranks"), index)
        for name, number in (("shared", rank.shared), ("update", rank.update)):
            if number >= count:
                path = path_of((trail, name))
                yield Fault(path=path, what=f"is {number}", expected=f"below {count}")
        for event, runs in rank.events.items():
            path = path_of(((trail, "events"), event))
            if not EVENT.fullmatch(event):
                yield Fault(path=path, what="is no event", expected="such as run 3F, send 3F 4")
            found = [RUN.fullmatch(run) for run in runs.split(" ")]
            if any(run is None or int(run["effect"]) >= count for run in found):
                yield Fault(path=path, what=f"is {shown(runs)}", expected=known)
