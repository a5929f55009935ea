"""The op problem of a model: its network, and what the states of the network stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.layout import Placement
from autopar.plan.plan import Plan
from autopar.search.network import Assignment, Network, priced
from autopar.search.op_costs import OpStates
from autopar.search.op_graph import Period
from autopar.sharding.choices import Choices

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpProblem:
    """The network of a model's period.

    Attributes:
        network: The network; its first variables are the ops.
        period: The ops and values.
        states: What each op can do.
        saved_bytes: Bytes kept from forward to backward, for one microbatch, by variable.
        held_bytes: Bytes of parameters, gradients and optimizer states, by variable.
        start: A good assignment; empty if none is known.
        unit_price: Seconds per byte with which all bytes of a known solution cost as much as its
            seconds.
        placement: The plan that it began with.
        plan: That plan.
    """

    network: Network
    period: Period
    states: tuple[OpStates, ...]
    saved_bytes: Mapping[int, Floats]
    held_bytes: Mapping[int, Floats]
    start: Assignment
    unit_price: float
    placement: Placement
    plan: Plan

    @property
    def bytes(self) -> dict[int, Floats]:
        """Bytes of both kinds, by variable."""
        return all_bytes(self.saved_bytes, self.held_bytes)

    def priced(self, price: float) -> Network:
        """The network in which a byte costs `price` seconds."""
        return priced(self.network, self.bytes, price)

    def size_bytes(self, vectors: Mapping[int, Floats], assignment: Assignment) -> float:
        """Bytes of an assignment.

        Args:
            vectors: Bytes of states, by variable.
            assignment: A state for every variable.
        """
        return float(sum(costs[assignment[variable]] for variable, costs in vectors.items()))

    def choices(self, assignment: Assignment) -> tuple[Choices, ...]:
        """Choices of every node of the folded graph.

        Args:
            assignment: A state for every variable.
        """
        placed = self.placement.sharded.choices
        return tuple(
            self.states[number].choices(assignment[number]) if number >= 0 else placed[index]
            for index, number in enumerate(self.period.of_node)
        )


def all_bytes(*kinds: Mapping[int, Floats]) -> dict[int, Floats]:
    """Bytes of several kinds, by variable."""
    found: dict[int, Floats] = {}
    for vectors in kinds:
        for variable, size in vectors.items():
            found[variable] = found[variable] + size if variable in found else size
    return found
