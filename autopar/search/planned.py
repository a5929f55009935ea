"""A step of given stages, simulated without what only the tape of each stage tells: a bound."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from autopar.cost_models.events import schedule_of
from autopar.cost_models.messages import Wires
from autopar.cost_models.pricing import Speed
from autopar.cost_models.simulate import Task, simulate
from autopar.schedules.actions import Action
from autopar.search.chain_bounds import Chain
from autopar.search.seconds import ending_seconds, kernel_seconds, program_seconds
from autopar.search.space import Point
from autopar.search.stage_cut import Cut, Filled, Floats, Intervals

PHASES = {"F": (0,), "B": (1, 2), "I": (1,), "W": (2,)}


Tasks = Mapping[tuple[str, bool], Task]
"""What programs of a stage take by action kind, the last of a step and others."""


def planned_s(
    point: Point,
    intervals: list[Intervals],
    cut: Cut,
    chain: Chain,
    wires: Wires,
    programs: Sequence[Tasks],
) -> float:
    """Seconds of a step of given stages, at least.

    Args:
        point: The point.
        intervals: For every stage the candidates.
        cut: The numbers of those that are taken.
        chain: What is known of the step.
        wires: Between pipeline ranks.
        programs: For every stage what `programs_of` says.
    """
    schedule = schedule_of(point.plan())
    places = schedule.stage_ranks
    sizes = [float(mine.edge_bytes[k]) for mine, k in zip(intervals, cut.chosen, strict=True)]
    known: dict[tuple[int, int], float] = {}

    def transfer_s(action: Action) -> float:
        assert action.peer is not None
        pair = (action.stage, action.peer)
        if pair not in known:
            size = sizes[max(pair)] if abs(pair[0] - pair[1]) == 1 else 0.0
            known[pair] = wires.seconds(places[pair[0]], places[pair[1]], int(size))
        return known[pair]

    done: Counter[tuple[int, str]] = Counter()

    def task_of(action: Action) -> Task:
        if action.kind == "REDUCE":
            return Task()
        done[action.stage, action.kind] += 1
        last = done[action.stage, action.kind] % schedule.microbatches_per_update == 0
        return programs[action.stage][action.kind, last]

    edges = _edges(intervals, cut, chain)
    return simulate(schedule, task_of, transfer_s, edges=edges, gradient_edges=edges).step_s


def _edges(intervals: list[Intervals], cut: Cut, chain: Chain) -> set[tuple[int, int]]:
    """Pairs of stages of which the second waits for the first in any case."""
    main = [
        stage
        for stage, (mine, k) in enumerate(zip(intervals, cut.chosen, strict=True))
        if chain.on_chain(mine)[k]
    ]
    return set(pairwise(main))


def programs_of(intervals: Intervals, filled: Filled, k: int, speed: Speed) -> Tasks:
    """What the programs of a stage take, at least.

    Args:
        intervals: The candidates.
        filled: What they keep.
        k: Number of the stage's.
        speed: Of the software.
    """
    at = slice(k, k + 1)
    mixed, _ = intervals.mixed(filled.low[at], filled.high[at], filled.upgraded[at], np.array([k]))
    sums = mixed[..., 0]
    found: dict[tuple[str, bool], Task] = {}
    full = np.broadcast_to(intervals.full_buckets, intervals.start.shape)[k : k + 1]
    for kind, phases in PHASES.items():
        parts: Floats = np.sum([sums[phase] for phase in phases], axis=0)[:, None]
        joined = float(program_seconds(parts, speed)[0])
        found[kind, False] = found[kind, True] = Task(compute_s=joined)
        if kind != "F":  # the last does not wait for its collectives
            sync_s = np.array([0.0 if kind == "I" else intervals.sync_s[k]])
            alone = float(kernel_seconds(parts, speed)[0] + (1 - speed.overlap) * sync_s[0])
            each = sums[list(phases)][..., None]
            late = float(ending_seconds(each, sync_s, speed, full)[0])
            found[kind, True] = Task(compute_s=alone, beside_s=late - alone)
    # In a stage some of W may be part of I, for whose end others wait: both take at least what
    # one program would.
    for last in (False, True):
        alone = max(0.0, found["B", last].compute_s - found["I", last].compute_s)
        hidden = speed.overlap * (sums[2, 2] + intervals.sync_s[k]) if last else 0.0
        found["W", last] = Task(compute_s=alone, beside_s=max(0.0, float(hidden) - alone))
    found["UPDATE", False] = found["UPDATE", True] = Task(compute_s=float(intervals.tail_s[k]))
    return found
