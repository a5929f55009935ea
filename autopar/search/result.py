"""What a search found, and how good it is proven to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from autopar.search.problem import Outcome
from autopar.search.space import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How far from the optimum the answer can be.

    Attributes:
        bound_s: No plan of the space takes less, in seconds; infinite if none fits.
        space: What the bound covers, in words.
        points: Number of points of the space.
        pruned: How many of them each reason has ruled out.
        evaluated: Number of plans that were priced exactly.
        complete: Whether the search ended by itself.
    """

    bound_s: float
    space: str
    points: int
    pruned: Mapping[str, int]
    evaluated: int
    complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
        best: The best plan that fits; None if none was found.
        alternatives: The best plans of other points, best first.
        certificate: How good `best` is.
        strategy: Name of the strategy.
        seconds: Seconds that it took.
    """

    best: Outcome | None
    alternatives: tuple[Outcome, ...]
    certificate: Certificate
    strategy: str
    seconds: float

    @property
    def gap(self) -> float:
        """How much faster another plan can be at most, as a fraction of the step of the best."""
        if self.best is None:
            return float("inf")
        return max(0.0, 1.0 - self.certificate.bound_s / self.best.step_s)


def others(outcomes: Iterable[Outcome], best: Outcome) -> tuple[Outcome, ...]:
    """Of every other point than that of the best plan the fastest plan that fits, fastest first.

    Args:
        outcomes: Plans that were priced.
        best: The best plan.
    """
    found: dict[Point, Outcome] = {}
    for item in sorted(outcomes, key=lambda item: (item.step_s, item.candidate.point)):
        if item.fits and item.candidate.point != best.candidate.point:
            found.setdefault(item.candidate.point, item)
    return tuple(found.values())


@dataclass(slots=True)
class Interruptible:
    """A block that Ctrl-C ends without an error if there is something to return.

    Attributes:
        found: Whether there is.
        interrupted: Whether it was ended so.
    """

    found: Callable[[], bool]
    interrupted: bool = False

    def __enter__(self) -> Interruptible:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        self.interrupted = kind is KeyboardInterrupt and self.found()
        return self.interrupted
