"""Seconds of the programs of a stage, from sums over its units: as simulated, or at least."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compute import race
from autopar.cost_models.pricing import Speed

Floats = NDArray[np.float64]
MANY = 1000.0
"""More pieces of collectives than a program has: stands for any number."""


def kernel_seconds(parts: Floats, speed: Speed) -> Floats:
    """Seconds of a program at least if it does not wait for the collectives beside it.

    Args:
        parts: See `program_seconds`.
        speed: Of the software.
    """
    compute, inline, beside, _, host = parts
    return race(compute + inline, host) + (1 - speed.overlap) * beside


def ending_seconds(
    phases: Floats, sync_s: Floats, speed: Speed, full_buckets: Floats | float = 0.0
) -> Floats:
    """Seconds of the last backward and the collectives that it starts, at least.

    Into how many pieces n these are cut is not known: with the first ready after x of e seconds of
    kernels and h of collectives, both end after ``max(e + slowdown (e - x), x + h)`` if h > e - x.
    There is one for each full bucket, and where weights are gathered and gradients summed there
    are two at least; x is at most e / n.

    Args:
        phases: Parts as in `program_seconds` of each phase of the program, shape (phases, 5, K).
        sync_s: Seconds of collectives once per step, shape (K,).
        speed: Of the software.
        full_buckets: See `Intervals`.
    """
    parts = phases.sum(axis=0)
    end = kernel_seconds(parts, speed) + (1 - speed.overlap) * sync_s
    hidden = speed.overlap * (parts[2] + sync_s)
    share = speed.slowdown / (1 + speed.slowdown)
    least = np.where((phases[:, 2] > 0).sum(axis=0) > 1, 2.0, 1.0)
    several = 1 - 1 / np.maximum(least, full_buckets)
    slower = np.maximum(
        share * np.minimum(hidden, end), speed.slowdown * np.minimum(hidden, several * end)
    )
    return np.maximum(hidden, end + slower)


def program_seconds(parts: Floats, speed: Speed) -> Floats:
    """Seconds of a program that waits for its collectives, as a simulation runs it.

    Where it is not known into how many pieces collectives are cut (`MANY`), at least: h seconds of
    them end x after e seconds of kernels and slow these down by h - x, for a piece of x seconds;
    both are least where they are equal.

    Args:
        parts: Seconds of kernels, of collectives inline, beside, number of the latter, of the host;
            shape (5, K).
        speed: Of the software.
    """
    compute, inline, beside, pieces, host = parts
    device = compute + inline
    compute = compute + (race(device, host) - device)
    end = compute + inline + (1 - speed.overlap) * beside
    hidden = speed.overlap * beside
    each = hidden / np.maximum(pieces, 1.0)
    done = np.maximum(end / np.maximum(pieces, 1.0) + hidden, end + each)
    shared = np.minimum(done, end) - np.maximum(done - hidden, 0.0)
    slower = np.maximum(end + speed.slowdown * np.clip(shared, 0.0, compute), done)
    share = speed.slowdown / (1 + speed.slowdown)
    least = np.maximum(end + np.minimum(speed.slowdown * compute, share * hidden), hidden)
    return np.where(hidden > 0, np.where(pieces >= MANY, least, slower), end)


def durations(sums: Floats, speed: Speed) -> tuple[Floats, Floats]:
    """Seconds of F and of B of every interval.

    Args:
        sums: Shape (phases, parts, K).
        speed: Of the software.
    """
    return program_seconds(sums[0], speed), program_seconds(sums[1] + sums[2], speed)
