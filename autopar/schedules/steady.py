"""What is known of schedules without making them."""

from __future__ import annotations

from functools import lru_cache

from autopar.schedules.actions import BACKWARDS, Schedule
from autopar.schedules.make import make_schedule


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
    if name == "gpipe":
        return (num_microbatches,) * num_ranks
    if name == "1f1b":
        return tuple(min(num_microbatches, num_ranks - r) for r in range(num_ranks))
    if name == "zb_h1":
        return (min(num_microbatches, num_ranks),) * num_ranks
    if name == "zbv":  # the forward of the second stage of a rank comes after those of all others
        return tuple(
            min(num_microbatches + 1 + r, 2 * num_microbatches, 2 * num_ranks)
            for r in range(num_ranks)
        )
    if name == "interleaved_1f1b" and num_microbatches % num_ranks == 0:
        ahead = ((chunks - 1) * num_ranks + 2 * (num_ranks - r) - 1 for r in range(num_ranks))
        return tuple(min(num_microbatches * chunks, most) for most in ahead)
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


@lru_cache(maxsize=1024)
def fullest(
    name: str, num_ranks: int, num_microbatches: int, chunks: int = 1
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """When ranks of a schedule that splits backward hold most, whatever a microbatch takes.

    Args:
        name: Name of the schedule.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of a step.
        chunks: Stages per rank.

    Returns:
        For each rank pairs of which no other time has more of both: forwards whose backward of
        inputs is not over, and those whose backward of weights alone is not over.
    """
    ranks = range(num_ranks)
    if name == "zb_h1" and num_microbatches >= num_ranks:
        return tuple(((num_ranks - r, r), (num_ranks - r - 1, r + 1)) for r in ranks)
    if name == "zbv" and num_microbatches >= 2 * num_ranks:
        first = (2 * num_ranks, 0), (2 * num_ranks - 1, 1)
        return tuple(
            (*first, *((num_ranks + r - late, late) for late in range(2, 2 * r + 2))) for r in ranks
        )
    return counted_fullest(name, num_ranks, num_microbatches, chunks)


def counted_fullest(
    name: str, num_ranks: int, num_microbatches: int, chunks: int = 1
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """`fullest`, counted in the schedule."""
    found = []
    for actions in _short(name, num_ranks, num_microbatches, chunks).actions:
        early = late = 0
        seen: dict[int, int] = {}
        for action in actions:
            early += (action.kind == "F") - (action.kind in ("B", "I"))
            late += (action.kind == "I") - (action.kind == "W")
            seen[early] = max(late, seen.get(early, 0))
        pairs: list[tuple[int, int]] = []
        for count in sorted(seen, reverse=True):
            if not pairs or seen[count] > pairs[-1][1]:
                pairs.append((count, seen[count]))
        found.append(tuple(pairs))
    return tuple(found)


@lru_cache(maxsize=256)
def moments(
    name: str, num_ranks: int, num_microbatches: int, chunks: int
) -> tuple[tuple[tuple[tuple[int, ...], tuple[int, ...]], ...], ...]:
    """What is under way on ranks with several stages, at all times that differ.

    After a few rounds a schedule repeats itself, so that of many microbatches some are left out.

    Args:
        name: Name of the schedule.
        num_ranks: Pipeline ranks.
        num_microbatches: Microbatches of a step.
        chunks: Stages per rank.

    Returns:
        For each rank pairs of which each has a number for every stage of the rank, ascending:
        forwards whose backward of inputs is not over, and those whose backward of weights alone
        is not over.
    """
    few = min(num_microbatches, (chunks + 4) * num_ranks)
    schedule = _short(name, num_ranks, few, chunks)
    found = []
    for rank, actions in enumerate(schedule.actions):
        mine = [stage for stage, place in enumerate(schedule.stage_ranks) if place == rank]
        at = {stage: number for number, stage in enumerate(mine)}
        early, late = [0] * len(mine), [0] * len(mine)
        seen: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
        for action in actions:
            if action.kind in ("F", *BACKWARDS):
                number = at[action.stage]
                early[number] += (action.kind == "F") - (action.kind in ("B", "I"))
                late[number] += (action.kind == "I") - (action.kind == "W")
                seen[tuple(early), tuple(late)] = None
        found.append(tuple(seen))
    return tuple(found)
