"""Streams: without collectives the plain timeline; with them no second is lost or counted twice."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.simulate import Task, simulate
from autopar.schedules.actions import Action
from autopar.schedules.make import make_schedule
from autopar.schedules.simulate import durations
from autopar.schedules.simulate import simulate as plain
from autopar.schedules.text import parse
from tests.unit.schedules.cases import made

SECONDS = st.sampled_from((0.0, 0.25, 1.0, 3.0))


def alone(action: Action) -> Task:
    return Task(compute_s=durations(forward_s=2, update_s=0.5)(action))


@given(made(max_ranks=4, max_microbatches=6))
def test_without_collectives_it_is_the_plain_timeline(schedule):
    seconds = durations(forward_s=2, update_s=0.5)
    want = plain(schedule, seconds, 0.125)
    have = simulate(schedule, alone, lambda _: 0.125)
    assert have.schedule == want.schedule
    for rank, row in enumerate(want.events):
        assert [(e.action, e.start_s, e.end_s) for e in have.events(rank)] == [
            (e.action, e.start_s, e.end_s) for e in row
        ]
    assert have.step_s == want.makespan_s
    assert have.bubble_fraction == pytest.approx(want.bubble_fraction)


@given(
    made(max_ranks=3, max_microbatches=4),
    st.randoms(use_true_random=False),
    st.sampled_from((0, 1)),
)
def test_the_parts_of_a_step_add_up(schedule, random, slowdown):
    tasks: dict[Action, Task] = {}

    def task(action: Action) -> Task:
        if action.kind == "REDUCE":
            return Task()
        pick = random.choice
        return tasks.setdefault(action, Task(
            compute_s=pick((0.5, 2.0)), inline_s=pick((0.0, 1.0)), beside_s=pick((0.0, 4.0)),
            parts=pick((1, 3)), joins=pick((False, True)),
        ))  # fmt: skip

    found = simulate(schedule, task, lambda _: 0.5, slowdown=slowdown)
    for rank, split in enumerate(found.splits):
        mine = [tasks[a] for a in found.schedule.actions[rank] if a in tasks]
        assert split.step_s == pytest.approx(found.step_s)
        assert split.inline_s == pytest.approx(sum(t.inline_s for t in mine))
        least = sum(t.compute_s for t in mine)
        most = least + slowdown * sum(t.beside_s for t in mine)
        assert least - 1e-9 <= split.compute_s <= most + 1e-9
        now = 0.0
        for event in found.events(rank):
            assert event.start_s >= now - 1e-9
            now = event.end_s
        beside = found.beside[rank]
        for first, then in pairwise(beside):
            assert then.end_s - then.start_s >= 0 and then.end_s >= first.end_s
        assert found.step_s >= max([now, *(event.end_s for event in beside)]) - 1e-9


@given(st.integers(1, 5), SECONDS, SECONDS)
def test_what_fits_beside_is_hidden_and_the_rest_is_exposed(parts, compute, beside):
    # One microbatch: forward, backward with gradients beside it, then the update.
    def task(action: Action) -> Task:
        if action.kind == "F":
            return Task(compute_s=1.0)
        if action.kind == "B":
            return Task(compute_s=compute, beside_s=beside, parts=parts)
        return Task()

    found = simulate(make_schedule("gpipe", 1, 1), task, lambda _: 0.0)
    # The last part is ready when backward ends; the first when 1/n of it is done.
    want = max(beside / parts, compute / parts + beside - compute) if beside else 0.0
    assert found.splits[0].exposed_s == pytest.approx(max(want, 0.0))
    assert found.step_s == pytest.approx(1.0 + compute + max(want, 0.0))


def test_collectives_of_one_stage_hide_beside_another():
    # Stage 1 of two on one rank ends first; its gradients travel while stage 0 computes.
    text = "rank 0: 0F0 1F0 1B0 0B0 1REDUCE0 0REDUCE0 1UPDATE0 0UPDATE0"
    schedule = parse(text)

    def task(action: Action) -> Task:
        beside = 5.0 if (action.kind, action.stage) == ("B", 1) else 0.0
        return Task(compute_s=5.0 if action.kind == "B" else 0.0, beside_s=beside)

    found = simulate(schedule, task, lambda _: 0.0)
    assert found.step_s == pytest.approx(10.0)
    assert found.splits[0].exposed_s == pytest.approx(0.0)
