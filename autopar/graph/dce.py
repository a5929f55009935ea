"""Removal of calls and inputs that nothing needs."""

from __future__ import annotations

from dataclasses import replace

from autopar.graph.ir import Graph


def remove_dead(graph: Graph) -> Graph:
    """`graph` without calls whose results reach no output.

    Parameters, buffers and user inputs stay even when unused, since training and the caller
    own them; unused constants go.
    """
    live = {item.value for item in graph.outputs if item.value is not None}
    kept = []
    for node in reversed(graph.nodes):
        if any(value.name in live for value in node.outputs):
            kept.append(node)
            live.update(node.operands)
    inputs = tuple(
        item for item in graph.inputs if item.kind != "constant" or item.value.name in live
    )
    if len(kept) == len(graph.nodes) and len(inputs) == len(graph.inputs):
        return graph
    kept.reverse()
    return replace(graph, inputs=inputs, nodes=tuple(kept), _specs={})
