"""ZB-H1 (Qi et al., arXiv 2401.10241, section 2.3): 1F1B with the backward cut in two.

Input gradients travel on at once, weight gradients fill what was idle: stage i of p does them i
microbatches late. The bubble is (p-1)(F + I - W) instead of 1F1B's (p-1)(F + I + W); stage i
holds, as the paper's table 2 has it, p-i microbatches up to I and i more up to W: no more than p,
as the first stage of 1F1B.
"""

from __future__ import annotations

from autopar.schedules.actions import Action, Schedule
from autopar.schedules.build import build
from autopar.schedules.one_f_one_b import one_f_one_b_order


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with one stage per rank."""
    orders = [_order(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return build("zb_h1", orders, range(num_ranks), num_microbatches)


def _order(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    order: list[Action] = []
    for action in one_f_one_b_order(stage, num_stages, num_microbatches):
        if action.kind == "F":
            order.append(action)
            continue
        order.append(Action("I", stage, action.microbatch))
        if action.microbatch >= stage:
            order.append(Action("W", stage, action.microbatch - stage))
    late = max(0, num_microbatches - stage)
    return order + [Action("W", stage, k) for k in range(late, num_microbatches)]
