"""Units: the pieces of a model between the places where stages may be cut.

A cut lies on a border of a repeated block (`autopar.plan.cuts.borders`), or, where a model repeats
little, where a module ends. Units that are copies of one block may also differ in what backward
computes again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost_models.layout import Layout
from autopar.graph.ir import Graph
from autopar.plan.cuts import borders
from autopar.plan.keys import op_keys
from autopar.plan.stages import forbidden_places, staged_nodes

FEW = 8
"""With fewer borders of blocks than this, ends of modules are borders, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """A model cut at every place where it may be.

    Attributes:
        graph: The model.
        nodes: For every unit the indexes of its nodes, ascending.
        starts: Key of the first op of every unit.
        block: For every unit the number of the repeated block that it is a copy of, -1 for none.
        unit_of: Unit of every node, by index; -1 for what every stage computes for itself.
        users: For every parameter, by value name, the units that use it, ascending.
        taken: For every unit the values that it takes from the one before it.
    """

    graph: Graph
    nodes: tuple[tuple[int, ...], ...]
    starts: tuple[str, ...]
    block: tuple[int, ...]
    unit_of: tuple[int, ...]
    users: dict[str, tuple[int, ...]]
    taken: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """Number of units."""
        return len(self.nodes)

    @classmethod
    def of(cls, layout: Layout) -> Units:
        """The units of a model."""
        graph = layout.graph
        staged = staged_nodes(graph)
        edges = (0, *_places(graph, staged), len(staged))
        keys = op_keys(graph)
        unit_of = [-1] * len(graph.nodes)
        nodes = []
        for number, (low, high) in enumerate(itertools.pairwise(edges)):
            nodes.append(tuple(staged[low:high]))
            for index in staged[low:high]:
                unit_of[index] = number
        block = tuple(_block_of(layout, mine) for mine in nodes)
        users: dict[str, dict[int, None]] = {item.value.name: {} for item in graph.parameters()}
        for index, node in enumerate(graph.nodes):
            for name in node.operands:
                if name in users and unit_of[index] >= 0:
                    users[name][unit_of[index]] = None
        return cls(
            graph=graph,
            nodes=tuple(nodes),
            starts=tuple(keys[mine[0]] for mine in nodes),
            block=block,
            unit_of=tuple(unit_of),
            users={name: tuple(sorted(found)) for name, found in users.items()},
            taken=_taken(graph, nodes, unit_of),
        )


def _taken(
    graph: Graph, nodes: Sequence[tuple[int, ...]], unit_of: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    made = {
        value.name: unit
        for node, unit in zip(graph.nodes, unit_of, strict=True)
        for value in node.outputs
    }
    found = []
    for unit, mine in enumerate(nodes):
        names = dict.fromkeys(name for index in mine for name in graph.nodes[index].operands)
        found.append(tuple(name for name in names if unit and made.get(name) == unit - 1))
    return tuple(found)


def _places(graph: Graph, staged: tuple[int, ...]) -> tuple[int, ...]:
    forbidden = forbidden_places(graph, staged)
    found = {place for place in borders(graph, staged) if place not in forbidden}
    if len(found) < FEW:
        found |= {place for place in _module_ends(graph, staged) if place not in forbidden}
    return tuple(sorted(found))


def _module_ends(graph: Graph, staged: tuple[int, ...]) -> list[int]:
    """Places where the path of the two outermost modules changes."""

    def top(place: int) -> tuple[str, ...]:
        return tuple(graph.nodes[staged[place]].module.split(".")[:2])

    return [place for place in range(1, len(staged)) if top(place) != top(place - 1)]


def _block_of(layout: Layout, nodes: tuple[int, ...]) -> int:
    """Number of the folded block of which `nodes` are a whole copy, -1 if they are not."""
    members = [layout.members.get(index) for index in nodes]
    first = members[0] if members else None
    if first is None or any(
        item is None or (item.block, item.copy) != (first.block, first.copy) for item in members
    ):
        return -1
    return first.block if len(nodes) == layout.blocks[first.block].size else -1
