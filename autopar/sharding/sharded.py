"""A graph with a choice for every op: placements of every value, complete and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.graph.ir import Graph
from autopar.sharding.choices import CallPlacement, Choices, fits, place_call
from autopar.sharding.factors import Factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Pair,
    Placement,
    Placements,
    Shard,
    legal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedGraph:
    """What `lower` needs: the graph and how every value of it lies on the mesh.

    Attributes:
        graph: The canonical graph.
        factors: Its rules and units.
        mesh: The mesh of (prime) sub-axes.
        choices: One choice per axis for every node.
        calls: Pairs of operands and outputs of every node.
        inputs: Pair in which each graph input is held. For parameters this is how they are
            stored; a Partial gradient is reduced once per step.
    """

    graph: Graph
    factors: Factors
    mesh: Mesh
    choices: tuple[Choices, ...]
    calls: tuple[CallPlacement, ...]
    inputs: dict[str, Pair]

    def pairs(self) -> dict[str, Pair]:
        """Pair of every value where it is made."""
        found = dict(self.inputs)
        for node, call in zip(self.graph.nodes, self.calls, strict=True):
            found.update(
                (value.name, pair) for value, pair in zip(node.outputs, call.outputs, strict=True)
            )
        return found

    def stored(self, storage: dict[str, Placements]) -> ShardedGraph:
        """The same with parameters held otherwise, by value name."""
        return replace(self, inputs=_inputs(self.graph, self.mesh, self.calls, storage))


def replicated(mesh: Mesh) -> Pair:
    """The pair of a value that every rank holds whole, with a whole gradient."""
    everywhere = (REPLICATE,) * len(mesh.shape)
    return Pair(everywhere, everywhere)


def shard_graph(
    graph: Graph,
    factors: Factors,
    mesh: Mesh,
    choices: tuple[Choices, ...],
    storage: dict[str, Placements] | None = None,
) -> ShardedGraph:
    """Derive all placements from the choices.

    Args:
        graph: The graph.
        factors: Its factors.
        mesh: The mesh of sub-axes.
        choices: For every node one choice per axis.
        storage: How to hold parameters, by value name; derived from their uses when absent.

    Returns:
        The complete sharded graph.
    """
    known: dict[object, CallPlacement] = {}
    calls = []
    for node, rule, picked in zip(graph.nodes, factors.rules, choices, strict=True):
        key = (id(rule), picked, len(node.operands), len(node.outputs))
        if key not in known:
            assert fits(picked, mesh.shape), f"{node.name}: a unit is split too often"
            known[key] = place_call(node, rule, picked)
        calls.append(known[key])
    return ShardedGraph(
        graph=graph,
        factors=factors,
        mesh=mesh,
        choices=choices,
        calls=tuple(calls),
        inputs=_inputs(graph, mesh, calls, storage or {}),
    )


def _inputs(
    graph: Graph, mesh: Mesh, calls: Sequence[CallPlacement], storage: dict[str, Placements]
) -> dict[str, Pair]:
    """How the graph's inputs are held; parameters as `storage` says, else as their uses agree."""
    uses: dict[str, list[Pair]] = {}
    for node, call in zip(graph.nodes, calls, strict=True):
        for name, pair in zip(node.operands, call.operands, strict=True):
            uses.setdefault(name, []).append(pair)
    inputs: dict[str, Pair] = {}
    for item in graph.inputs:
        name = item.value.name
        if item.kind == "parameter":
            wanted = storage.get(name)
            inputs[name] = _storage(uses.get(name, []), mesh, item.value.spec.shape, wanted)
        else:
            inputs[name] = replicated(mesh)
    return inputs


def _storage(
    uses: list[Pair], mesh: Mesh, shape: tuple[int, ...], wanted: Placements | None
) -> Pair:
    """How to hold a parameter: as its uses agree, else whole; Partial gradients stay so."""
    forward: list[Placement] = []
    for axis in range(len(mesh.shape)):
        found = {pair.forward[axis] for pair in uses}
        agreed = found.pop() if len(found) == 1 else REPLICATE
        forward.append(agreed if isinstance(agreed, Shard) else REPLICATE)
    if wanted is not None:
        forward = list(wanted)
    if legal(tuple(forward), shape, mesh.shape) is not None:
        forward = [REPLICATE] * len(mesh.shape)
    gradient: list[Placement] = []
    for axis, placement in enumerate(forward):
        if isinstance(placement, Shard):
            gradient.append(placement)
            continue
        partial = bool(uses) and all(
            pair.forward[axis] == REPLICATE and pair.gradient[axis] == PARTIAL for pair in uses
        )
        gradient.append(PARTIAL if partial else REPLICATE)
    return Pair(tuple(forward), tuple(gradient))
