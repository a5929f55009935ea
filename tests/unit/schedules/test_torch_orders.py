"""Orders are those of torch.distributed.pipelining, where it has the schedule."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from autopar.schedules.actions import Schedule, only
from autopar.schedules.make import make_schedule

SIZES = [(p, m) for p in range(1, 6) for m in (1, 2, 3, 4, 5, 8, 9, 12, 15)]


def stage(num_ranks: int, chunks: int) -> SimpleNamespace:
    """As much of a stage as a schedule looks at to order its actions."""
    return SimpleNamespace(
        num_stages=num_ranks * chunks,
        stage_index=0,
        group_size=num_ranks,
        group_rank=0,
        is_first=True,
        is_last=False,
        submod=None,
    )


def their_rows(schedule) -> list[list[str]]:
    names = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            f"{action.stage_index}{names[action.computation_type.name]}{action.microbatch_index}"
            for action in schedule.pipeline_order[rank]
            if action is not None and action.computation_type.name in names
        ]
        for rank in sorted(schedule.pipeline_order)
    ]


def our_rows(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in only(schedule, ("F", "B", "I", "W")).actions]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe(p: int, m: int):
    theirs = ScheduleGPipe(stage(p, 1), m)
    assert our_rows(make_schedule("gpipe", p, m)) == their_rows(theirs)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_1f1b(p: int, m: int):
    theirs = their_rows(Schedule1F1B(stage(p, 1), m))
    # torch 2.13 counts the forwards of the last rank from 1; their order is what is compared.
    forwards = iter(range(m))
    theirs[-1] = [f"{p - 1}F{next(forwards)}" if "F" in word else word for word in theirs[-1]]
    assert our_rows(make_schedule("1f1b", p, m)) == theirs


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % max(1, m // p) == 0])
def test_interleaved(p: int, m: int, v: int):
    theirs = ScheduleInterleaved1F1B([stage(p, v) for _ in range(v)], m)
    assert our_rows(make_schedule("interleaved_1f1b", p, m, chunks=v)) == their_rows(theirs)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv(p: int, m: int):
    theirs = ScheduleZBVZeroBubble([stage(p, 2) for _ in range(2)], m)
    assert our_rows(make_schedule("zbv", p, m, chunks=2)) == their_rows(theirs)
