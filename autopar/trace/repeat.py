"""Repeated layers traced once.

While the model is exported, the first two members and the last of each group of alike modules
run as usual between two markers; every other call becomes one opaque operator with results like
those recorded. Afterwards `expand` compares the bodies between markers and replaces each opaque
call by a copy of the body with that member's parameters. Whatever casts doubt on the likeness
raises `RegroupError`, and the model is traced again without that group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.trace.compat import Meta, no_lines, patched, patched_item, write_call
from autopar.trace.grouping import Group
from autopar.trace.guards import PLAIN


class RegroupError(Exception):
    """Groups whose members cannot be taken for one another.

    Args:
        group: Name of the group, or names.
        reason: Why, for people.
    """

    def __init__(self, group: str | frozenset[str], reason: str) -> None:
        super().__init__(f"{group}: {reason}")
        self.groups = frozenset((group,)) if isinstance(group, str) else group


class InexactError(Exception):
    """Rewritten bodies cannot be copied as they are; the raw ones perhaps can."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Calls of one group with one kind of input."""

    group: Group
    number: int
    inline: int = 0
    leaves: list[Any] = field(default_factory=list)
    metas: list[Meta] = field(default_factory=list)
    spec: Any = None


class UnhideError(Exception):
    """Someone looked inside a member whose parameters are hidden."""


class _Hidden(dict):  # type: ignore[type-arg]
    """Stands for ``_parameters``, ``_buffers`` or ``_modules`` of a member that will not run.

    It looks empty to torch.export, so that the cost of exporting does not grow with the number
    of members, and raises `UnhideError` when the model's own code looks into it.
    """

    def __init__(self, names: Iterable[str], watch: Callable[[], bool]) -> None:
        super().__init__()
        self.names, self.watch = frozenset(names), watch

    def _look(self) -> None:
        if self.watch() and self.names:
            raise UnhideError

    def __contains__(self, name: object) -> bool:
        if name in self.names:
            self._look()
        return False

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return iter(())

    def __len__(self) -> int:
        self._look()
        return 0

    def items(self) -> Any:
        self._look()
        return ()

    keys = values = items

    def get(self, name: str, default: Any = None) -> Any:
        return default if name not in self else None


