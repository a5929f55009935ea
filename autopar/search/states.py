"""Bytes and seconds that come from parameters: what a stage holds at all times, and its update."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.evaluate import Software
from autopar.graph.ir import ITEM_BYTES, Graph
from autopar.search.units import Units

if TYPE_CHECKING:
    from autopar.search.tables import UnitTable

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)


def ranges(values: Floats, start: Ints, stop: Ints) -> Floats:
    """Sums over intervals of the last dim."""
    prefix = np.zeros((*values.shape[:-1], values.shape[-1] + 1))
    np.cumsum(values, axis=-1, out=prefix[..., 1:])
    return np.asarray(prefix[..., stop] - prefix[..., start])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parameters:
    """Parameters of a model, in the order of the graph.

    Attributes:
        width: Bytes of an element, shape (parameters,).
        trained: 1 for those that are trained, else 0.
        state: Bytes of optimizer state of an element.
        first: Unit of the first use.
        later: Further uses: parameter, unit of the use before, unit of the use.
        num_units: Units of the model.
    """

    width: Floats
    trained: Floats
    state: Floats
    first: Ints
    later: tuple[tuple[int, int, int], ...]
    num_units: int

    @classmethod
    def of(cls, graph: Graph, units: Units, software: Software) -> Parameters:
        """The parameters of a model."""
        width, trained, state, first = [], [], [], []
        later = []
        for number, item in enumerate(graph.parameters()):
            spec = item.value.spec
            width.append(ITEM_BYTES[spec.dtype])
            trained.append(spec.requires_grad)
            state.append(software.optimizer.state_bytes(1, spec.dtype) * spec.requires_grad)
            users = units.users[item.value.name] or (0,)
            first.append(users[0])
            later += [(number, a, b) for a, b in itertools.pairwise(users)]
        return cls(
            width=np.array(width, dtype=np.float64),
            trained=np.array(trained, dtype=np.float64),
            state=np.array(state, dtype=np.float64),
            first=np.array(first, dtype=np.int64),
            later=tuple(later),
            num_units=units.count,
        )

    def bytes_of(self, table: UnitTable) -> tuple[Floats, Floats, Floats]:
        """Local bytes of weights, of weights that are trained, and of optimizer state."""
        weight = table.numel * self.width
        return weight, weight * self.trained, table.numel * self.state

    def sums(self, values: Floats, start: Ints, stop: Ints) -> Floats:
        """Sums over the parameters of intervals of units, each parameter once.

        Args:
            values: Of parameters.
            start: First unit of each interval.
            stop: Unit behind its last.
        """
        by_unit = np.bincount(self.first, values, self.num_units).astype(np.float64)
        found = ranges(by_unit, start, stop)
        for number, before, user in self.later:
            # Not if the interval has the use before it, too.
            found += values[number] * ((start <= user) & (user < stop) & (before < start))
        return found


def held_bytes(weight: Number, trained: Number, state: Number, zero: int, data: int) -> Number:
    """What a rank holds of parameters, gradients and optimizer state under ZeRO.

    Args:
        weight: Bytes of weights, as for the other two.
        trained: Of those that are trained; gradients have as many.
        state: Of optimizer state.
        zero: Stage.
        data: Ranks over which it divides.
    """
    found = weight - trained + (trained / data if zero == 3 else trained)
    found = found + (trained / data if zero >= 2 else trained)
    return found + (state / data if zero >= 1 else state)
