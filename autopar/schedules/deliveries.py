"""When a rank can know that what it sent has arrived."""

from __future__ import annotations

from autopar.schedules.actions import RECEIVES, SENDS, Action, Schedule


class Deliveries:
    """When a pipeline rank knows at the latest that what it sent has arrived.

    A message has surely arrived once something came back that its receiver sent after taking it,
    also by way of other ranks. Until then its memory counts as in use; a real rank may free it
    earlier.

    Args:
        schedule: With messages.
        rank: The pipeline rank.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.rank = rank
        # For each of the rank's actions: how many actions of every rank are known to be done.
        self._known: list[tuple[int, ...]] = []
        self._where = {
            (owner, action): position
            for owner, row in enumerate(schedule)
            for position, action in enumerate(row)
            if action.kind in RECEIVES
        }
        self._owners = schedule.stage_ranks
        self._run(schedule)

    def _run(self, schedule: Schedule) -> None:
        count = schedule.num_ranks
        known = [[0] * count for _ in range(count)]
        sent: dict[Action, list[int]] = {}
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(schedule):
                mine = known[rank]
                while mine[rank] < len(row):
                    action = row[mine[rank]]
                    if action.kind in RECEIVES:
                        news = sent.get(action.counterpart)
                        if news is None:
                            break
                        for other, done in enumerate(news):
                            mine[other] = max(mine[other], done)
                    mine[rank] += 1
                    moved = True
                    if action.kind in SENDS:
                        sent[action] = list(mine)
                    if rank == self.rank:
                        self._known.append(tuple(mine))

    def arrived(self, action: Action, now: int) -> bool:
        """Whether a message is known to have arrived before the rank's action number `now`."""
        assert action.peer is not None
        owner = self._owners[action.peer]
        position = self._where[owner, action.counterpart]
        return now > 0 and self._known[now - 1][owner] > position
