"""How much work an op is: an estimate for balancing stages, from shapes alone."""

from __future__ import annotations

import math

from autopar.graph.ir import Graph, Node
from autopar.graph.views import VIEWS
from autopar.sharding.factors import Factors
from autopar.sharding.rule import OpRule

FLOPS_PER_BYTE = 20
"""Operations that take as long as moving one byte: between a CPU core's and a GPU's ratio."""

_CONTRACTIONS = frozenset(
    (
        "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "bilinear", "einsum", "dot", "mv",
        "addmv", "vdot", "inner", "tensordot", "_grouped_mm", "grouped_mm_fallback",
        "grouped_mm",
    )
)  # fmt: skip
_LOOKUPS = frozenset(("embedding", "index", "index_select", "gather"))


def _base(node: Node) -> str:
    return node.op.split(".")[1]


def is_matmul(node: Node) -> bool:
    """Whether an op multiplies matrices, so that its work outgrows its bytes."""
    name = _base(node)
    return name in _CONTRACTIONS or name.startswith(("conv", "scaled_dot_product"))


def node_cost(graph: Graph, node: Node, rule: OpRule | None) -> int:
    """Estimated work of one op, in floating point operations.

    Matrix products count 2·m·n·k, views nothing, everything else the bytes it reads and makes;
    a look-up only what it makes.

    Args:
        graph: The graph.
        node: One of its nodes.
        rule: Its sharding rule, which knows what is contracted.
    """
    if node.op in VIEWS:
        return 0
    name = _base(node)
    shapes = [graph.spec(operand).shape for operand in node.operands]
    made = node.outputs[0].spec if node.outputs else None
    if made is not None and name.startswith("conv") and len(shapes) > 1:
        transposed = "transpose" in name
        spread = math.prod(shapes[0]) if transposed else made.numel
        return 2 * spread * math.prod(shapes[1][1:])
    if made is not None and name.startswith("scaled_dot_product") and len(shapes) > 2:
        return 2 * made.numel * shapes[1][-2] + 2 * math.prod(shapes[0]) * shapes[1][-2]
    if name in _CONTRACTIONS and rule is not None:
        return 2 * math.prod(letter.size for letter in rule.letters)
    sizes = sum(value.spec.size_bytes for value in node.outputs)
    if name not in _LOOKUPS:
        sizes += sum(graph.spec(operand).size_bytes for operand in node.operands)
    return FLOPS_PER_BYTE * sizes


def node_costs(graph: Graph, factors: Factors) -> list[int]:
    """`node_cost` of every node."""
    return [
        node_cost(graph, node, rule) for node, rule in zip(graph.nodes, factors.rules, strict=True)
    ]
