"""From a sharded graph to the fx graph that one rank runs.

Every op becomes the same op on local tensors: size arguments are localised, operands that lie
otherwise than the op wants go through one `Reshard` per (value, target pair), and ops whose split
letters need more than a local call go to their special lowering.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar.graph.ir import Arg, Node, Ref, Token
from autopar.runtime.operators import constant, on_device, resolve
from autopar.runtime.reshard import MeshContext, Reshard
from autopar.runtime.special import bind_special
from autopar.sharding.choices import CallPlacement, Choices
from autopar.sharding.placement import Pair, Placements
from autopar.sharding.sharded import ShardedGraph

Custom = Callable[[str], Callable[..., Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one rank runs.

    Attributes:
        module: Takes the local values of `inputs` in order, returns a tuple of local outputs.
        inputs: Names of the graph inputs it reads.
        outputs: Names of the values it returns.
        origins: Name of the graph node that each fx node came from.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
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

    def add_module(self, prefix: str, module: nn.Module) -> str:
        name = f"{prefix}_{len(self.root._modules)}"
        self.root.add_module(name, module)
        return name

    def value(self, name: str, want: Pair) -> fx.Node:
        """The fx node of `name`, placed as `want`."""
        have = self.pairs[name]
        spec = self.sharded.graph.spec(name)
        if not spec.requires_grad:
            have, want = Pair(have.forward, ()), Pair(want.forward, ())
        if have == want:
            return self.local[name]
        key = (name, want)
        if key not in self.moved:
            module = Reshard(have, want, spec.shape, self.context)
            target = self.add_module("reshard", module)
            self.moved[key] = self.fx.call_module(target, (self.local[name],))
        return self.moved[key]

    def shape(self, name: str, placements: Placements) -> tuple[int, ...]:
        return self.context.grid.local_shape(self.sharded.graph.spec(name).shape, placements)

    def emit(self, node: Node, index: int) -> None:
        node = on_device(node, self.context.comm.device)
        rule = self.sharded.factors.rules[index]
        choices, call = self.sharded.choices[index], self.sharded.calls[index]
        refs = iter(
            [
                self.value(name, pair)
                for name, pair in zip(node.operands, call.operands, strict=True)
            ]
        )
        args, kwargs = self.arguments(node, call, refs)
        split = {choice.unit.letter for choice in choices if choice.unit is not None}
        special = rule is not None and (
            rule.special or any(letter.special and letter.name in split for letter in rule.letters)
        )
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


def _needed(sharded: ShardedGraph, outputs: Iterable[str]) -> set[str]:
    """Names of the values that `outputs` depend on."""
    needed = set(outputs)
    for node in reversed(sharded.graph.nodes):
        if any(value.name in needed for value in node.outputs):
            needed.update(node.operands)
    return needed


def _no_custom(op: str) -> Callable[..., Any]:
    raise AssertionError(f"no callable for {op}")


def lower(
    sharded: ShardedGraph,
    context: MeshContext,
    outputs: Iterable[tuple[str, Pair]],
    custom: Custom = _no_custom,
) -> Program:
    """Write the program of one rank.

    Args:
        sharded: The graph and its placements.
        context: The rank.
        outputs: Values to return and how to place them.
        custom: Gives the callable of an ``autopar.*`` op.

    Returns:
        The rank's program.
    """
    wanted = tuple(outputs)
    state = _Lowering(sharded, context, custom)
    needed = _needed(sharded, (name for name, _ in wanted))
    inputs = [item.value.name for item in sharded.graph.inputs if item.value.name in needed]
    for name in inputs:
        made = state.fx.placeholder("in_" + re.sub(r"\W", "_", name))
        state.local[name], state.origins[made.name] = made, name
    for index, node in enumerate(sharded.graph.nodes):
        if any(value.name in needed for value in node.outputs):
            state.emit(node, index)
    state.fx.output(tuple(state.value(name, pair) for name, pair in wanted))
    state.fx.lint()
    module = fx.GraphModule(state.root, state.fx)
    return Program(
        module=module,
        inputs=tuple(inputs),
        outputs=tuple(name for name, _ in wanted),
        origins=state.origins,
    )
