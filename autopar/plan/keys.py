"""Names of ops that people can write and that stay when the rest of a model changes."""

from __future__ import annotations

from collections import Counter

from autopar.graph.ir import Graph


def op_keys(graph: Graph) -> tuple[str, ...]:
    """A stable key per node: module path, op and ordinal, e.g. ``layers.0.mlp/aten.relu#1``."""
    seen: Counter[str] = Counter()
    keys = []
    for node in graph.nodes:
        base = f"{node.module}/{node.op}"
        keys.append(f"{base}#{seen[base]}")
        seen[base] += 1
    return tuple(keys)
