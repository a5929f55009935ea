"""Which weights the asynchronous schedules use: the formulas of their papers."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.schedules.actions import Schedule
from autopar.schedules.make import SCHEDULES, make_schedule
from autopar.schedules.verify import check

RANKS, MICROBATCHES = st.integers(1, 6), st.integers(1, 16)


def updates_before_forward(schedule: Schedule, stage: int) -> list[int]:
    """Updates that `stage` has done when it sees each microbatch, counted in its actions."""
    counts, done = [], 0
    for action in schedule.actions[schedule.stage_ranks[stage]]:
        if action.kind == "UPDATE":
            done += 1
        if action.kind == "F":
            counts.append(done)
    return counts


def used(schedule: Schedule, stage: int, **options: int) -> list[int]:
    return [schedule.version(stage, k, **options) for k in range(schedule.num_microbatches)]


@given(RANKS, MICROBATCHES)
def test_pipedream_uses_the_newest_weights_there_are(p: int, m: int):
    schedule = make_schedule("pipedream", p, m)
    for stage in range(p):
        assert used(schedule, stage) == updates_before_forward(schedule, stage)


@given(RANKS, MICROBATCHES)
def test_vertical_sync_uses_the_weights_of_the_first_stage(p: int, m: int):
    schedule = make_schedule("pipedream", p, m, vertical_sync=True)
    for stage in range(p):
        assert used(schedule, stage) == updates_before_forward(schedule, 0)


@pytest.mark.parametrize("vertical_sync", [False, True])
def test_pipedream_in_its_papers_words(vertical_sync: bool):
    # w(t+1) = w(t) - lr * grad f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t)); all t-n+1 with sync.
    n, t = 4, 9
    schedule = make_schedule("pipedream", n, 12, vertical_sync=vertical_sync)
    wanted = [t - n + 1] * n if vertical_sync else [t - n + i for i in range(1, n + 1)]
    assert [schedule.version(stage, t) for stage in range(n)] == wanted


@given(RANKS, st.integers(1, 4), st.integers(0, 5))
def test_pipedream_2bw_is_one_update_late(p: int, updates: int, before: int):
    schedule = make_schedule("pipedream_2bw", p, updates * p, update_every=p)
    for stage in range(p):
        for k, version in enumerate(used(schedule, stage, updates_before=before)):
            assert version == max(0, before + k // p - 1)


@given(RANKS, st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_training_does_not_depend_on_steps(p: int, first: int, second: int, sync: bool):
    options = {"vertical_sync": sync}
    whole = make_schedule("pipedream", p, first + second, **options)
    parts = [make_schedule("pipedream", p, m, **options) for m in (first, second)]
    for stage in range(p):
        assert used(whole, stage) == [
            *used(parts[0], stage),
            *used(parts[1], stage, updates_before=first),
        ]


@given(RANKS, MICROBATCHES)
def test_stash_counts(p: int, m: int):
    plain = check(make_schedule("pipedream", p, m)).weight_versions
    assert plain == tuple(p - i for i in range(p))
    synced = check(make_schedule("pipedream", p, m, vertical_sync=True)).weight_versions
    assert synced == (p,) * p
    assert check(make_schedule("pipedream_2bw", p, m)).weight_versions == (2,) * p


@pytest.mark.parametrize("name", [n for n in SCHEDULES if not SCHEDULES[n].asynchronous])
def test_others_use_one_version(name: str):
    schedule = make_schedule(name, 3, 6, chunks=SCHEDULES[name].chunks or 2)
    assert set(check(schedule).weight_versions) == {1}
    for stage in range(schedule.num_stages):
        assert set(used(schedule, stage, updates_before=7)) == {7}


def test_descending_a_parabola_with_old_gradients():
    # f(w) = w^2 / 2 on one parameter per stage, exactly: each update walks against the gradient
    # at the version that the schedule names.
    schedule, rate = make_schedule("pipedream", 3, 6), Fraction(1, 2)
    trajectories = []
    for stage in range(3):
        weights = [Fraction(1)]
        for t in range(6):
            weights.append(weights[t] - rate * weights[schedule.version(stage, t)])
        trajectories.append(weights)
    late, newest = trajectories[0], trajectories[2]
    assert newest == [Fraction(1, 2**t) for t in range(7)]
    half = Fraction(1, 2)
    assert late[:5] == [1, half, 0, -half, -3 * half / 2]
