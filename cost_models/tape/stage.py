"""A stage of a sharded graph as a tape: what `autopar.runtime.lower` and `capture` make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import autopar.cost_models.ops  # noqa: F401  (registers what ops do)
from autopar.cost_models.implementation import Implementation
from autopar.cost_models.ops.call import OpCall, Rank, find, unknown
from autopar.cost_models.tape.basic import detach
from autopar.cost_models.tape.reshards import reshard
from autopar.cost_models.tape.tape import Tape
from autopar.cost_models.tape.tensors import Local, Memory, Shape
from autopar.graph.ir import Node, TensorSpec
from autopar.sharding.choices import CallPlacement, Choices
from autopar.sharding.placement import Pair
from autopar.sharding.rule import OpRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A node as a stage computes it.

    Attributes:
        node: The node; names of operands are looked up in `StageTask.alias` first.
        rule: Its sharding rule.
        choices: What it does along every axis.
        placement: Pairs of its operands and outputs.
        count: For how many equal nodes it stands.
        copy: Number of the copy of a repeated block that it is in, -1 for none.
    """

    node: Node
    rule: OpRule | None
    choices: Choices
    placement: CallPlacement
    count: int = 1
    copy: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """What a stage computes.

    Attributes:
        index: Number of the stage.
        calls: Its nodes in order.
        spec: Global spec of a value.
        pair: Pair of a value where it is made.
        kinds: Kind of every graph input.
        arriving: Values that other stages make.
        leaving: Values for other stages.
        loss: The loss and its pair, if the stage makes it.
        buffers: New values of buffers, with the pair in which they are kept.
        alias: Value that stands for another one.
        like: Parameter of a layer left out, as one like it is there with a count, to the one that
            stands for it; in the order of layers.
    """

    index: int
    calls: Sequence[Call]
    spec: Callable[[str], TensorSpec]
    pair: Callable[[str], Pair]
    kinds: Mapping[str, str]
    arriving: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    loss: tuple[str, Pair] | None = None
    buffers: tuple[tuple[str, Pair], ...] = ()
    alias: Mapping[str, str] = field(default_factory=dict)
    like: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Taped:
    """A stage's forward and backward.

    Attributes:
        task: What was taped.
        tape: All steps.
        num_forward: How many of them are forward.
        inputs: Local tensors of graph inputs and of values that arrive.
        results: Local tensors that forward gives: those that leave, the loss, buffers.
        gradients: Gradient of every parameter and arriving value that has one, by name.
        tangents: Memory of the gradients that come for results.
    """

    task: StageTask
    tape: Tape
    num_forward: int = 0
    inputs: dict[str, Local] = field(default_factory=dict)
    results: dict[str, Local] = field(default_factory=dict)
    gradients: dict[str, Local] = field(default_factory=dict)
    tangents: dict[str, Local] = field(default_factory=dict)


def tape_stage(task: StageTask, rank: Rank, implementation: Implementation) -> Taped:
    """Write forward and backward of a stage.

    Args:
        task: What it computes.
        rank: Whose local shapes count.
        implementation: How ops are carried out.
    """
    return _Writer(task, rank, implementation).run()


