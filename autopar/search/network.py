"""Pairwise cost networks: variables with finite domains, costs of single states and of pairs.

The value of an assignment x is

    constant + sum over variables i of unary_i(x_i) + sum over edges ij of costs_ij(x_i, x_j)

and an infinite cost forbids a state or a pair. `solve` looks for the least value:

    `autopar.search.dual`       a lower bound, and states that no better assignment can have
    `autopar.search.eliminate`  an exact solution of what is left, if its tables are small enough

What cannot be eliminated is answered with the best assignment that was met and the bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

Assignment = tuple[int, ...]
"""A state for every variable."""


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """Costs of the pairs of states of two variables.

    Attributes:
        first: The variable with the lower number.
        second: The other.
        costs: One row for each state of the first; infinite for pairs that are forbidden.
    """

    first: int
    second: int
    costs: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A pairwise cost network; see the module.

    Attributes:
        names: What variables are called.
        unary: Costs of the states of each variable.
        edges: At most one for each pair of variables, in order.
        constant: What every assignment costs.
    """

    names: tuple[str, ...]
    unary: tuple[Floats, ...]
    edges: tuple[Edge, ...]
    constant: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.unary)
        for edge in self.edges:
            assert edge.first < edge.second, "edges lead from lower to higher numbers"
            shape = (len(self.unary[edge.first]), len(self.unary[edge.second]))
            assert edge.costs.shape == shape, f"costs {edge.costs.shape} for states {shape}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of states of each variable."""
        return tuple(len(costs) for costs in self.unary)

    def value(self, assignment: Sequence[int]) -> float:
        """What an assignment costs.

        Args:
            assignment: A state for every variable.
        """
        total = self.constant
        for costs, state in zip(self.unary, assignment, strict=True):
            total += float(costs[state])
        for edge in self.edges:
            total += float(edge.costs[assignment[edge.first], assignment[edge.second]])
        return total

    def kept(self, states: Sequence[NDArray[np.intp]]) -> Network:
        """The network with some states of every variable only.

        Args:
            states: For every variable the states that stay, ascending.
        """
        if all(len(keep) == size for keep, size in zip(states, self.sizes, strict=True)):
            return self
        return replace(
            self,
            unary=tuple(costs[keep] for costs, keep in zip(self.unary, states, strict=True)),
            edges=tuple(
                replace(edge, costs=edge.costs[np.ix_(states[edge.first], states[edge.second])])
                for edge in self.edges
            ),
        )


class NetworkBuilder:
    """Collects variables and costs; costs of the same states add up."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._unary: list[Floats] = []
        self._edges: dict[tuple[int, int], Floats] = {}
        self._constant = 0.0

    def variable(self, name: str, costs: ArrayLike) -> int:
        """Add a variable.

        Args:
            name: What to call it.
            costs: Of its states, at least one.

        Returns:
            Its number.
        """
        given = np.array(costs, dtype=np.float64)
        assert given.ndim == 1 and given.size, f"{name}: costs of states, one number each"
        self._names.append(name)
        self._unary.append(_checked(given, name))
        return len(self._names) - 1

    def add_constant(self, cost: float) -> None:
        """Add to what every assignment costs."""
        self._constant += cost

    def add_unary(self, variable: int, costs: ArrayLike) -> None:
        """Add to the costs of the states of a variable."""
        self._unary[variable] = self._unary[variable] + _checked(
            np.asarray(costs, dtype=np.float64), self._names[variable]
        )

    def add_edge(self, first: int, second: int, costs: ArrayLike) -> None:
        """Add to the costs of pairs of states.

        Args:
            first: A variable, rows of `costs`.
            second: A variable, columns; of the same one the diagonal counts.
            costs: Of the pairs.
        """
        given = _checked(np.asarray(costs, dtype=np.float64), self._names[first])
        if first == second:
            self.add_unary(first, np.diagonal(given))
            return
        if first > second:
            first, second, given = second, first, given.T
        assert given.shape == (len(self._unary[first]), len(self._unary[second]))
        before = self._edges.get((first, second))
        self._edges[first, second] = given if before is None else before + given

    def build(self) -> Network:
        """The network."""
        return Network(
            names=tuple(self._names),
            unary=tuple(self._unary),
            edges=tuple(
                Edge(first, second, np.ascontiguousarray(costs))
                for (first, second), costs in sorted(self._edges.items(), key=lambda item: item[0])
            ),
            constant=self._constant,
        )


def _checked(costs: Floats, name: str) -> Floats:
    assert not np.isnan(costs).any() and not np.isneginf(costs).any(), f"{name}: {costs}"
    return costs


def priced(network: Network, bytes_vectors: Mapping[int, ArrayLike], price: float) -> Network:
    """The network in which bytes cost seconds, too; edges are shared.

    Args:
        network: Costs in seconds.
        bytes_vectors: Bytes that the states of variables take; of others none.
        price: Seconds per byte.
    """
    if not price:
        return network
    unary = list(network.unary)
    for variable, size_bytes in bytes_vectors.items():
        unary[variable] = unary[variable] + price * np.asarray(size_bytes, dtype=np.float64)
    return replace(network, unary=tuple(unary))


def supported(network: Network) -> list[NDArray[np.intp]] | None:
    """States that have a partner along every edge; None if a variable has no such state.

    Args:
        network: Any network.
    """
    alive = [np.isfinite(costs) for costs in network.unary]
    finite = [np.isfinite(edge.costs) for edge in network.edges]
    forbidding = [
        (edge, pairs) for edge, pairs in zip(network.edges, finite, strict=True) if not pairs.all()
    ]
    changed = True
    while changed:
        changed = False
        for edge, pairs in forbidding:
            first, second = alive[edge.first], alive[edge.second]
            for variable, have in (
                (edge.first, first & (pairs & second).any(axis=1)),
                (edge.second, second & (pairs.T & first).any(axis=1)),
            ):
                if (have != alive[variable]).any():
                    alive[variable], changed = have, True
    if not all(flags.any() for flags in alive):
        return None
    return [np.flatnonzero(flags) for flags in alive]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best assignment found, and how good it is.

    Attributes:
        assignment: A state for every variable; empty if none of finite value is known.
        value: What it costs, infinite if none is known.
        bound: No assignment costs less; infinite if none is allowed.
        exact: Whether it is the best there is (or whether there is none).
    """

    assignment: Assignment
    value: float
    bound: float
    exact: bool

    @property
    def gap(self) -> float:
        """By how much the best could be cheaper, relative to the value; 0 if exact."""
        if self.exact:
            return 0.0
        return (
            (self.value - self.bound) / abs(self.value) if math.isfinite(self.value) else math.inf
        )


INFEASIBLE = Solution(assignment=(), value=math.inf, bound=math.inf, exact=True)
