"""The graph that everything after tracing works on: frozen, torch-free, single assignment.

A `Graph` is a list of `Node`s in execution order. A node names an operator
(``aten.linear.default``), its arguments (`Ref`s to values, Python literals, `Token`s for dtypes
and devices, tuples of these) and the `Value`s it makes. Operators with several results list
several values: there is no getitem. Every value is assigned once; nothing mutates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int16": 2, "float16": 2, "bfloat16": 2, "uint16": 2,
    "int32": 4, "float32": 4, "uint32": 4,
    "int64": 8, "float64": 8, "complex64": 8, "uint64": 8, "complex128": 16,
}  # fmt: skip
FLOATING = frozenset({"float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor.

    Attributes:
        shape: Global sizes, one per dim.
        dtype: Name as torch prints it without the prefix, e.g. ``"bfloat16"``.
        requires_grad: Whether a gradient flows into this value.
    """

    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool = False

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether the dtype can carry a gradient."""
        return self.dtype in FLOATING

    def __str__(self) -> str:
        grad = "*" if self.requires_grad else ""
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]{grad}"


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor made once and named once."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Ref:
    """Use of a value as an argument."""

    name: str


@dataclass(frozen=True, slots=True)
class Token:
    """A torch constant that is no Python literal, e.g. ``Token("dtype", "float32")``.

    `kind` is one of dtype, device, layout, memory_format.
    """

    kind: str
    text: str


Arg = Ref | Token | int | float | bool | str | None | tuple["Arg", ...]


def map_refs(arg: Arg, function: Callable[[Ref], Arg]) -> Arg:
    """`arg` with every `Ref` in it, however deep, replaced by ``function(ref)``."""
    if isinstance(arg, Ref):
        return function(arg)
    if isinstance(arg, tuple):
        return tuple(map_refs(item, function) for item in arg)
    return arg


def iter_refs(arg: Arg) -> Iterator[Ref]:
    """All `Ref`s in `arg`, left to right."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            if type(item) is not int:
                yield from iter_refs(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call.

    Attributes:
        name: Unique name; equals the name of the first output.
        op: Operator, ``namespace.name.overload``.
        args: Positional arguments.
        kwargs: Keyword arguments as ``(key, value)`` pairs in schema order.
        outputs: Values made, in order of the operator's results.
        module: Path of the module whose forward made the call, ``""`` for the root.
        source: ``file:line`` of the call in the user's code, ``""`` when unknown.
        context: State the call runs under, e.g. ``("autocast", "cpu", "bfloat16")``.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[Value, ...]
    module: str = ""
    source: str = ""
    context: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor operands in order (args, then kwargs); a name may repeat."""
        names: list[str] = []
        for arg in self.args:
            if type(arg) is Ref:
                names.append(arg.name)
            elif type(arg) is tuple:
                names += [ref.name for ref in iter_refs(arg)]
        for _, arg in self.kwargs:
            if type(arg) is Ref or type(arg) is tuple:
                names += [ref.name for ref in iter_refs(arg)]
        return tuple(names)


InputKind = Literal["parameter", "buffer", "constant", "input"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A value that enters the graph.

    Attributes:
        kind: Where the value comes from.
        value: The value.
        target: FQN of the parameter or buffer, key of the constant, or path of the user input
            such as ``args[0]['more']['emb']`` or ``kwargs['labels']``.
        persistent: For buffers, whether it is part of the state dict.
    """

    kind: InputKind
    value: Value
    target: str
    persistent: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A value that leaves the graph.

    Attributes:
        kind: ``"user"`` for a leaf of the model's result, ``"buffer"`` for the new value of the
            buffer named by `target`.
        value: Name of a value, or None for a leaf that is a Python constant.
        target: Path in the result, e.g. ``['loss']``, or FQN of the buffer.
        literal: The Python constant when `value` is None.
    """

    kind: Literal["user", "buffer"]
    value: str | None
    target: str
    literal: Arg = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Consecutive calls that were copied, with others, from one original.

    Attributes:
        start: Index of the first call.
        stop: Index after the last.
        original: Equal for copies of the same calls.
        path: Path that stands in this copy's module paths where other copies have theirs.
    """

    start: int
    stop: int
    original: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model as a list of operator calls.

    Whoever makes a graph by copying calls may say so with `copied`, given with the tuple of nodes
    that it speaks of, so that a graph made of this one with other nodes has no `runs`.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    copied: tuple[tuple[Node, ...], tuple[Run, ...]] = field(
        default=((), ()), repr=False, compare=False
    )
    _specs: dict[str, TensorSpec] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        specs = self._specs
        specs.clear()
        for item in self.inputs:
            specs[item.value.name] = item.value.spec
        for node in self.nodes:
            for value in node.outputs:
                specs[value.name] = value.spec

    @property
    def runs(self) -> tuple[Run, ...]:
        """The copied calls, in order, as far as they are known."""
        nodes, runs = self.copied
        return runs if nodes is self.nodes else ()

    def spec(self, name: str) -> TensorSpec:
        """Spec of the value called `name`."""
        return self._specs[name]

    def parameters(self) -> tuple[Input, ...]:
        """The parameters, in order of appearance."""
        return tuple(item for item in self.inputs if item.kind == "parameter")
