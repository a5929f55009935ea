"""Parser of the text form of actions and schedules, and the grid that errors print.

    schedule 1f1b: microbatches 2, updates 1
    rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0REDUCE0 0UPDATE0
    rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1REDUCE0 1UPDATE0

A schedule with old weights ends its first line in ``, delays 1 0``. The first line may be left
out when a schedule is written by hand: its counts are then read off the actions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autopar.errors import PlanError
from autopar.schedules.actions import KINDS, MESSAGES, SENDS, Action, Kind, Schedule

_KIND: dict[str, Kind] = {kind: kind for kind in KINDS}
_ACTION = re.compile(rf"(\d+)({'|'.join(KINDS)})(\d+)(?:([<>])(\d+))?")
_TITLE = re.compile(
    r"schedule (?P<name>.+): microbatches (?P<microbatches>\d+), updates (?P<updates>\d+)"
    r"(?:, delays (?P<delays>\d+(?: \d+)*))?"
)
_RANK = re.compile(r"rank (\d+):(.*)")


def parse_action(text: str) -> Action:
    """The action that prints as `text`.

    Raises:
        PlanError: If it is none.
    """
    match = _ACTION.fullmatch(text)
    if match:
        stage, name, microbatch, sign, peer = match.groups()
        kind = _KIND[name]
        wanted = None if kind not in MESSAGES else ">" if kind in SENDS else "<"
        if sign == wanted:
            return Action(kind, int(stage), int(microbatch), None if peer is None else int(peer))
    raise PlanError(
        f"{text!r} is not an action of a schedule",
        expected="stage, kind, microbatch such as 2F0, 2B0, 2I0, 2W0, 2SEND_F0>3, 3RECV_F0<2,"
        " 3SEND_B0>2, 2RECV_B0<3, 2REDUCE0, 2UPDATE0",
    )


def parse(text: str) -> Schedule:
    """The schedule that prints as `text`; blank lines and ``#`` comments are skipped.

    It is read, not checked: `autopar.schedules.verify.check` does that.

    Raises:
        PlanError: If a line or an action cannot be read; the message marks it.
    """
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    lines = [line for line in lines if line]
    title = _TITLE.fullmatch(lines[0]) if lines else None
    rows = [_row(rank, line) for rank, line in enumerate(lines[1:] if title else lines)]
    if not rows:
        raise PlanError("a schedule needs one line of actions per rank", expected=_EXPECTED)
    if title is None:
        name = "by hand"
        delays: tuple[int, ...] = ()
        microbatches = 1 + max((a.microbatch for row in rows for a in row), default=0)
        updates = 1 + max((a.microbatch for row in rows for a in row if a.kind == "UPDATE"),
                          default=-1)  # fmt: skip
    else:
        name, updates = title["name"], int(title["updates"])
        microbatches = int(title["microbatches"])
        delays = tuple(map(int, (title["delays"] or "").split()))
    return Schedule(
        name=name,
        actions=tuple(rows),
        stage_ranks=_stage_ranks(rows),
        num_microbatches=microbatches,
        updates=updates,
        delays=delays,
    )


_EXPECTED = "lines such as 'rank 0: 0F0 0F1 0B0 0B1 0REDUCE0 0UPDATE0'"


def _row(rank: int, line: str) -> tuple[Action, ...]:
    match = _RANK.fullmatch(line)
    if match is None or int(match[1]) != rank:
        raise PlanError(
            f"{line[:60]!r} is not the line of rank {rank} of a schedule", expected=_EXPECTED
        )
    words = match[2].split()
    actions = []
    for index, word in enumerate(words):
        try:
            actions.append(parse_action(word))
        except PlanError as error:
            raise PlanError(
                error.what,
                expected=error.expected,
                where=f"rank {rank}, action {index}\n{grid({rank: words}, {rank: index})}",
            ) from None
    return tuple(actions)


def _stage_ranks(rows: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for index, action in enumerate(row):
            if ranks.setdefault(action.stage, rank) != rank:
                words = {r: list(map(str, line)) for r, line in enumerate(rows)}
                raise PlanError(
                    f"{action} is on rank {rank}, but stage {action.stage} is on rank"
                    f" {ranks[action.stage]}",
                    expected="every stage on one rank",
                    where=f"rank {rank}, action {index}\n{grid(words, {rank: index})}",
                )
    if sorted(ranks) != list(range(len(ranks))):
        raise PlanError(
            f"a schedule has actions of the stages {sorted(ranks)}",
            expected="stages numbered from 0 without a gap",
        )
    return tuple(ranks[stage] for stage in sorted(ranks))


def grid(rows: Mapping[int, Sequence[object]], marks: Mapping[int, int], *, radius: int = 5) -> str:
    """Lines of actions round a place, for errors.

        rank 0 | ... 0F1 0F2   0B0   0F3 ...
        rank 1 | ... 1F0 1B0 >>1F1<< 1B1 ...

    Args:
        rows: What each rank does, in order.
        marks: For ranks with a faulty action its position. Other ranks show what they do at the
            position of the first mark.
        radius: Actions shown on either side.
    """
    middle = next(iter(marks.values()), 0)
    cells: dict[int, list[str]] = {}
    for rank, row in rows.items():
        centre = marks.get(rank, middle)
        cells[rank] = [
            _cell(row, index, marked=rank in marks and index == centre)
            for index in range(centre - radius, centre + radius + 1)
        ]
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    starts = {rank: marks.get(rank, middle) - radius for rank in cells}
    lines = []
    for rank, line in cells.items():
        words = [cell.center(width) for cell, width in zip(line, widths, strict=True) if width]
        if max(starts.values()) > 0:
            words.insert(0, "..." if starts[rank] > 0 else "   ")
        if starts[rank] + 2 * radius + 1 < len(rows[rank]):
            words.append("...")
        lines.append(f"    rank {rank} | {' '.join(words)}".rstrip())
    return "\n".join(lines)


def _cell(row: Sequence[object], index: int, *, marked: bool) -> str:
    text = str(row[index]) if 0 <= index < len(row) else ""
    return f">>{text or 'end'}<<" if marked else text
