"""How chunks of a rank that were cut as asked, and so may differ, share its memory.

Chunks that a search cuts are alike, and have the same part of it each. Of others it counts which
microbatches of each are under way at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.schedules.steady import moments
from autopar.search.space import Point
from autopar.search.stage_cut import Intervals

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """What stages may take.

    Attributes:
        room_bytes: Of every stage; minus infinity on ranks that are too small for any plan.
        under_way: Microbatches of every stage whose saved memory is live when its rank is fullest.
        waiting: Of every stage those that wait for the backward of weights at that time.
    """

    room_bytes: Floats
    under_way: Floats
    waiting: Floats


def shares(point: Point, each: Sequence[Intervals], room_bytes: Floats) -> Shares:
    """Memory of ranks, divided so that stages get the same part of what they could use.

    Args:
        point: A point with several stages on a rank.
        each: For every stage all stages as they are on its device.
        room_bytes: Of every rank, shape (ranks,).
    """
    count = point.num_stages
    own = np.arange(count)
    static = np.array([mine.static[s] for s, mine in enumerate(each)])
    lean = np.array([mine.leanest()[0][s] for s, mine in enumerate(each)])
    plain = np.array([mine.saved[-1, s] for s, mine in enumerate(each)])
    late = np.array([0.0 if m.late is None else m.late[:, s].min() for s, m in enumerate(each)])
    places = np.array(point.stage_ranks)
    found = Shares(np.zeros(count), np.zeros(count), np.zeros(count))
    live = moments(point.schedule, point.pipeline, point.microbatches, point.chunks)
    for rank, times in enumerate(live):
        mine = own[places == rank]
        early, waiting = np.array(times, np.float64).transpose(1, 0, 2)
        held = waiting @ late[mine]
        fullest = int((early @ plain[mine] + held).argmax())
        least = static[mine] + early[fullest] * lean[mine] + waiting[fullest] * late[mine]
        more = early[fullest] * (plain[mine] - lean[mine])
        left = room_bytes[rank] - least.sum()
        part = more / more.sum() if more.sum() > 0 else np.full(len(mine), 1 / len(mine))
        found.room_bytes[mine] = least + left * part
        found.under_way[mine], found.waiting[mine] = early[fullest], waiting[fullest]
        if static[mine].sum() + (early @ lean[mine] + held).max() > room_bytes[rank]:
            found.room_bytes[mine] = -np.inf
    return found
