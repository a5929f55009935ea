"""A program: a graph of ATen ops and collectives with named inputs and outputs.

A program computes; it never decides when. Programs are made by `capture` and `split`, rewritten
by passes, printed for people and compiled to Python functions by `codegen`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx

from autopar.runtime.comm import Communicator

SlotKind = Literal[
    "parameter",
    "buffer",
    "constant",
    "input",
    "boundary",
    "tangent",
    "saved",
    "seed",
    "microbatch",
    "prologue",
    "gradient",
    "input_gradient",
    "loss",
    "output",
    "bucket",
    "shard",
    "handle",
]
Boxed = Callable[[list[Any]], list[Any]]

_KINDS = frozenset(get_args(SlotKind))
# How a dtype prints.
_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """What a value means to whoever runs a program.

    Attributes:
        kind: Its role.
        name: Name of a value of the canonical graph; for ``saved`` and ``prologue`` the name of
            the node that made it; for ``seed`` and ``microbatch`` the kind itself.
    """

    kind: SlotKind
    name: str

    def __post_init__(self) -> None:
        assert self.kind in _KINDS, self.kind

    def __str__(self) -> str:
        return f"{self.kind}:{self.name}"


@dataclass(kw_only=True, eq=False)
class Program:
    """A graph with named inputs and outputs.

    Attributes:
        name: For people, such as "stage 1 forward".
        graph: Placeholders in the order of `inputs`; the output node returns a tuple in the order
            of `outputs`. ``meta["val"]`` of every node is its fake result, ``meta["origin"]`` (if
            known) the node of the canonical graph that it serves, ``meta["phase"]`` is "forward" or
            "backward".
        inputs: What the placeholders are.
        outputs: What is returned. One node may stand behind several slots.
    """

    name: str
    graph: fx.Graph
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Assert that placeholders and results match the slots; passes call it when done."""
        holders = self.placeholders()
        assert len(holders) == len(self.inputs), (
            f"{self.name}: {len(holders)} placeholders, {len(self.inputs)} input slots"
        )
        results = self.results()
        assert len(results) == len(self.outputs), (
            f"{self.name}: {len(results)} results, {len(self.outputs)} output slots"
        )
        for slots in (self.inputs, self.outputs):
            assert len(set(slots)) == len(slots), f"{self.name}: a slot is named twice"
        for node in (*holders, *results):
            assert "val" in node.meta, f"{self.name}: {node} has no fake value"

    def placeholders(self) -> list[fx.Node]:
        """The nodes behind `inputs`."""
        return list(self.graph.find_nodes(op="placeholder"))

    def results(self) -> list[fx.Node]:
        """The nodes behind `outputs`."""
        return list(output_node(self.graph).args[0])  # type: ignore[arg-type]

    def calls(self) -> Iterator[fx.Node]:
        """The nodes that compute, in order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def input_nodes(self) -> dict[Slot, fx.Node]:
        """The placeholder of each input slot."""
        return dict(zip(self.inputs, self.placeholders(), strict=True))

    def output_nodes(self) -> dict[Slot, fx.Node]:
        """The node behind each output slot."""
        return dict(zip(self.outputs, self.results(), strict=True))

    def print_readable(self, modules: Mapping[str, str] | None = None) -> str:
        """The program as text, the same for equal programs.

        Args:
            modules: What to print for an origin, such as the path of its module; else the origin
                itself is printed.
        """
        return _Printer(self, modules or {}).text()

    def compile(self, comm: Communicator) -> Boxed:
        """The program as a function on `comm`; see `autopar.runtime.programs.codegen.generate`."""
        from autopar.runtime.programs.codegen import generate

        return generate(self, comm)


@dataclass(kw_only=True, eq=False)
class Joint(Program):
    """Forward and backward of a stage as one graph.

    Outputs are those of forward in the order asked for, then ``input_gradient``, then ``gradient``.

    Attributes:
        num_forward: How many of `outputs` are results of forward.
        absent: Gradients asked for that do not exist, because the outputs do not depend on the
            tensor differentiably; they are no outputs.
        estimated: Origins of sums over microbatches that are replaced by the number of microbatches
            times the summand of this one.
    """

    num_forward: int
    absent: tuple[Slot, ...] = ()
    estimated: tuple[str, ...] = field(default=())

    @property
    def forward_outputs(self) -> tuple[Slot, ...]:
        """Results of forward."""
        return self.outputs[: self.num_forward]

    def is_forward(self, node: fx.Node) -> bool:
        """Whether `node` is known without any tangent and was computed by forward."""
        return node.meta.get("phase") == "forward"


def output_node(graph: fx.Graph) -> fx.Node:
    """The output node of a graph."""
    node = next(iter(reversed(graph.nodes)))
    assert node.op == "output"
    return node


def target_name(target: Any) -> str:
    """How the target of a call prints: ``aten.mm``, ``autopar.all_reduce``, ``wait``."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return str(getattr(target, "__name__", target))


def type_text(value: Any) -> str:
    """How a fake value prints: ``f32[4, 8]``, tuples in parentheses."""
    if isinstance(value, Tensor):
        short = _SHORT.get(value.dtype) or str(value.dtype).removeprefix("torch.")
        return f"{short}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(type_text, value))})"
    return type(value).__name__


class _Printer:
    """Writes a program as text, nodes numbered in order."""

    def __init__(self, program: Program, modules: Mapping[str, str]) -> None:
        self.program, self.modules = program, modules
        self.numbers = {node: f"%{i}" for i, node in enumerate(program.graph.nodes)}

    def text(self) -> str:
        program = self.program
        lines = [program.name, "inputs"]
        for slot, node in zip(program.inputs, program.placeholders(), strict=True):
            lines.append(f"  {self._left(node)} = {slot}")
        lines.append("body")
        lines += [f"  {self._call(node)}" for node in program.calls()]
        lines.append("outputs")
        for slot, node in zip(program.outputs, program.results(), strict=True):
            lines.append(f"  {slot} = {self.numbers[node]}")
        return "\n".join(lines) + "\n"

    def _left(self, node: fx.Node) -> str:
        return f"{self.numbers[node]} {type_text(node.meta.get('val'))}"

    def _call(self, node: fx.Node) -> str:
        args = [self._arg(arg) for arg in node.args]
        args += [f"{key}={self._arg(arg)}" for key, arg in node.kwargs.items()]
        line = f"{self._left(node)} = {target_name(node.target)}({', '.join(args)})"
        origin = node.meta.get("origin")
        return f"{line}  # {self.modules.get(origin, origin)}" if origin else line

    def _arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.numbers[arg]
        if isinstance(arg, tuple | list):
            return f"[{', '.join(map(self._arg, arg))}]"
        if isinstance(arg, slice):
            return f"slice({arg.start}, {arg.stop}, {arg.step})"
        return repr(arg) if isinstance(arg, str) else str(arg).removeprefix("torch.")
