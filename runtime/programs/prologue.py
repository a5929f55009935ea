"""Sums over microbatches: hoisted where inputs alone decide them, estimated elsewhere."""

from __future__ import annotations

import re

import torch
from torch import fx

from autopar.runtime.programs import kinds, ops
from autopar.runtime.programs.dce import eliminate_dead
from autopar.runtime.programs.program import Joint, Program, Slot

aten = torch.ops.aten


def hoist_prologue(joint: Joint) -> tuple[Program | None, Joint]:
    """Take sums over microbatches that depend on inputs alone out of a stage.

    Args:
        joint: What `capture` gives; it is used up.

    Returns:
        A program that computes, for one microbatch, the summand of every such sum (output slots
        ``prologue``), or None if there is none; and the stage, which takes their totals under the
        same slots. Any other sum over microbatches becomes this microbatch's summand times their
        number; its origin is in ``estimated``. A total of bools is "any".
    """
    known = ("input", "constant", "microbatch")
    early = {node for slot, node in joint.input_nodes().items() if slot.kind in known}
    hoisted: list[fx.Node] = []
    estimated: list[fx.Node] = []
    for node in joint.calls():
        alone = all(source in early for source in node.all_input_nodes)
        if node.target is ops.MICROBATCH_SUM:
            (hoisted if alone else estimated).append(node)
        elif alone and not kinds.is_random(node):
            early.add(node)
    prologue = _prologue(joint, hoisted) if hoisted else None
    origins = _estimate(joint.graph, estimated)
    slots = tuple(Slot("prologue", node.name) for node in hoisted)
    moved = _ancestors([node.args[0] for node in hoisted])  # type: ignore[misc]
    first_call = next(iter(joint.calls()), None)
    for node, slot in zip(hoisted, slots, strict=True):
        with joint.graph.inserting_before(first_call):
            made = joint.graph.placeholder(re.sub(r"\W", "_", str(slot)))
        made.meta = {"val": node.meta["val"]}
        node.replace_all_uses_with(made)
        if node is first_call:
            first_call = node.next
        joint.graph.erase_node(node)
    eliminate_dead(joint.graph, lambda node: kinds.has_effect(node) and node not in moved)
    rest = Joint(
        name=joint.name,
        graph=joint.graph,
        inputs=(*joint.inputs, *slots),
        outputs=joint.outputs,
        num_forward=joint.num_forward,
        absent=joint.absent,
        estimated=origins,
    )
    return prologue, rest


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    """`nodes` and all that they depend on."""
    found, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _prologue(joint: Joint, sums: list[fx.Node]) -> Program:
    needed = _ancestors([node.args[0] for node in sums])  # type: ignore[misc]
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    slots = []
    for slot, node in joint.input_nodes().items():
        if node in needed:
            slots.append(slot)
    for node in joint.graph.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node.args[0]] for node in sums))  # type: ignore[index]
    return Program(
        name=f"{joint.name} prologue",
        graph=graph,
        inputs=tuple(slots),
        outputs=tuple(Slot("prologue", node.name) for node in sums),
    )


def _estimate(graph: fx.Graph, sums: list[fx.Node]) -> tuple[str, ...]:
    origins = []
    for node in sums:
        summand, count = node.args
        origins.append(node.meta.get("origin", ""))
        assert isinstance(summand, fx.Node)
        if summand.meta["val"].dtype == torch.bool:
            node.replace_all_uses_with(summand)
        else:
            with graph.inserting_before(node):
                made = graph.call_function(aten.mul.Tensor, (summand, count))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made)
        graph.erase_node(node)
    return tuple(dict.fromkeys(origins))
