"""PipeDream (Harlap et al., arXiv 1806.03377): 1F1B that updates after every microbatch.

The backward of a microbatch uses the weights that its forward used, so stage i of n keeps n-i
versions of them. With n stages, update t of stage i (counted from 0) is

    w_i(t+1) = w_i(t) - lr * grad f(w_0(t-n+1), w_1(t-n+2), ..., w_{n-1}(t))

and with vertical sync all stages use the version that the first one used, t-n+1, and keep n.
"""

from __future__ import annotations

from autopar.schedules.actions import Schedule
from autopar.schedules.build import build
from autopar.schedules.one_f_one_b import one_f_one_b_order


def pipedream(num_ranks: int, num_microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """PipeDream with one stage per rank."""
    return build(
        "pipedream",
        [one_f_one_b_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)],
        range(num_ranks),
        num_microbatches,
        updates=num_microbatches,
        delays=[num_ranks - 1 if vertical_sync else num_ranks - 1 - s for s in range(num_ranks)],
    )
