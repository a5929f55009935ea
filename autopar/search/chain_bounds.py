"""Lower bounds of a step by what each stage of it, and each two neighbours, take.

The bounds hold for 1F1B (M microbatches, P ranks, w_s = F_s + B_s of stage s): before the first
forward of s lie F_0 .. F_{s-1}; between the end of its first forward and its first backward lie
the programs of all later stages, and at most P - s - 1 of its own forwards fit in there; likewise
between its last forward and the last backward; after that lie B_{s-1} .. B_0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.stage_cut import Filled, Intervals, least_bottleneck

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def last_backward(filled: Filled, intervals: Intervals) -> Floats:
    """Seconds from the start of a stage's last backward to the end of its update, at least."""
    return filled.ending_s + intervals.tail_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """What a bound of a 1F1B step needs to know beside the candidates.

    Attributes:
        microbatches: M.
        before: Seconds that F, and that B, of the units before each take at least, one after the
            other, shape (units + 1,).
        after: Seconds that F and B of each unit and those behind it take, shape (units + 1,).
        side: Number of units before each that need not wait for one another, shape (units + 1,).
        hop_s: Seconds of any message between neighbours, at least.
        end_s: Seconds of what the first stage does after its last backward, at least.
    """

    microbatches: int
    before: tuple[Floats, Floats]
    after: Floats
    side: Ints
    hop_s: float = 0.0
    end_s: float = 0.0

    def on_chain(self, intervals: Intervals) -> NDArray[np.bool_]:
        """Whether candidates have a unit of the chain, so that others wait for them."""
        beside = self.side[intervals.stop] - self.side[intervals.start]
        return np.asarray(beside < intervals.stop - intervals.start)


def stage_bound(
    filled: Filled, intervals: Intervals, chain: Chain, stage: int, num_stages: int
) -> Floats:
    """Seconds that a 1F1B step takes at least if a candidate is stage `stage`; see the module.

    Args:
        filled: Candidates with what they can keep.
        intervals: The candidates.
        chain: The step.
        stage: Number of the stage.
        num_stages: Number of stages P.
    """
    f, b, microbatches = filled.forward_s, filled.backward_s, chain.microbatches
    before, behind = outside(filled, intervals, chain, stage)
    later = num_stages - stage - 1
    hops = np.maximum(later - (chain.side[-1] - chain.side[intervals.stop]), 0)
    after = np.where(
        chain.on_chain(intervals), chain.after[intervals.stop] + 2 * hops * chain.hop_s, 0.0
    )
    own = min(later + 1, microbatches) - 1
    with np.errstate(invalid="ignore"):
        first = np.maximum(after - own * f, 0.0)
        second = np.maximum(after - own * b, 0.0)
        both = first + second if microbatches > later + 1 else np.maximum(first, second)
        found = before + microbatches * f + (microbatches - 1) * b + both + behind
    return np.where(np.isfinite(f), found, np.inf)


def outside(
    filled: Filled, intervals: Intervals, chain: Chain, stage: int
) -> tuple[Floats, Floats]:
    """Seconds before a stage's first forward and from its last backward on, at least."""
    hops = np.maximum(stage - chain.side[intervals.start], 0)
    waits = chain.on_chain(intervals)
    before, back = (
        np.where(waits, sums[intervals.start] + hops * chain.hop_s, 0.0) for sums in chain.before
    )
    end = np.where(hops * waits > 0, chain.end_s, 0.0)
    return before, np.maximum(filled.alone_s + back + end, last_backward(filled, intervals))


def any_bound(
    filled: Filled, intervals: Intervals, chain: Chain, stage: int, *, whole: bool
) -> Floats:
    """Seconds that a step of any schedule takes at least if a candidate is stage `stage`.

    Args:
        filled: Candidates with what they can keep.
        intervals: The candidates.
        chain: The step.
        stage: Number of the stage.
        whole: Whether a backward is one program, so that stages before wait for all of it.
    """
    before, behind = outside(filled, intervals, chain, stage)
    if not whole:
        behind = np.maximum(filled.alone_s, last_backward(filled, intervals))
    work = chain.microbatches * filled.forward_s
    with np.errstate(invalid="ignore"):
        found = before + work + (chain.microbatches - 1) * filled.backward_s + behind
    return np.where(np.isfinite(filled.forward_s), found, np.inf)


