"""Sums over a whole model, from which the cheapest bounds of a step are made.

Memory that is short makes some units compute again: which these are is a knapsack. Its relaxation
(a part of a unit may be computed again) is a bound that takes a sort of the units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.pricing import Speed
from autopar.schedules.steady import least_live
from autopar.search.seconds import durations, kernel_seconds
from autopar.search.space import Point
from autopar.search.states import Parameters
from autopar.search.tables import UnitTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FORWARD = 0.9
"""Slope, over the model's mean, of what forward takes at least beside both, but for an offset."""
ROUNDED = 1 - 1e-9
"""Seconds of sums in another order are less at most by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relief:
    """What units can free by computing more again, the cheapest of each unit first.

    Attributes:
        unit: The unit, shape (steps,).
        freed_bytes: Saved memory that becomes free, for a microbatch under way.
        device_s: Seconds of the device that it takes.
    """

    unit: Ints
    freed_bytes: Floats
    device_s: Floats

    @classmethod
    def of(cls, table: UnitTable) -> Relief:
        """The lower convex hull of the options of every unit, from the last on.

        Args:
            table: The units.
        """
        took = table.seconds[:, :, 0:2].sum(axis=(1, 2))
        saved, everyone = table.saved_bytes, np.arange(table.saved_bytes.shape[1])
        now = np.full(len(everyone), len(saved) - 1)
        units, freed, seconds = [], [], []
        for _ in range(len(saved) - 1):
            less = saved[now, everyone] - saved
            more = np.maximum(took - took[now, everyone], 0.0)
            price = np.where(less > 0, more / np.where(less > 0, less, 1.0), np.inf)
            chosen = price.argmin(axis=0)
            steps = np.flatnonzero(np.isfinite(price[chosen, everyone]))
            units.append(steps)
            freed.append(less[chosen[steps], steps])
            seconds.append(more[chosen[steps], steps])
            now[steps] = chosen[steps]
        return cls(
            unit=np.concatenate(units) if units else np.zeros(0, np.int64),
            freed_bytes=np.concatenate(freed) if freed else np.zeros(0),
            device_s=np.concatenate(seconds) if seconds else np.zeros(0),
        )

    def least_s(self, live: Floats, short_bytes: float) -> float:
        """Seconds of the device that free so much memory at least; infinite if nothing does.

        Args:
            live: Microbatches under way at least, for every unit.
            short_bytes: Bytes that have to become free.
        """
        if short_bytes <= 0:
            return 0.0
        freed = self.freed_bytes * live[self.unit]
        order = np.argsort(self.device_s / freed, kind="stable")
        reached = np.cumsum(freed[order])
        last = int(np.searchsorted(reached, short_bytes * ROUNDED))
        if last == len(reached):
            return math.inf
        took = self.device_s[order]
        part = (short_bytes - (reached[last - 1] if last else 0.0)) / freed[order[last]]
        return float(took[:last].sum() + max(0.0, part) * took[last]) * ROUNDED


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Totals:
    """A table, summed up.

    Attributes:
        seconds: Of the fastest option, shape (phases, parts, 1).
        chain: The same of the units that follow one another in any case.
        after: Seconds of kernels of each unit and those behind it, shape (units,).
        slope: Seconds of forward of the first units, over those of forward and backward, at least;
        offset: but for so many seconds.
        kept_bytes: Saved memory of the fastest option, shape (units,).
        relief: What computing more again frees.
        held: Bytes of all weights, of those that are trained, and of optimizer state.
        trained_each: Of each parameter that is trained.
        most_bytes: Saved memory of the fastest options.
        least_bytes: Of those with least.
        lean_s: Seconds of the device at least that units compute again if each keeps as little as
            it can; 0 where no option has least memory for all of them.
        dearest_s: Seconds of the device of the units that take most, summed up, shape (units + 1,).
    """

    seconds: Floats
    chain: Floats
    after: Floats
    slope: float
    offset: float
    kept_bytes: Floats
    relief: Relief
    held: tuple[float, float, float]
    trained_each: Floats
    most_bytes: float
    least_bytes: float
    lean_s: float
    dearest_s: Floats
    _crowds: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls, table: UnitTable, parameters: Parameters, main: NDArray[np.bool_], speed: Speed
    ) -> Totals:
        """Sum up a table.

        Args:
            table: The table.
            parameters: Those of the model.
            main: Units that follow one another in any case.
            speed: Of the software.
        """
        weight, trained, state = parameters.bytes_of(table)
        each = table.seconds[-1]
        forward, backward = durations(each, speed)
        sums = np.cumsum(each[0] * main, axis=-1)
        start, both = kernel_seconds(sums, speed), np.cumsum(forward + backward)
        slope = FORWARD * float(start[-1] / both[-1]) if both[-1] else 0.0
        rest = np.cumsum(each[..., ::-1], axis=-1)[..., ::-1]
        after = kernel_seconds(rest[0], speed) + kernel_seconds(rest[1] + rest[2], speed)
        relief, least = Relief.of(table), table.saved_bytes.min(axis=0)
        common = (table.saved_bytes <= least).all(axis=1).any()
        device_s = np.sort(each[:, 0:2].sum(axis=(0, 1)))[::-1]
        return cls(
            seconds=each.sum(axis=-1, keepdims=True),
            chain=each[..., main].sum(axis=-1, keepdims=True),
            after=after,
            slope=slope,
            offset=float(np.max(slope * both - start, initial=0.0)),
            kept_bytes=table.saved_bytes[-1],
            relief=relief,
            held=(float(weight.sum()), float(trained.sum()), float(state.sum())),
            trained_each=trained,
            most_bytes=float(table.saved_bytes[-1].sum()),
            least_bytes=float(least.sum()),
            lean_s=float(relief.device_s.sum()) * ROUNDED if common else 0.0,
            dearest_s=np.concatenate([[0.0], np.cumsum(device_s)]),
        )

    def crowded_s(self, ranks: int) -> float:
        """Seconds of the device at least that a microbatch takes on the rank with most to do.

        Args:
            ranks: Pipeline ranks.
        """
        if ranks not in self._crowds:
            self._crowds[ranks] = crowded_s(self.dearest_s, ranks) * ROUNDED
        return self._crowds[ranks]

    def live_at_least(self, point: Point, share: float, limit: float) -> Floats:
        """For every unit the microbatches at least whose saved memory is live at once.

        Under 1F1B and ZB-H1 a rank works no longer than the limit, so that a unit with much behind
        it is in a stage with many behind it. Microbatches of ZB-H1 that wait for the backward of
        weights are not counted: they may hold less than what forward has saved.

        Args:
            point: The point.
            share: Samples of its microbatches, over those of this table.
            limit: Seconds of a step; slower ones do not count.
        """
        ranks, count = point.pipeline, point.microbatches
        if point.chunks > 1:
            least = least_live(point.schedule, ranks, count, point.chunks) / point.chunks
            return np.full(len(self.after), least)
        if math.isinf(limit):
            return np.ones(len(self.after))
        stage = np.floor(ranks - self.after * share / (limit / count) * (1 - 1e-9))
        return np.clip(ranks - np.maximum(stage, 0), 1, min(ranks, count))


def crowded_s(dearest_s: Floats, ranks: int) -> float:
    """Seconds at least of the rank with most to do, as units are whole.

    Of the dearest j units one rank has a share that is rounded up, and these take at least as long
    as the cheapest of the j.

    Args:
        dearest_s: Seconds of the units that take most, summed up from the dearest on, from 0;
            shape (units + 1,).
        ranks: Ranks between which the units are divided.
    """
    dearest = np.arange(1, len(dearest_s))
    least = dearest_s[dearest] - dearest_s[dearest - -(-dearest // ranks)]
    return float(least.max(initial=0.0))
