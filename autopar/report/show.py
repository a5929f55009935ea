"""A plan in the space of a terminal: what is split over what, and why it fits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from autopar.cost_models.replay import timeline_of
from autopar.plan.fold import Folded, fold
from autopar.plan.forecast import CertificateForecast, Forecast, cost_words, room_words
from autopar.plan.plan import Plan, UnruledOp
from autopar.report.overview import (
    AxisView,
    ParameterView,
    axes,
    current_forecast,
    num_devices,
    parameters,
)
from autopar.report.ranks import is_stage_note, ranks, time_parts
from autopar.report.room import EVERYTHING, MOST_LINES, ROOMS, Room
from autopar.report.show_ranks import pipeline_part, ranks_part, time_part
from autopar.report.terminal import Page, clean
from autopar.units import counted, format_bytes, format_count, format_seconds

NO_FORECAST = (
    "nothing was predicted of this plan: no times, no memory. "
    "`autopar reprice PLAN MODEL --cluster C -o PLAN` predicts"
)
STALE = (
    "the file's predictions are of other choices than it has now, and are not shown. "
    "`autopar reprice PLAN MODEL -o PLAN` predicts anew"
)
_ZERO = ("", "optimizer state", "optimizer state and gradients",
         "optimizer state, gradients and parameters")  # fmt: skip


def show(plan: Plan, width: int, *, colour: bool = False, everything: bool = False) -> str:
    """A plan as text, of at most `MOST_LINES` lines if it can be told in so many.

    Args:
        plan: The plan.
        width: Columns that no line goes beyond.
        colour: Whether the text holds codes for colours.
        everything: Whether all is shown, however long that is.
    """
    rows, forecast = parameters(plan), current_forecast(plan)
    simulated = functools.cache(lambda: timeline_of(plan))
    text = ""
    for room in (EVERYTHING,) if everything else ROOMS:
        page = Page(width, colour=colour)
        _facts(page, plan, forecast, rows, room)
        _parameters(page, rows, room)
        ranks_part(page, plan, forecast, room)
        if forecast is not None and forecast.ranks:
            time_part(page, plan, forecast)
            pipeline_part(page, plan, room, simulated)
        _remarks(page, plan, room)
        text = page.text.lstrip("\n")
        if text.count("\n") < MOST_LINES:
            break
    return text


def show_json(plan: Plan) -> dict[str, Any]:
    """What `show` says, as data; seconds and bytes are predicted."""
    forecast = current_forecast(plan)
    slow = None if forecast is None or not forecast.ranks else forecast.slowest
    return {
        "mesh": [asdict(axis) for axis in axes(plan)],
        "ranks": plan.device_mesh.size,
        "strategy": plan.strategy,
        "searched": plan.searched,
        "pipeline": {**asdict(plan.pipeline), "stages": plan.num_stages},
        "zero": asdict(plan.zero),
        "recompute": list(plan.recompute),
        "parameters": [asdict(row) for row in parameters(plan)],
        "pipeline_ranks": [asdict(row) for row in ranks(plan, forecast, most=plan.num_stages)],
        "predicted": None if forecast is None else {
            "cluster": forecast.cluster.text,
            "step_s": forecast.step_s,
            "fits": forecast.fits,
            "global_batch_size": forecast.global_batch_size,
            "sequence_length": forecast.sequence_length,
            "slowest_rank": None if slow is None else slow.rank,
            "time": [] if slow is None else [
                asdict(part) for part in time_parts(slow, plan.pipeline.axis)
            ],
            "certificate": forecast.certificate and asdict(forecast.certificate),
        },
        "unruled": [asdict(op) for op in plan.unruled],
        "notes": list(plan.notes),
    }  # fmt: skip


# Facts


def _facts(
    page: Page, plan: Plan, forecast: Forecast | None, rows: Sequence[ParameterView], room: Room
) -> None:
    elements = format_count(sum(row.elements for row in rows))
    dtypes = " and ".join(dict.fromkeys(item.dtype for item in plan.parameters))
    what = f"{elements} in {counted(len(plan.parameters), 'tensor')}" if plan.parameters else "none"
    told = [what, dtypes] if dtypes else [what]
    if forecast is not None:
        told[1:] = [forecast.cost_model.precision, forecast.cost_model.optimizer]
    page.fact("parameters", ", ".join(told))
    how = "a search chose it" if plan.searched else f"{plan.strategy} (not searched)"
    page.fact("strategy", how)
    if forecast is not None:
        devices = num_devices(forecast.cluster)
        page.fact("cluster", f"{forecast.cluster.text}: {counted(devices, 'device')}")
    page.fact("mesh", f"{plan.device_mesh}: {counted(plan.device_mesh.size, 'rank')}")
    names = max((len(axis.name) for axis in axes(plan)), default=0)
    for axis in axes(plan):
        page.fact("", f"{clean(axis.name):<{names}}  {_axis(axis)}")
    if batch := _batch(plan, forecast):
        page.fact("batch", batch)
    if plan.num_stages > 1:
        page.fact("pipeline", _pipeline_words(plan))
    if plan.zero.stage:
        over = ", ".join(plan.zero.axes)
        page.fact(f"ZeRO-{plan.zero.stage}", f"{_ZERO[plan.zero.stage]} divided over {over}")
    if plan.recompute:
        page.fact("recompute", _some(fold(plan.recompute), room.patterns))
    if plan.overrides:
        page.fact("ops", f"{len(plan.overrides):,} chosen one by one")
    if forecast is None:
        page.fact("predicted", NO_FORECAST if plan.forecast is None else STALE)
    else:
        page.fact("predicted", _predicted(forecast, plan))
        page.fact("proven", certificate_line(forecast.certificate))


def _some(items: Sequence[Folded], most: int) -> str:
    """The first of `items`, and how many more there are."""
    rest = len(items) - most
    more = f" and {counted(rest, 'more pattern')}" if rest > 0 else ""
    return ", ".join(item.text for item in items[:most]) + more


def _axis(axis: AxisView) -> str:
    parts = [f"splits {', '.join(axis.splits) or 'nothing'}", *axis.also]
    if axis.size > 1 and axis.per_node is not None:
        if axis.per_node == axis.size:
            parts.append("inside a node")
        elif axis.per_node == 1:
            parts.append("across nodes")
        else:
            parts.append(f"across nodes, {axis.per_node} in each")
    return "; ".join(parts)


def _batch(plan: Plan, forecast: Forecast | None) -> str:
    size = None if forecast is None else forecast.global_batch_size
    count = plan.pipeline.microbatches
    parts = []
    if forecast is not None and size:
        tokens = forecast.sequence_length
        of = f" of {counted(tokens, 'token')}" if tokens else ""
        parts.append(counted(size, "sample") + of)
    if count > 1:
        each = f" of {size // count:,}" if size and size % count == 0 else ""
        parts.append(f"{counted(count, 'microbatch')}{each}")
    return " in ".join(parts)


def _pipeline_words(plan: Plan) -> str:
    part = plan.pipeline
    words = f"{counted(plan.num_stages, 'stage')} over {part.axis}, schedule {part.schedule}"
    if part.chunks > 1:
        words += f", {counted(part.chunks, 'stage')} per rank"
    if part.update_every:
        words += f", update every {part.update_every}"
    return words + (", vertical sync" if part.vertical_sync else "")


def _predicted(forecast: Forecast, plan: Plan) -> str:
    words = [f"{format_seconds(forecast.step_s)} per step"]
    if forecast.global_batch_size and forecast.step_s > 0:
        rate = forecast.global_batch_size / forecast.step_s
        if forecast.sequence_length:
            rate *= forecast.sequence_length
        unit = "tokens" if forecast.sequence_length else "samples"
        each = rate / plan.device_mesh.size
        words.append(f"{format_count(rate)} {unit}/s, {format_count(each)} per device")
    usd = forecast.cluster.usd_per_hour
    if usd is not None:
        sizes = forecast.global_batch_size, forecast.sequence_length
        words.append(cost_words(usd, forecast.step_s, *sizes))
    return "; ".join([*words, room_words(forecast)])


def certificate_line(proof: CertificateForecast | None) -> str:
    """What a search has proven, in a line."""
    if proof is None:
        return "nothing: no search chose this plan"
    seen = f"{proof.points:,} points, {counted(proof.evaluated, 'plan')} priced"
    how = f"{proof.strategy}, {seen}, {format_seconds(proof.seconds_s)}"
    ended = "" if proof.complete else ", stopped early"
    if proof.bound_s is None:
        return f"nothing: the best that was seen ({how}{ended})"
    return f"no plan searched is faster by more than {100 * proof.gap:.2g} % ({how}{ended})"


# Parameters


def _parameters(page: Page, rows: Sequence[ParameterView], room: Room) -> None:
    if not rows:
        return
    shown = rows if len(rows) <= room.parameters else rows[: room.parameters - 2]
    names = ["parameters", "stored", "shape", ">elements"]
    wanted = 4 if page.width >= 80 else 2
    cells: list[list[str | Text]] = []
    block = ""
    for row in shown:
        if row.block != block:
            block = row.block
            if block:
                cells.append([Text(clean(block), "cyan"), *[""] * (wanted - 1)])
        cells.append(_parameter(row)[:wanted])
    page.blank()
    page.table(names[:wanted], cells, indent=0)
    if rest := len(rows) - len(shown):
        page.note(f"and {counted(rest, 'more row')} (--all shows them)")


def _parameter(row: ParameterView) -> list[str | Text]:
    style = "dim" if row.stored == "whole" else ""
    return [
        f"  {row.name}" if row.block else row.name,
        Text(clean(row.stored), style),
        row.shape,
        format_count(row.elements),
    ]


# What people should know


def _remarks(page: Page, plan: Plan, room: Room) -> None:
    groups: dict[str, list[UnruledOp]] = {}
    for op in plan.unruled:
        groups.setdefault(op.op, []).append(op)
    lines = [_unruled(name, ops) for name, ops in groups.items()]
    lines += [note for note in plan.notes if not _said(note, plan)]
    if not lines:
        return
    page.blank()
    shown = lines[: room.notes]
    for line in shown:
        page.fact("note", page.cut(line, room.note_lines))
    if rest := len(lines) - len(shown):
        page.fact("", f"{counted(rest, 'more note')} (--all shows them)")


def _unruled(name: str, ops: Sequence[UnruledOp]) -> str:
    """What it costs that an operator has no rule."""
    rest = f" and {counted(len(ops) - 1, 'more place')}" if len(ops) > 1 else ""
    size = format_bytes(sum(op.size_bytes for op in ops))
    return (
        f"no rule for {name} in {ops[0].module or '(root)'}{rest}: every rank does all of it, "
        f"{size} of operands"
    )


def _said(note: str, plan: Plan) -> bool:
    """Whether what a note says has been said: of stages, or of the search."""
    return is_stage_note(note) or (plan.forecast is not None and note.startswith("predicted "))
