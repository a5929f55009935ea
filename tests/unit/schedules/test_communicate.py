"""Messages: one for every edge and microbatch, in one order at both ends, and in time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.schedules.actions import MESSAGES, Action
from autopar.schedules.communicate import add_communication
from autopar.schedules.make import make_schedule
from autopar.schedules.verify import check
from tests.unit.schedules.cases import by_hand, can_run, edge_sets, made


@given(st.data())
def test_messages_are_those_of_the_edges(data):
    schedule = data.draw(made(max_ranks=4, max_microbatches=6))
    edges, gradients = data.draw(edge_sets(schedule.num_stages))
    talking = add_communication(schedule, edges, gradients)
    ranks = schedule.stage_ranks
    wanted = Counter()
    for k in range(schedule.num_microbatches):
        for a, b in edges:
            if ranks[a] != ranks[b]:
                wanted.update([Action("SEND_F", a, k, b), Action("RECV_F", b, k, a)])
                if (a, b) in gradients:
                    wanted.update([Action("SEND_B", b, k, a), Action("RECV_B", a, k, b)])
    found = Counter(a for row in talking.actions for a in row if a.kind in MESSAGES)
    assert found == wanted
    assert can_run(talking, edges, gradients)
    check(talking, edges, gradients)
    assert add_communication(talking, edges, gradients) == talking


@given(by_hand())
def test_any_order_that_can_run_can_run_with_messages(case):
    schedule, edges, gradients = case
    talking = add_communication(schedule, edges, gradients)
    assert can_run(talking, edges, gradients)
    check(talking, edges, gradients)


def test_a_skip_connection():
    schedule = add_communication(make_schedule("1f1b", 3, 1), {(0, 1), (1, 2), (0, 2)}, {(0, 2)})
    assert [" ".join(map(str, row[:-2])) for row in schedule.actions] == [
        "0F0 0SEND_F0>1 0SEND_F0>2 0RECV_B0<2 0B0",
        "1RECV_F0<0 1F0 1SEND_F0>2 1B0",
        "2RECV_F0<0 2RECV_F0<1 2F0 2B0 2SEND_B0>0",
    ]


def test_receives_keep_the_order_of_sends_where_uses_do_not():
    # Rank 0 has the stages 0 and 2; rank 1 has 1 and 3 and uses what it gets in another order.
    schedule = make_schedule("interleaved_1f1b", 2, 2, chunks=2)
    talking = add_communication(schedule, {(0, 1), (0, 3), (1, 2), (2, 3)})
    sends = [a for a in talking.actions[0] if a.kind in ("SEND_F", "SEND_B")]
    receives = [a for a in talking.actions[1] if a.kind in ("RECV_F", "RECV_B")]
    assert [a.counterpart for a in sends] == receives
    row = list(map(str, talking.actions[1]))
    assert row.index("3RECV_F0<0") < row.index("1RECV_F1<0") < row.index("1F1") < row.index("3F0")


def test_stages_of_one_rank_send_nothing():
    schedule = add_communication(make_schedule("zbv", 2, 2, chunks=2))
    messages = [a for row in schedule.actions for a in row if a.kind in MESSAGES]
    assert messages
    assert not [a for a in messages if {a.stage, a.peer} == {1, 2}]


@pytest.mark.parametrize(
    ("edges", "gradients", "message"),
    [
        ({(1, 0)}, None, "from stage 1 to stage 0"),
        ({(0, 5)}, None, "from stage 0 to stage 5 of 2"),
        ({(0, 1)}, {(0, 2)}, "pass no tensor on"),
    ],
)
def test_bad_edges_are_refused(edges, gradients, message):
    with pytest.raises(PlanError, match=message):
        add_communication(make_schedule("1f1b", 2, 2), edges, gradients)
