"""What is live on a rank, by kind, while its step is executed on fake tensors.

Counted is memory, not tensors: a storage counts once, whoever views it, from the op that returned
it until nothing refers to it. A program that is summarised instead of run tells its high-water mark
and leaves `Block` objects behind for what it saved.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.programs.liveness import Bytes, MemoryKind


class Block:
    """Memory without a tensor: what a summarised program saved."""

    __slots__ = ("__weakref__", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


@dataclass(slots=True, kw_only=True)
class Moment:
    """Live bytes over one action.

    Attributes:
        what: The action as text.
        peak_bytes: Most that was live during it.
        where: The program and node at that mark, empty if there is none.
        live: Bytes by kind after it.
    """

    what: str
    peak_bytes: int = 0
    where: str = ""
    live: Bytes = field(default_factory=dict)

    @property
    def live_bytes(self) -> int:
        """Bytes after the action."""
        return sum(self.live.values())


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    kind: MemoryKind
    reference: Any


class Ledger(TorchDispatchMode):
    """Counts live memory while it is entered, on the thread that entered it.

    Attributes:
        live: Bytes now, by kind.
        peak: Bytes by kind at the high-water mark since `restart`.
        where: The action and place of that mark.
        moments: Every action since `restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[MemoryKind] = Counter()
        self.peak: Bytes = {}
        self.peak_bytes = 0
        self.where = ""
        self.moments: list[Moment] = []
        self._total = 0
        self._entries: dict[int, _Entry] = {}
        self._moment = Moment(what="start")
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is no memory of the rank, such as the fakes of a graph."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def live_bytes(self) -> int:
        """Bytes now."""
        return self._total

    def restart(self) -> None:
        """Forget the marks so far, not what is live."""
        self.peak, self.peak_bytes, self.where, self.moments = {}, 0, "", []
        self.begin("start")

    def begin(self, what: str) -> None:
        """An action starts."""
        self._moment = Moment(what=what)
        self._look()

    def end(self) -> None:
        """The action is over."""
        self._moment.live = +self.live
        self.moments.append(self._moment)

    def holds(self, key: int) -> bool:
        """Whether memory is live; see `key`."""
        return key in self._entries

    def size_of(self, key: int) -> int:
        """Bytes of live memory."""
        return self._entries[key].size_bytes

    def is_temporary(self, value: Tensor | Block) -> bool:
        """Whether nobody has said yet what the memory of `value` is for."""
        return self._entries[self.key(value)].kind == "temporary"

    @staticmethod
    def key(value: Tensor | Block) -> int:
        """Identity of the memory of a value."""
        return id(value) if isinstance(value, Block) else value.untyped_storage()._cdata

    def watch(self, values: Any, kind: MemoryKind = "temporary") -> None:
        """Count the memory of tensors and blocks in `values`, once each, until it is freed."""
        for value in _leaves(values):
            holder = value if isinstance(value, Block) else value.untyped_storage()
            key = self.key(value)
            if key in self._entries:
                continue
            size = holder.size_bytes if isinstance(holder, Block) else holder.nbytes()
            self._entries[key] = _Entry(size, kind, weakref.ref(holder, self._forget(key)))
            self.live[kind] += size
            self._total += size
        self._look()

    def label(self, values: Any, kind: MemoryKind) -> None:
        """Say what the memory of `values` is for; what is not counted yet is from now on."""
        for value in _leaves(values):
            entry = self._entries.get(self.key(value))
            if entry is None:
                self.watch([value], kind)
            else:
                self.live[entry.kind] -= entry.size_bytes
                self.live[kind] += entry.size_bytes
                entry.kind = kind

    def pass_over(self, peak: Bytes, where: str) -> None:
        """A summarised program had `peak` live beside all that is live now."""
        size_bytes = sum(peak.values())
        if self._total + size_bytes > self._moment.peak_bytes:
            self._moment.peak_bytes = self._total + size_bytes
            self._moment.where = where
        if self._total + size_bytes > self.peak_bytes:
            self.peak = +(self.live + Counter(peak))
            self.peak_bytes, self.where = self._total + size_bytes, self._place(where)

    def _look(self) -> None:
        self._moment.peak_bytes = max(self._moment.peak_bytes, self._total)
        if self._total > self.peak_bytes:
            self.peak, self.peak_bytes = +self.live, self._total
            self.where = self._place("")

    def _place(self, where: str) -> str:
        return f"{self._moment.what}: {where}" if where else self._moment.what

    def _forget(self, key: int) -> Any:
        def forget(_: object) -> None:
            entry = self._entries.pop(key)
            self.live[entry.kind] -= entry.size_bytes
            self._total -= entry.size_bytes

        return forget

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and watch what it returns."""
        result = func(*args, **(kwargs or {}))
        if not self._paused:
            self.watch(result)
        return result


def _leaves(values: Any) -> Iterable[Tensor | Block]:
    if isinstance(values, Tensor | Block):
        return (values,)
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor | Block))
