"""What schedules of many microbatches have in common with those of few: no need to make them."""

from __future__ import annotations

from functools import lru_cache

from autopar.schedules.actions import BACKWARDS, Schedule
from autopar.schedules.make import make_schedule

TURNS = 4
"""After so many microbatches per rank a schedule's order repeats itself, but for GPipe's, which has
no steady state, and interleaved 1F1B in groups of unequal sizes."""


@lru_cache(maxsize=1024)
def _short(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    return make_schedule(name, num_ranks, num_microbatches, chunks=chunks)


def stage_ranks(name: str, num_ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """For each stage of a schedule its rank; they do not depend on the number of microbatches."""
    return _short(name, num_ranks, num_ranks, chunks).stage_ranks


@lru_cache(maxsize=1024)
def most_live(name: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> tuple[int, ...]:
    """For each rank the most forwards whose backward is not over, of all its stages together.

    Args:
        name: Name of a synchronous schedule.
        num_ranks: Pipeline ranks p.
        num_microbatches: Microbatches of a step m.
        chunks: Stages per rank.
    """
    if name == "zb_h1":
        return (min(num_microbatches, num_ranks),) * num_ranks
    if name == "zbv":  # the forward of the second stage of a rank comes after those of all others
        return tuple(
            min(num_microbatches + 1 + r, 2 * num_microbatches, 2 * num_ranks)
            for r in range(num_ranks)
        )
    left = num_microbatches % num_ranks
    if name == "interleaved_1f1b" and not left:
        ahead = ((chunks - 1) * num_ranks + 2 * (num_ranks - r) - 1 for r in range(num_ranks))
        return tuple(min(num_microbatches * chunks, most) for most in ahead)
    repeats = name not in ("gpipe", "interleaved_1f1b")
    if repeats and num_microbatches > TURNS * num_ranks:
        num_microbatches = TURNS * num_ranks + left
    return _counted(name, num_ranks, num_microbatches, chunks)


def _counted(name: str, num_ranks: int, num_microbatches: int, chunks: int) -> tuple[int, ...]:
    """The same, counted in the schedule."""
    found = []
    for actions in _short(name, num_ranks, num_microbatches, chunks).actions:
        live = most = 0
        for action in actions:
            live += (action.kind == "F") - (action.kind in BACKWARDS and action.kind != "I")
            most = max(most, live)
        found.append(most)
    return tuple(found)


def least_live(name: str, num_ranks: int, num_microbatches: int, chunks: int = 1) -> int:
    """The least of `most_live` over the ranks."""
    return min(most_live(name, num_ranks, num_microbatches, chunks))
