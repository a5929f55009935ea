"""What the charts of a report are drawn from, as plain data.

Times are whole numbers of ticks, so that columns stay short: a step has `TICKS` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.cost_models.simulate import Timeline
from autopar.report.overview import parameters
from autopar.report.terminal import clean
from autopar.report.trace import Step
from autopar.schedules.actions import KINDS, Action
from autopar.schedules.chrome import RankStep, Recording

TICKS = 2**22


def chart_data(step: Step, recording: Recording | None) -> dict[str, Any]:
    """Everything that charts show.

    Args:
        step: The predicted step.
        recording: A measured step to lay beside it.
    """
    whole_s = step.timeline.step_s
    if recording is not None:
        whole_s = max(whole_s, recording.step_s)
    tick_s = whole_s / TICKS if whole_s > 0 else 1.0
    return {
        "tick_s": tick_s,
        "step_s": step.timeline.step_s,
        "kinds": [*KINDS, "collectives"],
        "ranks": [
            {
                "stages": list(rank.stages),
                "capacity": rank.capacity_bytes,
                "device": rank.device_bytes,
                "reserved": rank.reserved_bytes,
                "context": rank.context_bytes,
                "peak": dict(rank.peak),
                "time": [rank.compute_s, rank.inline_s, rank.exposed_s, rank.idle_s, rank.host_s],
            }
            for rank in step.forecast.ranks
        ],
        "rows": [_predicted_row(step.timeline, rank, tick_s) for rank in range(step.num_ranks)],
        "measured": None if recording is None else _measured(recording, step.num_ranks, tick_s),
        "memory": _memory(step, tick_s),
        "parameters": _parameters(step),
        "points": _points(step),
        "bound_s": step.forecast.certificate and step.forecast.certificate.bound_s,
    }


_Item = tuple[Action, int, int]
"""Action, start and end in ticks."""


def _columns(items: Sequence[_Item], beside: Sequence[_Item]) -> dict[str, list[int]]:
    """Items as columns; starts count from the start before."""
    names: dict[str, list[int]] = {name: [] for name in ("k", "s", "m", "p", "t", "d")}
    places: Mapping[str, int] = {kind: place for place, kind in enumerate(KINDS)}
    for row, kind in ((items, None), (beside, len(KINDS))):
        before = 0
        for action, start, end in row:
            names["k"].append(places[action.kind] if kind is None else kind)
            names["s"].append(action.stage)
            names["m"].append(action.microbatch)
            names["p"].append(-1 if action.peer is None else action.peer)
            names["t"].append(start - before)
            names["d"].append(end - start)
            before = start
    return {**names, "n": [len(items)]}


def _predicted_row(timeline: Timeline, rank: int, tick_s: float) -> dict[str, list[int]]:
    items = [
        (action, round(start / tick_s), round(end / tick_s))
        for action, (start, end) in zip(
            timeline.schedule.actions[rank], timeline.spans[rank], strict=True
        )
    ]
    beside = [
        (event.action, round(event.start_s / tick_s), round(event.end_s / tick_s))
        for event in timeline.beside[rank]
    ]
    return _columns(items, beside)


def _measured(recording: Recording, count: int, tick_s: float) -> dict[str, Any]:
    """The first measured rank of each place of the pipeline."""
    first: dict[int, RankStep] = {}
    for found in recording.ranks:
        first.setdefault(found.pipeline_rank, found)
    rows = []
    for place in range(count):
        actions = {bar.name: _action(bar.name, bar.details) for bar in first[place].actions}
        items = [
            (actions[bar.name], round(bar.start_s / tick_s), round(bar.end_s / tick_s))
            for bar in first[place].actions
        ]
        beside = [
            (
                actions[str(bar.details["action"])],
                round(bar.start_s / tick_s),
                round(bar.end_s / tick_s),
            )
            for bar in first[place].bars
            if bar.stream == "collective" and bar.details.get("action") in actions
        ]
        rows.append(_columns(items, beside))
    return {"rows": rows, "ranks": [first[place].rank for place in range(count)]}


def _action(name: str, details: Mapping[str, Any]) -> Action:
    """The action of a bar, whose names `autopar.cost_models.residuals` has checked."""
    body, _, peer = name.replace("<", ">").partition(">")
    kind = body.strip("0123456789")
    found = next(word for word in KINDS if word == kind)
    return Action(
        found, int(details["stage"]), int(details["microbatch"]), int(peer) if peer else None
    )


def _memory(step: Step, tick_s: float) -> dict[str, Any]:
    """Memory over time: rows of bytes by kind, and which of them each rank has when."""
    kinds: dict[str, int] = {}
    rows: dict[tuple[tuple[str, int], ...], int] = {}
    ranks = []
    for rank in range(step.num_ranks):
        times: list[int] = []
        which: list[int] = []
        before = 0
        for start, end, peak, live in step.moments(rank):
            for at, row in ((start, peak), (end, live)):
                key = tuple(row.items())
                number = rows.setdefault(key, len(rows))
                if which and which[-1] == number:
                    continue
                tick = max(before, round(at / tick_s))
                times.append(tick - before)
                which.append(number)
                before = tick
        ranks.append({"t": times, "r": which})
    for key in rows:
        for kind, _ in key:
            kinds.setdefault(kind, len(kinds))
    table = [[dict(key).get(kind, 0) for kind in kinds] for key in rows]
    return {"kinds": list(kinds), "rows": table, "ranks": ranks}


def _parameters(step: Step) -> list[dict[str, Any]]:
    return [
        {
            "name": clean(".".join(part for part in (view.block, view.name) if part)),
            "elements": view.elements,
            "stored": clean(view.stored),
        }
        for view in parameters(step.plan)
    ]


def _points(step: Step) -> list[dict[str, Any]]:
    """This plan first, then its alternatives."""
    full = step.forecast.fullest
    mine = {
        "text": "this plan", "step_s": step.forecast.step_s, "bytes": full.device_bytes,
        "capacity": full.capacity_bytes, "fits": step.forecast.fits,
    }  # fmt: skip
    others = [
        {
            "text": clean(item.text), "step_s": item.step_s, "bytes": item.device_bytes,
            "capacity": item.capacity_bytes, "fits": item.fits,
        }
        for item in step.forecast.alternatives
    ]  # fmt: skip
    return [mine, *others]
