"""Which groups of ranks a plan communicates in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations

from autopar.sharding.placement import REPLICATE, Pair, Placements
from autopar.sharding.reshard import plan_steps
from autopar.sharding.sharded import ShardedGraph, replicated

Axes = tuple[int, ...]


def summed_axes(pair: Pair, time: int | None = None) -> Axes:
    """Axes, but for that of the microbatches, along which a parameter's gradient is summed."""
    both = enumerate(zip(pair.gradient, pair.forward, strict=True))
    return tuple(axis for axis, (have, want) in both if have != want and axis != time)


def copied_axes(pair: Pair, time: int | None = None) -> Axes:
    """Axes, but for that of the microbatches, along which ranks hold copies of a parameter."""
    return tuple(a for a, held in enumerate(pair.forward) if held == REPLICATE and a != time)


def used_axes(sharded: ShardedGraph, time: int | None, divided: Axes = ()) -> set[Axes]:
    """Sets of mesh axes along which some collective of a sharded graph runs.

    Args:
        sharded: The graph.
        time: Index of the microbatch axis, along which nothing is sent.
        divided: Axes over which ZeRO divides.

    Returns:
        Sets of indices, ascending, none empty.
    """
    found: set[Axes] = set()
    pairs, whole = sharded.pairs(), replicated(sharded.mesh)
    for node, call, picked in zip(sharded.graph.nodes, sharded.calls, sharded.choices, strict=True):
        for name, want in zip(node.operands, call.operands, strict=True):
            have = pairs[name]
            if have != want:
                found.update(_steps(have.forward, want.forward))
                found.update(_steps(want.gradient, have.gradient))
        # Special lowerings reduce over what splits some of their letters.
        split = [axis for axis, choice in enumerate(picked) if choice.unit is not None]
        found.update(_subsets(split))
    for out in sharded.graph.outputs:
        if out.value is not None:
            found.update(_steps(pairs[out.value].forward, whole.forward))
    for item in sharded.graph.parameters():
        pair = sharded.inputs[item.value.name]
        summed = summed_axes(pair)
        found.update(_steps(pair.forward, whole.forward))
        found.add(summed)
        found.add(tuple(axis for axis in summed if axis in divided))
        found.add(tuple(axis for axis in summed if axis not in divided))
        found.add(copied_axes(pair))
    found = {tuple(axis for axis in axes if axis != time) for axes in found}
    return found - {()}


def _steps(source: Placements, target: Placements) -> Iterator[Axes]:
    return (tuple(sorted(step.axes)) for step in plan_steps(source, target))


def _subsets(axes: Iterable[int]) -> Iterator[Axes]:
    known = tuple(axes)
    return chain.from_iterable(combinations(known, n) for n in range(1, len(known) + 1))
