"""From a sharded graph to the fx graph that one rank runs.

Every op becomes the same op on local tensors: size arguments are localised, operands that lie
otherwise than the op wants go through one `Reshard` per (value, target pair), and ops whose split
letters need more than a local call go to their special lowering.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.graph.ir import Arg, Node, Ref, Token
from autopar.graph.routing import GROUPED
from autopar.runtime.lower_routed import Order, SortedRows
from autopar.runtime.mesh import MeshContext
from autopar.runtime.microbatch import set_moment
from autopar.runtime.operators import constant, on_device, resolve
from autopar.runtime.programs.program import Slot
from autopar.runtime.reshard import Reshard
from autopar.runtime.special import bind_special
from autopar.runtime.special.routing import multiply
from autopar.sharding.choices import CallPlacement, Choices
from autopar.sharding.placement import Pair, Placements
from autopar.sharding.rule import OpRule
from autopar.sharding.sharded import ShardedGraph

Custom = Callable[[str], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalForward:
    """The forward computation of one rank's stage, as modules call each other.

    Attributes:
        module: Takes the local values of `inputs` in order, returns a tuple of local outputs.
        inputs: What it reads: seed, microbatch, graph inputs, values of earlier stages.
        outputs: Names of the values it returns.
        origins: Name of the graph node that each fx node came from.
    """

    module: fx.GraphModule
    inputs: tuple[Slot, ...]
    outputs: tuple[str, ...]
    origins: dict[str, str]

    def print_readable(self) -> str:
        """The program as Python text with its reshards."""
        text = self.module.print_readable(print_output=False)
        lines = [
            f"# {name}: {child.extra_repr()}"
            for name, child in self.module.named_children()
            if isinstance(child, Reshard)
        ]
        return text + "\n".join(lines) + "\n"


class _Autocast(nn.Module):
    """An op under autocast."""

    def __init__(self, function: Callable[..., Any], context: tuple[str, ...]) -> None:
        super().__init__()
        self.function = function
        self.device, self.dtype = context[1], getattr(torch, context[2])

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device, dtype=self.dtype):
            return self.function(*args, **kwargs)


class _Opaque(nn.Module):
    """A callable without a name that fx could print."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class _Lowering:
    """State while one program is written."""

    def __init__(self, sharded: ShardedGraph, context: MeshContext, custom: Custom) -> None:
        self.sharded, self.context, self.custom = sharded, context, custom
        self.pairs = sharded.pairs()
        self.fx = fx.Graph()
        self.root = nn.Module()
        self.local: dict[str, fx.Node] = {}
        self.moved: dict[tuple[str, Pair], fx.Node] = {}
        self.origins: dict[str, str] = {}
        self.sorted = SortedRows(self.fx.call_function)

    def add_module(self, prefix: str, module: nn.Module) -> str:
        name = f"{prefix}_{len(self.root._modules)}"
        self.root.add_module(name, module)
        return name

    def pair(self, name: str, pair: Pair) -> Pair:
        """`pair` as far as it matters for `name`."""
        trained = self.sharded.graph.spec(name).requires_grad
        return pair if trained else Pair(pair.forward, ())

    def is_placed(self, name: str, want: Pair) -> bool:
        """Whether `name` lies as `want` where it is made."""
        return self.pair(name, self.pairs[name]) == self.pair(name, want)

    def value(self, name: str, want: Pair) -> fx.Node:
        """The fx node of `name`, placed as `want`."""
        have, want = self.pair(name, self.pairs[name]), self.pair(name, want)
        local = self.sorted.restored(name, self.local[name])
        if have == want:
            return local
        key = (name, want)
        if key not in self.moved:
            module = Reshard(have, want, self.sharded.graph.spec(name).shape, self.context)
            target = self.add_module("reshard", module)
            self.moved[key] = self.fx.call_module(target, (local,))
        return self.moved[key]

    def operands(self, node: Node, call: CallPlacement, sort: bool) -> list[fx.Node]:
        """Operands, placed; those that are sorted stay so if `sort`."""
        return [
            self.local[name] if sort and self.sorted.of(name) else self.value(name, pair)
            for name, pair in zip(node.operands, call.operands, strict=True)
        ]

    def shape(self, name: str, placements: Placements) -> tuple[int, ...]:
        return self.context.grid.local_shape(self.sharded.graph.spec(name).shape, placements)

    def emit(self, node: Node, index: int) -> None:
        node = on_device(node, self.context.comm.device)
        rule = self.sharded.factors.rules[index]
        choices, call = self.sharded.choices[index], self.sharded.calls[index]
        if node.op == GROUPED:
            self.emit_grouped(node, call)
            return
        split = {choice.unit.letter for choice in choices if choice.unit is not None}
        special = rule is not None and (
            rule.special or any(letter.special and letter.name in split for letter in rule.letters)
        )
        order = None if special else self.shared_order(node, rule, call)
        args, kwargs = self.arguments(node, call, self.operands(node, call, order is not None))
        if special:
            made = self.emit_special(node, choices, index)
        elif node.op.startswith("autopar."):
            made = self.opaque(self.custom(node.op), args, kwargs)
            if len(node.outputs) == 1:
                made = self.fx.call_function(operator.getitem, (made, 0))
        elif node.context:
            module = _Autocast(resolve(node.op), node.context)
            made = self.fx.call_module(self.add_module("autocast", module), args, kwargs)
        else:
            made = self.fx.call_function(resolve(node.op), args, kwargs)
            if self.widened(node):
                made = self.fx.call_method("to", (made, torch.float64))
        self.origins[made.name] = node.name
        if len(node.outputs) == 1:
            self.local[node.outputs[0].name] = made
            return
        for position, value in enumerate(node.outputs):
            self.local[value.name] = self.fx.call_function(operator.getitem, (made, position))
            self.origins[self.local[value.name].name] = node.name

    def shared_order(self, node: Node, rule: OpRule | None, call: CallPlacement) -> Order | None:
        """The order by which the operands of `node` are sorted and may stay, and its results."""
        if not all(map(self.is_placed, node.operands, call.operands)):
            return None
        order = self.sorted.shared(node, rule, self.sharded.graph.spec)
        if order is not None:
            for value in node.outputs:
                self.sorted.mark(value.name, order)
        return order

    def emit_grouped(self, node: Node, call: CallPlacement) -> None:
        """A product of rows with the matrix of their group; the result's rows stay sorted."""
        rows, weight, ids = node.operands
        repeat, op = node.args[3:5]
        assert isinstance(repeat, int) and isinstance(op, str)
        groups = self.sharded.graph.spec(weight).shape[0]
        order = self.sorted.order(self.value(ids, call.operands[2]), groups)
        if self.sorted.of(rows) is order and self.is_placed(rows, call.operands[0]):
            source = self.local[rows]
        else:
            source = self.sorted.sort(self.value(rows, call.operands[0]), order, repeat)
        args = (source, self.value(weight, call.operands[1]), order.ends, op)
        if node.context:
            module = _Autocast(multiply, node.context)
            made = self.fx.call_module(self.add_module("autocast", module), args)
        else:
            made = self.fx.call_function(multiply, args)
        self.origins[made.name] = node.name
        self.local[node.name] = made
        self.sorted.mark(node.name, order)

    def widened(self, node: Node) -> bool:
        """Whether `node` should make float64 of what torch gives the default dtype.

        Numbers made of no floating operand (a range of floats, a quotient of integers) have
        torch's default dtype; a graph in float64 wants them wide.
        """
        spec = self.sharded.graph.spec
        return (
            len(node.outputs) == 1
            and node.outputs[0].spec.dtype == "float64"
            and not any(spec(name).is_floating for name in node.operands)
            and not any(isinstance(arg, Token) and arg.kind == "dtype" for _, arg in node.kwargs)
            and not any(isinstance(arg, Token) and arg.kind == "dtype" for arg in node.args)
        )

    def opaque(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        return self.fx.call_module(self.add_module("custom", _Opaque(function)), args, kwargs)

    def emit_special(self, node: Node, choices: Choices, index: int) -> fx.Node:
        call = self.sharded.calls[index]
        rule = self.sharded.factors.rules[index]
        assert rule is not None
        function = bind_special(node, rule, choices, call, self.sharded.graph.spec, self.context)
        operands = tuple(
            self.value(name, pair) for name, pair in zip(node.operands, call.operands, strict=True)
        )
        return self.opaque_special(node, function, operands)

    def opaque_special(
        self, node: Node, function: Callable[..., Any], operands: tuple[fx.Node, ...]
    ) -> fx.Node:
        prefix = node.op.split(".")[1]
        return self.fx.call_module(self.add_module(prefix, _Opaque(function)), operands)

    def arguments(
        self, node: Node, call: CallPlacement, refs: Iterable[fx.Node]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Local arguments: operands placed, sizes localised, tokens resolved."""
        source = iter(refs)

        def build(arg: Arg) -> Any:
            if isinstance(arg, Ref):
                return next(source)
            if isinstance(arg, Token):
                return constant(arg)
            if isinstance(arg, tuple):
                return [build(item) for item in arg]
            return arg

        args = [build(arg) for arg in node.args]
        kwargs = {key: build(arg) for key, arg in node.kwargs}
        rule = self.sharded.factors.rules[self.sharded.factors.positions[node.name]]
        if rule is not None and rule.size_arg is not None:
            args[rule.size_arg[1]] = self.sizes(node, call)
        return tuple(args), kwargs

    def sizes(self, node: Node, call: CallPlacement) -> list[int]:
        """The local shape of the output, or the local sizes of the pieces of a split."""
        shapes = [
            self.shape(value.name, pair.forward)
            for value, pair in zip(node.outputs, call.outputs, strict=True)
        ]
        if node.op != "aten.split_with_sizes.default":
            return list(shapes[0])
        dim = int(node.args[2]) if len(node.args) > 2 else 0  # type: ignore[arg-type]
        return [shape[dim] for shape in shapes]


def _needed(
    sharded: ShardedGraph, outputs: Iterable[str], arriving: Container[str]
) -> tuple[set[int], set[str]]:
    """Indices of the nodes to run for `outputs`, and the names of the values they depend on."""
    needed, nodes = set(outputs), set()
    for index in reversed(range(len(sharded.graph.nodes))):
        node = sharded.graph.nodes[index]
        if any(value.name in needed and value.name not in arriving for value in node.outputs):
            nodes.add(index)
            needed.update(node.operands)
    return nodes, needed


def _no_custom(op: str) -> Callable[..., Any]:
    raise AssertionError(f"no callable for {op}")


def lower(
    sharded: ShardedGraph,
    context: MeshContext,
    outputs: Iterable[tuple[str, Pair]],
    custom: Custom = _no_custom,
    arriving: Sequence[str] = (),
) -> LocalForward:
    """Write the forward of one rank.

    Args:
        sharded: The graph and its placements.
        context: The rank.
        outputs: Values to return and how to place them.
        custom: Gives the callable of an ``autopar.*`` op.
        arriving: Values that earlier stages make, in the placement they are made in.

    Returns:
        The rank's forward; of values that arrive it reads those that its outputs need.
    """
    wanted = tuple(outputs)
    state = _Lowering(sharded, context, custom)
    nodes, needed = _needed(sharded, (name for name, _ in wanted), frozenset(arriving))
    inputs = [Slot("seed", "seed"), Slot("microbatch", "microbatch")]
    moment = tuple(state.fx.placeholder(slot.name) for slot in inputs)
    state.fx.call_function(set_moment, moment)
    inputs += [
        Slot(item.kind, item.value.name)
        for item in sharded.graph.inputs
        if item.value.name in needed and item.value.name not in arriving
    ]
    inputs += [Slot("boundary", name) for name in arriving if name in needed]
    for slot in inputs[2:]:
        made = state.fx.placeholder("in_" + re.sub(r"\W", "_", slot.name))
        state.local[slot.name], state.origins[made.name] = made, slot.name
    for index in sorted(nodes):
        state.emit(sharded.graph.nodes[index], index)
    state.fx.output(tuple(state.value(name, pair) for name, pair in wanted))
    state.fx.lint()
    module = fx.GraphModule(state.root, state.fx)
    return LocalForward(
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(name for name, _ in wanted),
        origins=state.origins,
    )
