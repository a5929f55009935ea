"""Cut a joint graph into forward, backward and weight-gradient programs.

Forward keeps what it computed while it was traced. Backward reads primal inputs anew and gets
everything else as ``saved`` values, or computes it again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.runtime.programs import kinds
from autopar.runtime.programs.dce import eliminate_dead
from autopar.runtime.programs.program import Joint, Program, Slot
from autopar.runtime.programs.weights import separate_convolutions, weight_nodes

# Inputs that backward is given again; the others (what another stage sent, a version of a buffer)
# belong to one microbatch, so forward passes them on.
_GIVEN_AGAIN = frozenset(
    ("parameter", "shard", "constant", "input", "seed", "microbatch", "prologue")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """What one stage runs for a microbatch.

    Attributes:
        forward: Outputs are those of the stage, then what is ``saved`` for the others.
        backward: Takes saved values and tangents; gives ``input_gradient``, ``gradient`` and, if
            there is a weight program, what is ``saved`` for it.
        weight: Gives gradients of parameters that nothing else waits for; None if not asked for.
    """

    forward: Program
    backward: Program
    weight: Program | None

    def all(self) -> tuple[Program, ...]:
        """The programs in the order in which they run."""
        every = (self.forward, self.backward, self.weight)
        return tuple(program for program in every if program is not None)


class _Part:
    """A program under construction: nodes are pulled in when something reads them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.inputs: dict[Slot, fx.Node] = {}
        # Inputs found late still go in front.
        self.mark = self.graph.placeholder("mark")

    def input(self, node: fx.Node, slot: Slot) -> fx.Node:
        """The placeholder for `node`."""
        if slot not in self.inputs:
            with self.graph.inserting_before(self.mark):
                made = self.graph.placeholder(node.name)
            made.meta = {key: value for key, value in node.meta.items() if key != "phase"}
            self.inputs[slot] = made
        return self.inputs[slot]

    def copy(self, node: fx.Node) -> fx.Node:
        """Compute `node` here; what it reads must be here."""
        made = self.graph.node_copy(node, self.env.__getitem__)
        self.env[node] = made
        return made

    def finish(self, name: str, outputs: Iterable[tuple[Slot, fx.Node]]) -> Program:
        """The program that returns nodes of the joint graph."""
        pairs = list(outputs)
        self.graph.output(tuple(self.env[node] for _, node in pairs))
        self.graph.erase_node(self.mark)
        return Program(
            name=name,
            graph=self.graph,
            inputs=tuple(self.inputs),
            outputs=tuple(slot for slot, _ in pairs),
        )


class _Split:
    """State of one cut."""

    def __init__(self, joint: Joint, recompute: Collection[str]) -> None:
        self.joint = joint
        self.recompute = frozenset(recompute)
        self.slots = {node: slot for slot, node in joint.input_nodes().items()}
        self.index = {node: i for i, node in enumerate(joint.graph.nodes)}
        self.results = joint.output_nodes()
        self.saved: set[fx.Node] = set()  # by forward
        self.handed: set[fx.Node] = set()  # by backward for weight

    def in_order(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.index.__getitem__)

    def forward_results(self) -> list[tuple[Slot, fx.Node]]:
        return [(slot, self.results[slot]) for slot in self.joint.forward_outputs]

    def is_saved(self, node: fx.Node) -> bool:
        """Whether a forward value is kept instead of computed again."""
        if kinds.is_random(node):
            return True
        if kinds.is_view_node(node) or not node.all_input_nodes:
            return False  # costs nothing, or is made of nothing
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            return self.is_saved(source)
        return node.meta.get("origin") not in self.recompute

    def resolve_forward(self, part: _Part, node: fx.Node) -> bool:
        """Bring a forward value into a later part as an input, unless it must be computed."""
        slot = self.slots.get(node)
        if slot is not None and (slot.kind in _GIVEN_AGAIN or slot.kind == "tangent"):
            part.env[node] = part.input(node, slot)
        elif slot is not None or self.is_saved(node):
            self.saved.add(node)
            part.env[node] = part.input(node, Slot("saved", node.name))
        else:
            return False
        return True

    def pull(self, part: _Part, node: fx.Node, resolve: Callable[[_Part, fx.Node], bool]) -> None:
        """Bring what `node` reads into `part`, computing again what is not saved, in order."""
        missing: set[fx.Node] = set()
        pending = [source for source in node.all_input_nodes if source not in part.env]
        while pending:
            source = pending.pop()
            if source in part.env or source in missing or resolve(part, source):
                continue
            missing.add(source)
            pending += source.all_input_nodes
        for source in self.in_order(missing):
            part.copy(source)


