"""The best plan once more, op by op: choices that no role of a tensor axis has.

The op-level problem (`autopar.search.op_search`) is solved on the mesh of a plan that was found;
what it proposes is priced like any other plan and taken if it is faster and fits.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.search.keep import keeps_placements, pinned_nodes
from autopar.search.op_search import best_overrides
from autopar.search.problem import Outcome, Problem

LARGEST = 8
"""Largest tensor axis whose ops are looked at one by one: states grow with the third power."""


def refine(problem: Problem, outcome: Outcome, deadline_s: float) -> Outcome:
    """A plan of the same point that is at least as good, and keeps what is asked for.

    Args:
        problem: The problem.
        outcome: The plan.
        deadline_s: Time of `time.monotonic` after which to stop.
    """
    point, best = outcome.candidate.point, outcome
    if not 1 < point.tensor <= LARGEST or time.monotonic() > deadline_s or problem.asked.pinned:
        return outcome
    asked, plan = problem.asked, problem.plan(outcome.candidate)
    found = best_overrides(
        problem.layout, plan, problem.loss, problem.cluster, problem.software, axes=("tp",),
        pinned=pinned_nodes(problem.evaluator, plan, asked.splits, asked.placements),
    )  # fmt: skip
    for sharding in found:
        if not sharding.overrides or time.monotonic() > deadline_s:
            continue
        overrides = tuple(sorted(sharding.overrides.items()))
        candidate = replace(outcome.candidate, overrides=overrides)
        if not keeps_placements(problem.evaluator, problem.plan(candidate), asked.placements):
            continue
        other = problem.outcome(candidate)
        if other is not None and other.fits and other.step_s < best.step_s:
            best = other
    return best
