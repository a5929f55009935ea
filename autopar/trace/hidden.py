"""What a graph cannot hold and tracing would lose without a word: refused by name.

Gradient hooks run outside forward; Python state that forward changes, and numbers drawn by Python
or numpy, are constants in a graph; parameters that share memory without being one object would
train apart.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.errors import TraceError
from autopar.trace.state import ModelState, named_modules

_PLAIN = (bool, int, float, str, torch.Tensor)
_SIZED = (list, dict, set)


def refuse_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients.

    Raises:
        TraceError: Names the parameter or module.
    """
    fix = "remove the hook, and change gradients in the loss or in the optimizer"
    for name, parameter in module.named_parameters():
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


class ChangedStateError(Exception):
    """Forward set plain attributes: harmless if it sets them to the same values again.

    Attributes:
        changes: Module, name and new value of each.
        error: What to raise if they change once more.
    """

    def __init__(self, changes: list[tuple[nn.Module, str, Any]], error: TraceError) -> None:
        super().__init__(str(error))
        self.changes, self.error = changes, error


@contextlib.contextmanager
def python_state_watched(module: nn.Module) -> Iterator[None]:
    """Refuse a forward that changes Python state or draws from Python's or numpy's generators.

    Raises:
        ChangedStateError: Plain values changed, once the body has run.
        TraceError: Anything else did; names the module and attribute, or the generator.
    """
    before = [(path, child, _held(child)) for path, child in named_modules(module)]
    drawn = _generators()
    yield
    plain: list[tuple[nn.Module, str, Any]] = []
    error: TraceError | None = None
    for path, child, old in before:
        for name, (value, length) in _held(child).items():
            then, sized = old.get(name, (None, None))
            if not _changed(then, value) and length == sized:
                continue
            error = TraceError(
                f"forward changes the Python attribute {name!r}: a graph would keep the value it "
                "had while tracing",
                where=f"module {path or '(root)'}",
                fix="keep it in a buffer (register_buffer) and update that in place",
            )
            if length != sized or isinstance(value, torch.Tensor):
                raise error
            plain.append((child, name, value))
    if error is not None:
        raise ChangedStateError(plain, error)
    for name, same in zip(("random", "numpy.random"), _same(drawn, _generators()), strict=True):
        if not same:
            raise TraceError(
                f"forward draws numbers from {name}: a graph would repeat those of the trace",
                where="forward",
                fix="draw with torch (torch.rand_like, dropout), or pass the numbers in as inputs",
            )


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