def pair_bound(
    filled: tuple[Filled, Filled],
    intervals: Intervals,
    chain: Chain,
    stage: int,
    num_stages: int,
    pairs: tuple[Ints, Ints],
    message_s: Floats,
) -> Floats:
    """The same if two candidates are the stages `stage` and the next.

    In the steady state of 1F1B a stage and the next wait for each other: from F(k) of the first
    over F(k) and a backward of the second back to F(k + 2) there are a forward and a backward of
    both, and two messages.

    Args:
        filled: What candidates can keep as either stage.
        intervals: The candidates.
        chain: The step.
        stage: Number of the first.
        num_stages: Number of stages P.
        pairs: Numbers of candidates for the first and for the second.
        message_s: Seconds of a message between them, for each pair.
    """
    here, there = pairs
    f, b = filled[0].forward_s[here], filled[0].backward_s[here]
    last = filled[1].backward_s[there]
    both = f + b + filled[1].forward_s[there] + last + 2 * message_s
    ahead, microbatches = num_stages - 1 - stage, chain.microbatches
    turns = (microbatches - ahead) // 2
    if turns <= 0:
        return np.zeros(len(here))
    before, behind = (part[here] for part in outside(filled[0], intervals, chain, stage))
    left = (microbatches - ahead + 1 - 2 * turns) * f + (microbatches - 2 * turns) * b
    # The last backward of the next stage does not wait for its collectives either.
    found = before + (ahead - 1) * f + turns * both + left + behind
    found -= np.maximum(last - filled[1].alone_s[there], 0.0)
    waits = chain.on_chain(intervals)
    return np.where(waits[here] & waits[there], found, 0.0)


def least_chain(
    intervals: list[Intervals],
    filled: list[Filled],
    chain: Chain,
    message_s: Callable[[int, Floats], Floats],
    limit: float,
) -> float:
    """Seconds that a 1F1B step takes at least, whatever the cut.

    Args:
        intervals: For every stage the candidates.
        filled: For every stage what they can keep.
        chain: The step.
        message_s: From the number of a stage and bytes to seconds of a message to the next.
        limit: Where the bound is not below it, it need not be exact.
    """
    count, same = len(filled), intervals[0]
    costs = [
        stage_bound(item, mine, chain, stage, count)
        for stage, (mine, item) in enumerate(zip(intervals, filled, strict=True))
    ]
    least, tables = least_bottleneck(same, costs)
    if count == 1 or least >= limit:
        return least
    back = least_from_behind(same, costs)
    kept = []
    for stage, cost in enumerate(costs):
        reach = np.maximum(tables[stage][same.start], back[stage + 1][same.stop])
        kept.append(np.flatnonzero(np.maximum(reach, cost) < limit))
    value = costs[0][kept[0]]
    for stage in range(count - 1):
        here, there = _pairs(same, kept[stage], kept[stage + 1])
        if not len(here):
            return limit
        first, second = kept[stage][here], kept[stage + 1][there]
        wait = message_s(stage, same.edge_bytes[second])
        bound = pair_bound(
            (filled[stage], filled[stage + 1]), intervals[stage], chain, stage, count,
            (first, second), wait,
        )  # fmt: skip
        reached = np.maximum(np.maximum(value[here], bound), costs[stage + 1][second])
        value = np.full(len(kept[stage + 1]), np.inf)
        np.minimum.at(value, there, reached)
    return min(limit, float(value.min(initial=np.inf)))


def least_from_behind(intervals: Intervals, costs: list[Floats]) -> list[Floats]:
    """For every stage and unit the least maximum of costs of the stages from there on."""
    best = np.full(intervals.num_units + 1, np.inf)
    best[-1] = 0.0
    tables = [best]
    for cost in reversed(costs):
        following = np.full(intervals.num_units + 1, np.inf)
        np.minimum.at(following, intervals.start, np.maximum(best[intervals.stop], cost))
        best = following
        tables.append(best)
    return tables[::-1]


def _pairs(intervals: Intervals, first: Ints, second: Ints) -> tuple[Ints, Ints]:
    """Places in `first` and `second` of candidates that meet."""
    order = np.argsort(intervals.start[second], kind="stable")
    starts = intervals.start[second][order]
    low = np.searchsorted(starts, intervals.stop[first], "left")
    high = np.searchsorted(starts, intervals.stop[first], "right")
    here = np.repeat(np.arange(len(first)), high - low)
    offset = np.arange(len(here)) - np.repeat(np.cumsum(high - low) - (high - low), high - low)
    return here, order[np.repeat(low, high - low) + offset]
