"""From an exported program to a raw Graph: every call as torch traced it, in-place ones included.

Regions (``no_grad``, ``autocast``) are inlined; positional arguments are completed with the
operator's defaults; module paths and source lines are attached; equal constants are one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from autopar.errors import TraceError
from autopar.graph.ir import Arg, Graph, Input, Node, Output, Ref, TensorSpec, Token, Value
from autopar.graph.views import ALIASES, RESHAPES
from autopar.trace.guards import dtype_name
from autopar.trace.places import (
    data_dependent_error,
    describe_place,
    higher_order_error,
    user_line,
)
from autopar.trace.schema import Signature
from autopar.trace.state import State

_MAYBE_ALIAS = ALIASES | RESHAPES
_READS_VALUE = frozenset({"aten._local_scalar_dense.default", "aten.item.default"})
_CUSTOM = "autopar.custom_function.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A raw graph and what it came with.

    Attributes:
        graph: Raw graph; not functional, not canonical.
        copies: Results of maybe-aliasing operators that do not alias.
        constants: Key to tensor, equal tensors once.
    """

    graph: Graph
    copies: set[str]
    constants: dict[str, torch.Tensor]


def tensor_spec(tensor: torch.Tensor, requires_grad: bool = False) -> TensorSpec:
    """The spec of a tensor with static sizes."""
    return TensorSpec(tuple(map(int, tensor.shape)), dtype_name(tensor.dtype), requires_grad)


def _without_out(target: Any) -> str | None:
    """The overload that returns what ``target``, with its ``out`` argument, writes."""
    packet = target.overloadpacket
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if a.name != "out"]
    for name in packet.overloads():
        found = getattr(packet, name)
        own = [(a.name, str(a.type)) for a in found._schema.arguments]
        if own == wanted and not found._schema.is_mutable and len(found._schema.returns) == 1:
            return str(found)
    return None


def convert(arg: Any, names: Mapping[torch.fx.Node, str]) -> Arg:
    """An fx argument as an IR argument."""
    if isinstance(arg, torch.fx.Node):
        return Ref(names[arg])
    if isinstance(arg, list | tuple):
        return tuple(convert(item, names) for item in arg)
    if isinstance(arg, float) and math.isnan(arg):
        return math.nan
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    if isinstance(arg, torch.dtype):
        return Token("dtype", dtype_name(arg))
    if isinstance(arg, torch.device):
        return Token("device", str(arg))
    if isinstance(arg, torch.layout):
        return Token("layout", str(arg).removeprefix("torch."))
    if isinstance(arg, torch.memory_format):
        return Token("memory_format", str(arg).removeprefix("torch."))
    raise TypeError(f"argument of type {type(arg).__name__}")


