"""Plans whose ops do not follow the strategy."""

from __future__ import annotations

from autopar.cost_models.layout import Layout
from autopar.graph.ir import Graph
from autopar.plan.build import apply_plan, make_plan
from autopar.plan.keys import op_keys
from autopar.plan.plan import Plan
from autopar.search.op_search import with_overrides
from autopar.sharding.mesh import Mesh


def split_across(graph: Graph, mesh: str, constraints: str, ops: str) -> Plan:
    """A plan that splits the batch over tp instead of dp for ops with `ops` in their key."""
    plan, _ = make_plan(graph, Mesh.parse(mesh), constraints)
    sharded = apply_plan(plan, graph)
    dp, tp = (sharded.mesh.names.index(name) for name in ("dp", "tp"))
    found: dict[str, tuple[str, ...]] = {}
    for key, picked in zip(op_keys(graph), sharded.choices, strict=True):
        if ops in key:
            words = [str(choice) for choice in picked]
            assert words[dp].startswith("batch"), (key, words)
            words[dp], words[tp] = "replicate", words[dp]
            found[key] = tuple(words)
    assert found, ops
    return with_overrides(Layout.of(graph), plan, found)
