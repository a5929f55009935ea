"""Reinforcement learning over plans: REINFORCE with a moving baseline (Williams 1992).

The policy draws each field of a point, and the option of recomputation, from a table of its own,
as the placement learners of arXiv 1706.04972 do with a network; rewards are logarithms of seconds.
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from autopar.search.bounds import Bounds
from autopar.search.first import first_plan
from autopar.search.mcmc import State, evaluate, experts, recut, unproven
from autopar.search.problem import Outcome, Problem
from autopar.search.result import Interruptible, SearchResult
from autopar.search.space import Point

FIELDS = (
    "pipeline", "tensor", "role", "microbatches", "zero", "schedule", "chunks", "data_outside"
)  # fmt: skip
RATE, KEEP, WARM = 0.6, 0.9, 0.15
"""Step of the policy's logits; what the baseline keeps; share of draws at random."""
UNFIT = 3.0
"""Loss of what cannot be carried out, above the baseline."""


def search(
    problem: Problem,
    *,
    seed: int = 0,
    plans: int = 400,
    time_limit_s: float = math.inf,
) -> SearchResult:
    """A good plan, without a proof.

    Args:
        problem: The problem.
        seed: The same seed finds the same plan, unless time runs out.
        plans: Plans to price.
        time_limit_s: Stop after so many seconds, with what there is.
    """
    begun, rng = time.monotonic(), np.random.default_rng(seed)
    points = list(problem.space.points())
    policy, bounds = _Policy(points, len(problem.policies)), Bounds(problem)
    best: Outcome | None = None
    found: list[Outcome] = []
    baseline: float | None = None
    complete, given = True, experts(problem, bounds)
    with Interruptible(lambda: best is not None) as walk:
        for number in range(plans):
            if time.monotonic() - begun > time_limit_s:
                complete = False
                break
            state = given[number] if number < len(given) else policy.draw(rng)
            loss, outcome = evaluate(problem, bounds, state)
            if outcome is not None and outcome.fits:
                found.append(outcome)
                best = outcome if best is None or outcome.step_s < best.step_s else best
            if not math.isfinite(loss):
                loss = (baseline or 0.0) + UNFIT
            baseline = loss if baseline is None else KEEP * baseline + (1 - KEEP) * loss
            policy.learn(state, baseline - loss)
        best = recut(problem, bounds, best, found, begun + time_limit_s)
    complete = complete and not walk.interrupted
    if best is None and not complete:
        best = first_plan(problem, bounds)
    return unproven("rl", problem, best, found, len(points), begun, complete=complete)


class _Policy:
    """A table of logits for each field; fields are drawn one after the other among what is left."""

    def __init__(self, points: list[Point], options: int) -> None:
        self.points = points
        self.values = [sorted({getattr(point, name) for point in points}) for name in FIELDS]
        self.codes = np.array(
            [
                [
                    values.index(getattr(point, name))
                    for name, values in zip(FIELDS, self.values, strict=True)
                ]
                for point in points
            ]
        )  # fmt: skip
        self.logits = [np.zeros(len(values)) for values in self.values]
        self.option = np.zeros(options)

    def draw(self, rng: np.random.Generator) -> State:
        """A point and an option."""
        left = np.arange(len(self.points))
        for column, logits in enumerate(self.logits):
            codes = self.codes[left, column]
            usable = np.unique(codes)
            weights = _softmax(logits[usable])
            if rng.random() < WARM:
                weights = np.full(len(usable), 1 / len(usable))
            code = rng.choice(usable, p=weights)
            left = left[codes == code]
        option = int(rng.choice(len(self.option), p=_softmax(self.option)))
        return self.points[int(left[0])], option

    def learn(self, state: State, advantage: float) -> None:
        """Make what was drawn more likely if it was better than expected."""
        point, option = state
        for name, values, logits in zip(FIELDS, self.values, self.logits, strict=True):
            _ascend(logits, values.index(getattr(point, name)), advantage)
        _ascend(self.option, option, advantage)


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    found = np.exp(logits - logits.max())
    return np.asarray(found / found.sum())


def _ascend(logits: NDArray[np.float64], chosen: int, advantage: float) -> None:
    gradient = -_softmax(logits)
    gradient[chosen] += 1.0
    logits += RATE * advantage * gradient
