"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473): v chunks of the model on every rank.

Stage s is on rank s mod p. The bubble is that of 1F1B divided by v, and v times as much is sent.
Microbatches go through the chunks of a rank in groups of p. The paper wants m to be a multiple of
p; here m is divided into m // p groups (at least one) of sizes that differ by at most one, larger
ones first. Where all are equal, the order is that of torch's ScheduleInterleaved1F1B.
"""

from __future__ import annotations

from itertools import pairwise

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.build import build


def interleaved(num_ranks: int, num_microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with `chunks` stages per rank."""
    groups = _groups(num_microbatches, max(1, num_microbatches // num_ranks))
    orders = [_order(rank, num_ranks, chunks, groups) for rank in range(num_ranks)]
    ranks = [stage % num_ranks for stage in range(chunks * num_ranks)]
    return build("interleaved_1f1b", orders, ranks, num_microbatches)


def _groups(num_microbatches: int, count: int) -> list[range]:
    """`count` consecutive groups of microbatches, larger ones first.

    A group must not be larger than the one before it: the forwards done ahead of the first
    backward are counted with the first group, and would not suffice.
    """
    size, larger = divmod(num_microbatches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _order(rank: int, num_ranks: int, chunks: int, groups: list[range]) -> list[Action]:
    stages = range(rank, chunks * num_ranks, num_ranks)
    forwards = [Action("F", stage, k) for group in groups for stage in stages for k in group]
    backwards = [
        Action("B", stage, k) for group in groups for stage in reversed(stages) for k in group
    ]
    # The last rank must reach its last chunk; every rank before it waits two steps longer.
    ahead = (chunks - 1) * len(groups[0]) + 2 * (num_ranks - 1 - rank)
    ahead = min(ahead, len(forwards))
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += (forward, backward)
    return order + backwards[len(forwards) - ahead :]
