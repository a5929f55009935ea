"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards.

The bubble is (p-1)/(m+p-1) of the time; every stage holds m microbatches.
"""

from __future__ import annotations

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.build import build


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """GPipe with one stage per rank."""
    microbatches = range(num_microbatches)
    orders = [
        [
            *(Action("F", rank, k) for k in microbatches),
            *(Action("B", rank, k) for k in microbatches),
        ]
        for rank in range(num_ranks)
    ]
    return build("gpipe", orders, range(num_ranks), num_microbatches)
