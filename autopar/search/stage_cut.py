"""Where to cut a model into stages, and what each stage computes again: exact, by intervals.

A stage is an interval of units. Its programs take what `autopar.cost_models.pricing` and
`autopar.cost_models.simulate` make of the sums over its units; what it keeps follows from the
microbatches under way. The layers of a stage may differ in what backward computes again: as many
as its memory allows take the faster of two options.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.pricing import Speed
from autopar.search.seconds import durations, ending_seconds, kernel_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
LONG = 1.6
"""Stages of more than this many times the mean seconds are not looked at."""
TOGETHER = 2000
"""Most candidates of which all pairs of options are worked out at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Intervals:
    """Candidate stages: units ``start[k]`` to ``stop[k]``, the last not included.

    Attributes:
        start: First unit, shape (K,).
        stop: Shape (K,).
        sums: Sums of `UnitTable.seconds`, shape (options, phases, parts, K).
        saved: Bytes of saved memory of a microbatch, shape (options, K).
        late: Bytes of a microbatch whose backward of weights is still to come, where that is a
            program of its own, shape (options, K).
        layers: Units that may differ in what is computed again, shape (K,).
        layer_sums: What of `sums` is theirs; None if the rest does not depend on the option.
        layer_saved: What of `saved` is theirs.
        layer_late: What of `late` is theirs.
        alike: Whether these are copies of one block, shape (K,).
        working: Bytes that the first backward holds beside, when it begins, shape (options, K).
        static: Bytes that are there at all times, shape (K,).
        tail_s: Seconds of what follows the last backward and its collectives, shape (K,).
        sync_s: Seconds of collectives that the last backward starts, shape (K,).
        edge_bytes: Bytes of the message that a stage takes from the one before, shape (K,).
        full_buckets: Buckets that its gradients fill at least, shape (K,) or a number.
        num_units: Units of the model.
    """

    start: Ints
    stop: Ints
    sums: Floats
    saved: Floats
    layers: Floats
    alike: NDArray[np.bool_]
    static: Floats
    tail_s: Floats
    sync_s: Floats
    edge_bytes: Floats
    full_buckets: Floats | float = 0.0
    num_units: int
    layer_sums: Floats | None = None
    layer_saved: Floats | None = None
    late: Floats | None = None
    layer_late: Floats | None = None
    working: Floats | None = None
    _plain: list[tuple[Floats, Floats]] = field(default_factory=list)
    _alone: list[Floats] = field(default_factory=list)
    _ending: list[Floats] = field(default_factory=list)
    _lean: list[tuple[Floats, Ints, Ints]] = field(default_factory=list)
    _spread: list[tuple[Intervals, Ints]] = field(default_factory=list)

    def spread(self, start: Ints, stop: Ints, kind: Ints) -> Intervals:
        """Intervals of which each is like one of these.

        Args:
            start: First unit of each, shape (K,).
            stop: Unit behind its last.
            kind: Number of the one that it is like.
        """
        found = Intervals(
            start=start,
            stop=stop,
            sums=self.sums[..., kind],
            saved=self.saved[:, kind],
            layers=self.layers[kind],
            alike=self.alike[kind],
            static=self.static[kind],
            tail_s=self.tail_s[kind],
            sync_s=self.sync_s[kind],
            edge_bytes=self.edge_bytes[kind],
            full_buckets=np.broadcast_to(self.full_buckets, self.start.shape)[kind],
            num_units=self.num_units,
            layer_sums=None if self.layer_sums is None else self.layer_sums[..., kind],
            layer_saved=None if self.layer_saved is None else self.layer_saved[:, kind],
            working=None if self.working is None else self.working[:, kind],
            late=None if self.late is None else self.late[:, kind],
            layer_late=None if self.layer_late is None else self.layer_late[:, kind],
        )
        found._spread.append((self, kind))
        return found

    def kinds(self) -> tuple[Intervals, Ints]:
        """Intervals that differ, and the number of the one that each of these is like."""
        return self._spread[0] if self._spread else (self, np.arange(len(self.start)))

    @property
    def layered(self) -> tuple[Floats, Floats]:
        """`sums` and `saved` of layers; of options only their differences count."""
        if self.layer_sums is None or self.layer_saved is None:
            return self.sums, self.saved
        return self.layer_sums, self.layer_saved

    @property
    def waiting(self) -> tuple[Floats, Floats] | None:
        """`late`, and what of it is layers'."""
        if self.late is None:
            return None
        return self.late, self.late if self.layer_late is None else self.layer_late

    def late_mixed(self, low: Ints, high: Ints, number: Floats, k: Ints) -> Floats:
        """Bytes of `late` of candidates of which some layers have another option; see `mixed`."""
        if self.waiting is None:
            return np.zeros(len(k))
        late, layers = self.waiting
        share = number / np.maximum(self.layers[k], 1.0)
        return np.asarray(late[low, k] + share * (layers[high, k] - layers[low, k]))

    def mixed(self, low: Ints, high: Ints, number: Floats, k: Ints) -> tuple[Floats, Floats]:
        """Sums and saved bytes of candidates of which some layers have another option.

        Args:
            low: Option of all units, shape (n,).
            high: Option of as many layers as `number` says, shape (n,).
            number: Shape (n,).
            k: Numbers of the candidates, shape (n,).

        Returns:
            Arrays of shape (phases, parts, n) and (n,).
        """
        sums, saved = self.layered
        share = number / np.maximum(self.layers[k], 1.0)
        # Advanced indexes that a slice separates come first.
        more = (sums[high, ..., k] - sums[low, ..., k]) * share[:, None, None]
        found = np.moveaxis(self.sums[low, ..., k] + more, 0, -1)
        return found, self.saved[low, k] + share * (saved[high, k] - saved[low, k])

    def leanest(self) -> tuple[Floats, Ints, Ints]:
        """Least bytes of saved memory, and the options of all units and of layers for them."""
        if not self._lean:
            _, layers = self.layered
            low = (self.saved - layers).argmin(axis=0)
            high = layers.argmin(axis=0)
            k = np.arange(len(self.start))
            more = np.where(self.layers > 0, layers[high, k] - layers[low, k], 0.0)
            self._lean.append((self.saved[low, k] + more, low, high))
        return self._lean[0]

    def plain(self, speed: Speed) -> tuple[Floats, Floats]:
        """Seconds of F and B where nothing is computed again."""
        if not self._plain and self._spread:
            kinds, kind = self._spread[0]
            forward, backward = kinds.plain(speed)
            self._plain.append((forward[kind], backward[kind]))
        elif not self._plain:
            self._plain.append(durations(self.sums[-1], speed))
        return self._plain[0]

    def ending(self, speed: Speed) -> Floats:
        """`ending_seconds` where nothing is computed again."""
        if not self._ending:
            self._ending.append(
                ending_seconds(self.sums[-1, 1:], self.sync_s, speed, self.full_buckets)
            )
        return self._ending[0]

    def alone(self, speed: Speed) -> Floats:
        """Seconds of B at least if it does not wait for the collectives beside it."""
        if not self._alone and self._spread:
            kinds, kind = self._spread[0]
            self._alone.append(kinds.alone(speed)[kind])
        elif not self._alone:
            self._alone.append(kernel_seconds(self.sums[-1, 1] + self.sums[-1, 2], speed))
        return self._alone[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Filled:
    """Candidate stages with the best of what they can keep (of one stage, or of all).

    Attributes:
        forward_s: Shape (K,); infinite where nothing fits.
        backward_s: Shape (K,).
        low: Option of all units, shape (K,).
        high: Option of as many layers as `upgraded` says, shape (K,).
        upgraded: Shape (K,); whole numbers unless relaxed.
        alone_s: See `Intervals.alone`, shape (K,).
        ending_s: Seconds from the start of the last backward to the end of its collectives.
    """

    forward_s: Floats
    backward_s: Floats
    alone_s: Floats
    ending_s: Floats
    low: Ints
    high: Ints
    upgraded: Floats

    def each(self, kind: Ints | None, looked_at: NDArray[np.bool_] | None) -> list[Filled]:
        """Those of every stage, of arrays of all; see `fill_all`."""

        def spread(values: Any) -> Any:
            return values if kind is None else values.take(kind, axis=-1)

        forward = spread(self.forward_s)
        if looked_at is not None:
            forward = np.where(looked_at, forward, np.inf)
        alone = spread(self.alone_s)
        rest = (self.backward_s, self.ending_s, self.low, self.high, self.upgraded)
        rows = zip(forward, *map(spread, rest), strict=True)
        return [
            Filled(
                forward_s=f, backward_s=b, alone_s=alone, ending_s=ending, low=low, high=high,
                upgraded=number,
            )
            for f, b, ending, low, high, number in rows
        ]  # fmt: skip


def fill(
    intervals: Intervals, speed: Speed, under_way: float, room_bytes: float, *, relaxed: bool
) -> Filled:
    """For every candidate the fastest two options that fit; see `fill_all`."""
    return fill_all(
        intervals, speed, np.array([under_way]), np.array([room_bytes]), relaxed=relaxed
    )[0]


def fill_all(
    intervals: Intervals,
    speed: Speed,
    under_way: Floats,
    room_bytes: Floats,
    *,
    relaxed: bool,
    kind: Ints | None = None,
    looked_at: NDArray[np.bool_] | None = None,
    over_bytes: Floats | None = None,
    waiting: Floats | None = None,
) -> list[Filled]:
    """For every stage and candidate the fastest two options that fit.

    Args:
        intervals: The candidates.
        speed: Of the software.
        under_way: Microbatches whose saved memory is live at once, shape (stages,).
        room_bytes: What all memory may take, shape (stages,).
        relaxed: Let a part of a layer take an option: a bound.
        kind: Number of the one of `intervals` that each candidate is like, shape (K,); by default
            they are the candidates.
        looked_at: Candidates that a stage may be, shape (stages, K); all by default.
        over_bytes: What is known to be neither static nor saved, shape (stages,).
        waiting: Microbatches at that time whose backward of weights is still to come; none by
            default.
    """
    shape, last = (len(under_way), len(intervals.start)), len(intervals.saved) - 1
    found = Filled(
        forward_s=np.full(shape, np.inf),
        backward_s=np.full(shape, np.inf),
        alone_s=intervals.alone(speed),
        ending_s=np.tile(intervals.ending(speed), (shape[0], 1)),
        low=np.full(shape, last),
        high=np.full(shape, last),
        upgraded=np.zeros(shape),
    )
    left = room_bytes[:, None] - intervals.static
    over = np.zeros(shape[:1]) if over_bytes is None else over_bytes
    working = 0.0 if intervals.working is None else intervals.working[-1]
    beside = np.maximum(over[:, None], working)
    kept, lean = intervals.saved[-1], intervals.leanest()[0]
    kept, lean = under_way[:, None] * kept + beside, under_way[:, None] * lean + over[:, None]
    late = np.zeros(shape[0]) if waiting is None or intervals.late is None else waiting
    if intervals.late is not None:
        kept = kept + late[:, None] * intervals.late[-1]
    fits = left >= kept
    rest = ~fits & (left >= lean)
    if kind is None and looked_at is not None:
        fits, rest = fits & looked_at, rest & looked_at
    # The last option computes nothing again: where it fits, nothing is faster.
    for values, plain in zip(
        (found.forward_s, found.backward_s), intervals.plain(speed), strict=True
    ):
        np.copyto(values, plain, where=fits)
    stages, candidates = np.nonzero(rest)
    if len(stages):
        _fill_rest(
            found, intervals, speed, under_way[stages], late[stages], left[rest], over[stages],
            stages, candidates, relaxed,
        )  # fmt: skip
    return found.each(kind, looked_at)


def _fill_rest(
    found: Filled,
    intervals: Intervals,
    speed: Speed,
    under_way: Floats,
    late: Floats,
    left: Floats,
    over: Floats,
    stages: Ints,
    candidates: Ints,
    relaxed: bool,
) -> None:
    """Pairs of a stage and a candidate that have too little memory to keep everything."""
    sums, saved = intervals.sums[..., candidates], intervals.saved[:, candidates]
    layer_sums, layer_saved = intervals.layered
    layer_sums, layer_saved = layer_sums[..., candidates], layer_saved[:, candidates]
    layers, alike = intervals.layers[candidates], intervals.alike[candidates]
    full = np.broadcast_to(intervals.full_buckets, intervals.start.shape)[candidates]
    best, ending, least = (np.full(len(candidates), np.inf) for _ in range(3))
    waiting = intervals.waiting
    if waiting is not None:
        waiting = waiting[0][:, candidates], waiting[1][:, candidates]
    # Of equals the one without recomputation.
    pairs = np.array(list(product(reversed(range(len(saved))), range(len(saved)))))
    for some in [pairs] if len(candidates) <= TOGETHER else pairs[:, None]:
        a, b = some.T
        beside = over
        if intervals.working is not None:
            working = intervals.working[:, candidates]
            beside = np.maximum(over, np.minimum(working[a], working[b]))
        spare = left - under_way * saved[a] - beside
        each = under_way * (layer_saved[b] - layer_saved[a])
        if waiting is not None:
            spare = spare - late * waiting[0][a]
            each = each + late * (waiting[1][b] - waiting[1][a])
        each = each / np.maximum(layers, 1.0)
        number, good = _upgraded(spare, each, layers * (a != b)[:, None], alike, relaxed)
        if not good.any():
            continue
        share = (number / np.maximum(layers, 1.0))[:, None, None]
        mix = np.moveaxis(sums[a] + share * (layer_sums[b] - layer_sums[a]), 0, 2)
        f, w = durations(mix, speed)
        last = ending_seconds(mix[1:], intervals.sync_s[candidates], speed, full)
        ending = np.minimum(ending, np.where(good, last, np.inf).min(axis=0))
        least = np.minimum(least, np.where(good, w, np.inf).min(axis=0))
        took = np.where(good, f + w, np.inf)
        first = took.argmin(axis=0)
        took = took[first, np.arange(len(first))]
        faster = np.flatnonzero(took < best)
        best[faster], first = took[faster], first[faster]
        chosen = stages[faster], candidates[faster]
        found.forward_s[chosen], found.backward_s[chosen] = f[first, faster], w[first, faster]
        found.low[chosen], found.high[chosen] = a[first], b[first]
        found.upgraded[chosen] = number[first, faster]
    found.ending_s[stages, candidates] = ending
    if relaxed:  # bounds take each by itself
        found.backward_s[stages, candidates] = least


def _upgraded(
    spare: Floats, each: Floats, layers: Floats, alike: NDArray[np.bool_], relaxed: bool
) -> tuple[Floats, NDArray[np.bool_]]:
    """How many layers take the second of two options, and whether any number fits.

    As many as fit where it needs more memory, and is faster; as few as have to where the first
    does not fit. Layers that are not alike may differ in what they need, so that a bound lets all
    of them have what is faster.

    Args:
        spare: Bytes that are left if none takes it.
        each: Bytes that a layer needs more, on average.
        layers: Layers that may take it.
        alike: Whether they are copies of one block.
        relaxed: Let a part of a layer take it.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = np.where(each != 0, spare / each, np.inf)
    most = np.where(each > 0, np.clip(exact, 0.0, layers), layers)
    fewest = np.where((each < 0) & (spare < 0), np.clip(exact, 0.0, layers), layers)
    if not relaxed:
        most, fewest = np.floor(most + 1e-9), np.ceil(fewest - 1e-9)
    else:
        most = np.where(alike, most, layers)
        fewest = np.where(alike | (spare >= 0), fewest, 0.0)
    fits = np.where(each < 0, spare - layers * each >= 0, spare >= 0)
    return np.where(each < 0, fewest, most), fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Stages and what they keep.

    Attributes:
        chosen: Number of the candidate of every stage.
        value: Seconds of the objective.
    """

    chosen: tuple[int, ...]
    value: float


def least_bottleneck(
    intervals: Intervals, costs: list[Floats], limit: float = np.inf
) -> tuple[float, list[Floats]]:
    """Least possible maximum of the stages' costs, and the table it is read from.

    Args:
        intervals: The candidates.
        costs: For each stage the cost of every candidate, shape (K,) each.
        limit: Costs above it do not matter.
    """
    best = np.full(intervals.num_units + 1, np.inf)
    best[0] = 0.0
    tables = [best]
    for cost in costs:
        value = np.maximum(best[intervals.start], cost)
        following = np.full(intervals.num_units + 1, np.inf)
        np.minimum.at(following, intervals.stop, np.where(value <= limit, value, np.inf))
        best = following
        tables.append(best)
    return float(best[-1]), tables


def cheapest_sum(
    intervals: Intervals, costs: list[Floats], weights: list[Floats], limit: float
) -> Cut | None:
    """Stages of the least sum of weights among those whose costs keep a limit.

    Args:
        intervals: The candidates.
        costs: For each stage what must not exceed `limit`.
        weights: For each stage what is added up.
        limit: The limit.
    """
    size = intervals.num_units + 1
    best = np.full(size, np.inf)
    best[0] = 0.0
    back: list[Ints] = []
    for cost, weight in zip(costs, weights, strict=True):
        value = np.where(cost <= limit, best[intervals.start] + weight, np.inf)
        following = np.full(size, np.inf)
        np.minimum.at(following, intervals.stop, value)
        which = np.full(size, -1, np.int64)
        hit = np.flatnonzero((value == following[intervals.stop]) & np.isfinite(value))
        which[intervals.stop[hit[::-1]]] = hit[::-1]  # the first of equals
        back.append(which)
        best = following
    if not np.isfinite(best[-1]):
        return None
    chosen, at = [], size - 1
    for which in reversed(back):
        number = int(which[at])
        chosen.append(number)
        at = int(intervals.start[number])
    return Cut(chosen=tuple(reversed(chosen)), value=float(best[-1]))


def most_even(intervals: Intervals, costs: list[Floats]) -> Cut | None:
    """Stages of the least largest cost and, of these, of the least sum of squares; None for none.

    Args:
        intervals: The candidates.
        costs: For each stage the cost of every candidate, shape (K,) each.
    """
    least, _ = least_bottleneck(intervals, costs)
    squares = [cost**2 for cost in costs]
    return cheapest_sum(intervals, costs, squares, least * (1 + 1e-12))
