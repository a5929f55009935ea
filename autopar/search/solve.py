"""The least value of a pairwise cost network: bound, states dropped, elimination of what is left.

1. Networks of small tables are eliminated at once (`autopar.search.eliminate`).
2. Else message passing (`autopar.search.dual`) drops states until the tables are small.
3. If they never are, the best assignment met is improved by kicks and descents, and returned
   with the bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from autopar.search.dual import descend, dual
from autopar.search.eliminate import CELLS, eliminate, elimination_order
from autopar.search.network import INFEASIBLE, Assignment, Network, Solution, supported

if TYPE_CHECKING:
    from numpy.typing import NDArray

AT_ONCE = 2**21
"""Cells of all tables up to which elimination is faster than a sweep."""
_KICKS = 30
_KICKED = 0.1
"""Share of variables that a kick moves."""


def solve(
    network: Network,
    *,
    seed: int = 0,
    cells: int = CELLS,
    sweeps: int = 60,
    start: Assignment = (),
) -> Solution:
    """The least value of a network, or a good one with a bound.

    Args:
        network: The network.
        seed: Of the kicks; the same seed gives the same solution.
        cells: Most cells of a table of elimination.
        sweeps: Most sweeps of message passing.
        start: An assignment that the answer shall not be worse than.
    """
    states = supported(network)
    if states is None:
        return INFEASIBLE
    at_once = min(AT_ONCE, cells)
    if elimination_order(network.kept(states)).total <= at_once:
        return _eliminated(network, network.kept(states), states, (), math.inf, cells)

    def enough(left: Network) -> bool:
        return elimination_order(left).total <= at_once

    found = dual(network, sweeps=sweeps, start=start, enough=enough)
    if found.closed:
        return Solution(
            assignment=found.assignment, value=found.value, bound=found.value, exact=True
        )
    left = network.kept(found.states)
    if elimination_order(left).largest <= cells:
        return _eliminated(network, left, found.states, found.assignment, found.value, cells)
    assignment, value = _kicked(network, found.assignment, found.value, seed)
    return Solution(assignment=assignment, value=value, bound=found.bound, exact=False)


def _eliminated(
    network: Network,
    left: Network,
    states: Sequence[NDArray[np.intp]],
    known: Assignment,
    value: float,
    cells: int,
) -> Solution:
    """The best of a known assignment and all of the states that are left."""
    found = eliminate(left, cells=cells)
    assert found.fits
    if found.value >= value:
        return Solution(assignment=known, value=value, bound=value, exact=True)
    if not found.assignment:
        return INFEASIBLE
    assignment = tuple(
        int(keep[state]) for keep, state in zip(states, found.assignment, strict=True)
    )
    value = network.value(assignment)
    return Solution(assignment=assignment, value=value, bound=value, exact=True)


def _kicked(
    network: Network, assignment: Assignment, value: float, seed: int
) -> tuple[Assignment, float]:
    """The best of descents from an assignment of which some variables were moved at random."""
    if not assignment:
        return assignment, value
    random = np.random.default_rng(seed)
    sizes = np.array(network.sizes)
    for _ in range(_KICKS):
        moved = random.random(len(sizes)) < _KICKED
        other = np.where(moved, random.integers(sizes), np.array(assignment))
        found = descend(network, tuple(int(state) for state in other), rounds=4)
        cost = network.value(found)
        if cost < value:
            assignment, value = found, cost
    return assignment, value
