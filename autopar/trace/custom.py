"""Custom autograd functions: kept as opaque calls, so that their backward survives tracing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import TraceError


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of the tensor operand `index` among the arguments of a custom function."""

    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomFunction:
    """One way in which a model calls a `torch.autograd.Function`.

    The graph calls it as ``autopar.custom_function.<key>`` on its tensor arguments.

    Attributes:
        function: The class.
        arguments: Arguments of ``apply``, tensors replaced by `Slot`s.
        kept: For each leaf of the result, whether it is a tensor (others are no graph values).
    """

    function: type[torch.autograd.Function]
    arguments: tuple[Any, ...]
    kept: tuple[bool, ...]

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the function on whole tensors; returns the tensors of its result."""
        args = [tensors[a.index] if isinstance(a, Slot) else a for a in self.arguments]
        leaves = pytree.tree_leaves(self.function.apply(*args))
        return tuple(leaf for leaf, kept in zip(leaves, self.kept, strict=True) if kept)


class _Draws(TorchDispatchMode):
    """Notes the first op that draws random numbers: each rank would draw its own."""

    found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and not self.found:
            self.found = str(func)
        return func(*args, **kwargs or {})


class CustomFunctions:
    """Collects the custom functions met during one trace."""

    def __init__(self) -> None:
        self.calls: dict[str, CustomFunction] = {}
        self.checkpoints = 0
        self._classes: dict[str, type[torch.autograd.Function]] = {}
        self._running: dict[str, tuple[Any, tuple[Any, ...]]] = {}
        self._results: dict[str, tuple[list[Any], Any]] = {}

    def intercept(self, cls: type, run: Any, *args: Any) -> Any:
        """Replaces ``cls.apply(*args)`` while tracing."""
        if cls is torch.utils.checkpoint.CheckpointFunction:
            self.checkpoints += 1
            return args[0](*args[2:])
        if cls.__module__.startswith("torch."):
            return run(*args)
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        nested = [arg for arg in args if not isinstance(arg, torch.Tensor)]
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(nested)):
            raise _refused(cls, "takes tensors inside a list or dict", "pass each on its own")
        slots = iter(range(len(tensors)))
        arguments = tuple(Slot(next(slots)) if isinstance(a, torch.Tensor) else a for a in args)
        key = self._key(cls, arguments)
        self._running[key] = (run, arguments)
        flat = list(torch.ops.autopar.custom_function(tensors, key))
        leaves, spec = self._results[key]
        made = iter(flat)
        filled = [next(made) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(filled, spec)

    def fake(self, tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
        """Results of the call `key` on fake tensors."""
        run, arguments = self._running[key]
        versions = [tensor._version for tensor in tensors]
        args = [tensors[a.index] if isinstance(a, Slot) else a for a in arguments]
        draws = _Draws()
        with torch.no_grad(), draws:
            leaves, spec = pytree.tree_flatten(run(*args))
        cls = self._classes[key]
        if [tensor._version for tensor in tensors] != versions:
            raise _refused(cls, "writes its inputs in place", "return new tensors")
        if draws.found:
            fix = "draw them in forward, where all ranks draw the same, and pass them in"
            raise _refused(cls, f"draws random numbers ({draws.found})", fix)
        kept = tuple(isinstance(leaf, torch.Tensor) for leaf in leaves)
        self._results[key] = (leaves, spec)
        self.calls[key] = CustomFunction(function=cls, arguments=arguments, kept=kept)
        return [torch.empty_like(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _key(self, cls: type, arguments: tuple[Any, ...]) -> str:
        name = cls.__qualname__.rsplit(".", 1)[-1]
        count = 0
        while True:
            key = f"{name}_{count}" if count else name
            known = self._running.get(key)
            if known is None:
                self._classes[key] = cls
                return key
            if self._classes[key] is cls and _same(known[1], arguments):
                return key
            count += 1


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    if len(first) != len(second):
        return False
    for a, b in zip(first, second, strict=True):
        if a is b:
            continue
        if type(a) is not type(b) or not isinstance(a, int | float | str | Slot | tuple):
            return False
        if a != b:
            return False
    return True


def _refused(cls: type, what: str, fix: str) -> TraceError:
    return TraceError(
        f"the autograd function {cls.__qualname__} {what}, which cannot be kept in a graph",
        expected="a function of tensor arguments that returns new tensors",
        fix=fix,
    )
