"""Which submodules of a model are the same layer again.

Two modules are alike when their classes, parameters (shapes, dtypes, requires_grad, ties),
buffers, other attributes and children are alike. Integer attributes that differ between the
members of a group (``layer_idx``) are *index attributes*: reading one while a member is traced
shows that the members may differ, and undoes the group.
"""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.trace.state import named_modules

_SKIPPED = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_HOOKS = frozenset(
    {
        "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
        "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs", "_is_full_backward_hook",
    }
)  # fmt: skip
SMALLEST_GROUP = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules that are the same layer again.

    Attributes:
        name: Path pattern, e.g. ``model.layers.*``; unique.
        paths: FQN of each member, in module order.
        modules: The members.
        indexed: Attribute names, by path inside the member, that hold a member's own integer.
        inner: Whether members lie inside members of another group.
    """

    name: str
    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    indexed: tuple[tuple[str, str], ...]
    inner: bool = False


class _UnknownError(Exception):
    """A value that cannot be compared."""


class _Freezer:
    """Turns attributes into hashable values that are equal when behaviour is."""

    def __init__(self) -> None:
        self.known: dict[int, Any] = {}

    def freeze(self, value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, bool | float | str | torch.dtype | torch.device):
            return (type(value).__name__, value)
        if isinstance(value, int):
            return ("int", value)
        if id(value) in self.known:
            return self.known[id(value)][0]
        if depth > 6:
            raise _UnknownError
        if isinstance(value, list | tuple):
            return (type(value).__name__, *(self.freeze(item, depth + 1) for item in value))
        if isinstance(value, dict):
            pairs = [(repr(k), self.freeze(v, depth + 1)) for k, v in value.items()]
            return ("dict", *pairs)
        if isinstance(value, set | frozenset):
            return ("set", tuple(sorted(map(repr, value))))
        if isinstance(value, type | types.BuiltinFunctionType | types.ModuleType):
            return ("id", id(value))
        if isinstance(value, torch.Tensor | nn.Module):
            raise _UnknownError
        return self._object(value, depth)

    def _object(self, value: Any, depth: int) -> Any:
        key = id(value)
        self.known[key] = (("id", key), value)  # met again inside itself
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            frozen: Any = ("function", id(value.__code__), *(self._safe(c, depth) for c in cells))
        elif isinstance(value, types.MethodType):
            frozen = ("method", id(value.__func__), id(value.__self__))
        else:
            frozen = self._safe(value, depth)
        self.known[key] = (frozen, value)
        return frozen

    def _safe(self, value: Any, depth: int) -> Any:
        """Objects compare by class and attributes when they are plain, else by identity."""
        if isinstance(value, int | float | str | type(None) | tuple):
            return self.freeze(value, depth + 1)
        space = getattr(value, "__dict__", None)
        if space is None or isinstance(value, type | types.FunctionType):
            return ("id", id(value))
        try:
            return (id(type(value)), self.freeze(space, depth + 1))
        except _UnknownError:
            return ("id", id(value))


class _Signer:
    """Structural signatures of modules, bottom-up."""

    def __init__(self, root: nn.Module) -> None:
        self.freezer = _Freezer()
        self.signatures: dict[int, Any] = {}
        self.numbers: dict[int, dict[tuple[str, str], int]] = {}
        self.interned: dict[Any, int] = {}

    def sign(self, module: nn.Module, top: bool) -> int | None:
        """A number equal for modules that are alike, or None when this cannot be known."""
        own = self._own(module)
        children = []
        for name, child in module._modules.items():
            if child is None:
                children.append((name, None))
                continue
            signature = self.signatures.get(id(child))
            if signature is None:
                return None
            children.append((name, signature))
        if own is None:
            return None
        key = (own, tuple(children))
        return self.interned.setdefault(key, len(self.interned))

    def _own(self, module: nn.Module) -> Any:
        parts: list[Any] = [id(type(module))]
        ties: dict[int, int] = {}
        for kind, table in (("p", module._parameters), ("b", module._buffers)):
            for name, tensor in table.items():
                if tensor is None:
                    parts.append((kind, name, None))
                    continue
                tie = ties.setdefault(id(tensor), len(ties))
                strides = tuple(tensor.stride()) if tensor.layout == torch.strided else None
                parts.append(
                    (kind, name, tuple(tensor.shape), tensor.dtype, tensor.device, strides,
                     tensor.requires_grad, tie)
                )  # fmt: skip
        numbers: dict[tuple[str, str], int] = {}
        try:
            for name, value in module.__dict__.items():
                if name in _SKIPPED or (name in _HOOKS and not value):
                    continue
                exact = type(value)
                if exact is bool or value is None:
                    parts.append((name, exact, value))
                elif exact is int:
                    numbers["", name] = value
                    parts.append((name, "number"))
                elif name in _HOOKS:
                    hooks = value.values() if isinstance(value, dict) else (value,)
                    parts.append((name, self.freezer.freeze(tuple(hooks))))
                else:
                    parts.append((name, self.freezer.freeze(value)))
        except _UnknownError:
            return None
        self.numbers[id(module)] = numbers
        return tuple(parts)


def _pattern(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def find_groups(root: nn.Module, excluded: set[str] | frozenset[str] = frozenset()) -> list[Group]:
    """Groups of at least `SMALLEST_GROUP` alike modules whose paths differ in numbers only.

    Args:
        root: The model.
        excluded: Names of groups not to make; their children may form groups.

    Returns:
        Outermost and inner groups; a module is in one group at most.
    """
    signer = _Signer(root)
    modules = named_modules(root)
    for path, module in reversed(modules):
        signature = signer.sign(module, not path)
        if signature is not None:
            signer.signatures[id(module)] = signature
    members: dict[tuple[str, int], list[tuple[str, nn.Module]]] = defaultdict(list)
    for path, module in modules:
        signature = signer.signatures.get(id(module))
        if signature is not None and "*" in (pattern := _pattern(path)) and _worthwhile(module):
            members[pattern, signature].append((path, module))
    groups: list[Group] = []
    covering: set[str] = set()
    for (pattern, signature), found in sorted(members.items(), key=_depth):
        kept, inner = _uncovered(found, covering)
        if len(kept) < SMALLEST_GROUP:
            continue
        for name, part, indexed in _by_numbers(f"{pattern}#{signature}", kept, signer):
            if name not in excluded:
                paths, mods = zip(*part, strict=True)
                groups.append(
                    Group(name=name, paths=paths, modules=mods, indexed=indexed, inner=inner)
                )
                covering.update(paths)
    return groups


def _depth(item: tuple[tuple[str, int], object]) -> int:
    return item[0][0].count(".")


def _worthwhile(module: nn.Module) -> bool:
    """Whether a call of `module` is more than an operator or two."""
    return bool(module._modules) or not type(module).__module__.startswith("torch.nn")


def _uncovered(
    found: list[tuple[str, nn.Module]], covering: set[str]
) -> tuple[list[tuple[str, nn.Module]], bool]:
    """The modules outside members of other groups; all of them when many lie in one member.

    Returns:
        The modules, and whether some lie inside members.
    """
    outers = []
    for path, _ in found:
        parts = path.split(".")
        above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
        outers.append(next((outer for outer in above if outer in covering), None))
    counts = Counter(outer for outer in outers if outer is not None)
    if counts and max(counts.values()) >= 2 * SMALLEST_GROUP:
        return found, True
    return [item for item, outer in zip(found, outers, strict=True) if outer is None], False


def _numbers(module: nn.Module, signer: _Signer) -> dict[tuple[str, str], int]:
    result = {}
    for path, child in named_modules(module):
        for (_, name), value in signer.numbers.get(id(child), {}).items():
            result[path, name] = value
    return result


def _by_numbers(
    name: str, found: list[tuple[str, nn.Module]], signer: _Signer
) -> list[tuple[str, list[tuple[str, nn.Module]], tuple[tuple[str, str], ...]]]:
    """Split by integers that take few values; those all different are index attributes."""
    tables = [_numbers(module, signer) for _, module in found]
    keys = list(tables[0])
    varied = [key for key in keys if len({table[key] for table in tables}) > 1]
    indexed = tuple(key for key in varied if len({t[key] for t in tables}) == len(tables))
    rest = [key for key in varied if key not in indexed]
    parts: dict[Any, list[tuple[str, nn.Module]]] = defaultdict(list)
    for table, item in zip(tables, found, strict=True):
        parts[tuple(table[key] for key in rest)].append(item)
    result = []
    for values, part in parts.items():
        if len(part) >= SMALLEST_GROUP:
            result.append((f"{name}{list(values)}" if rest else name, part, indexed))
    return result
