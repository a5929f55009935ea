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


def solve(
    residual: Callable[[Floats], Floats],
    found: Sequence[Parameter],
    *,
    reach: Sequence[Flags] | None = None,
    rounds: int = 25,
) -> Solution:
    """Fit parameters to log errors.

    Args:
        residual: Log of predicted over measured, for logarithms of the parameters.
        found: The parameters; their priors are the start.
        reach: Which errors each parameter can change; all by default. Slopes of parameters that
            change different errors are taken at once.
        rounds: Most steps.

    Returns:
        The best parameters found, all within their ranges.
    """
    prior = np.log([item.constant.prior for item in found])
    spread = np.array([item.constant.spread for item in found])
    low = np.log([item.constant.low for item in found])
    high = np.log([item.constant.high for item in found])

    def total(errors: Floats, logs: Floats) -> float:
        return _loss(errors) + 0.5 * float((((logs - prior) / spread) ** 2).sum())

    logs = prior.copy()
    errors = residual(logs)
    if reach is None:
        reach = [np.ones(len(errors), dtype=bool)] * len(logs)
    apart = _apart(reach)
    loss, damping, taken = total(errors, logs), 1e-2, 0
    for _ in range(rounds):
        slopes = np.zeros((len(errors), len(logs)))
        for places in apart:
            moved = logs.copy()
            moved[places] += STEP
            change = (residual(moved) - errors) / STEP
            for place in places:
                slopes[:, place] = np.where(reach[place], change, 0.0)
        weight = _weights(errors)
        normal = (slopes * weight[:, None]).T @ slopes + np.diag(1 / spread**2)
        right = -(slopes * weight[:, None]).T @ errors - (logs - prior) / spread**2
        gained = 0.0
        for _ in range(6):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), right)
            tried = np.clip(logs + np.clip(change, -0.3, 0.3), low, high)
            new_errors = residual(tried)
            new_loss = total(new_errors, tried)
            if new_loss < loss:
                gained, logs, errors, loss = loss - new_loss, tried, new_errors, new_loss
                damping, taken = max(damping / 3, 1e-4), taken + 1
                break
            damping *= 4
        if gained <= 1e-4 * loss:
            break
    return Solution(logs=logs, loss=loss, rounds=taken)
