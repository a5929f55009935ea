"""Calls into torch that may differ from 2.11 to 2.14 or lie outside its stable face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.runtime.programs import tracer

OpOverload = torch._ops.OpOverload


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and strides but no values."""
    return FakeTensorMode(allow_non_fake_inputs=False)


def traced(function: Callable[..., Any], args: list[Tensor]) -> tracer.Recording:
    """`function` on fake tensors as a graph of ATen ops, none decomposed."""
    return tracer.record(function, args)


def traced_graph() -> fx.Graph:
    """The graph that the innermost `traced` is writing."""
    return tracer.current().graph


def last_traced() -> fx.Node | None:
    """The newest node of the graph that is being traced; None at its start."""
    return next(iter(reversed(traced_graph().nodes)), None)


def traced_since(node: fx.Node | None) -> Iterator[fx.Node]:
    """What was traced after `node`, newest first."""
    for newer in reversed(traced_graph().nodes):
        if newer is node:
            return
        yield newer


@contextmanager
def one_thread() -> Iterator[None]:
    """Backward runs in the calling thread, where the tracer is."""
    with ExitStack() as stack:
        setting = getattr(torch.autograd, "set_multithreading_enabled", None)
        if setting is not None:
            stack.enter_context(setting(False))
        yield


def real_value(tensor: Tensor) -> Tensor:
    """The value of a constant that was made while tracing.

    Raises:
        ValueError: If a fake tensor has none.
    """
    if isinstance(tensor, FakeTensor):
        if tensor.constant is None:
            raise ValueError("a fake tensor has no value")
        return tensor.constant
    return tensor


def schema_of(target: Any) -> Any | None:
    """The schema of an operator; None for anything else."""
    return target._schema if isinstance(target, OpOverload) else None


def raw_callable(target: Any) -> Any:
    """What an operator calls, without the Python frame around it."""
    return getattr(target, "_op", target) if isinstance(target, OpOverload) else target


_KEEPS_FOR_BACKWARD = frozenset(("aten::mkldnn_rnn_layer",))
"""Operators that give the workspace of their backward only where gradients are recorded."""


def recording(call: Callable[..., Any], target: Any) -> Callable[..., Any]:
    """`call`, of the operator `target`, such that it gives all that its backward wants."""
    schema = schema_of(target)
    if schema is None or schema.name not in _KEEPS_FOR_BACKWARD:
        return call

    def recorded(*args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            return call(*args, **kwargs)

    return recorded


def without_autocast() -> AbstractContextManager[object]:
    """What runs inside is not cast, whatever the caller's autocast."""
    guard = getattr(torch._C, "_DisableAutocast", None)
    return nullcontext() if guard is None else guard()
