"""The exact search against trying everything: what is compared, and what may not happen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from autopar.search import exact, exhaustive
from autopar.search.bounds import Bounds
from autopar.search.problem import Outcome, Problem
from tests.unit.search.constraints import constrained, not_as_asked
from tests.unit.search.problems import PLENTY, Small, small

EQUAL = 1e-9
EARLY = 0.05
"""Gap at which a second search stops early."""


@dataclass(slots=True)
class Tally:
    """What many comparisons have shown.

    Attributes:
        counts: Of problems, and of what holds of them.
        wrong: What must not happen, in words.
        worst: How much slower the worst answer was than the best plan.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    worst: float = 0.0

    @property
    def equal(self) -> float:
        """Share of problems of which the best plan was found."""
        return self.counts["equal"] / max(self.counts["problems"], 1)

    def text(self) -> str:
        """All figures."""
        parts = [f"{count} {name}" for name, count in self.counts.items()]
        return f"{self.equal:.1%} equal, worst {self.worst:.2%} slower; " + ", ".join(parts)


def memories(problem: Small) -> list[int]:
    """Plenty, less, the least that any plan needs, and a byte less than that."""
    needs = problem.needs()
    if not needs:
        return [PLENTY]
    tight = [needs[int(len(needs) * share)] for share in (0.6, 0.25)]
    return [PLENTY, *tight, needs[0], needs[0] - 1]


def unpruned(problem: Problem) -> float:
    """Seconds of the best of the best plans of all points."""
    bounds = Bounds(problem)
    found = [exact.best_candidate(problem, bounds, point)[0] for point in problem.space.points()]
    return min((item.step_s for item in found if item is not None), default=math.inf)


def compare(problem: Small, memory_bytes: int, tally: Tally) -> Outcome | None:
    """Search with so much memory, and try everything.

    Args:
        problem: The problem.
        memory_bytes: Memory of each device.
        tally: Gets what is found.

    Returns:
        The best plan that the search found.
    """

    def fresh() -> Problem:
        return problem.problem.with_memory(memory_bytes)

    found, early = exact.search(fresh()), exact.search(fresh(), gap=EARLY)
    truth = exhaustive.search(fresh()).best
    tally.counts += Counter({"problems": 1, problem.name.split()[1]: 1})
    bad: list[str] = []
    if found.best is None or early.best is None or truth is None:
        if not found.best is early.best is truth:
            bad.append("feasibility")
        tally.counts += Counter(infeasible=1, equal=1)
    else:
        least = truth.step_s
        slower = found.best.step_s / least - 1
        tally.worst = max(tally.worst, slower)
        tally.counts += Counter(equal=slower <= EQUAL, proven=found.gap <= EQUAL)
        bad += ["does not fit"] * (not found.best.fits or not early.best.fits)
        bad += ["plan that was not tried"] * (slower < -EQUAL)
        for name, result in (("bound", found), ("early bound", early)):
            excess = result.certificate.bound_s / least - 1
            bad += [f"{name} {excess:.2g} above the optimum"] * (excess > EQUAL)
        bad += ["early stop too early"] * (early.best.step_s * (1 - EARLY) > least * (1 + EQUAL))
        again = exact.search(fresh())
        if (again.best, again.certificate.bound_s) != (found.best, found.certificate.bound_s):
            bad.append("not the same again")
        bad += ["unpruned is better"] * (unpruned(fresh()) < found.best.step_s * (1 - EQUAL))
    tally.wrong += [f"{what}: {problem.name}, {memory_bytes} bytes" for what in bad]
    return found.best


def campaign(
    seeds: Iterable[int],
    *,
    most: int = 160,
    constraints: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> Tally:
    """Compare on the problems of many seeds.

    Args:
        seeds: Of the problems.
        most: Most plans of 1F1B of a problem.
        constraints: Whether each gets constraints, and plans are looked at for keeping them.
        on_progress: Called with a line now and then.
    """
    tally = Tally()
    for seed in seeds:
        problem = small(seed, most)
        if problem is None or not problem.plans:
            continue
        if constraints:
            problem, wrong = constrained(problem, seed)
            tally.wrong += wrong
            tally.counts.update(f"with {name}" for name in problem.problem.asked.texts())
        for number, memory in enumerate(memories(problem)):
            best = compare(problem, memory, tally)
            if constraints and number == 0 and best is not None:
                tally.wrong += not_as_asked(problem, best.candidate)
                tally.counts["kept"] += 1
        if on_progress is not None:
            on_progress(f"{seed}: {tally.text()}")
    return tally
