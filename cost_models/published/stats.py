"""Errors of predictions, and how well they order plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

LARGE_SET = 8
"""Plans from which a set can tell a good order from luck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Relative errors, as fractions of what was measured.

    Attributes:
        n: Number of predictions.
        mean_abs_error: Mean of the absolute errors.
        median_abs_error: Median.
        p90_abs_error: What nine of ten do not exceed, interpolated.
        max_abs_error: The largest.
        bias: Mean of the signed errors; positive when predictions are too large.
    """

    n: int
    mean_abs_error: float
    median_abs_error: float
    p90_abs_error: float
    max_abs_error: float
    bias: float

    def as_dict(self) -> dict[str, float]:
        """By name, as ``--json`` prints it."""
        return asdict(self)


def error_stats(predicted: Sequence[float], measured: Sequence[float]) -> Stats:
    """Statistics of the errors of `predicted`.

    Args:
        predicted: Predictions.
        measured: Measurements, positive, of the same things.
    """
    errors = [guess / truth - 1 for guess, truth in zip(predicted, measured, strict=True)]
    if not errors:
        return Stats(
            n=0, mean_abs_error=math.nan, median_abs_error=math.nan, p90_abs_error=math.nan,
            max_abs_error=math.nan, bias=math.nan,
        )  # fmt: skip
    sizes = sorted(map(abs, errors))
    return Stats(
        n=len(errors),
        mean_abs_error=sum(sizes) / len(sizes),
        median_abs_error=quantile(sizes, 0.5),
        p90_abs_error=quantile(sizes, 0.9),
        max_abs_error=sizes[-1],
        bias=sum(errors) / len(errors),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie, by linear interpolation."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well predictions order a set of plans of one job on one cluster.

    Attributes:
        plans: Number of plans.
        spearman: Rank correlation, or None when all plans measure (or predict) the same.
        best_in_top_3: Whether the plan that measured best is among the three predicted best.
        regret: How much slower the predicted best measured than the best.
        spread: Slowest over fastest as measured.
    """

    plans: int
    spearman: float | None
    best_in_top_3: bool
    regret: float
    spread: float


def ranking(predicted: Sequence[float], measured: Sequence[float]) -> Ranking:
    """How well `predicted` orders at least one plan that took `measured` seconds."""
    order = sorted(range(len(predicted)), key=predicted.__getitem__)
    best = min(range(len(measured)), key=measured.__getitem__)
    return Ranking(
        plans=len(measured),
        spearman=spearman(predicted, measured),
        best_in_top_3=any(measured[place] <= measured[best] for place in order[:3]),
        regret=measured[order[0]] / measured[best] - 1,
        spread=max(measured) / min(measured),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Rank correlation with mean ranks for ties; None when one side has no order."""
    left, right = _ranks(first), _ranks(second)
    mean = (len(left) - 1) / 2
    product = sum((a - mean) * (b - mean) for a, b in zip(left, right, strict=True))
    size = math.sqrt(sum((a - mean) ** 2 for a in left) * sum((b - mean) ** 2 for b in right))
    return product / size if size else None


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end + 1 < len(order) and values[order[end + 1]] == values[order[start]]:
            end += 1
        for place in order[start : end + 1]:
            ranks[place] = (start + end) / 2
        start = end + 1
    return ranks
