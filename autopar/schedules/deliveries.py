"""When a rank can know that what it sent has arrived."""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.schedules.actions import RECEIVES, SENDS, Action, Schedule

Clock = NDArray[np.int32]


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
        clocks, where = _clocks(schedule)
        known, owners = np.array(clocks[rank]), schedule.stage_ranks
        sends: dict[int, list[Action]] = defaultdict(list)
        for action in schedule.actions[rank]:
            if action.kind in SENDS:
                assert action.peer is not None
                sends[owners[action.peer]].append(action)
        self._since: dict[Action, int] = {}
        for owner, actions in sends.items():
            taken = [where[owner, action.counterpart] for action in actions]
            since = np.searchsorted(known[:, owner], taken, side="right") + 1
            self._since.update(zip(actions, since.tolist(), strict=True))

    def since(self, action: Action) -> int:
        """Number of the rank's first action before which a message is known to have arrived."""
        return self._since[action]

    def arrived(self, action: Action, now: int) -> bool:
        """Whether a message is known to have arrived before the rank's action number `now`."""
        return now >= self._since[action]


@lru_cache(maxsize=4)
def _clocks(schedule: Schedule) -> tuple[list[list[Clock]], dict[tuple[int, Action], int]]:
    """For each action of each rank how many actions of every rank are then known to be done.

    Returns:
        These (vector clocks; actions that learn nothing share one, whose count of the
        rank's own actions is then too low), and the place of every receive in its rank's actions.
    """
    count = schedule.num_ranks
    where = {
        (owner, action): position
        for owner, row in enumerate(schedule)
        for position, action in enumerate(row)
        if action.kind in RECEIVES
    }
    clocks: list[list[Clock]] = [[] for _ in range(count)]
    now: list[Clock] = [np.zeros(count, np.int32) for _ in range(count)]
    sent: dict[Action, Clock] = {}
    waiting: dict[Action, int] = {}  # the receive that a rank has come to
    ready = list(range(count))
    while ready:
        rank = ready.pop()
        row, mine = schedule.actions[rank], clocks[rank]
        while len(mine) < len(row):
            action = row[len(mine)]
            if action.kind in RECEIVES:
                news = sent.get(action.counterpart)
                if news is None:
                    waiting[action.counterpart] = rank
                    break
                now[rank] = np.maximum(now[rank], news)
            mine.append(now[rank])
            if action.kind in SENDS:
                told = now[rank].copy()
                told[rank] = len(mine)
                sent[action] = told
                if action in waiting:
                    ready.append(waiting.pop(action))
    return clocks, where