class Repeater:
    """Patches the members of groups for the time of one export.

    Args:
        groups: Modules to take for one another.
        hide: Whether members that will not run hide their parameters from torch.export.
    """

    def __init__(self, groups: list[Group], hide: bool = True) -> None:
        self.groups, self.hide = groups, hide
        self.running = False
        self.records: dict[Any, Record] = {}
        self.numbered: list[Record] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of members go through the repeater."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                for index, module in enumerate(group.modules):
                    forward = self._forward(group, index, module.forward)
                    stack.enter_context(patched(module, "forward", forward))
                    # Often the input of the first requires no gradient, so that the next two run.
                    if self.hide and not group.inner and 2 < index < len(group.modules) - 1:
                        self._hide(module, stack)
            yield

    def _hide(self, module: nn.Module, stack: contextlib.ExitStack) -> None:
        for name in ("_parameters", "_buffers", "_modules"):
            hidden = _Hidden(vars(module)[name], lambda: self.running)
            stack.enter_context(patched_item(module, name, hidden))

    def _forward(
        self, group: Group, index: int, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(group, index, original, args, kwargs)

        return forward

    def _call(
        self, group: Group, index: int, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
            if isinstance(vars(group.modules[index])["_modules"], _Hidden):
                raise UnhideError
            return original(*args, **kwargs)
        first: dict[int, int] = {}
        signature = (
            group.name,
            repr(spec),
            tuple(
                (first.setdefault(id(leaf), place), Meta.of(leaf))
                if isinstance(leaf, torch.Tensor)
                else (type(leaf), leaf)
                for place, leaf in enumerate(leaves)
            ),
            torch.is_grad_enabled(),
            tuple(_autocast(device) for device in ("cpu", "cuda")),
        )
        record = self.records.get(signature)
        if record is None:
            record = self.records[signature] = Record(group=group, number=len(self.numbered))
            self.numbered.append(record)
        key = f"{record.number}:{index}"
        if record.inline < 2 or index == len(group.modules) - 1:
            if isinstance(vars(group.modules[index])["_modules"], _Hidden):
                raise UnhideError
            return self._inline(record, index, key, tensors, lambda: original(*args, **kwargs))
        made = iter(_repeat(record, tensors, key))
        filled = [next(made) if isinstance(x, torch.Tensor) else x for x in record.leaves]
        return pytree.tree_unflatten(filled, record.spec)

    def _inline(
        self,
        record: Record,
        index: int,
        key: str,
        tensors: list[torch.Tensor],
        run: Callable[[], Any],
    ) -> Any:
        group = record.group
        module = group.modules[index]
        before = _state(module)
        torch.ops.autopar.enter(tensors, key)
        with _watched(group, module):
            result = run()
        leaves, spec = pytree.tree_flatten(result)
        if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
            raise RegroupError(group.name, "returns an object that is no tree of tensors")
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        torch.ops.autopar.leave(results, key)
        if _state(module) != before:
            raise RegroupError(group.name, "forward changes Python attributes")
        metas = [Meta.of(leaf) for leaf in results]
        values = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if record.inline:
            same = metas == record.metas and spec == record.spec
            known = [None if isinstance(x, torch.Tensor) else x for x in record.leaves]
            if not same or values != known:
                raise RegroupError(group.name, "members return different results")
        record.inline += 1
        record.leaves, record.metas, record.spec = leaves, metas, spec
        return result

    def fake(self, key: str) -> list[torch.Tensor]:
        """Results of the opaque call `key`."""
        record = self.numbered[int(key.split(":")[0])]
        return [meta.empty() for meta in record.metas]


def _repeat(record: Record, tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    """The results of the opaque call `key`, which is written into the graph."""
    one = len(record.metas) == 1
    target = torch.ops.autopar.repeat.one if one else torch.ops.autopar.repeat.default
    made = write_call(target, tensors, key, record.metas)
    if made is not None:
        return made
    with no_lines():
        result = target(tensors, key)
    return [result] if one else list(result)


def _autocast(device: str) -> Any:
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _state(module: nn.Module) -> list[Any]:
    """Plain attributes of a module and its children, to see whether a call changes them."""
    state: list[Any] = []
    for child in module.modules():
        state += [(name, id(value)) for name, value in child.__dict__["_buffers"].items()]
        for name, value in child.__dict__.items():
            if name.startswith("_") and name.endswith(("hooks", "_modules", "_parameters")):
                continue
            if isinstance(value, PLAIN):
                state.append((name, value))
            elif isinstance(value, list | dict | set):
                state.append((name, id(value), len(value)))
            else:
                state.append((name, id(value)))
    return state


@contextlib.contextmanager
def _watched(group: Group, module: nn.Module) -> Iterator[None]:
    """Reading an index attribute of `module` or its children raises `RegroupError`."""
    by_path: dict[str, list[str]] = {}
    for path, name in group.indexed:
        by_path.setdefault(path, []).append(name)
    changed = []
    try:
        children = dict(module.named_modules()) if by_path else {}
        for path, names in by_path.items():
            child = children[path]
            kind = type(child)
            space: dict[str, Any] = {n: _watch(group, n) for n in names}
            space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            child.__class__ = type(kind.__name__, (kind,), space)
            changed.append((child, kind))
        yield
    finally:
        for child, kind in changed:
            child.__class__ = kind


def _watch(group: Group, name: str) -> property:
    def read(_: Any) -> Any:
        raise RegroupError(group.name, f"forward reads {name}, which differs between members")

    def write(_: Any, value: Any) -> None:
        raise RegroupError(group.name, f"forward writes {name}, which differs between members")

    return property(read, write)
