"""Memory that waits for the backward of weights, against plans priced exactly."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.schedules.steady import fullest
from autopar.search.bounds import Bounds
from autopar.search.exact import _candidate
from autopar.search.problem import Problem
from autopar.search.space import Point
from tests.unit.search.problems import traced


@pytest.mark.parametrize("options", [("none",), ("selective",), ("full",)], ids=lambda o: o[0])
def test_ranks_hold_what_bounds_say(options: tuple[str, ...]):
    found = traced("gpt", 4, 2, 16)
    problem = Problem(found.graph, found.loss, ClusterSpec.parse("1x2xA100"), options=options)
    bounds = Bounds(problem)
    point = Point(pipeline=2, microbatches=8, schedule="zb_h1")
    fixed = bounds.fixed(point, None)
    assert fixed is not None
    stages, cut = fixed
    outcome = problem.outcome(_candidate(point, stages, cut))
    assert outcome is not None
    planned, waits = np.zeros(2), np.zeros(2)
    for stage, rank in enumerate(point.stage_ranks):
        intervals, filled, k = stages.each[stage], stages.filled[stage], np.array([stage])
        mix = (filled.low[k], filled.high[k], filled.upgraded[k], k)
        kept, late = intervals.mixed(*mix)[1], intervals.late_mixed(*mix)
        waits[rank] = stages.waiting[stage] * late[0]
        planned[rank] = intervals.static[stage] + stages.under_way[stage] * kept[0] + waits[rank]
    factor = problem.reserved_factor(problem.device)
    held = bounds.room(problem.device) + np.array(outcome.rank_over_bytes) / factor
    assert (planned <= held * (1 + 1e-9)).all()
    assert waits[-1] > 0
    # What bounds of all cuts take for granted, each rank holds before any such backward waits.
    totals = bounds.totals(point)
    assert totals is not None
    live = totals.live_at_least(point, 1.0, outcome.step_s / bounds.sharing())
    for stage, times in enumerate(fullest("zb_h1", 2, 8)):
        mine = slice(stages.intervals.start[stage], stages.intervals.stop[stage])
        assert (live[mine] >= 1).all() and (live[mine] <= max(early for early, _ in times)).all()
