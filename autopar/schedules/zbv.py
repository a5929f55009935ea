"""ZB-V (Qi et al., arXiv 2401.10241, section 6): two chunks per rank, in the shape of a V.

Stage s and stage 2p-1-s are on rank s, so that the loss and the first stage are on rank 0. When
F, I and W take the same time and m >= 2p-1, no rank ever waits between its first action and its
last. No rank holds more than 1F1B's first: 2p microbatches of half a rank's layers.
"""

from __future__ import annotations

from autopar.schedules.actions import Action, Kind, Schedule
from autopar.schedules.build import build


def zbv(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V; the order is also that of torch's ScheduleZBVZeroBubble."""
    # The pattern needs 2p-1 microbatches; with fewer, those that are not there are left out.
    count = max(num_microbatches, 2 * num_ranks - 1)
    orders = [
        [
            action
            for action in _order(rank, num_ranks, count)
            if action.microbatch < num_microbatches
        ]
        for rank in range(num_ranks)
    ]
    ranks = [min(stage, 2 * num_ranks - 1 - stage) for stage in range(2 * num_ranks)]
    return build("zbv", orders, ranks, num_microbatches)


class _Line:
    """Actions of a rank; each counts the microbatches of its kind and chunk."""

    def __init__(self, down: int, up: int) -> None:
        self.stages = (down, up)
        self.actions: list[Action] = []
        self.counts: dict[tuple[Kind, int], int] = {}

    def count(self, kind: Kind, chunk: int) -> int:
        return self.counts.get((kind, chunk), 0)

    def add(self, *steps: tuple[Kind, int]) -> None:
        """Append the next microbatch of each kind and chunk (0 goes down the V, 1 up)."""
        for kind, chunk in steps:
            microbatch = self.count(kind, chunk)
            self.actions.append(Action(kind, self.stages[chunk], microbatch))
            self.counts[kind, chunk] = microbatch + 1


def _order(rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    line = _Line(rank, 2 * num_ranks - 1 - rank)
    # Warm-up: down the V, then as microbatches come back up.
    for _ in range(2 * (num_ranks - rank) - 1):
        line.add(("F", 0))
    for _ in range(rank):
        line.add(("F", 1), ("F", 0))
    for _ in range(num_ranks - rank):
        line.add(("F", 1), ("I", 1), ("W", 1))
    # Steady: F I W of the chunk down, F I W of the chunk up.
    while line.count("F", 1) < num_microbatches:
        if line.count("F", 0) < num_microbatches:
            line.add(("F", 0))
        line.add(("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1))
    # Cool-down: input gradients first where other ranks wait for them.
    for _ in range(rank):
        line.add(("I", 0), ("I", 1))
    for _ in range(num_ranks - rank):
        line.add(("I", 0), ("W", 0))
    for chunk in (1, 0):
        while line.count("W", chunk) < num_microbatches:
            line.add(("W", chunk))
    return line.actions
