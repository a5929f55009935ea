"""The ops of one period of a model: equal layers are one, and everything in them counts.

Copies of a repeated block are tied: all take the same choices, so that the loop from a layer to
the next is closed. An op of a block stands for as many calls as there are copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.cost_models.layout import Layout, Placement
from autopar.graph.ir import Node, TensorSpec
from autopar.plan.stages import input_only

ClassKey = tuple[int, int]
"""An op: block and place in it, or -1 and its index in the folded graph."""


@dataclass(frozen=True, slots=True)
class Use:
    """An operand.

    Attributes:
        op: Number of the op.
        slot: Which of its operands.
        count: How many calls of the model use a value there.
    """

    op: int
    slot: int
    count: int


@dataclass(slots=True, kw_only=True)
class Tied:
    """An op of the period.

    Attributes:
        index: Its index in the folded graph: that of the second copy, if there are several.
        node: The call.
        count: Calls that it stands for.
        fixed: Whether it only depends on inputs, so that the plan's choice stays.
        members: Indexes of all its nodes in the folded graph.
    """

    index: int
    node: Node
    count: int
    fixed: bool
    members: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Made:
    """A value that ops make, or a parameter.

    Attributes:
        name: Of the value, in the second copy if there are several.
        spec: Global shape and dtype.
        count: How many values it stands for.
        op: Number of the op that makes it, -1 for a parameter.
        slot: Which of its outputs.
        uses: Who takes it.
    """

    name: str
    spec: TensorSpec
    count: int
    op: int = -1
    slot: int = 0
    uses: list[Use] = field(default_factory=list)

    @property
    def shared(self) -> bool:
        """Whether several take it."""
        return len(self.uses) > 1 or any(use.count > self.count for use in self.uses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Period:
    """One period of a model.

    Attributes:
        ops: Its ops in order.
        values: What they make and is used.
        parameters: What they are given to train.
        of_node: Number of the op of every node of the folded graph, -1 for what nobody needs.
    """

    ops: tuple[Tied, ...]
    values: tuple[Made, ...]
    parameters: tuple[Made, ...]
    of_node: tuple[int, ...]


def period_of(placement: Placement, loss: str | None) -> Period:
    """The period of a placed model.

    Args:
        placement: A plan's placement; its layout says which layers are equal.
        loss: Name of the loss, None for a graph without.
    """
    layout = placement.layout
    graph = layout.folded
    needed = _needed(layout, loss)
    fixed = input_only(graph)
    ops: list[Tied] = []
    numbers: dict[ClassKey, int] = {}
    of_node = [-1] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        if index not in needed:
            continue
        key, count, second = _key(layout, index)
        number = numbers.setdefault(key, len(ops))
        if number == len(ops):
            ops.append(Tied(index=index, node=node, count=0, fixed=index in fixed))
        tied = ops[number]
        tied.count += count
        tied.members.append(index)
        if second:
            tied.index, tied.node = index, node
        of_node[index] = number
    values, parameters = _values(layout, ops, of_node)
    return Period(ops=tuple(ops), values=values, parameters=parameters, of_node=tuple(of_node))


def _key(layout: Layout, index: int) -> tuple[ClassKey, int, bool]:
    """Which op a node belongs to, for how many calls it stands, whether it is a second copy's."""
    member = layout.members.get(layout.positions[layout.folded.nodes[index].name])
    if member is None:
        return (-1, index), 1, False
    second = member.copy == 1
    count = layout.blocks[member.block].count - 2 if second else 1
    return (member.block, member.place), count, second


def _needed(layout: Layout, loss: str | None) -> frozenset[int]:
    graph = layout.folded
    wanted: set[str | None] = {out.value for out in graph.outputs if out.kind == "buffer"}
    wanted.update([loss] if loss is not None else [out.value for out in graph.outputs])
    found = set()
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if any(value.name in wanted for value in node.outputs):
            found.add(index)
            wanted.update(node.operands)
    return frozenset(found)


def _tied_inputs(layout: Layout) -> Mapping[str, str]:
    """Parameters of the first and the last copy of a block to that of the second."""
    found: dict[str, str] = {}
    for block in layout.blocks:
        for first, second, last in zip(
            block.inputs[0], block.inputs[1], block.inputs[-1], strict=True
        ):
            if layout.kinds.get(second) == "parameter" and first != second:
                found[first] = found[last] = second
    return found


def _values(
    layout: Layout, ops: list[Tied], of_node: list[int]
) -> tuple[tuple[Made, ...], tuple[Made, ...]]:
    graph = layout.folded
    like = _tied_inputs(layout)
    parameters: dict[str, Made] = {}
    values: dict[tuple[int, int], Made] = {}
    of_value: dict[str, Made] = {}
    for item in graph.parameters():
        name = like.get(item.value.name, item.value.name)
        made = parameters.setdefault(name, Made(name=name, spec=item.value.spec, count=0))
        of_value[item.value.name] = made
    counts: dict[tuple[str, int, int], int] = {}
    for index, node in enumerate(graph.nodes):
        number = of_node[index]
        if number < 0:
            continue
        count = _key(layout, index)[1]
        for slot, name in enumerate(node.operands):
            if name in of_value and node.operands.index(name) == slot:
                key = (of_value[name].name, number, slot)
                counts[key] = counts.get(key, 0) + count
        for slot, value in enumerate(node.outputs):
            tied = ops[number]
            own = tied.node.outputs[slot].name
            made = values.setdefault(
                (number, slot),
                Made(name=own, spec=value.spec, count=tied.count, op=number, slot=slot),
            )
            of_value[value.name] = made
    known = {made.name: made for made in (*parameters.values(), *values.values())}
    for (name, number, slot), count in counts.items():
        known[name].uses.append(Use(number, slot, count))
    for name, made in parameters.items():
        copies = max((use.count for use in made.uses), default=1)
        made.count = copies if name in like.values() else 1
    return (
        tuple(made for made in values.values() if made.uses),
        tuple(made for made in parameters.values() if made.uses),
    )
