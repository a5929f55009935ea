"""What a graph cannot hold and tracing would lose without a word: refused by name.

Gradient hooks run outside forward; Python state that forward changes, and numbers drawn by Python
or numpy, are constants in a graph; parameters that share memory without being one object would
train apart.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.graph.ir import Graph
from autopar.graph.text import to_text
from autopar.trace import compat
from autopar.trace.state import ModelState, named_modules, named_tensors

_PLAIN = (bool, int, float, str, torch.Tensor)
_SIZED = (list, dict, set)


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients.

    Raises:
        TraceError: Names the parameter or module.
    """
    fix = "remove the hook, and change gradients in the loss or in the optimizer"
    for name, parameter in named_tensors(module, "_parameters"):
        held = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        if any(held):
            raise TraceError(
                f"parameter {name} has a gradient hook, which would not run", where=name, fix=fix
            )
    for path, child in named_modules(module):
        if child._backward_hooks or child._backward_pre_hooks:
            raise TraceError(
                f"module {path or '(root)'} has a backward hook, which would not run",
                where=path or "(root)",
                fix=fix,
            )


def refuse_tensor_hook(tensor: torch.Tensor, hook: object) -> None:
    """Stands for ``Tensor.register_hook`` while forward is traced.

    Raises:
        TraceError: Always.
    """
    raise TraceError(
        "forward registers a gradient hook on a tensor, which would not run",
        where="forward",
        fix="change gradients in the loss, or in a custom torch.autograd.Function",
    )


def refuse_shared_memory(state: ModelState) -> None:
    """Refuse parameters and buffers that are different objects on overlapping memory.

    Raises:
        TraceError: Names both.
    """
    spans = []
    for name, tensor in {**state.parameters, **state.buffers}.items():
        if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
            continue
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        spans.append((start, start + reach * tensor.element_size(), name))
    last_end, last_name = 0, ""
    for start, end, name in sorted(spans):
        if start < last_end:
            raise TraceError(
                f"{last_name} and {name} are different tensors in the same memory",
                where=name,
                expected="tied weights as one nn.Parameter object",
                fix="assign the Parameter itself (b.weight = a.weight), not its .data",
            )
        if end > last_end:
            last_end, last_name = end, name


@dataclass(frozen=True, slots=True)
class Change:
    """A Python attribute that forward changed.

    Attributes:
        module: The module it is on.
        name: Its name.
        value: Its new value; None for a collection, which keeps what was put into it.
        path: Path of the module.
    """

    module: nn.Module
    name: str
    value: Any
    path: str

    def error(self) -> TraceError:
        """What to raise if the graph depends on it."""
        return TraceError(
            f"forward changes the Python attribute {self.name!r} and depends on it: a graph would "
            "keep the value it had while tracing",
            where=f"module {self.path or '(root)'}",
            fix="keep it in a buffer (register_buffer) and update that in place",
        )


@contextlib.contextmanager
def python_state_watched(
    modules: list[tuple[str, nn.Module]], changes: list[Change]
) -> Iterator[None]:
    """Note Python attributes that forward changes; refuse draws from Python or numpy.

    Args:
        modules: All modules with their paths, listed before tracing hides any.
        changes: Where to note what changed.

    Raises:
        TraceError: Forward drew numbers from `random` or `numpy.random`.
    """
    before = [(path, child, _held(child)) for path, child in modules]
    drawn = _generators()
    yield
    for path, child, old in before:
        for name, (value, length) in _held(child).items():
            then, sized = old.get(name, (None, None))
            if length != sized:
                changes.append(Change(child, name, None, path))
            elif _changed(then, value):
                changes.append(Change(child, name, value, path))
    for name, same in zip(("random", "numpy.random"), _same(drawn, _generators()), strict=True):
        if not same:
            raise TraceError(
                f"forward draws numbers from {name}: a graph would repeat those of the trace",
                where="forward",
                fix="draw with torch (torch.rand_like, dropout), or pass the numbers in as inputs",
            )


def refuse_dependence(first: Graph, again: Callable[[], Graph], changes: list[Change]) -> None:
    """Refuse a graph that depends on Python attributes which forward changes.

    The model is traced once more in the state forward left it in (tensors are stood for by zeros,
    which show as constants where they are read): only if the graph is the same does the state not
    matter, as with counters for logs, losses kept for the caller, or sizes set from the inputs.

    Args:
        first: The graph traced in the model's first state.
        again: Traces once more.
        changes: What changed the first time.

    Raises:
        TraceError: Names the attribute.
    """
    with contextlib.ExitStack() as stack:
        for change in changes:
            value = change.value
            if value is None:
                continue
            if isinstance(value, torch.Tensor):
                value = torch.zeros(tuple(value.shape), dtype=value.dtype)
            stack.enter_context(compat.patched(change.module, change.name, value))
        try:
            same = to_text(again()) == to_text(first)
        except TraceError:
            same = False
    if not same:
        raise changes[0].error()


def _changed(old: Any, new: Any) -> bool:
    if new is old or not isinstance(new, _PLAIN):
        return False
    return isinstance(new, torch.Tensor) or type(new) is not type(old) or bool(new != old)


def _held(module: nn.Module) -> dict[str, tuple[Any, int | None]]:
    """Public attributes of a module, with the lengths of its collections."""
    return {
        name: (value, len(value) if isinstance(value, _SIZED) else None)
        for name, value in vars(module).items()
        if name[:1] != "_" and name != "training"
    }


def _generators() -> tuple[Any, Any]:
    numbers: Any = np.random.get_state()  # noqa: NPY002 -- the legacy state is what we watch
    return random.getstate(), numbers[1]


def _same(old: tuple[Any, Any], new: tuple[Any, Any]) -> tuple[bool, bool]:
    return old[0] == new[0], bool(np.array_equal(old[1], new[1]))
