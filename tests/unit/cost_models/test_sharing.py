"""Ranks that share cores: what idle ones leave makes the others faster."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.sharing import faster, idle_cores_factor
from autopar.cost_models.simulate import Task, Timeline, simulate
from autopar.schedules.make import make_schedule


def timeline(name: str, ranks: int, microbatches: int) -> Timeline:
    schedule = make_schedule(name, ranks, microbatches)
    return simulate(schedule, lambda _: Task(compute_s=1.0), lambda _: 0.0)


def node(ranks: int, cores: int):
    spec = ClusterSpec.local(ranks).with_figures({"node.cores": cores}, source="test")
    return spec.hardware(0).node


def test_busy_ranks_get_what_was_measured():
    step = timeline("gpipe", 1, 4)
    assert idle_cores_factor(step, node(4, 2), 4) == 1
    assert faster(step, 1.0) is step


def test_half_the_ranks_have_a_core_each():
    assert idle_cores_factor(timeline("gpipe", 1, 4), node(4, 2), 2) == pytest.approx(0.5)


def test_ranks_that_have_a_core_each_are_not_faster():
    step = timeline("gpipe", 4, 4)
    assert idle_cores_factor(step, node(4, 4), 4) == 1
    assert idle_cores_factor(step, ClusterSpec.local(4).hardware(0).node, 4) == 1


@given(ranks=st.integers(2, 5), microbatches=st.integers(1, 8), cores=st.integers(1, 4))
def test_no_core_works_more_than_all_the_time(ranks: int, microbatches: int, cores: int):
    step = timeline("1f1b", ranks, microbatches)
    factor = idle_cores_factor(step, node(ranks, cores), ranks)
    after = faster(step, factor)
    assert min(1, cores / ranks) <= factor <= 1
    assert after.step_s == pytest.approx(step.step_s * factor)
    for before, split in zip(step.splits, after.splits, strict=True):
        assert split.step_s == pytest.approx(after.step_s)
        assert split.compute_s == pytest.approx(before.compute_s * factor)
    # Seconds of cores: a rank's own seconds are those that the figures say, times cores / ranks.
    if cores < ranks:
        work = sum(split.compute_s for split in step.splits) * cores / ranks
        assert work <= cores * after.step_s * (1 + 1e-9)


def test_a_timeline_keeps_its_form():
    step = timeline("1f1b", 2, 4)
    half = faster(step, 0.5)
    assert half.spans == tuple(tuple((a / 2, b / 2) for a, b in row) for row in step.spans)
    assert dataclasses.replace(half, spans=step.spans).schedule is step.schedule
