"""Ranks that share cores: while some of them wait, the others are faster.

The figures of a CPU hold while all N ranks of a node are busy on its c cores. With N > c a rank
that waits leaves its part to others, so a step on n of them takes

    max(c / N * step, n / N * mean of the ranks' busy time)

where `step` and `busy` are what the figures say: no rank is faster than alone on a core, and no
core works more than all the time. Moving bytes between processes is work for cores, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cost_models.simulate import Event, Split, Timeline

if TYPE_CHECKING:
    from autopar.cost_models.device import Machine
    from autopar.cost_models.pricing import ProgramCost, StageCost


def idle_cores_factor(timeline: Timeline, node: Machine, ranks: int) -> float:
    """Factor, at most 1, on all seconds of a step because of what idle ranks leave to others.

    Args:
        timeline: The step as if all ranks of the machine were always busy.
        node: The machine.
        ranks: Ranks that the plan runs on, on as few machines as they fit.
    """
    if not 0 < node.cores < node.devices or not timeline.step_s:
        return 1.0
    used = min(ranks, node.devices) / node.devices
    busy = sum(1 - split.idle_s / timeline.step_s for split in timeline.splits)
    return min(1.0, max(node.cores / node.devices, used * busy / len(timeline.splits)))


def faster(timeline: Timeline, factor: float) -> Timeline:
    """The same step in `factor` of the time."""
    if factor == 1:
        return timeline

    def event(item: Event) -> Event:
        return Event(item.action, item.stream, item.start_s * factor, item.end_s * factor)

    return replace(
        timeline,
        spans=tuple(
            tuple((start * factor, end * factor) for start, end in row) for row in timeline.spans
        ),
        beside=tuple(tuple(map(event, row)) for row in timeline.beside),
        splits=tuple(
            Split(
                compute_s=split.compute_s * factor,
                inline_s=split.inline_s * factor,
                exposed_s=split.exposed_s * factor,
                idle_s=split.idle_s * factor,
            )
            for split in timeline.splits
        ),
        step_s=timeline.step_s * factor,
    )


def faster_cost(cost: StageCost, factor: float) -> StageCost:
    """The same stage in `factor` of the time."""
    if factor == 1:
        return cost

    def programs(found: Mapping[str, ProgramCost]) -> dict[str, ProgramCost]:
        return {
            kind: replace(
                program,
                kernels=_times(program.kernels, factor),
                inline=_times(program.inline, factor),
                beside=_times(program.beside, factor),
            )
            for kind, program in found.items()
        }

    return replace(
        cost,
        programs=programs(cost.programs),
        last=programs(cost.last),
        update_kernels_s=cost.update_kernels_s * factor,
        update=_times(cost.update, factor),
    )


def _times(found: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in found.items()}
