"""Seconds that it takes to carry a value from one placement to another, and its gradient back.

Steps are those of `autopar.sharding.reshard.plan_steps`, collectives cost what `Prices` says, and
copies what the runtime makes before and after them. Which steps lead from one placement to another
depends on which splits overlap, not on sizes: values of different shapes share what was planned
(`_Book`), and each distinct step is priced once for a shape.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.compute import COLLECTIVE_LAUNCHES
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.pricing import Prices
from autopar.cost_models.work import Move
from autopar.graph.ir import ITEM_BYTES, TensorSpec
from autopar.sharding.placement import Pair, Placements, Shard
from autopar.sharding.reshard import Step, plan_steps, split_time

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_IN_TIME = frozenset({"slice", "mask", "all_reduce"})
"""Steps that can run along the axis in time (see `autopar.plan.microbatch`)."""
_WIDE = 2**40
_FORBIDDEN = (-1,)

Route = tuple[int, ...]
"""Numbers of steps; `_FORBIDDEN` for a way that cannot be gone."""


@dataclass(slots=True)
class _Book:
    """Routes between placements made of the same splits.

    Attributes:
        time: Index of the axis in time, None without.
        steps: Every distinct step.
        step_numbers: Number of a step, by what it does.
        routes: Every distinct route.
        route_numbers: Number of a route.
        places: Number of a placement.
        table: Number of the route from one placement to another, -1 where none was planned yet.
    """

    time: int | None
    steps: list[Step] = field(default_factory=list)
    step_numbers: dict[object, int] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
    route_numbers: dict[Route, int] = field(default_factory=dict)
    places: dict[Placements, int] = field(default_factory=dict)
    table: NDArray[np.int32] = field(default_factory=lambda: np.full((64, 64), -1, np.int32))

    def numbers(
        self, sources: Sequence[Placements], targets: Sequence[Placements]
    ) -> NDArray[np.int32]:
        """Numbers of the routes between all of them."""
        rows, columns = (
            [self.places.setdefault(item, len(self.places)) for item in items]
            for items in (sources, targets)
        )
        size = len(self.table)
        while size < len(self.places):
            size *= 2
        if size > len(self.table):
            wide = np.full((size, size), -1, np.int32)
            wide[: len(self.table), : len(self.table)] = self.table
            self.table = wide
        cells = np.ix_(rows, columns)
        for row, column in np.argwhere(self.table[cells] < 0).tolist():
            route = self._plan(sources[row], targets[column])
            number = self.route_numbers.setdefault(route, len(self.routes))
            if number == len(self.routes):
                self.routes.append(route)
            self.table[rows[row], columns[column]] = number
        return self.table[cells]

    def _plan(self, source: Placements, target: Placements) -> Route:
        if source == target:
            return ()
        found = []
        for step in plan_steps(source, target):
            for part in split_time(step, self.time):
                if part.axes == (self.time,):
                    if part.kind not in _IN_TIME:
                        return _FORBIDDEN
                    continue
                if part.kind in ("slice", "mask"):
                    continue
                key = (part.kind, part.axes, part.before, part.after)
                number = self.step_numbers.setdefault(key, len(self.steps))
                if number == len(self.steps):
                    self.steps.append(part)
                found.append(number)
        return tuple(found)


@lru_cache(maxsize=1024)
def _book(time: int | None, shards: tuple[Shard, ...]) -> _Book:
    return _Book(time)


class Routes:
    """Prices ways between placements.

    Args:
        rank: A rank of the mesh of sub-axes.
        prices: Of collectives.
        copy_s_per_byte: Seconds of a byte that is read or written by a copy.
        launch_s: Seconds of the host per launch.
        weights: What a second of the device costs, and one of the host.
    """

    def __init__(
        self,
        rank: Rank,
        prices: Prices,
        copy_s_per_byte: float,
        launch_s: float,
        weights: tuple[float, float],
    ) -> None:
        self.rank, self.prices, self.copy_s_per_byte = rank, prices, copy_s_per_byte
        self.launch_s, self.weights = launch_s, weights
        self._known: dict[object, dict[int, float]] = {}

    def pairs(
        self,
        spec: TensorSpec,
        sources: Sequence[Pair],
        targets: Sequence[Pair],
        strided: bool = False,
    ) -> Floats:
        """Seconds of a value's way there and of its gradient's way back.

        Args:
            spec: The value.
            sources: Pairs in which it may be made, rows of the result.
            targets: Pairs in which it may be used, columns.
            strided: Whether its elements do not lie in a row.

        Returns:
            Seconds; infinite for what cannot be done.
        """
        found = self._spread(
            spec, [pair.forward for pair in sources], [pair.forward for pair in targets], strided
        )
        if spec.requires_grad:
            back = self._spread(
                spec, [pair.gradient for pair in targets], [pair.gradient for pair in sources],
                strided,
            )  # fmt: skip
            found = found + back.T
        return found

    def _spread(
        self,
        spec: TensorSpec,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        strided: bool,
    ) -> Floats:
        """`seconds`, each distinct way looked at once."""
        rows, row = _distinct(sources)
        columns, column = _distinct(targets)
        return self.seconds(spec, rows, columns, strided)[np.ix_(row, column)]

    def seconds(
        self,
        spec: TensorSpec,
        sources: Sequence[Placements],
        targets: Sequence[Placements],
        strided: bool = False,
    ) -> Floats:
        """Seconds of one way.

        Args:
            spec: The value.
            sources: Placements at the start, rows of the result.
            targets: Placements at the end, columns.
            strided: Whether elements do not lie in a row.
        """
        shards = sorted(
            {p for item in (*sources, *targets) for p in item if isinstance(p, Shard)},
            key=lambda shard: (shard.dim, -shard.stride, shard.size),
        )
        names = _plain(tuple(shards))
        real = {names[shard]: shard for shard in shards}
        plain = all(shard.size == _WIDE for shard in real)
        book = _book(self.rank.time, () if plain else tuple(real))
        starts = [_renamed(item, names) for item in sources]
        ends = [_renamed(item, names) for item in targets]
        unlike, place = np.unique(book.numbers(starts, ends), return_inverse=True)
        known = self._known.setdefault(
            (spec.shape, spec.dtype, tuple(shards), strided), {-1: math.inf}
        )
        costs = np.zeros(len(unlike))
        for position, route in enumerate(unlike.tolist()):
            for number in book.routes[route]:
                if number not in known:
                    known[number] = self._step(book.steps[number], spec, real, strided)
                costs[position] += known[number]
        return costs[place].reshape(len(starts), len(ends))

    def _step(self, step: Step, spec: TensorSpec, real: dict[Shard, Shard], strided: bool) -> float:
        """What a step costs, with the copies that the runtime makes around it."""
        sizes = self.rank.grid.sizes
        whole = spec.numel * ITEM_BYTES[spec.dtype]
        before, after = (
            whole / math.prod(sizes[i] for i, p in enumerate(state) if isinstance(p, Shard))
            for state in (step.before, step.after)
        )
        size = after if step.kind == "all_gather" else before
        seconds = self.collective(step.kind, size, step.axes, spec.dtype)
        shard = step.source if step.kind in ("all_gather", "all_to_all") else step.target
        copies = []
        if strided and step.kind in ("all_reduce", "all_gather"):
            copies.append(before)
        if shard is not None and self._outside(real[shard], step, spec.shape, real) > 1:
            copies.append(size)
        if step.kind == "all_to_all":
            copies.append(size)
        device, host = self.weights
        launches = COLLECTIVE_LAUNCHES + len(copies)
        seconds += 2 * sum(copies) * self.copy_s_per_byte
        return device * seconds + host * launches * self.launch_s

    def collective(self, kind: str, size_bytes: float, axes: tuple[int, ...], dtype: str) -> float:
        """Seconds of a collective along sub-axes.

        Args:
            kind: Of collective.
            size_bytes: Payload, as torch.distributed counts it.
            axes: Indices of sub-axes.
            dtype: Of what is sent.
        """
        if self.rank.group(axes) < 2:
            return 0.0
        return self.prices.seconds(
            Move(
                kind=kind,  # type: ignore[arg-type]
                size_bytes=math.ceil(size_bytes),
                axes=tuple(self.rank.names[axis] for axis in axes),
                group=self.rank.group(axes),
                phase="forward",
                dtype=dtype,
                node="",
            )
        )

    def _outside(
        self, shard: Shard, step: Step, shape: tuple[int, ...], real: dict[Shard, Shard]
    ) -> float:
        """Local positions outside of a split factor: with one, its parts lie in a row."""
        outside = math.prod(shape[: shard.dim]) * shape[shard.dim] // (shard.stride * shard.size)
        split = 1
        for axis, placed in enumerate(step.before):
            other = real[placed] if isinstance(placed, Shard) else None
            if other is not None and (other.dim, -other.stride) < (shard.dim, -shard.stride):
                split *= self.rank.grid.sizes[axis]
        return outside / split


def _distinct(items: Sequence[Placements]) -> tuple[list[Placements], list[int]]:
    """The distinct items, and for each item the place of its like."""
    places: dict[Placements, int] = {}
    found = [places.setdefault(item, len(places)) for item in items]
    return list(places), found


def _plain(shards: tuple[Shard, ...]) -> dict[Shard, Shard]:
    """Names for splits: splits of different dims if none overlap, else the splits themselves."""
    if any(one.overlaps(other) for one, other in combinations(shards, 2)):
        return {shard: shard for shard in shards}
    return {shard: Shard(number, 1, _WIDE) for number, shard in enumerate(shards)}


def _renamed(placements: Placements, names: dict[Shard, Shard]) -> Placements:
    return tuple(names[item] if isinstance(item, Shard) else item for item in placements)
