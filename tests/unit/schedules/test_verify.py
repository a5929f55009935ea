"""The checker accepts all that can run, and notices every damage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.schedules.actions import MESSAGES, Action, Schedule
from autopar.schedules.communicate import add_communication
from autopar.schedules.make import make_schedule
from autopar.schedules.text import parse
from autopar.schedules.verify import check
from tests.unit.schedules.cases import by_hand, can_run, chain, made


def accepted(schedule: Schedule, edges=None, gradients=None) -> bool:
    try:
        check(schedule, edges, gradients)
    except PlanError:
        return False
    return True


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


@given(by_hand())
def test_any_order_that_can_run_is_accepted(case):
    schedule, edges, gradients = case
    check(schedule, edges, gradients)


def ends_in_order(schedule: Schedule) -> bool:
    """The rules about one stage, said another way than the checker does."""
    for stage, rank in enumerate(schedule.stage_ranks):
        own = [a for a in schedule.actions[rank] if a.stage == stage and a.kind not in MESSAGES]
        for k in range(schedule.num_microbatches):
            kinds = "".join(a.kind for a in own if a.microbatch == k and len(a.kind) == 1)
            if kinds not in ("FB", "FIW"):
                return False
        size = schedule.microbatches_per_update
        for update in range(schedule.updates):
            numbers = [n for n, a in enumerate(own) if a == Action("UPDATE", stage, update)]
            before = own[: numbers[0]]
            if before.count(Action("REDUCE", stage, update)) != 1:
                return False
            before = before[: before.index(Action("REDUCE", stage, update))]
            done = {a.microbatch for a in before if a.kind in ("B", "W")}
            if not done >= set(range(update * size, (update + 1) * size)):
                return False
            if sum(a.kind == "UPDATE" for a in before) != update:
                return False
        for n, action in enumerate(own):
            if action.kind == "F":
                applied = sum(a.kind == "UPDATE" for a in own[:n])
                if action.microbatch // size - schedule.delay(stage) > applied:
                    return False
    return True


def users_in_order(schedule: Schedule) -> bool:
    """Sends after what they send, receives before what needs them."""
    for row in schedule.actions:
        places = {action: index for index, action in enumerate(row)}
        for action, index in places.items():
            if action.kind not in MESSAGES:
                continue
            kinds = ("F",) if action.kind.endswith("F") else ("B", "I")
            users = [Action(kind, action.stage, action.microbatch) for kind in kinds]
            (at,) = [places[user] for user in users if user in places]
            if (at < index) != action.kind.startswith("SEND"):
                return False
    return True


@given(st.data())
def test_a_move_is_refused_exactly_when_it_breaks_something(data):
    schedule = data.draw(made(max_ranks=4, max_microbatches=5))
    if data.draw(st.booleans()):
        schedule = add_communication(schedule)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    action = row.pop(data.draw(st.integers(0, len(row) - 1)))
    row.insert(data.draw(st.integers(0, len(row))), action)
    moved = with_row(schedule, rank, row)
    edges = chain(schedule)
    wanted = ends_in_order(moved) and users_in_order(moved) and can_run(moved, edges, edges)
    assert accepted(moved) == wanted


@given(st.data())
def test_a_missing_or_doubled_action_is_refused(data):
    schedule = add_communication(data.draw(made(max_ranks=4, max_microbatches=5)))
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    row = list(schedule.actions[rank])
    index = data.draw(st.integers(0, len(row) - 1))
    assert not accepted(with_row(schedule, rank, row[:index] + row[index + 1 :]))
    assert not accepted(with_row(schedule, rank, [*row, row[index]]))


@given(st.data())
def test_an_action_on_another_rank_is_refused(data):
    schedule = data.draw(made(max_ranks=4, max_microbatches=4))
    assume(schedule.num_ranks > 1)
    rank = data.draw(st.integers(1, schedule.num_ranks - 1))
    rows = [list(row) for row in schedule.actions]
    rows[0].append(rows[rank].pop())
    with pytest.raises(PlanError, match=f"expected: it on rank {rank}"):
        check(replace(schedule, actions=tuple(map(tuple, rows))))


GOOD = str(add_communication(make_schedule("1f1b", 2, 3)))

DAMAGE = [
    ("0F1 ", "0F1 0F1 ", "0F1 comes twice"),
    ("0F1 ", "", "stage 0 has B for microbatch 1"),
    ("0B1 ", "0I1 ", "stage 0 has F I for microbatch 1"),
    ("0B1 ", "0B1 0W1 ", "stage 0 has B F W for microbatch 1"),
    ("0RECV_B1<1 0B1", "0B1 0RECV_B1<1", "0B1 comes before 0RECV_B1<1"),
    ("0F0 0SEND_F0>1", "0SEND_F0>1 0F0", "0SEND_F0>1 comes before 0F0"),
    ("1F0 1B0", "1B0 1F0", "1B0 comes before 1F0"),
    ("0SEND_F1>1 ", "", "0SEND_F1>1 is missing after 0F1"),
    ("0SEND_F0>1", "0SEND_F0>2", "0SEND_F0>2 is a message that no edge needs"),
    ("0REDUCE0 0UPDATE0", "0UPDATE0 0REDUCE0", "0UPDATE0 comes before 0REDUCE0"),
    ("0REDUCE0 ", "", "0REDUCE0 is missing"),
    ("0UPDATE0", "0UPDATE0 0UPDATE1", "0UPDATE1 is of an update that is not there"),
    ("0F0 ", "0F0 0F3 ", "0F3 is of a microbatch that is not there"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), DAMAGE)
def test_damage_is_explained(old: str, new: str, message: str):
    assert GOOD.count(old) == 1
    check(parse(GOOD))
    with pytest.raises(PlanError) as caught:
        check(parse(GOOD.replace(old, new)))
    assert message in str(caught.value)
    assert ">>" in str(caught.value)


def test_a_deadlock_shows_who_waits_for_what():
    text = GOOD.replace("0F0 0SEND_F0>1 0F1", "0F0 0RECV_B0<1 0SEND_F0>1 0F1")
    text = text.replace("0SEND_F1>1 0RECV_B0<1 ", "0SEND_F1>1 ")
    with pytest.raises(PlanError) as caught:
        check(parse(text))
    assert "deadlock: 0RECV_B0<1 on rank 0 waits for 1SEND_B0>0;" in str(caught.value)
    assert "rank 0 | 0F0 >>0RECV_B0<1<< 0SEND_F0>1" in str(caught.value)
    assert "rank 1 |     >>1RECV_F0<0<<    1F0" in str(caught.value)


def test_a_deadlock_without_messages():
    schedule = parse(
        "rank 0: 0F0 0B0 0F1 0B1 0REDUCE0 0UPDATE0\nrank 1: 1F0 1F1 1B0 1B1 1REDUCE0 1UPDATE0"
    )
    with pytest.raises(PlanError, match="0B0 on rank 0 waits for 1B0; 1F1 on rank 1 waits for 0F1"):
        check(schedule)


def test_messages_in_another_order_are_shown_at_both_ends():
    text = GOOD.replace("0SEND_F0>1 0F1 0SEND_F1>1", "0F1 0SEND_F1>1 0SEND_F0>1")
    with pytest.raises(PlanError) as caught:
        check(parse(text))
    assert "rank 0 sends 0SEND_F1>1 where rank 1 takes 1RECV_F0<0" in str(caught.value)
    assert ">>0SEND_F1>1<<" in str(caught.value)
    assert ">>1RECV_F0<0<<" in str(caught.value)


def test_weights_must_be_there():
    schedule = replace(make_schedule("pipedream", 2, 4), delays=(0, 0))
    with pytest.raises(PlanError, match="0F1 uses weights that 0UPDATE0 makes after it"):
        check(schedule)


def test_whole_and_split_backwards_mix():
    schedule = parse(
        "rank 0: 0F0 0F1 0B0 0I1 0W1 0REDUCE0 0UPDATE0\n"
        "rank 1: 1F0 1I0 1F1 1B1 1W0 1REDUCE0 1UPDATE0"
    )
    report = check(add_communication(schedule))
    assert report.in_flight == (2, 2)
    assert report.before_input_gradient == (2, 1)
    assert report.before_weight_gradient == (1, 1)


def test_errors_of_long_schedules_stay_short():
    schedule = add_communication(make_schedule("zb_h1", 4, 64))
    row = [a for a in schedule.actions[2] if str(a) != "2I40"]
    with pytest.raises(PlanError, match="stage 2 has F W for microbatch 40") as caught:
        check(with_row(schedule, 2, row))
    assert max(map(len, str(caught.value).splitlines())) < 200
