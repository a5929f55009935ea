"""The parameters and buffers of the user's model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


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
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._add(name, parameter, self.parameters)
        for name, buffer in module.named_buffers(remove_duplicate=False):
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
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            ]
            found = {name: values[self.by_id[id(tensor)]] for name, tensor in pairs}
            self._suffixes[id(module)] = found
        return found


def _persistent_buffers(module: nn.Module) -> set[str]:
    """FQNs of the buffers that are part of the state dict."""
    return {
        f"{path}.{name}" if path else name
        for path, child in module.named_modules(remove_duplicate=False)
        for name in child._buffers
        if name not in child._non_persistent_buffers_set
    }
