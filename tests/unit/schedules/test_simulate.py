"""Times: the longest path, and the bubbles that the papers state."""

from __future__ import annotations

from itertools import pairwise

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.schedules.actions import MESSAGES, Action, Schedule, only
from autopar.schedules.communicate import add_communication
from autopar.schedules.make import make_schedule
from autopar.schedules.simulate import durations, simulate
from autopar.schedules.text import parse
from tests.unit.schedules.cases import by_hand, chain, made, waits

RANKS = st.integers(1, 6)
COSTS = st.integers(1, 9)


def longest_path(schedule: Schedule, edges, gradients, seconds, latency: int) -> int:
    """Length of the longest chain of actions, each after what it waits for."""
    graph = nx.DiGraph()
    for row in schedule.actions:
        for action in row:
            graph.add_edge((action, "start"), (action, "end"), weight=seconds(action))
        for first, then in pairwise(row):
            graph.add_edge((first, "end"), (then, "start"), weight=0)
    ranks = schedule.stage_ranks
    for first, then in waits(schedule, edges, gradients):
        weight = 0 if ranks[first.stage] == ranks[then.stage] else latency
        graph.add_edge((first, "end"), (then, "start"), weight=weight)
    return nx.dag_longest_path_length(graph)


@given(by_hand(), st.randoms(use_true_random=False))
def test_makespan_is_the_longest_path(case, random):
    schedule, edges, gradients = case
    table: dict[Action, int] = {}

    def seconds(action: Action) -> int:
        return table.setdefault(action, random.randint(0, 9))

    timeline = simulate(schedule, seconds, edges=edges, gradient_edges=gradients)
    assert timeline.makespan_s == longest_path(schedule, edges, gradients, seconds, 0)


@given(made(("gpipe", "1f1b", "zb_h1", "pipedream"), max_ranks=4, max_microbatches=6))
def test_latency_is_on_the_path(schedule: Schedule):
    # Two seconds of latency and three of work: messages of one pair of ranks do not meet.
    seconds = durations(forward_s=3, input_gradient_s=3, weight_gradient_s=3)
    timeline = simulate(schedule, seconds, 2)
    edges = chain(schedule)
    assert timeline.makespan_s == longest_path(schedule, edges, edges, seconds, 2)


@given(made(max_ranks=4, max_microbatches=6))
def test_a_timeline_is_the_schedule(schedule: Schedule):
    timeline = simulate(schedule, durations(reduce_s=0.5, update_s=0.25), 0.125)
    assert timeline.schedule == add_communication(schedule)
    starts: dict[Action, float] = {}
    for rank, row in enumerate(timeline.events):
        assert tuple(event.action for event in row) == timeline.schedule.actions[rank]
        now = 0.0
        for event in row:
            assert event.start_s == now
            now = event.end_s
            starts[event.action] = event.start_s
        assert timeline.busy_s(rank) + timeline.bubble_s(rank) == timeline.makespan_s
    for row in timeline.events:
        for event in row:
            if event.action.kind in ("RECV_F", "RECV_B"):
                assert event.end_s >= starts[event.action.counterpart] + 0.125


@given(RANKS, st.integers(1, 12), COSTS, COSTS, COSTS)
def test_gpipe_bubble(p: int, m: int, forward: int, inputs: int, weights: int):
    seconds = durations(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights)
    timeline = simulate(make_schedule("gpipe", p, m), seconds)
    assert timeline.makespan_s == (m + p - 1) * (forward + inputs + weights)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(RANKS, st.integers(0, 9), COSTS, COSTS, COSTS)
def test_1f1b_bubble(p: int, more: int, forward: int, inputs: int, weights: int):
    m = p + more
    seconds = durations(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights)
    timeline = simulate(make_schedule("1f1b", p, m), seconds)
    assert timeline.makespan_s == (m + p - 1) * (forward + inputs + weights)
    assert timeline.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@given(RANKS, st.integers(2, 4), st.integers(0, 9), COSTS)
def test_interleaving_divides_the_bubble(p: int, v: int, more: int, forward: int):
    # A chunk costs 1/v of a rank's layers. Also where m is not a multiple of p.
    m, forward = p + more, 12 * forward
    chunk = forward // v
    seconds = durations(forward_s=chunk, input_gradient_s=chunk, weight_gradient_s=chunk)
    timeline = simulate(make_schedule("interleaved_1f1b", p, m, chunks=v), seconds)
    assert timeline.makespan_s - m * 3 * forward == (p - 1) * 3 * forward // v


@given(RANKS, st.integers(0, 9), COSTS, COSTS, COSTS)
def test_zb_h1_bubble(p: int, more: int, forward: int, inputs: int, weights: int):
    # Table 2 of arXiv 2401.10241; it takes weight gradients not to be the slowest.
    weights = min(forward, inputs, weights)
    m = p + more
    seconds = durations(forward_s=forward, input_gradient_s=inputs, weight_gradient_s=weights)
    timeline = simulate(make_schedule("zb_h1", p, m), seconds)
    bubble = timeline.makespan_s - m * (forward + inputs + weights)
    assert bubble == (p - 1) * (forward + inputs - weights)


@given(RANKS, st.integers(0, 9), COSTS)
def test_zbv_has_no_bubble_when_all_takes_the_same_time(p: int, more: int, each: int):
    m = 2 * p - 1 + more
    seconds = durations(forward_s=each, input_gradient_s=each, weight_gradient_s=each)
    timeline = simulate(make_schedule("zbv", p, m, chunks=2), seconds)
    for rank in range(p):
        assert timeline.span_s(rank) == timeline.busy_s(rank) == 6 * m * each
    assert timeline.makespan_s == (6 * m + p - 1) * each


def test_messages_between_two_ranks_travel_one_after_the_other():
    schedule = only(make_schedule("gpipe", 2, 3), ("F",))
    timeline = simulate(schedule, durations(), 4)
    ends = [e.end_s for e in timeline.events[1] if e.action.kind == "RECV_F"]
    assert ends == [5, 9, 13]
    timeline = simulate(schedule, durations(), lambda send: 4 - send.microbatch)
    ends = [e.end_s for e in timeline.events[1] if e.action.kind == "RECV_F"]
    assert ends == [5, 8, 10]
    assert not [e for e in timeline.work(1) if e.action.kind in MESSAGES]


def test_what_hangs_is_refused():
    with pytest.raises(PlanError, match="deadlock"):
        simulate(parse("rank 0: 0B0 0F0\nrank 1: 1F0 1B0"), durations())
