"""Which part of backward only gradients of parameters wait for."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autopar.runtime.programs import kinds
from autopar.runtime.programs.program import Joint, Slot

aten = torch.ops.aten

_MASK = 10  # the argument of convolution_backward that says which results are wanted
_MANY = Slot("output", "several")


def weight_nodes(joint: Joint) -> frozenset[fx.Node]:
    """Backward nodes that lead to exactly one gradient of a parameter and to nothing else.

    "All that no input gradient needs" would take the whole backward of a stage without inputs; what
    several gradients share stays in backward (zero-bubble pipelines: Qi et al., arXiv:2401.10241).
    The backward of a convolution that gives no input gradient counts as one although it gives two,
    weight and bias.
    """
    nodes = [node for node in joint.calls() if not joint.is_forward(node)]
    leads: dict[fx.Node, Slot] = {}

    def add(node: fx.Node, slot: Slot) -> None:
        leads[node] = slot if leads.get(node, slot) == slot else _MANY

    for slot, node in joint.output_nodes().items():
        add(node, slot if slot.kind == "gradient" else _MANY)
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        slot = leads.setdefault(node, _MANY)  # else a collective that nothing reads here
        if slot != _MANY or _gives_only_weights(node, found):
            found.add(node)
        for source in node.all_input_nodes:
            add(source, slot)
    # What only picks or views a result of an earlier program is made there.
    for node in nodes:
        picks = node.target is operator.getitem or kinds.is_view_node(node)
        if picks and not any(source in found for source in node.all_input_nodes):
            found.discard(node)
    return frozenset(found)


def _gives_only_weights(node: fx.Node, found: set[fx.Node]) -> bool:
    if node.target is not aten.convolution_backward.default or node.args[_MASK][0]:  # type: ignore[index]
        return False
    return bool(node.users) and all(user in found for user in node.users)


def separate_convolutions(joint: Joint) -> Joint:
    """A copy in which the backward of a convolution for its input and for its weights are two."""
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    weights: dict[fx.Node, fx.Node] = {}
    for node in joint.graph.nodes:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and source in weights and node.args[1] != 0:
            made = graph.call_function(operator.getitem, (weights[source], node.args[1]))
            made.meta = dict(node.meta)
        else:
            made = graph.node_copy(node, env.__getitem__)
        env[node] = made
        if node.target is aten.convolution_backward.default:
            mask = list(node.args[_MASK])
            if mask[0] and any(mask[1:]):
                weights[node] = _wanting(graph, made, [False, *mask[1:]])
                env[node] = _wanting(graph, made, [True, False, False])
                graph.erase_node(made)
    return Joint(
        name=joint.name,
        graph=graph,
        inputs=joint.inputs,
        outputs=joint.outputs,
        num_forward=joint.num_forward,
        absent=joint.absent,
        estimated=joint.estimated,
    )


def _wanting(graph: fx.Graph, node: fx.Node, mask: list[bool]) -> fx.Node:
    """The same call for some of its results."""
    target: Any = node.target
    made = graph.call_function(target, (*node.args[:_MASK], mask), dict(node.kwargs))
    pairs = zip(node.meta["val"], mask, strict=True)
    made.meta = {**node.meta, "val": tuple(value if wanted else None for value, wanted in pairs)}
    return made
