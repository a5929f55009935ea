"""Which units follow one another in any case: a chain of values with gradients up to the loss.

Stages need not wait for the one before them: a stage may hold nothing but an embedding that only a
later one uses. Bounds count what the units of the chain take one after the other.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autopar.search.units import Units


def main_units(units: Units, loss: str | None) -> NDArray[np.bool_]:
    """The units of the chain with most ops: each takes a value with a gradient from the last.

    Args:
        units: All units.
        loss: Name of the loss; the chain ends where it is made.

    Returns:
        Whether each unit is one of them, shape (units,).
    """
    graph = units.graph
    made: dict[str, int] = {}
    last = units.count - 1
    for node, unit in zip(graph.nodes, units.unit_of, strict=True):
        for value in node.outputs:
            if value.spec.requires_grad and unit >= 0:
                made[value.name] = unit
            if value.name == loss and unit >= 0:
                last = unit
    length, before = [0] * units.count, [-1] * units.count
    for unit, mine in enumerate(units.nodes):
        for index in mine:
            for name in graph.nodes[index].operands:
                source = made.get(name, unit)
                if source < unit and length[source] > length[unit]:
                    length[unit], before[unit] = length[source], source
        length[unit] += len(mine)
    found = np.zeros(units.count, bool)
    while last >= 0:
        found[last] = True
        last = before[last]
    return found