class _Writer:
    def __init__(self, task: StageTask, rank: Rank, implementation: Implementation) -> None:
        self.task, self.rank = task, rank
        self.tape = Tape(implementation)
        self.taped = Taped(task=task, tape=self.tape)
        self.local: dict[str, Local] = {}
        self.moved: dict[tuple[str, int], Local] = {}
        self.arriving = frozenset(task.arriving)
        self.shapes: dict[tuple[Shape, int], Shape] = {}
        self.makers: dict[str, int] = {}
        # Pairs are compared often, and hashing one is slow.
        self.numbers: dict[int, int] = {}
        self.known: dict[Pair, int] = {}
        self.kept: list[Pair] = []

    def run(self) -> Taped:
        task, taped = self.task, self.taped
        needed = _needed(task)
        for place, call in enumerate(task.calls):
            if place in needed:
                self.tape.origin = place
                self.emit(call)
        self.tape.origin = len(task.calls)
        ends = [(name, task.pair(name)) for name in task.leaving]
        ends += [task.loss] if task.loss is not None else []
        for name, pair in (*ends, *task.buffers):
            taped.results[name] = self.value(name, pair)
        taped.num_forward = len(self.tape.steps)
        self.backward([name for name, _ in ends])
        return taped

    def backward(self, ends: Iterable[str]) -> None:
        taped = self.taped
        pairs = []
        for name in ends:
            result = taped.results[name]
            if result.trains:
                # The loss's gradient is a number that is there already.
                kind = "tangent" if name in self.task.leaving else "constant"
                memory = Memory(result.numel * result.itemsize, None, kind, name)
                taped.tangents[name] = Local(result.shape, result.dtype, memory)
                pairs.append((result, taped.tangents[name]))
        self.tape.backward(pairs)
        for name, value in taped.inputs.items():
            gradient = self.tape.gradient(value)
            if gradient is not None:
                taped.gradients[name] = gradient

    def number(self, pair: Pair) -> int:
        """A number that is the same for equal pairs."""
        found = self.numbers.get(id(pair))
        if found is None:
            self.kept.append(pair)  # so that no other gets its identity
            found = self.numbers[id(pair)] = self.known.setdefault(pair, len(self.known))
        return found

    def shape(self, shape: Shape, pair: Pair) -> Shape:
        key = (shape, self.number(pair))
        found = self.shapes.get(key)
        if found is None:
            found = self.shapes[key] = self.rank.grid.local_shape(shape, pair.forward)
        return found

    def input(self, name: str) -> Local:
        """The local tensor of a graph input, or of a value that arrives."""
        spec = self.task.spec(name)
        shape = self.shape(spec.shape, self.task.pair(name))
        arrives = name in self.arriving
        kind = "boundary" if arrives else self.task.kinds[name]
        value = Local(shape, spec.dtype, Memory(0, None, kind, name))
        value.memory.size_bytes = value.numel * value.itemsize
        if spec.requires_grad and kind in ("boundary", "parameter"):
            self.tape.leaf(value)
        self.taped.inputs[name] = value
        return value

    def value(self, name: str, want: Pair) -> Local:
        """A value placed as `want`; one reshard per value and target, as in `lower`."""
        task = self.task
        name = task.alias.get(name, name)
        found = self.local.get(name)
        if found is None:
            found = self.local[name] = self.input(name)
        have = task.pair(name)
        number = self.number(want)
        if self.number(have) == number:
            return found
        key = (name, number)
        moved = self.moved.get(key)
        if moved is not None:
            return moved
        spec = task.spec(name)
        if not spec.requires_grad:
            if have.forward == want.forward:
                return found
            have, want = Pair(have.forward, ()), Pair(want.forward, ())
            key = (name, self.number(want))
            moved = self.moved.get(key)
        if moved is None:
            # A reshard belongs to the value that it moves, as in a captured program.
            self.tape.maker = self.makers.get(name, -1)
            moved = reshard(self.tape, self.rank, found, have, want, spec.shape)
            self.moved[key], self.tape.maker = moved, None
        return moved

    def emit(self, call: Call) -> None:
        node, placement = call.node, call.placement
        operands = tuple(
            [
                self.value(name, pair)
                for name, pair in zip(node.operands, placement.operands, strict=True)
            ]
        )
        outputs = tuple(
            [
                (self.shape(value.spec.shape, pair), value.spec.dtype)
                for value, pair in zip(node.outputs, placement.outputs, strict=True)
            ]
        )
        local = OpCall(
            tape=self.tape,
            node=node,
            operands=operands,
            outputs=outputs,
            rule=call.rule,
            choices=call.choices,
            placement=placement,
            specs=tuple([self.task.spec(self.alias(name)) for name in node.operands]),
            rank=self.rank,
        )
        results = (find(node.op) or unknown)(local)
        for value, result in zip(node.outputs, results, strict=True):
            if result.maker is not None and not value.spec.requires_grad:
                result = detach(result)
            self.local[value.name] = result
            self.makers[value.name] = self.tape.origin

    def alias(self, name: str) -> str:
        return self.task.alias.get(name, name)


def _needed(task: StageTask) -> set[int]:
    """Places of the calls on which some result depends."""
    wanted = {*task.leaving, *(name for name, _ in task.buffers)}
    if task.loss is not None:
        wanted.add(task.loss[0])
    arriving, alias = frozenset(task.arriving), task.alias
    found: set[int] = set()
    for place in range(len(task.calls) - 1, -1, -1):
        node = task.calls[place].node
        if any(v.name in wanted and v.name not in arriving for v in node.outputs):
            found.add(place)
            wanted.update([alias.get(name, name) for name in node.operands])
    return found
