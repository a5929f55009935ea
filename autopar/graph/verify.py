"""Invariants of a graph."""

from __future__ import annotations

from autopar.graph.canonical import CANONICAL_AWAY
from autopar.graph.ir import ITEM_BYTES, Graph, Input, Node, Value
from autopar.graph.mutations import is_inplace


class GraphError(AssertionError):
    """A pass of autopar made a malformed graph."""


def verify(graph: Graph, *, canonical: bool = True) -> None:
    """Check the invariants of `graph`.

    Every value is assigned once, used after it is made, and has a known dtype and non-negative
    sizes; every output names a value; inputs and buffer outputs have distinct targets.

    Args:
        graph: The graph.
        canonical: Check also that no operator mutates or has another canonical spelling.

    Raises:
        GraphError: With the first violation and where it is.
    """
    made: set[str] = set()
    good: set[int] = set()
    ops: set[str] = set()
    targets: set[tuple[str, str]] = set()
    for item in graph.inputs:
        _define(item.value, made, good, item)
        key = (item.kind, item.target)
        if key in targets:
            raise GraphError(f"two inputs are the {item.kind} '{item.target}'")
        targets.add(key)
    for node in graph.nodes:
        for name in node.operands:
            if name not in made:
                raise GraphError(f"{node.name} ({node.op}) uses %{name} before it is made")
        for value in node.outputs:
            _define(value, made, good, node)
        if node.outputs and node.outputs[0].name != node.name:
            raise GraphError(f"{node.name} ({node.op}) is not named after its first result")
        if node.op not in ops:
            if canonical and (is_inplace(node.op) or node.op in CANONICAL_AWAY):
                raise GraphError(f"{node.name} calls {node.op}, which is not canonical")
            ops.add(node.op)
    _verify_outputs(graph, made)


def _define(value: Value, made: set[str], good: set[int], maker: Node | Input) -> None:
    """Note that a value is made, once and with a sound spec; `good` holds ids of sound specs."""
    if value.name in made:
        raise GraphError(f"%{value.name} is made twice, again by {_place(maker)}")
    made.add(value.name)
    if id(value.spec) in good:
        return
    where = _place(maker)
    if value.spec.dtype not in ITEM_BYTES:
        raise GraphError(f"%{value.name} has unknown dtype {value.spec.dtype}, in {where}")
    if any(size < 0 for size in value.spec.shape):
        raise GraphError(f"%{value.name} has a negative size in {value.spec}, in {where}")
    if value.spec.requires_grad and not value.spec.is_floating:
        raise GraphError(f"%{value.name} of dtype {value.spec.dtype} cannot require a gradient")
    good.add(id(value.spec))


def _place(maker: Node | Input) -> str:
    if isinstance(maker, Input):
        return f"input '{maker.target}'"
    return f"{maker.name} ({maker.op})"


def _verify_outputs(graph: Graph, made: set[str]) -> None:
    buffers = {item.target: item.value.spec for item in graph.inputs if item.kind == "buffer"}
    seen: set[tuple[str, str]] = set()
    for item in graph.outputs:
        if item.value is not None and item.value not in made:
            raise GraphError(f"output {item.target!r} names %{item.value}, which nothing makes")
        if (item.kind, item.target) in seen:
            raise GraphError(f"two outputs are the {item.kind} output {item.target!r}")
        seen.add((item.kind, item.target))
        if item.kind == "buffer":
            spec = buffers.get(item.target)
            if spec is None or item.value is None:
                raise GraphError(f"buffer output '{item.target}' belongs to no buffer")
            new = graph.spec(item.value)
            if (new.shape, new.dtype) != (spec.shape, spec.dtype):
                raise GraphError(f"buffer '{item.target}' is {spec} but becomes {new}")
