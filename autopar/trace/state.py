"""The parameters and buffers of the user's model."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def named_modules(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """``root.named_modules()``, several times faster in deep models."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        seen.add(id(module))
        found.append((path, module))
        prefix = path + "." if path else ""
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                visit(prefix + name, child)

    visit("", root)
    return found


def named_tensors(root: nn.Module, kind: str) -> list[tuple[str, torch.Tensor]]:
    """All parameters or buffers of `root`, tied ones under each of their paths.

    Args:
        root: A module.
        kind: ``"_parameters"`` or ``"_buffers"``.
    """
    found: list[tuple[str, torch.Tensor]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        for name, tensor in vars(module)[kind].items():
            if tensor is not None:
                found.append((prefix + name, tensor))
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}{name}.", child)

    visit("", root)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A parameter or buffer of the user's model."""

    kind: str
    tensor: torch.Tensor
    persistent: bool = True

    @property
    def grad(self) -> bool:
        """Whether it is a parameter that is trained."""
        return self.kind == "parameter" and self.tensor.requires_grad


class ModelState:
    """Parameters and buffers of a model, tied ones once."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.by_id: dict[int, str] = {}
        for name, parameter in named_tensors(module, "_parameters"):
            self._add(name, parameter, self.parameters)
        for name, buffer in named_tensors(module, "_buffers"):
            self._add(name, buffer, self.buffers)
        self.table: dict[str, State] = {
            name: State(kind="parameter", tensor=tensor) for name, tensor in self.parameters.items()
        }
        persistent = _persistent_buffers(module)
        for name, tensor in self.buffers.items():
            self.table[name] = State(kind="buffer", tensor=tensor, persistent=name in persistent)
        self._suffixes: dict[int, dict[str, str]] = {}

    def _add(self, name: str, tensor: torch.Tensor, table: dict[str, Any]) -> None:
        first = self.by_id.setdefault(id(tensor), name)
        if first == name:
            table[name] = tensor
        else:
            self.aliases[name] = first

    def canonical(self, name: str) -> str:
        """The FQN that stands for `name`."""
        return self.aliases.get(name, name)

    def names(self, values: dict[str, str], module: nn.Module) -> dict[str, str]:
        """Value name of each parameter and buffer of `module` by path inside it."""
        found = self._suffixes.get(id(module))
        if found is None:
            pairs = [
                *named_tensors(module, "_parameters"),
                *named_tensors(module, "_buffers"),
            ]
            found = {name: values[self.by_id[id(tensor)]] for name, tensor in pairs}
            self._suffixes[id(module)] = found
        return found


def _persistent_buffers(module: nn.Module) -> set[str]:
    """FQNs of the buffers that are part of the state dict."""
    found: set[str] = set()

    def visit(prefix: str, module: nn.Module) -> None:
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        found.update(prefix + name for name in kept)
        for name, child in module._modules.items():
            if child is not None:
                visit(f"{prefix}{name}.", child)

    visit("", module)
    return found


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Whatever tracing or the model's forward changes in the modules is changed back."""
    tables, empty = [], []
    for _, child in named_modules(module):
        space = vars(child)
        tables.append((space, space.copy()))
        for name, value in space.items():
            if isinstance(value, dict) and name[:1] == "_":
                if value:
                    tables.append((value, value.copy()))
                else:
                    empty.append(value)
    tensors = {id(tensor): tensor for _, tensor in named_tensors(module, "_parameters")}
    grads = [(tensor, tensor.requires_grad) for tensor in tensors.values()]
    try:
        yield
    finally:
        for table, old in tables:
            same = len(table) == len(old) and all(map(operator.is_, table, old))
            if not same or not all(map(operator.is_, table.values(), old.values())):
                table.clear()
                table.update(old)
        for table in empty:
            table.clear()
        for parameter, flag in grads:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
