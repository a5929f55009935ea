"""1F1B: PipeDream-flush (arXiv 2006.09503) and DAPPLE (arXiv 2007.01045).

The bubble is GPipe's, (p-1)/(m+p-1) of the time, but stage i of p holds at most p-i microbatches.
"""

from __future__ import annotations

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.build import build


def one_f_one_b_order(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Forwards and backwards of `stage`.

    First as many forwards as stages follow it, then one backward after each forward, then the
    backwards left over.
    """
    ahead = min(num_stages - 1 - stage, num_microbatches)
    order = [Action("F", stage, k) for k in range(ahead)]
    for k in range(ahead, num_microbatches):
        order += (Action("F", stage, k), Action("B", stage, k - ahead))
    order += (Action("B", stage, k) for k in range(num_microbatches - ahead, num_microbatches))
    return order


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with one stage per rank."""
    orders = [one_f_one_b_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return build("1f1b", orders, range(num_ranks), num_microbatches)
