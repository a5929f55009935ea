"""A plain interpreter of graphs on real tensors: the oracle of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autopar.graph.ir import Arg, Node, Ref, Token
from autopar.trace.tracer import Traced

_CUSTOM = "autopar.custom_function."


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a graph computed.

    Attributes:
        result: The model's result, as the model would return it.
        loss: The scalar loss, or None.
        buffers: FQN to new value, for the buffers that forward updates.
    """

    result: Any
    loss: torch.Tensor | None
    buffers: dict[str, torch.Tensor]


@cache
def operator(name: str) -> Any:
    """The torch operator called `name`, e.g. ``aten.linear.default``."""
    space, packet, overload = name.split(".", 2)
    return getattr(getattr(getattr(torch.ops, space), packet), overload)


def to_torch(arg: Arg, values: Mapping[str, torch.Tensor], device: torch.device) -> Any:
    """An IR argument as torch takes it."""
    if isinstance(arg, Ref):
        return values[arg.name]
    if isinstance(arg, tuple):
        return [to_torch(item, values, device) for item in arg]
    if isinstance(arg, Token):
        if arg.kind == "device":
            return device
        return getattr(torch, arg.text)
    return arg


def _context(node: Node, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if not node.context:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, node.context[2]))


_FACTORIES = frozenset(
    ("full", "arange", "rand", "randn", "randint", "randperm", "linspace", "eye", "tril_indices",
     "triu_indices", "logspace", "normal", "one_hot_", "hann_window", "hamming_window")
)  # fmt: skip


def _call(
    node: Node, traced: Traced, values: dict[str, torch.Tensor], device: torch.device
) -> list[torch.Tensor]:
    args = [to_torch(arg, values, device) for arg in node.args]
    kwargs = {key: to_torch(arg, values, device) for key, arg in node.kwargs}
    if node.op.startswith(_CUSTOM):
        return list(traced.custom[node.op.removeprefix(_CUSTOM)](*args))
    if node.op.split(".")[1] in _FACTORIES:
        kwargs["device"] = device
    with _context(node, device):
        result = operator(node.op)(*args, **kwargs)
    if isinstance(result, torch.Tensor):
        return [result]
    return [item for item in result or () if isinstance(item, torch.Tensor)]


def run_graph(
    traced: Traced,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    state: Mapping[str, torch.Tensor] | None = None,
) -> Run:
    """Run the graph on real tensors, with autograd.

    Args:
        traced: The graph and its parameters.
        args: Positional inputs, as for the model.
        kwargs: Keyword inputs.
        state: Values for parameters and buffers by FQN; the model's own where absent.

    Returns:
        Result, loss and new buffers. The model's buffers are not changed.
    """
    tensors = iter(traced.flatten_inputs(args, kwargs))
    known: dict[str, torch.Tensor] = {**traced.parameters, **traced.buffers, **(state or {})}
    values: dict[str, torch.Tensor] = {}
    for item in traced.graph.inputs:
        if item.kind == "input":
            values[item.value.name] = next(tensors)
        elif item.kind == "constant":
            values[item.value.name] = traced.constants[item.target]
        else:
            values[item.value.name] = known[item.target]
    device = next(iter(values.values())).device if values else torch.device("cpu")
    for node in traced.graph.nodes:
        made = _call(node, traced, values, device)
        for value, tensor in zip(node.outputs, made, strict=True):
            spec = value.spec
            if tuple(tensor.shape) != spec.shape or str(tensor.dtype)[6:] != spec.dtype:
                raise AssertionError(f"{node.name} ({node.op}) made {tensor.shape}, not {spec}")
            values[value.name] = tensor
    user = [i for i in traced.graph.outputs if i.kind == "user"]
    leaves = [i.literal if i.value is None else values[i.value] for i in user]
    buffers = {
        item.target: values[item.value]
        for item in traced.graph.outputs
        if item.kind == "buffer" and item.value is not None
    }
    loss = values[traced.loss] if traced.loss else None
    return Run(result=traced.unflatten_outputs(leaves), loss=loss, buffers=buffers)
