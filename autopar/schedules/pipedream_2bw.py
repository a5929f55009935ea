"""PipeDream-2BW (Narayanan et al., arXiv 2006.09503): two versions of the weights everywhere.

Every m microbatches a stage updates, m not below the number of stages, with gradients that are
one update old: w(t+1) = w(t) - lr * grad f(w(t-1)).
"""

from __future__ import annotations

from autopar.schedules.actions import Schedule
from autopar.schedules.build import build
from autopar.schedules.one_f_one_b import one_f_one_b_order


def pipedream_2bw(num_ranks: int, num_microbatches: int, update_every: int) -> Schedule:
    """PipeDream-2BW with one stage per rank and an update every `update_every` microbatches."""
    return build(
        "pipedream_2bw",
        [one_f_one_b_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)],
        range(num_ranks),
        num_microbatches,
        updates=num_microbatches // update_every,
        delays=[1] * num_ranks,
    )
