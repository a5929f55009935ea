"""Candidates for stages that consist of the same units: looked at once.

Models repeat, and so do the intervals of their units: of a hundred equal layers, stages of eight
layers are all alike wherever they begin. What a stage takes, and can keep, is worked out for one of
each kind; where it begins counts only for what lies before and behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.search.states import Parameters

if TYPE_CHECKING:
    from autopar.search.tables import UnitTable

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Intervals of units, and which of them are alike.

    Attributes:
        start: First unit of every interval, shape (K,).
        stop: Unit behind its last, shape (K,).
        first: Number of the first interval of each kind, shape (C,).
        kind: Kind of every interval, shape (K,).
    """

    start: Ints
    stop: Ints
    first: Ints
    kind: Ints


def unit_kinds(table: UnitTable, blocks: Ints, parameters: Parameters) -> Ints:
    """A number for every unit, equal for units that take and hold the same.

    Args:
        table: What units take.
        blocks: Number of the block that a unit is a copy of, shape (units,).
        parameters: Those of the model. Units that share some are each of their own kind.
    """
    count = len(blocks)
    each = np.stack(parameters.bytes_of(table))
    order = np.lexsort((*each, parameters.first))
    held = np.ascontiguousarray(each[:, order].T)
    ends = np.searchsorted(parameters.first[order], np.arange(count + 1))
    shared = {unit for _, before, user in parameters.later for unit in (before, user)}
    columns = np.concatenate(
        [
            table.seconds.reshape(-1, count), table.saved_bytes, table.late_bytes,
            table.working_bytes,
            table.edge_bytes[None], blocks[None],
        ]
    )  # fmt: skip
    known: dict[object, int] = {}
    found = []
    for unit, column in enumerate(np.ascontiguousarray(columns.T)):
        own = unit if unit in shared else -1
        key = (column.tobytes(), held[ends[unit] : ends[unit + 1]].tobytes(), own)
        found.append(known.setdefault(key, len(known)))
    return np.array(found)


def grid_of(kinds: Ints, start: Ints, stop: Ints) -> Grid:
    """Intervals, those alike that lie within a run of units of one kind and are equally long.

    Args:
        kinds: See `unit_kinds`.
        start: First unit of every interval.
        stop: Unit behind its last.
    """
    count = len(kinds)
    run = np.concatenate(([0], np.cumsum(kinds[1:] != kinds[:-1])))
    inside = run[start] == run[stop - 1]
    own = np.where(inside, kinds[start] - count, start)
    _, first, kind = np.unique(
        own * (count + 1) + np.where(inside, stop - start, stop),
        return_index=True, return_inverse=True,
    )  # fmt: skip
    return Grid(start, stop, first, kind)
