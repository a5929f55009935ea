"""Simulated annealing over plans (Metropolis; as FlexFlow, arXiv 1807.05358, and Aceso do).

The state is a point with even stages and one option of recomputation; a move changes one of its
fields. Plans that do not fit pay for each byte, so that the walk finds its way back.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import fields, replace

from autopar.search.bounds import Bounds
from autopar.search.closing import close
from autopar.search.exact import FEW_UNITS, as_asked, best_candidate, even_candidate
from autopar.search.first import first_plan
from autopar.search.problem import Outcome, Problem
from autopar.search.result import Certificate, Interruptible, SearchResult, others
from autopar.search.space import Point
from autopar.search.starts import first_bounds, starts

FIRST, LAST = 0.3, 0.003
"""Temperature at the start and at the end, as a share of a step's seconds."""
RECUT = 6
"""Points of which the best plan is looked for in the end."""
BRANCHED = 60
"""Plans of each of them that are evaluated, of models of few units."""
State = tuple[Point, int]


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
    begun, rng = time.monotonic(), random.Random(seed)
    points = list(problem.space.points())
    neighbours, bounds = _Neighbours(points), Bounds(problem)
    state: State = (rng.choice(points), 0)
    score: tuple[float, Outcome | None] = (math.inf, None)
    best: Outcome | None = None
    found: list[Outcome] = []
    complete = True
    with Interruptible(lambda: best is not None) as walk:
        for other in (state, *experts(problem, bounds)):
            value = evaluate(problem, bounds, other)
            if value[0] < score[0]:
                state, score = other, value
                if value[1] is not None and value[1].fits:
                    best, found = value[1], [value[1]]
        for number in range(plans):
            if time.monotonic() - begun > time_limit_s:
                complete = False
                break
            trial = _move(neighbours, state, len(problem.policies), rng)
            value = evaluate(problem, bounds, trial)
            warmth = FIRST * (LAST / FIRST) ** (number / plans)
            if value[0] <= score[0] or rng.random() < math.exp((score[0] - value[0]) / warmth):
                state, score = trial, value
            outcome = value[1]
            if outcome is not None and outcome.fits:
                found.append(outcome)
                best = outcome if best is None or outcome.step_s < best.step_s else best
        best = recut(problem, bounds, best, found, begun + time_limit_s)
    complete = complete and not walk.interrupted
    if best is None and not complete:
        best = first_plan(problem, bounds)
    return unproven("mcmc", problem, best, found, len(points), begun, complete=complete)


def recut(
    problem: Problem,
    bounds: Bounds,
    best: Outcome | None,
    found: Sequence[Outcome],
    deadline_s: float,
) -> Outcome | None:
    """The best plan of the best points: walks know even stages with one option only.

    Args:
        problem: The problem.
        bounds: Its bounds.
        best: The best plan of the walk.
        found: All that fit.
        deadline_s: Time of `time.monotonic` after which to stop.
    """
    points = set(problem.space.points())
    tried: dict[Point, None] = {}
    for item in sorted(found, key=lambda item: (item.step_s, item.candidate.point)):
        point = item.candidate.point
        plain = replace(point, schedule="1f1b", chunks=1)  # stages of which may be uneven
        tried |= dict.fromkeys(other for other in (point, plain) if other in points)
        if len(tried) >= RECUT:
            break
    for point in tried:
        if time.monotonic() > deadline_s:
            break
        other, _ = best_candidate(problem, bounds, point)
        if other is not None and (best is None or other.step_s < best.step_s):
            best = other
        if best is not None and point.schedule == "1f1b" and problem.units.count <= FEW_UNITS:
            better = close(
                bounds, point, best.step_s, BRANCHED, lambda: time.monotonic() > deadline_s
            ).best
            best = better if better is not None and better.step_s < best.step_s else best
    return best


def experts(problem: Problem, bounds: Bounds) -> list[State]:
    """States that experts would begin with, so that no walk ends with less."""
    known = starts(bounds, first_bounds(bounds))
    return [(point, option) for _, point in known for option in range(len(problem.policies))]


def evaluate(problem: Problem, bounds: Bounds, state: State) -> tuple[float, Outcome | None]:
    """Logarithm of a plan's seconds, dearer where it does not fit, and what it takes."""
    candidate = even_candidate(problem, bounds, *state)
    outcome = problem.outcome(candidate) if candidate is not None else None
    if outcome is None:
        return math.inf, None
    room = problem.capacity_bytes(problem.devices(state[0])[0])
    over = max(0.0, outcome.over_bytes / room)
    return math.log(outcome.step_s) + 2 * over + (over > 0), outcome


def unproven(
    strategy: str,
    problem: Problem,
    best: Outcome | None,
    found: Sequence[Outcome],
    points: int,
    begun: float,
    *,
    complete: bool,
) -> SearchResult:
    """The result of a strategy that proves nothing."""
    return SearchResult(
        best=best,
        alternatives=others(found, best) if best is not None else (),
        certificate=Certificate(
            bound_s=0.0, space=as_asked(problem, "no proof"), points=points, pruned={},
            evaluated=problem.evaluated, complete=complete,
        ),
        strategy=strategy,
        seconds=time.monotonic() - begun,
    )  # fmt: skip


class _Neighbours:
    """Points that differ in one field."""

    names = tuple(item.name for item in fields(Point))

    def __init__(self, points: Sequence[Point]) -> None:
        self.points = points
        self.groups: dict[tuple[object, ...], list[Point]] = {}
        for point in points:
            for name in self.names:
                self.groups.setdefault(self._key(point, name), []).append(point)

    def _key(self, point: Point, free: str) -> tuple[object, ...]:
        sizes = ("pipeline", "data", "tensor", "role")
        loose: tuple[str, ...] = (free,)
        if free in sizes:  # the product of the sizes stays; what depends on it may follow
            loose = (*sizes, "data_outside", "chunks", "schedule")
        return (free, *((n, getattr(point, n)) for n in self.names if n not in loose))

    def of(self, point: Point, name: str) -> list[Point]:
        """All that differ at most in `name` and what has to follow."""
        return self.groups[self._key(point, name)]


def _move(neighbours: _Neighbours, state: State, options: int, rng: random.Random) -> State:
    point, option = state
    name = rng.choice((*neighbours.names, "option", "any"))
    if name == "option":
        return point, rng.randrange(options)
    if name == "any":
        return rng.choice(neighbours.points), option
    return rng.choice(neighbours.of(point, name)), option
