"""The text form goes both ways, and what cannot be read is marked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.schedules.actions import KINDS, MESSAGES, Action, Schedule, only
from autopar.schedules.communicate import add_communication
from autopar.schedules.make import make_schedule
from autopar.schedules.text import parse, parse_action
from autopar.schedules.verify import check
from tests.unit.schedules.cases import made

NUMBERS = st.integers(0, 2000)


@given(st.sampled_from(KINDS), NUMBERS, NUMBERS, NUMBERS)
def test_actions_read_back(kind, stage, microbatch, peer):
    action = Action(kind, stage, microbatch, peer if kind in MESSAGES else None)
    assert parse_action(str(action)) == action


@given(made())
def test_schedules_read_back(schedule: Schedule):
    assert parse(str(schedule)) == schedule
    talking = add_communication(schedule)
    assert parse(str(talking)) == talking


def test_text_of_actions():
    actions = [
        Action("F", 2, 0), Action("I", 2, 0), Action("W", 2, 0), Action("B", 2, 0),
        Action("SEND_F", 2, 0, 3), Action("RECV_F", 3, 0, 2), Action("REDUCE", 2, 0),
        Action("UPDATE", 2, 0),
    ]  # fmt: skip
    wanted = "2F0 2I0 2W0 2B0 2SEND_F0>3 3RECV_F0<2 2REDUCE0 2UPDATE0"
    assert " ".join(map(str, actions)) == wanted
    assert Action("SEND_B", 3, 0, 1).counterpart == Action("RECV_B", 1, 0, 3)


def test_a_schedule_written_by_hand_needs_no_title():
    schedule = parse(
        """
        rank 0: 0F0 0F1 0B1 0B0 0REDUCE0 0UPDATE0  # backwards in any order
        rank 1: 1F0 1F1 1B1 1B0 1REDUCE0 1UPDATE0
        """
    )
    assert (schedule.num_microbatches, schedule.updates) == (2, 1)
    assert schedule.stage_ranks == (0, 1)
    assert check(schedule).in_flight == (2, 2)


@pytest.mark.parametrize(
    "word", ["F0", "2F", "2X0", "2F0>3", "2SEND_F0", "2SEND_F0<3", "2RECV_F0>3", "2f0", "-1F0", ""]
)
def test_unknown_actions_are_refused(word: str):
    with pytest.raises(PlanError, match="is not an action"):
        parse_action(word)


def test_an_unreadable_word_is_marked():
    with pytest.raises(PlanError) as caught:
        parse("rank 0: 0F0 0B0 0REDUCE0 0UPDATE0\nrank 1: 1F0 1G0 1B0")
    assert "rank 1 | 1F0 >>1G0<< 1B0" in str(caught.value)
    assert "rank 1, action 1" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "one line of actions per rank"),
        ("rank 1: 0F0", "not the line of rank 0"),
        ("rank 0: 0F0\nrank 1: 0B0", "stage 0 is on rank 0"),
        ("rank 0: 0F0 2F0", "stages \\[0, 2\\]"),
        ("schedule x: microbatches 3, updates 2\nrank 0: 0F0", "divide 3 microbatches"),
        ("schedule x: microbatches 0, updates 0\nrank 0: 0F0", "0 microbatches"),
        ("schedule x: microbatches 1, updates 1, delays 1 2\nrank 0: 0F0", "delays"),
        ("rank 0: 0F0\nrank 1:", "every rank needs a stage"),
    ],
)
def test_unreadable_schedules_are_refused(text: str, message: str):
    with pytest.raises(PlanError, match=message):
        parse(text)


def test_only_keeps_the_order():
    schedule = add_communication(make_schedule("pipedream", 2, 3))
    forward = only(schedule, ("F", "SEND_F", "RECV_F"))
    assert str(forward) == (
        "schedule pipedream: microbatches 3, updates 0\n"
        "rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0F2 0SEND_F2>1\n"
        "rank 1: 1RECV_F0<0 1F0 1RECV_F1<0 1F1 1RECV_F2<0 1F2\n"
    )
    check(forward)
    assert only(schedule, ("F", "B")).delays == schedule.delays
