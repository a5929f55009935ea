"""From the order of forwards and backwards to a whole schedule."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.schedules.actions import WEIGHT_GRADIENTS, Action, Schedule


def build(
    name: str,
    orders: Sequence[Sequence[Action]],
    stage_ranks: Sequence[int],
    num_microbatches: int,
    *,
    updates: int = 1,
    delays: Sequence[int] = (),
) -> Schedule:
    """The schedule of `orders`, with gradients finished and applied.

    A stage reduces right after the last weight gradient of an update. One update for a whole
    step comes at the end, when the gradients of all stages of the rank are there; with several,
    each stage updates as soon as it has reduced.

    Args:
        name: What the schedule is called.
        orders: For each rank its ``F``, ``B``, ``I`` and ``W``.
        stage_ranks: For each stage its rank.
        num_microbatches: Microbatches in a step.
        updates: Optimizer updates in a step.
        delays: For each stage how old its weights are, in updates.
    """
    size = num_microbatches // updates
    rows = []
    for order in orders:
        row: list[Action] = []
        at_end: list[Action] = []
        done: dict[tuple[int, int], int] = {}
        for action in order:
            row.append(action)
            if action.kind not in WEIGHT_GRADIENTS:
                continue
            key = (action.stage, action.microbatch // size)
            done[key] = done.get(key, 0) + 1
            if done[key] == size:
                row.append(Action("REDUCE", *key))
                (at_end if updates == 1 else row).append(Action("UPDATE", *key))
        rows.append((*row, *sorted(at_end)))
    return Schedule(
        name=name,
        actions=tuple(rows),
        stage_ranks=tuple(stage_ranks),
        num_microbatches=num_microbatches,
        updates=updates,
        delays=tuple(delays),
    )