def _forward(split: _Split, joint: Joint) -> Program:
    part = _Part()
    for node in joint.graph.nodes:
        slot = split.slots.get(node)
        if slot is not None and slot.kind != "tangent":
            part.env[node] = part.input(node, slot)
        elif node.op == "call_function" and joint.is_forward(node):
            part.copy(node)
    outputs = split.forward_results()
    outputs += [(Slot("saved", node.name), node) for node in split.in_order(split.saved)]
    program = part.finish(f"{joint.name} forward", outputs)
    eliminate_dead(program.graph)
    return _without_unread(program)


def _without_unread(program: Program) -> Program:
    """Drop inputs that nothing reads."""
    kept = []
    for slot, node in program.input_nodes().items():
        if node.users:
            kept.append(slot)
        else:
            program.graph.erase_node(node)
    program.inputs = tuple(kept)
    program.validate()
    return program


def _later(
    state: _Split,
    nodes: Iterable[fx.Node],
    outputs: Iterable[tuple[Slot, fx.Node]],
    resolve: Callable[[_Part, fx.Node], bool],
) -> _Part:
    """A part that computes `nodes` and whatever else they and `outputs` need."""
    part = _Part()
    for node in nodes:
        state.pull(part, node, resolve)
        part.copy(node)
    for _, node in outputs:
        if node not in part.env and not resolve(part, node):
            state.pull(part, node, resolve)
            part.copy(node)
    return part


def split(joint: Joint, *, recompute: Collection[str] = (), weight: bool = False) -> Programs:
    """Cut a joint graph; it is left as it is.

    Forward is what was traced in forward, so a mask that a custom function made there for its
    backward stays there. Every view is made again from what it is a view of, so that few distinct
    tensors are saved; random ops without a key of their own are never run twice.

    Args:
        joint: Forward and backward.
        recompute: Origins whose values backward computes again, right before it first reads them,
            instead of keeping them. Collectives among them run again too, in the order of `joint`.
        weight: Make a program of its own of the nodes that lead to exactly one gradient of a
            parameter.

    Returns:
        The programs. A ``saved`` slot bears the name of its node in `joint`.
    """
    if weight:
        joint = separate_convolutions(joint)
    state = _Split(joint, recompute)
    own = joint.outputs[joint.num_forward :]
    results = [(slot, state.results[slot]) for slot in own]
    nodes = [node for node in joint.calls() if not joint.is_forward(node)]
    late = weight_nodes(joint) if weight else frozenset[fx.Node]()
    early_results = [(slot, node) for slot, node in results if node not in late]
    early = [node for node in nodes if node not in late]
    part = _later(state, early, early_results, state.resolve_forward)
    weight_program = None
    if weight:
        late_results = [(slot, node) for slot, node in results if node in late]
        weight_program = _weight(state, joint, part, [n for n in nodes if n in late], late_results)
    early_results += [(Slot("saved", node.name), node) for node in state.in_order(state.handed)]
    backward = part.finish(f"{joint.name} backward", early_results)
    return Programs(forward=_forward(state, joint), backward=backward, weight=weight_program)


def _weight(
    state: _Split,
    joint: Joint,
    backward: _Part,
    nodes: list[fx.Node],
    results: list[tuple[Slot, fx.Node]],
) -> Program:
    def hand(part: _Part, node: fx.Node) -> bool:
        state.handed.add(node)
        part.env[node] = part.input(node, Slot("saved", node.name))
        return True

    def resolve(part: _Part, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            source: Any = node.args[0]
            made = backward.env.get(source)
            if made is not None and made.op != "placeholder" and not kinds.is_view_node(source):
                # What is handed over is one tensor, never several together.
                if node not in backward.env:
                    backward.copy(node)
                return hand(part, node)
        if node in state.slots or kinds.is_view_node(node):
            return node in state.slots and state.resolve_forward(part, node)
        here = backward.env.get(node)
        if here is None or here.op == "placeholder":
            # Not made by backward: from forward, or computed again here.
            return state.resolve_forward(part, node)
        return hand(part, node)

    part = _later(state, nodes, results, resolve)
    return part.finish(f"{joint.name} weight gradients", results)
