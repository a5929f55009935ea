"""Dead code."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from autopar.runtime.programs import kinds


def eliminate_dead(
    graph: fx.Graph, keep: Callable[[fx.Node], bool] = kinds.has_effect
) -> list[fx.Node]:
    """Erase calls that nothing reads; collectives and writes stay.

    Args:
        graph: Changed in place; inputs stay.
        keep: Calls to keep although nothing reads them.

    Returns:
        The erased nodes, last first.
    """
    erased = []
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not keep(node):
            graph.erase_node(node)
            erased.append(node)
    return erased
