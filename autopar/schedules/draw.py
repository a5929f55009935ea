"""A timeline as text.

    rank 0 |F0 F1 ......B0--- ...B1--- |
    rank 1 |...F0 B0--- F1 B1--- ......|
            0 s    bubble 33 %      9 s

With several stages on a rank the number of the stage comes first (``2F0``). Where this does not
fit, every column is one letter, ``.`` for waiting, and every second stage of a rank is lower case.
Of long timelines `draw_ends` shows the beginning and the end.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.actions import Kind
from autopar.schedules.simulate import Event, Timeline

_DRAWN: frozenset[Kind] = frozenset(("F", "B", "I", "W"))
_LETTER: dict[Kind, str] = {
    "F": "F", "B": "B", "I": "I", "W": "W", "REDUCE": "R", "UPDATE": "U",
}  # fmt: skip
_MIN_COLUMNS = 4
_GAP = " ~ "


def draw(timeline: Timeline, width: int = 100, *, wrap: bool = False) -> str:
    """`timeline` as text, one line per rank, no line longer than `width` if that is possible.

    Args:
        timeline: What to draw.
        width: Columns there are; from 24 on lines keep within it.
        wrap: Go on below with what does not fit, in place of making it smaller.
    """
    names = [f"rank {rank} |" for rank in range(len(timeline.events))]
    names = [name.rjust(max(map(len, names))) for name in names]
    room = max(_MIN_COLUMNS, width - len(names[0]) - 1)
    total = timeline.makespan_s
    if total <= 0:
        return "\n".join(f"{name}|" for name in names)
    columns = _labelled_columns(timeline)
    if columns > room and not wrap:
        rows = [_letters(timeline, rank, room, (0.0, total)) for rank in range(len(names))]
        columns = room
    else:
        rows = [_labels(timeline, rank, columns) for rank in range(len(names))]
    panels = []
    for start in range(0, columns, room):
        end = min(start + room, columns)
        lines = [f"{name}{row[start:end]}|" for name, row in zip(names, rows, strict=True)]
        left, right = (_seconds(total * place / columns) for place in (start, end))
        gap = max(1, end - start - len(left) - len(right))
        note = f"bubble {100 * timeline.bubble_fraction:.0f} %"
        middle = note.center(gap) if end == columns and len(note) + 2 <= gap else " " * gap
        lines.append(" " * len(names[0]) + left + middle + right)
        panels.append("\n".join(lines))
    return "\n\n".join(panels)


def draw_ends(timeline: Timeline, width: int, ranks: Sequence[int]) -> str:
    """Some ranks of `timeline` as letters, of a long one its beginning and its end.

    Args:
        timeline: What to draw.
        width: Columns there are; from 24 on lines keep within it.
        ranks: The ranks to draw.
    """
    names = [f"rank {rank} |" for rank in ranks]
    names = [name.rjust(max(map(len, names))) for name in names]
    room, total = max(_MIN_COLUMNS, width - len(names[0]) - 1), timeline.makespan_s
    if total <= 0:
        return "\n".join(f"{name}|" for name in names)
    half = (room - len(_GAP)) // 2
    work = [timeline.work(rank) for rank in ranks]
    seconds = [e.duration_s for row in work for e in row if e.action.kind in _DRAWN]
    shortest = max(min(seconds, default=total), max(seconds, default=total) / 4)
    filled = max((row[0].start_s for row in work if row), default=0.0)
    shown = half * max(shortest, 1.5 * filled / half)
    if 2 * shown >= total:
        parts, gap = [(0.0, total, room)], ""
    else:
        parts, gap = [(0.0, shown, half), (total - shown, total, half)], _GAP
    lines = [
        name + gap.join(_letters(timeline, rank, n, (a, b)) for a, b, n in parts) + "|"
        for name, rank in zip(names, ranks, strict=True)
    ]
    scale = gap.join(
        _seconds(a) + _seconds(b).rjust(n - len(_seconds(a))) for a, b, n in parts
    )  # fmt: skip
    return "\n".join([*lines, " " * len(names[0]) + scale])


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1 or value == 0:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _label(timeline: Timeline, rank: int, event: Event) -> str:
    action = event.action
    stage = "" if len(timeline.schedule.stages_of(rank)) == 1 else str(action.stage)
    return f"{stage}{_LETTER[action.kind]}{action.microbatch}"


def _labelled_columns(timeline: Timeline) -> int:
    """Columns in which labels fit into all but exceptionally short actions."""
    seconds, longest = [], 1
    for rank in range(len(timeline.events)):
        for event in timeline.work(rank):
            if event.action.kind in _DRAWN and event.duration_s > 0:
                seconds.append(event.duration_s)
                longest = max(longest, len(_label(timeline, rank, event)))
    if not seconds:
        return _MIN_COLUMNS
    shortest = max(min(seconds), max(seconds) / 4)
    return max(_MIN_COLUMNS, round(timeline.makespan_s / shortest * (longest + 1)))


def _labels(timeline: Timeline, rank: int, columns: int) -> str:
    scale = columns / timeline.makespan_s
    row = ["."] * columns
    for event in timeline.work(rank):
        start, end = round(event.start_s * scale), round(event.end_s * scale)
        cell = _label(timeline, rank, event)
        if len(cell) > end - start:
            cell = _LETTER[event.action.kind]
        row[start:end] = (cell.ljust(end - start - 1, "-") + " ")[: end - start]
    return "".join(row)


def _letters(timeline: Timeline, rank: int, columns: int, window: tuple[float, float]) -> str:
    """One letter per column of a window (start and end in seconds): what takes most of its time."""
    stages = timeline.schedule.stages_of(rank)
    begin, stop = window
    scale = columns / (stop - begin)
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for event in timeline.work(rank):
        if event.end_s < begin or event.start_s > stop:
            continue
        letter = _LETTER[event.action.kind]
        if stages.index(event.action.stage) % 2:
            letter = letter.lower()
        start, end = (event.start_s - begin) * scale, (event.end_s - begin) * scale
        for index in range(max(0, int(start)), min(columns, int(end) + 1)):
            share = min(end, index + 1) - max(start, index)
            shares[index][letter] = shares[index].get(letter, 0.0) + share
    row = []
    for column in shares:
        column["."] = 1.0 - sum(column.values())
        row.append(max(column, key=column.__getitem__))
    return "".join(row)
