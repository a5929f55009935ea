"""Steps that were composed from one traced step of a model with one block.

vTrain traces a step that starts with an idle device: the host launches one kernel after the other,
and is ahead only where the device is busy. What a kernel takes, and the gap after it, counts for
the part of the model that launched it; blocks are then put one after the other, with collectives
from a table between them (VIA-Research/vTrain f8dda84, ``src/trainer.py``, ``src/predictor.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.published import tables
from autopar.cost_models.published.jobs import Job
from autopar.cost_models.published.tables import Piece

if TYPE_CHECKING:
    from autopar.cost_models.published.tables import Floats, Integers

_ORDER = (
    (tables.FIRST, False), (tables.BLOCK, False), (tables.LAST, False),
    (tables.LAST, True), (tables.BLOCK, True), (tables.FIRST, True),
)  # fmt: skip
"""Parts of the model in the order of a step, and whether backward."""
_WITH_THE_NEXT = frozenset(("dropout_mask",))
"""Ops of the graph that a kernel of another op does as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The launches of a step of one job.

    Attributes:
        row: Of each launch, the kernel among those of all jobs.
        share: What of the kernel's time it is.
        backward: 1 where it is launched in backward.
        launched: 1, or 0 for what another launch does as well.
        begins: Of each part of `_ORDER`, its first launch; then the number of launches.
    """

    row: Integers
    share: Floats
    backward: Floats
    launched: Floats
    begins: Integers

    @classmethod
    def of(cls, pieces: Sequence[Piece], first_row: int) -> Trace:
        """The launches of kernels that lie from `first_row` on in the table of all jobs."""
        listed: list[tuple[int, float, bool, bool]] = []
        begins = []
        for part in _ORDER:
            begins.append(len(listed))
            listed += _launches(pieces, first_row, *part)
        columns = np.array(listed, dtype=np.float64).reshape(-1, 4)
        return cls(
            row=columns[:, 0].astype(np.int64), share=columns[:, 1], backward=columns[:, 2],
            launched=columns[:, 3], begins=np.array([*begins, len(listed)], dtype=np.int64),
        )  # fmt: skip

    def seconds(self, spent: Floats, launch_s: float, backward_share: float) -> Floats:
        """Seconds of each part of `_ORDER`, gaps after its kernels included.

        Args:
            spent: Seconds of the device, of all runs of every kernel of the table.
            launch_s: What a launch takes the host in forward.
            backward_share: What of that it takes in backward.
        """
        device = spent[self.row] * self.share
        slower = np.where(self.backward > 0, backward_share, 1.0)
        ready = np.cumsum(self.launched * slower) * launch_s
        done = np.cumsum(device)
        before = done - device
        start = before + np.maximum.accumulate(ready - before)
        edges = np.append(start, start[-1] + device[-1])[self.begins]
        return np.diff(edges)


def _launches(
    pieces: Sequence[Piece], first_row: int, part: int, backward: bool
) -> Iterator[tuple[int, float, bool, bool]]:
    for place, piece in enumerate(pieces):
        kernel = piece.kernel
        if piece.part != part or (kernel.phase != "forward") != backward:
            continue
        count = kernel.launches * kernel.count
        own = count > 0 and kernel.op not in _WITH_THE_NEXT
        count = count if own else 1
        for _ in range(count):
            yield first_row + place, 1 / count, backward, own


def traces(jobs: Sequence[Job], pieces: Sequence[Sequence[Piece]]) -> dict[int, Trace]:
    """The traces of those of `jobs` that are composed from one, by place.

    Args:
        jobs: The jobs.
        pieces: The kernels of each.
    """
    found, row = {}, 0
    for place, (job, own) in enumerate(zip(jobs, pieces, strict=True)):
        if job.stack.traced:
            found[place] = Trace.of(own, row)
        row += len(own)
    return found


def parts(found: dict[int, Trace], spent: Floats, launch_s: Floats, share: Floats) -> Floats:
    """Seconds of forward and backward of a block, of what is before blocks and after: by job.

    Args:
        found: The traces, by place of the job.
        spent: Seconds of the device, of all runs of every kernel of the table.
        launch_s: What a launch takes the host in forward, of every job.
        share: What of that it takes in backward, of every job.

    Returns:
        Four rows; zeros for jobs that are not composed from a trace.
    """
    seconds = np.zeros((4, len(launch_s)))
    for place, trace in found.items():
        first, block, last, last_back, back, first_back = trace.seconds(
            spent, float(launch_s[place]), float(share[place])
        )
        seconds[:, place] = block, back, first + first_back, last + last_back
    return seconds
