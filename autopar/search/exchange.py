"""Seconds of what data parallelism and ZeRO move for each parameter, at least."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.buckets import LIMIT_BYTES
from autopar.cost_models.work import Move
from autopar.search.problem import Problem
from autopar.search.seconds import MANY
from autopar.search.space import Point

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Seconds of collectives over the data axis, for each parameter or interval.

    Attributes:
        scattered: Gradients, for every microbatch.
        gathered: Weights, for every forward and every backward.
        summed: Gradients, once per step.
        returned: Weights, after the update.
    """

    scattered: Floats
    gathered: Floats
    summed: Floats
    returned: Floats

    def put(self, sums: Floats) -> Floats:
        """Sums of shape (..., phases, parts, K) with what moves for every microbatch."""
        if not self.scattered.any() and not self.gathered.any():
            return sums
        sums = sums.copy()
        sums[..., 2, 2, :] += self.scattered
        sums[..., 0:2, 2, :] += self.gathered
        sums[..., 3, :] += MANY  # how many buckets there are follows from the stage
        return sums


@dataclass(slots=True)
class Exchange:
    """Prices collectives over the data axis; remembers what it has priced.

    Attributes:
        problem: The problem.
    """

    problem: Problem
    _moves: dict[object, float] = field(default_factory=dict)
    _sizes: dict[bytes, tuple[Floats, NDArray[np.int64]]] = field(default_factory=dict)
    _moved: dict[object, Floats] = field(default_factory=dict)

    def alone(self, point: Point, values: Floats) -> Floats:
        """Values of parameters, zero for those that several stages may use.

        Gradients of these are summed over stages first, at the end of the step.

        Args:
            point: The point.
            values: One for each parameter.
        """
        shared = sorted({number for number, _, _ in self.problem.parameters.later})
        if point.pipeline == 1 or not shared:
            return values
        found = values.copy()
        found[shared] = 0
        return found

    def moved_s(self, point: Point, kind: str, trained: Floats) -> Floats:
        """Seconds that a collective over the data axis takes at least for each parameter.

        Buckets are closed as soon as they are full: one has at most one member that fills it.

        Args:
            point: The point.
            kind: Of the collective.
            trained: Bytes of each parameter, shape (parameters,).
        """
        if point.data == 1:
            return np.zeros_like(trained)
        given = trained.tobytes()
        key = (point.mesh, kind, given)
        if key in self._moved:
            return self._moved[key]
        if given not in self._sizes:
            self._sizes[given] = np.unique(trained, return_inverse=True)
        sizes, places = self._sizes[given]
        largest = LIMIT_BYTES + sizes[-1]
        rate = self._move_s(point, kind, largest) / largest
        seconds = [
            self._move_s(point, kind, size) if size >= LIMIT_BYTES else rate * size
            for size in sizes.tolist()
        ]
        self._moved[key] = np.array(seconds)[places]
        return self._moved[key]

    def _move_s(self, point: Point, kind: str, size: float) -> float:
        key = (point.mesh, kind, size)
        if key not in self._moves:
            prices = self.problem.prices(point)
            owners: list[tuple[str, ...]] = [("dp",)]
            # Of weights that are whole on all tensor ranks both sums are one, which may be faster.
            if kind == "all_reduce" and point.tensor > 1:
                owners.append(("dp", "tp"))
            self._moves[key] = min(
                prices.seconds(_move(prices.names, kind, size, point, wanted)) for wanted in owners
            )
        return self._moves[key]

    def exchanged(self, point: Point, trained: Floats) -> Exchanged:
        """What ZeRO, or data parallelism, moves for each parameter.

        Args:
            point: The point.
            trained: Bytes of trained weights, shape (parameters,).
        """
        none, trained = np.zeros_like(trained), self.alone(point, trained)
        zero = point.zero
        scatter = self.moved_s(point, "reduce_scatter" if zero else "all_reduce", trained)
        gather = self.moved_s(point, "all_gather", trained) if zero else none
        return Exchanged(
            scattered=scatter if zero >= 2 else none,
            gathered=gather if zero == 3 else none,
            summed=scatter if zero < 2 else none,
            returned=gather if zero in (1, 2) else none,
        )


def _move(
    names: Mapping[str, str], kind: str, size: float, point: Point, owners: tuple[str, ...]
) -> Move:
    """A collective over all ranks along some axes."""
    return Move(
        kind=kind, size_bytes=int(size),  # type: ignore[arg-type]
        axes=tuple(name for name, owner in names.items() if owner in owners),
        group=point.data * (point.tensor if "tp" in owners else 1),
        phase="weight_gradient", node="", dtype="",
    )  # fmt: skip
