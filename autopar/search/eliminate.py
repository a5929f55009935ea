"""Exact solution by elimination: one variable after the other is minimised out of its tables.

Eliminating a variable joins all tables that mention it into one over its neighbours and itself,
takes the minimum over it, and leaves a table over its neighbours. The order takes the variable
with the smallest joined table first. Networks of small treewidth need small tables, whatever
their number of variables. Reference: Dechter, "Bucket elimination: a unifying framework for
reasoning", Artificial Intelligence 113, 1999.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.search.network import Assignment, Network

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CELLS = 2**25
"""Most cells of a joined table, by default; such a table is never held as a whole."""
_CHUNK = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """In which order to eliminate.

    Attributes:
        variables: All of them.
        largest: Cells of the largest joined table.
        total: Cells of all joined tables.
    """

    variables: tuple[int, ...]
    largest: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """What came of it.

    Attributes:
        fits: Whether all tables were small enough; else nothing was computed.
        assignment: The best assignment; empty if it does not fit or none is allowed.
        value: What it costs; infinite if none is allowed.
        order: The order taken.
    """

    fits: bool
    assignment: Assignment
    value: float
    order: Order


@dataclass(frozen=True, slots=True)
class _Table:
    """Costs over a scope of variables, ascending."""

    scope: tuple[int, ...]
    costs: Floats


def elimination_order(network: Network) -> Order:
    """An order of elimination, smallest joined table first.

    Args:
        network: Any network.
    """
    sizes = network.sizes
    around: list[set[int]] = [set() for _ in sizes]
    for edge in network.edges:
        around[edge.first].add(edge.second)
        around[edge.second].add(edge.first)

    def cells(variable: int) -> int:
        return sizes[variable] * math.prod(sizes[other] for other in around[variable])

    costs = {variable: cells(variable) for variable in range(len(sizes))}
    order: list[int] = []
    largest = total = 0
    while costs:
        variable = min(costs, key=lambda item: (costs[item], item))
        largest, total = max(largest, costs[variable]), total + costs[variable]
        order.append(variable)
        del costs[variable]
        near = sorted(around[variable])
        for other in near:
            around[other].discard(variable)
            around[other].update(item for item in near if item != other)
        for other in near:
            costs[other] = cells(other)
    return Order(variables=tuple(order), largest=largest, total=total)


def eliminate(network: Network, *, cells: int = CELLS) -> Elimination:
    """The best assignment of a network whose tables are small enough.

    Args:
        network: The network.
        cells: Most cells of a joined table.
    """
    order = elimination_order(network)
    if order.largest > cells:
        return Elimination(fits=False, assignment=(), value=math.inf, order=order)
    tables: list[_Table] = [_Table((i,), costs) for i, costs in enumerate(network.unary)]
    tables += [_Table((edge.first, edge.second), edge.costs) for edge in network.edges]
    of_variable: list[list[_Table]] = [[] for _ in network.unary]
    place = {variable: number for number, variable in enumerate(order.variables)}
    for table in tables:
        of_variable[min(table.scope, key=place.__getitem__)].append(table)
    value = network.constant
    for variable in order.variables:
        left = _minimum(variable, of_variable[variable], network.sizes)
        if left.scope:
            of_variable[min(left.scope, key=place.__getitem__)].append(left)
        else:
            value += float(left.costs)
    if not math.isfinite(value):
        return Elimination(fits=True, assignment=(), value=math.inf, order=order)
    assignment = [-1] * len(network.unary)
    for variable in reversed(order.variables):
        costs = sum(_row(table, variable, assignment) for table in of_variable[variable])
        assignment[variable] = int(np.argmin(costs))
    return Elimination(
        fits=True,
        assignment=tuple(assignment),
        value=network.value(assignment),
        order=order,
    )


def _row(table: _Table, variable: int, assignment: Sequence[int]) -> Floats:
    """Costs of the states of `variable` where all others are assigned."""
    index = tuple(slice(None) if item == variable else assignment[item] for item in table.scope)
    return table.costs[index]


def _minimum(variable: int, tables: Sequence[_Table], sizes: Sequence[int]) -> _Table:
    """All tables of a variable joined, and the variable minimised out."""
    scope = tuple(sorted({item for table in tables for item in table.scope} - {variable}))
    axes = (*scope, variable)
    views = [_spread(table, axes) for table in tables]
    shape = tuple(sizes[item] for item in scope)
    total = math.prod(shape) * sizes[variable]
    if not scope or total <= _CHUNK:
        return _Table(scope, np.asarray(_join(views)).min(axis=-1))
    found = np.empty(shape)
    rows = max(1, _CHUNK * shape[0] // total)
    for start in range(0, shape[0], rows):
        part = [view[start : start + rows] if view.shape[0] > 1 else view for view in views]
        found[start : start + rows] = _join(part).min(axis=-1)
    return _Table(scope, found)


def _spread(table: _Table, axes: tuple[int, ...]) -> Floats:
    """Costs with an axis for each of `axes`, of size 1 where the table does not mention it."""
    place = {variable: number for number, variable in enumerate(table.scope)}
    costs = table.costs.transpose([place[axis] for axis in axes if axis in place])
    index = tuple(slice(None) if axis in place else None for axis in axes)
    return costs[index]


def _join(views: Sequence[Floats]) -> Floats:
    """The sum, small ones first."""
    total: Floats = np.zeros(())
    for view in sorted(views, key=lambda item: item.size):
        total = total + view
    return total
