"""What a terminal shows of pipeline ranks: their layers, memory, time, and the pipeline drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.text import Text

from autopar.cost_models.simulate import Timeline
from autopar.errors import AutoparError
from autopar.plan.fold import span_text
from autopar.plan.forecast import Forecast, RankForecast
from autopar.plan.plan import Plan
from autopar.report.ranks import MOST_RUNS, RanksView, ranks, time_parts
from autopar.report.room import Room
from autopar.report.terminal import STYLES, Cell, Page, bar, percent
from autopar.report.trees import over
from autopar.schedules.draw import draw, draw_ends
from autopar.schedules.simulate import Event
from autopar.schedules.simulate import Timeline as Events
from autopar.units import counted, format_bytes, format_seconds

LETTERS = {
    "parameters": "P", "gradients": "G", "optimizer": "O", "activations": "A", "temporary": "t",
    "reserved": "r",
}  # fmt: skip
"""Letters of kinds of memory in bars."""
_SEEN = 5e-4
"""Share of a step below which a part of it is not shown."""
_NARROW = 90
"""Below so many columns layers have a table of their own."""


def ranks_part(page: Page, plan: Plan, forecast: Forecast | None, room: Room) -> None:
    """Stages, layers and memory of pipeline ranks, those that are alike in one line.

    Args:
        page: Where it is written.
        plan: The plan.
        forecast: Its predictions.
        room: How many lines of ranks there may be.
    """
    several, narrow = plan.num_stages > 1, page.width < _NARROW
    most = min(room.runs, MOST_RUNS // 2) if narrow and room.runs <= MOST_RUNS else room.runs
    found = ranks(plan, forecast, most)
    full = None if forecast is None or not forecast.ranks else forecast.fullest.rank
    rows = _some(found, 2 * most, full)
    known = forecast is not None and rows[0].most_bytes is not None
    if known:
        by = ", by pipeline rank" if several else ""
        page.heading(f"memory of a device{by} (predicted)")
        _memory_table(page, rows, several, plan.pipeline.chunks > 1 and not narrow, not narrow)
    elif several:
        page.heading("pipeline ranks")
    if several and ((narrow and room.layers) or not known):
        cells = [
            (span_text(row.first, row.last), stages_text(row.stages), row.layers) for row in rows
        ]
        page.table(["rank", "stages", "layers"], cells, gives=2)
    if hidden := len(found) - len(rows):
        page.note(f"and {counted(hidden, 'more line of ranks')} (--all shows them)")
    if known and forecast is not None:
        page.note(_legend(next(row for row in rows if row.fullest == full), several))


def _some(rows: Sequence[RanksView], most: int, full: int | None) -> list[RanksView]:
    """The first and the last of many rows, and that of the rank whose memory is told below."""
    if len(rows) <= most:
        return list(rows)
    kept = {*range(most // 2), *range(len(rows) - most // 2, len(rows))}
    return [
        row
        for place, row in enumerate(rows)
        if place in kept or (full is not None and row.fullest == full)
    ]


def _memory_table(
    page: Page, rows: Sequence[RanksView], several: bool, stages: bool, layers: bool
) -> None:
    scale = max(max(row.capacity_bytes or 0, row.most_bytes or 0) for row in rows)
    used = [_used(row) for row in rows]
    taken = 28 + max(len(cell) for cell in used)
    if several and layers:
        taken += min(40, max(len(row.layers) for row in rows))
    room = max(8, min(50, page.width - taken - (10 if stages else 0)))
    columns: dict[str, list[Cell]] = {}
    if several:
        columns["rank"] = [span_text(row.first, row.last) for row in rows]
    if several and stages:
        columns["stages"] = [stages_text(row.stages) for row in rows]
    columns[""] = [_bar(row, scale, room) for row in rows]
    columns["used"] = list(used)
    columns["of"] = [
        "?" if row.capacity_bytes is None else format_bytes(row.capacity_bytes) for row in rows
    ]
    if several and layers:
        columns["layers"] = [row.layers for row in rows]
    page.table(
        list(columns),
        list(zip(*columns.values(), strict=True)),
        gives=len(columns) - 1 if several and layers else list(columns).index(""),
    )


def _bar(row: RanksView, scale: int, room: int) -> Text:
    shares = [(LETTERS[kind], float(size)) for kind, size in (row.kinds or {}).items()]
    return bar(shares, scale, room, row.capacity_bytes or 0)


def _used(row: RanksView) -> Text:
    text = Text(_bytes_span(row.least_bytes or 0, row.most_bytes or 0))
    if row.over_bytes is not None and row.over_bytes > 0:
        text.append(f" over by {format_bytes(row.over_bytes)}", STYLES["!"])
    return text


def stages_text(stages: Sequence[int]) -> str:
    """Stages in short, such as ``0..3, 16..19``."""
    runs: list[list[int]] = []
    for stage in sorted(stages):
        if runs and runs[-1][1] == stage - 1:
            runs[-1][1] = stage
        else:
            runs.append([stage, stage])
    shown = [span_text(*run) for run in runs[:3]] + (["..."] if len(runs) > 3 else [])
    return ",".join(shown)


def _bytes_span(least: int, most: int) -> str:
    """``18.1..19.6 GB``; one size if both read the same."""
    low, high = format_bytes(least), format_bytes(most)
    if low.split()[-1] == high.split()[-1] and low != high:
        low = low.split()[0]
    return "..".join(dict.fromkeys((low, high)))


def _legend(row: RanksView, several: bool) -> Text:
    """Letters of the bars, with what they are on the fullest rank."""
    text = Text()
    if several:
        text.append(f"on rank {row.fullest}: ")
    parts = [(LETTERS[kind], kind, size) for kind, size in (row.kinds or {}).items() if size > 0]
    for place, (letter, kind, size) in enumerate(parts):
        text.append(", " if place else "")
        text.append(letter, STYLES[letter])
        text.append(f" {kind} {format_bytes(size)}")
    return text


# Time


def time_part(page: Page, plan: Plan, forecast: Forecast) -> None:
    """Where the step of the rank goes that waits least."""
    slow = forecast.slowest
    where = f" of pipeline rank {slow.rank}, which waits least" if len(forecast.ranks) > 1 else ""
    page.heading(f"time of a step{where} (predicted)")
    whole = slow.step_s
    parts = [p for p in time_parts(slow, plan.pipeline.axis) if abs(p.seconds_s) > _SEEN * whole]
    room = max(8, min(40, page.width - 62))
    rows: list[list[str | Text]] = [
        [
            part.name,
            format_seconds(part.seconds_s),
            percent(part.seconds_s, whole),
            bar([("#", max(0.0, part.seconds_s))], whole, room),
        ]
        for part in parts
    ]
    page.table(["", ">", ">", ""], rows)
    if hidden := _hidden(slow):
        page.note(hidden)


def _hidden(rank: RankForecast) -> str:
    """What collectives beside computation take, most of it unseen."""
    if not rank.beside:
        return ""
    each = ", ".join(f"{over(axis)} {format_seconds(s)}" for axis, s in rank.beside.items())
    return f"beside computation: collectives over {each}"


def pipeline_part(page: Page, plan: Plan, room: Room, simulated: Callable[[], Timeline]) -> None:
    """The pipeline as a drawing.

    Args:
        page: Where it is written.
        plan: The plan.
        room: How much may be drawn.
        simulated: Makes the predicted timeline of the plan.
    """
    stages, count = plan.num_stages, plan.pipeline.microbatches
    if stages < 2:
        return
    if stages * count * 2 > room.actions:
        page.blank()
        page.note(f"pipeline of {stages * count * 2:,} actions: --all draws it", indent=0)
        return
    try:
        found = simulated()
    except AutoparError as error:
        page.note(f"the pipeline cannot be drawn: {error.what}", indent=0)
        return
    total = len(found.spans)
    chosen = list(range(total))
    if total > room.drawn:
        chosen = [round(i * (total - 1) / (room.drawn - 1)) for i in range(room.drawn)]
    wanted = set(chosen)
    timeline = Events(
        schedule=found.schedule,
        events=tuple(
            tuple(
                Event(action, *span)
                for action, span in zip(found.schedule.actions[rank], spans, strict=True)
            )
            if rank in wanted else ()
            for rank, spans in enumerate(found.spans)
        ),
    )  # fmt: skip
    bubble = f"{100 * found.bubble_fraction:.1f} % of all ranks' time is idle"
    page.heading(f"pipeline (predicted): {bubble}")
    lines = _drawing(timeline, page.width, chosen, whole=total == len(chosen))
    for line in lines.split("\n"):
        page.line(line)


def _drawing(timeline: Events, width: int, chosen: Sequence[int], *, whole: bool) -> str:
    """All of a short timeline with numbers, the ends of a long one in letters."""
    if whole and len(timeline.schedule.actions[0]) <= width // 2:
        text = draw(timeline, width)
        if any(digit.isdigit() for digit in text.split("\n")[0].partition("|")[2]):
            return text
    return draw_ends(timeline, width, chosen)
