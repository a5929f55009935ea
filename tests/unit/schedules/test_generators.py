"""Every generator: valid for all sizes, the order of its paper, the memory its paper states."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.schedules.actions import Schedule, only
from autopar.schedules.communicate import add_communication
from autopar.schedules.make import SCHEDULES, make_schedule
from autopar.schedules.verify import check
from tests.unit.schedules.cases import made

SIZES = st.integers(1, 8), st.integers(1, 20)


@given(made())
def test_all_are_valid_with_and_without_messages(schedule: Schedule):
    assert check(schedule) == check(add_communication(schedule))
    check(only(schedule, ("F",)))


def rows(schedule: Schedule) -> list[str]:
    work = only(schedule, ("F", "B", "I", "W"))
    return [" ".join(map(str, row)) for row in work.actions]


def test_gpipe_is_figure_2_of_its_paper():
    assert rows(make_schedule("gpipe", 2, 3)) == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F1 1F2 1B0 1B1 1B2",
    ]


def test_1f1b_for_three_ranks():
    assert str(make_schedule("1f1b", 3, 4)) == (
        "schedule 1f1b: microbatches 4, updates 1\n"
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0REDUCE0 0UPDATE0\n"
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 1REDUCE0 1UPDATE0\n"
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2REDUCE0 2UPDATE0\n"
    )


def test_interleaved_is_the_figure_of_its_paper():
    # Figure 4 of arXiv 2104.04473, four devices, two chunks, eight microbatches: its first
    # and its last device up to some backwards.
    schedule = make_schedule("interleaved_1f1b", 4, 8, chunks=2)
    lines = rows(schedule)
    assert lines[0].startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2")
    assert lines[3].startswith("3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1")
    assert schedule.stage_ranks == (0, 1, 2, 3, 0, 1, 2, 3)


def test_zb_h1_for_three_ranks():
    assert rows(make_schedule("zb_h1", 3, 4)) == [
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


def test_zbv_for_two_ranks():
    schedule = make_schedule("zbv", 2, 3, chunks=2)
    assert rows(schedule) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]
    assert schedule.stage_ranks == (0, 1, 1, 0)


def test_a_stage_reduces_as_soon_as_its_gradients_are_there_and_updates_at_the_end():
    row = str(make_schedule("interleaved_1f1b", 2, 2, chunks=2)).splitlines()[1]
    assert row.endswith("2B0 2B1 2REDUCE0 0B0 0B1 0REDUCE0 0UPDATE0 2UPDATE0")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h1", "pipedream", "pipedream_2bw"])
def test_one_rank_works(name: str):
    report = check(make_schedule(name, 1, 3))
    assert report.in_flight == ((3,) if name == "gpipe" else (1,))


def test_gradient_accumulation_is_1f1b_on_one_rank():
    assert rows(make_schedule("1f1b", 1, 2)) == ["0F0 0B0 0F1 0B1"]


@given(*SIZES)
def test_gpipe_holds_all_microbatches(p: int, m: int):
    assert check(make_schedule("gpipe", p, m)).in_flight == (m,) * p


@given(*SIZES)
def test_1f1b_holds_p_minus_i(p: int, m: int):
    wanted = tuple(min(p - i, m) for i in range(p))
    assert check(make_schedule("1f1b", p, m)).in_flight == wanted


@given(*SIZES)
def test_zb_h1_holds_what_table_2_of_its_paper_says(p: int, m: int):
    report = check(make_schedule("zb_h1", p, m))
    # (p - i) M_B + i M_W at one time, i from 0; i + 1 microbatches for a moment, before W.
    assert report.before_input_gradient == tuple(min(p - i, m) for i in range(p))
    assert report.before_weight_gradient == tuple(min(i + 1, m) for i in range(p))
    assert report.in_flight == (min(p, m),) * p


@given(*SIZES)
def test_zbv_holds_no_more_than_1f1b(p: int, m: int):
    report = check(make_schedule("zbv", p, m, chunks=2))
    assert max(report.rank_in_flight) <= 2 * p  # of half a rank's layers each
    if m >= 2 * p:
        assert set(report.rank_in_flight) == {2 * p}


@given(st.integers(1, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_holds_what_its_warm_up_does(p: int, v: int, rounds: int):
    m = rounds * p
    wanted = tuple(min((v - 1) * p + 2 * (p - 1 - r) + 1, v * m) for r in range(p))
    assert check(make_schedule("interleaved_1f1b", p, m, chunks=v)).rank_in_flight == wanted


BAD = [
    ("1f1b", (0, 4), {}, "0 pipeline ranks"),
    ("1f1b", (2, 0), {}, "0 microbatches"),
    ("1f1b", (2, 4), {"chunks": 2}, "2 chunks per rank"),
    ("interleaved_1f1b", (2, 4), {"chunks": 1}, "1 chunks per rank"),
    ("zbv", (2, 4), {"chunks": 1}, "1 chunks per rank"),
    ("zbv", (2, 4), {"chunks": 3}, "3 chunks per rank"),
    ("1f1b", (2, 4), {"update_every": 2}, "one update for all 4"),
    ("1f1b", (2, 4), {"vertical_sync": True}, "pipedream only"),
    ("pipedream", (2, 4), {"update_every": 2}, "after every microbatch"),
    ("pipedream_2bw", (2, 4), {"update_every": 3}, "a divisor"),
    ("pipedream_2bw", (2, 4), {"update_every": 0}, "a divisor"),
    ("pipedream_2bw", (4, 8), {"update_every": 2}, "two versions of"),
    ("1f2b", (2, 4), {}, "did you mean '1f1b'"),
]


@pytest.mark.parametrize(("name", "sizes", "options", "message"), BAD)
def test_bad_input_is_explained(name, sizes, options, message):
    with pytest.raises(PlanError, match=message):
        make_schedule(name, *sizes, **options)


def test_update_every_may_be_said_where_it_changes_nothing():
    assert make_schedule("1f1b", 2, 4, update_every=4) == make_schedule("1f1b", 2, 4)
    assert make_schedule("pipedream", 2, 4, update_every=1) == make_schedule("pipedream", 2, 4)


def test_pipedream_2bw_updates_as_often_as_it_may():
    assert make_schedule("pipedream_2bw", 3, 8).updates == 2
    assert make_schedule("pipedream_2bw", 3, 7).updates == 1
    assert make_schedule("pipedream_2bw", 4, 2).updates == 1


def test_the_registry_says_what_there_is():
    assert set(SCHEDULES) == {
        "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "pipedream", "pipedream_2bw",
    }  # fmt: skip
    assert {name for name in SCHEDULES if SCHEDULES[name].asynchronous} == {
        "pipedream", "pipedream_2bw",
    }  # fmt: skip
    for name in SCHEDULES:
        schedule = make_schedule(name, 2, 4, chunks=SCHEDULES[name].chunks or 2)
        kinds = {action.kind for row in schedule.actions for action in row}
        assert ("I" in kinds) == SCHEDULES[name].splits_backward
        assert schedule.name == name
        assert bool(schedule.delays) == SCHEDULES[name].asynchronous