class Capturer:
    """Walks fx graphs and writes raw nodes.

    Args:
        program: The exported program.
        prefix: Path prefix of the user's model in the traced wrapper, e.g. ``"model"``.
    """

    def __init__(self, program: torch.export.ExportedProgram, prefix: str) -> None:
        self.program, self.prefix = program, prefix
        self.nodes: list[Node] = []
        self.specs: dict[str, TensorSpec] = {}
        self.copies: set[str] = set()
        self.tuples: dict[torch.fx.Node, list[str | None]] = {}
        self.names: dict[torch.fx.Node, str] = {}
        self.signatures: dict[Any, Signature] = {}
        self.sources: dict[str, str] = {}
        self.modules: dict[str, str] = {}
        self.counter = 0
        self.context: tuple[str, ...] = ()

    def fresh(self) -> str:
        """A new value name."""
        self.counter += 1
        return f"v{self.counter}"

    def path(self, raw: str) -> str:
        """Path in the user's model of a path in the wrapper."""
        if raw == self.prefix:
            return ""
        return raw.removeprefix(self.prefix + ".") if self.prefix else raw

    def module(self, node: torch.fx.Node) -> str:
        """Path of the module that made a call."""
        stack = node.meta.get("nn_module_stack")
        if not stack:
            return ""
        raw = next(reversed(stack.values()))[0]
        raw = re.sub(r"@\d+", "", raw)
        found = self.modules.get(raw)
        if found is None:
            found = "" if raw == "" else self.path(raw)
            self.modules[raw] = found
        return found

    def source(self, node: torch.fx.Node) -> str:
        """``file:line`` of a call in the user's code."""
        trace = node.meta.get("stack_trace")
        if not trace:
            return ""
        found = self.sources.get(trace)
        if found is None:
            found = self.sources[trace] = user_line(trace)
        return found

    def walk(self, graph: torch.fx.Graph, owner: torch.nn.Module) -> None:
        """Write every call of `graph`; placeholders are named by the caller."""
        for node in graph.nodes:
            if node.op == "get_attr":
                self.names.setdefault(node, node.target)
            elif node.op == "call_function":
                self._call(node, owner)
            elif node.op not in ("placeholder", "output"):
                raise TraceError(f"traced graph holds a {node.op} of {node.target}")

    def _call(self, node: torch.fx.Node, owner: torch.nn.Module) -> None:
        target = node.target
        if target is operator.getitem:
            source, index = node.args
            name = self.tuples[source][index]  # type: ignore[index]
            if name is not None:
                self.names[node] = name
            return
        label = str(target)
        if label == "wrap_with_set_grad_enabled":
            self._grad_region(node, owner)
        elif label == "wrap_with_autocast":
            self._autocast_region(node, owner)
        elif isinstance(target, torch._ops.OpOverload):
            self._operator(node, target)
        elif isinstance(target, torch._ops.HigherOrderOperator):
            raise higher_order_error(label, self.module(node), self.source(node))
        elif "sym" not in label and label not in ("mul", "add", "sub", "eq", "ge", "le"):
            raise TraceError(
                f"the traced graph calls {label}, which is no tensor operator",
                where=describe_place(self.module(node), self.source(node)),
            )

    def _operator(self, node: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        signature = self.signatures.get(target)
        if signature is None:
            signature = self.signatures[target] = Signature(target)
        args, kwargs = signature.normalise(node)
        op = str(target)
        if signature.refused or (signature.out and signature.plain is None):
            raise TraceError(
                f"{op} writes tensors in place in a way that cannot be followed",
                where=describe_place(self.module(node), self.source(node)),
                fix="use an operator that returns new tensors",
            )
        if op in _READS_VALUE:
            raise data_dependent_error(self.module(node), self.source(node))
        try:
            ir_args = tuple(convert(arg, self.names) for arg in args)
            ir_kwargs = tuple((key, convert(arg, self.names)) for key, arg in kwargs)
        except TypeError as error:
            raise TraceError(
                f"{op} is called with an {error} that cannot be kept",
                where=describe_place(self.module(node), self.source(node)),
                fix="use tensors, real numbers, strings, dtypes or devices",
            ) from None
        if op == _CUSTOM:
            op, ir_args = f"autopar.custom_function.{ir_args[1]}", ir_args[0]  # type: ignore[assignment]
        outputs = self._outputs(node, op)
        if signature.plain is not None:
            self._out_call(node, signature.plain, ir_args, dict(ir_kwargs), outputs)
            return
        self.nodes.append(
            Node(
                name=outputs[0].name if outputs else self.fresh(),
                op=op,
                args=ir_args,
                kwargs=ir_kwargs,
                outputs=outputs,
                module=self.module(node),
                source=self.source(node),
                context=self.context,
            )
        )

    def _out_call(
        self,
        node: torch.fx.Node,
        op: str,
        args: tuple[Arg, ...],
        kwargs: dict[str, Arg],
        outputs: tuple[Value, ...],
    ) -> None:
        """A call with ``out=`` as the plain call and a copy into ``out``."""
        out = kwargs.pop("out")
        plain = Value(self.fresh(), outputs[0].spec)
        self.specs[plain.name] = plain.spec
        calls = (
            (op, args, tuple(kwargs.items()), plain),
            ("aten.copy_.default", (out, Ref(plain.name), False), (), outputs[0]),
        )
        for name, call_args, call_kwargs, value in calls:
            self.nodes.append(
                Node(
                    name=value.name,
                    op=name,
                    args=call_args,
                    kwargs=call_kwargs,
                    outputs=(value,),
                    module=self.module(node),
                    source=self.source(node),
                    context=self.context,
                )
            )

    def _outputs(self, node: torch.fx.Node, op: str) -> tuple[Value, ...]:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            name = self.names[node] = self.fresh()
            if op in _MAYBE_ALIAS and not _same_storage(node, value):
                self.copies.add(name)
            return (self._value(name, value, node),)
        if isinstance(value, list | tuple):
            names: list[str | None] = []
            made = []
            for item in value:
                if isinstance(item, torch.Tensor):
                    name = self.fresh()
                    made.append(self._value(name, item, node))
                    names.append(name)
                else:
                    names.append(None)
            self.tuples[node] = names
            return tuple(made)
        return ()

    def _value(self, name: str, tensor: torch.Tensor, node: torch.fx.Node) -> Value:
        if any(not isinstance(size, int) for size in tensor.shape):
            raise data_dependent_error(self.module(node), self.source(node))
        spec = self.specs[name] = tensor_spec(tensor)
        return Value(name, spec)

    def _inline(
        self, node: torch.fx.Node, owner: torch.nn.Module, body: Any, operands: Any
    ) -> None:
        inner = getattr(owner, str(body.target)) if isinstance(body, torch.fx.Node) else body
        places = [item for item in inner.graph.nodes if item.op == "placeholder"]
        for place, operand in zip(places, operands, strict=True):
            if isinstance(operand, torch.fx.Node) and operand in self.names:
                self.names[place] = self.names[operand]
        self.walk(inner.graph, inner)
        result = next(item for item in inner.graph.nodes if item.op == "output").args[0]
        if isinstance(result, torch.fx.Node):
            self.names[node] = self.names[result]
        else:
            self.tuples[node] = [
                self.names.get(item) if isinstance(item, torch.fx.Node) else None for item in result
            ]

    def _grad_region(self, node: torch.fx.Node, owner: torch.nn.Module) -> None:
        enabled, body, *operands = node.args
        if enabled:
            self._inline(node, owner, body, operands)
            return
        entered: dict[torch.fx.Node, str] = {}
        for operand in operands:
            if isinstance(operand, torch.fx.Node) and operand in self.names:
                entered[operand] = self.names[operand]
                self.names[operand] = self._detached(self.names[operand], node)
        self._inline(node, owner, body, operands)
        self.names.update(entered)

    def _detached(self, name: str, node: torch.fx.Node) -> str:
        spec = self.specs[name]
        if not spec.is_floating:
            return name
        result = self.fresh()
        self.specs[result] = spec
        self.nodes.append(
            Node(
                name=result,
                op="aten.detach.default",
                args=(Ref(name),),
                outputs=(Value(result, spec),),
                module=self.module(node),
                source=self.source(node),
                context=self.context,
            )
        )
        return result

    def _autocast_region(self, node: torch.fx.Node, owner: torch.nn.Module) -> None:
        device, dtype, enabled, _, body, *operands = node.args
        before = self.context
        if dtype is None:
            dtype = torch.get_autocast_dtype(str(device))
        self.context = ("autocast", str(device), dtype_name(dtype)) if enabled else ()  # type: ignore[arg-type]
        self._inline(node, owner, body, operands)
        self.context = before


def _same_storage(node: torch.fx.Node, value: torch.Tensor) -> bool:
    operand = node.args[0]
    source = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else None
    if not isinstance(source, torch.Tensor):
        return False
    return bool(source.untyped_storage()._cdata == value.untyped_storage()._cdata)


def input_name(kind: str, target: str, taken: Mapping[str, Any]) -> str:
    """A readable, unused value name for an input."""
    name = target
    if kind == "input":
        name = re.sub(r"^kwargs\['(\w+)'\]", r"\1", target)
        name = re.sub(r"\W+", "_", name).strip("_")
    name = re.sub(r"[^\w.]", "_", name)
    while name in taken or not name:
        name += "_"
    return name


def capture(
    program: torch.export.ExportedProgram,
    *,
    prefix: str,
    input_paths: list[str],
    canonical: Callable[[str], str],
    state: Mapping[str, State],
    outputs: list[Output],
) -> Capture:
    """The raw graph of an exported program.

    Args:
        program: Training IR whose user inputs are the tensors of `input_paths`.
        prefix: Path prefix of the user's model in the traced module.
        input_paths: Path of each tensor input.
        canonical: FQN of a parameter or buffer (user's model) to the one that stands for it.
        state: The model's parameters and buffers by canonical FQN.
        outputs: Result leaves; a `value` of ``"#3"`` stands for the third tensor returned.
    """
    work = Capturer(program, prefix)
    inputs, constants = _inputs(work, input_paths, canonical, state)
    work.walk(program.graph_module.graph, program.graph_module)
    result = next(n for n in program.graph_module.graph.nodes if n.op == "output").args[0]
    returned = [work.names.get(item) for item in result]
    count = sum(item.value is not None for item in outputs)
    returned = returned[len(returned) - count :]
    named = tuple(
        item
        if item.value is None
        else Output(
            kind=item.kind,
            value=returned[int(item.value[1:])],
            target=canonical(item.target) if item.kind == "buffer" else item.target,
        )
        for item in outputs
    )
    graph = Graph(inputs=tuple(inputs), nodes=tuple(work.nodes), outputs=named)
    return Capture(graph=graph, copies=work.copies, constants=constants)


def _inputs(
    work: Capturer,
    paths: list[str],
    canonical: Callable[[str], str],
    state: Mapping[str, State],
) -> tuple[list[Input], dict[str, torch.Tensor]]:
    inputs: list[Input] = []
    constants: dict[str, torch.Tensor] = {}
    keys: dict[Any, str] = {}
    made: dict[tuple[str, str], str] = {}

    def add(kind: str, target: str, spec: TensorSpec, persistent: bool = True) -> str:
        name = made.get((kind, target))
        if name is None:
            name = made[kind, target] = input_name(kind, target, work.specs)
            work.specs[name] = spec
            value = Value(name, spec)
            inputs.append(Input(kind=kind, value=value, target=target, persistent=persistent))  # type: ignore[arg-type]
        return name

    for target, item in state.items():
        add(item.kind, target, tensor_spec(item.tensor, item.grad), item.persistent)
    known = {_memory(item.tensor): target for target, item in state.items()}
    places = [n for n in work.program.graph_module.graph.nodes if n.op == "placeholder"]
    pairs = list(zip(places, work.program.graph_signature.input_specs, strict=True))
    for place, spec in pairs:
        path = work.path(str(spec.target))
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            target = canonical(path)
            work.names[place] = made[state[target].kind, target]
        elif spec.kind != InputKind.USER_INPUT:
            tensor = work.program.constants[str(spec.target)]
            same = known.get(_memory(tensor))
            if same is not None:  # an attribute that is a parameter or buffer by another name
                work.names[place] = made[state[same].kind, same]
                continue
            if "lifted_tensor" in path:
                path = _constant_key(tensor, keys, constants)
            else:
                constants[path] = tensor
            work.names[place] = add("constant", path, tensor_spec(tensor))
    users = [place for place, spec in pairs if spec.kind == InputKind.USER_INPUT]
    for place, path in zip(users, paths, strict=True):
        tensor = place.meta["val"]
        work.names[place] = add("input", path, tensor_spec(tensor, tensor.requires_grad))
    return inputs, constants


def _memory(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements of the same memory."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _constant_key(
    tensor: torch.Tensor, keys: dict[Any, str], constants: dict[str, torch.Tensor]
) -> str:
    """Key of a lifted constant; equal tensors share one."""
    mark: Any = id(tensor)
    if tensor.device.type == "cpu" and tensor.layout == torch.strided:
        flat = tensor.detach().contiguous().view(-1)
        mark = (tuple(tensor.shape), tensor.dtype, bytes(flat.view(torch.uint8).numpy().data))
    key = keys.get(mark)
    if key is None:
        key = keys[mark] = f"constant_{len(keys)}"
        constants[key] = tensor.detach()
    return key
