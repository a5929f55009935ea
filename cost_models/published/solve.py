"""Robust least squares with priors: Levenberg and Marquardt's method on a few dozen constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from autopar.cost_models.published.priors import Parameter

    Flags = NDArray[np.bool_]
    Floats = NDArray[np.float64]

SCALE = 0.06
"""Errors up to this size count squared, larger ones linearly (Huber)."""
CAP = 0.25
"""Errors beyond this size are outliers."""
FAR = 0.3
"""What an outlier counts of what it exceeds the cap by."""
EFFECT = 0.03
"""Standard deviation of what all rows of a family share and no constant explains: a large family
does not outvote several small ones."""
STEP = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Where a fit ended.

    Attributes:
        logs: Logarithms of the parameters.
        loss: The value of the loss.
        rounds: Steps that were taken.
    """

    logs: Floats
    loss: float
    rounds: int


def _loss(errors: Floats) -> float:
    size = np.abs(errors) / SCALE
    huber = np.where(size < 1, 0.5 * size**2, size - 0.5)
    most = CAP / SCALE - 0.5
    return float(np.where(huber < most, huber, most + FAR * (huber - most)).sum())


def _weights(errors: Floats) -> Floats:
    size = np.maximum(np.abs(errors) / SCALE, 1e-9)
    weight = np.where(size < 1, 1.0, 1 / size)
    return np.where(np.abs(errors) > CAP, FAR * weight, weight) / SCALE**2


def _apart(reach: Sequence[Flags]) -> list[list[int]]:
    """Parameters in groups of which no two change the same error."""
    groups: list[tuple[Flags, list[int]]] = []
    for place, mask in enumerate(reach):
        for taken, places in groups:
            if not (taken & mask).any():
                taken |= mask
                places.append(place)
                break
        else:
            groups.append((mask.copy(), [place]))
    return [places for _, places in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Where a fit is: parameters and effects of families, their errors and loss."""

    values: Floats
    raw: Floats
    errors: Floats
    loss: float


def _columns(groups: Sequence[int] | None, rows: int) -> Floats:
    """A column per group, 1 for the errors that belong to it."""
    if groups is None:
        return np.zeros((rows, 0))
    numbers = np.asarray(groups)
    return np.asarray(numbers[:, None] == np.unique(numbers)[None, :], dtype=np.float64)


def solve(
    residual: Callable[[Floats], Floats],
    found: Sequence[Parameter],
    *,
    reach: Sequence[Flags] | None = None,
    groups: Sequence[int] | None = None,
    rounds: int = 25,
) -> Solution:
    """Fit parameters to log errors.

    Args:
        residual: Log of predicted over measured, for logarithms of the parameters.
        found: The parameters; their priors are the start.
        reach: Which errors each parameter can change; all by default. Slopes of parameters that
            change different errors are taken at once.
        groups: Family of each error: families have an effect of their own, with a prior of 0 and
            `EFFECT`, which is fitted beside the parameters and then forgotten.
        rounds: Most steps.

    Returns:
        The best parameters found, all within their ranges.
    """
    count = len(found)
    start = np.log([item.constant.prior for item in found])
    first = residual(start)
    shared = _columns(groups, len(first))
    extra = np.zeros(shared.shape[1])
    prior = np.concatenate([start, extra])
    spread = np.array([item.constant.spread for item in found] + [EFFECT] * len(extra))
    low = np.log([item.constant.low for item in found])
    high = np.log([item.constant.high for item in found])

    def state(values: Floats) -> _State:
        raw = residual(values[:count])
        errors = raw + shared @ values[count:]
        loss = _loss(errors) + 0.5 * float((((values - prior) / spread) ** 2).sum())
        return _State(values=values, raw=raw, errors=errors, loss=loss)

    if reach is None:
        reach = [np.ones(len(first), dtype=bool)] * count
    apart = _apart(reach)
    now, damping, taken = state(prior), 1e-2, 0
    for _ in range(rounds):
        slopes = np.zeros((len(first), count))
        for places in apart:
            moved = now.values[:count].copy()
            moved[places] += STEP
            change = (residual(moved) - now.raw) / STEP
            for place in places:
                slopes[:, place] = np.where(reach[place], change, 0.0)
        slopes = np.concatenate([slopes, shared], axis=1)
        weight = _weights(now.errors)
        normal = (slopes * weight[:, None]).T @ slopes + np.diag(1 / spread**2)
        right = -(slopes * weight[:, None]).T @ now.errors - (now.values - prior) / spread**2
        gained = 0.0
        for _ in range(6):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), right)
            tried = now.values + np.clip(change, -0.3, 0.3)
            tried[:count] = np.clip(tried[:count], low, high)
            after = state(tried)
            if after.loss < now.loss:
                gained, now = now.loss - after.loss, after
                damping, taken = max(damping / 3, 1e-4), taken + 1
                break
            damping *= 4
        if gained <= 1e-4 * now.loss:
            break
    return Solution(logs=now.values[:count], loss=now.loss, rounds=taken)
