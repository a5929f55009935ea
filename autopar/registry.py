"""A table of named things that rejects duplicates and explains unknown names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from autopar.errors import AutoparError, meant

T = TypeVar("T")


class Registry(Generic[T]):
    """Name to entry, filled at import and read afterwards.

    Args:
        kind: What the entries are, in the singular, for messages: ``"strategy"``.
        error: Error type raised for an unknown name.

    Example:
        >>> schedules = Registry[int]("schedule")
        >>> schedules.add("gpipe", 1)
        >>> schedules["gpipe"]
        1
    """

    def __init__(self, kind: str, *, error: type[AutoparError] = AutoparError) -> None:
        self.kind = kind
        self._error = error
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T) -> None:
        """Enter `entry` under `name`.

        Raises:
            ValueError: If the name is taken.
        """
        if name in self._entries:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._entries[name] = entry

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""

        def enter(entry: T) -> T:
            self.add(name, entry)
            return entry

        return enter

    def get(self, name: str) -> T | None:
        """Entry called `name`, or None."""
        return self._entries.get(name)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise self._unknown(name) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def _unknown(self, name: str) -> AutoparError:
        return self._error(
            f"unknown {self.kind} {name!r}",
            expected="one of " + ", ".join(self) if self._entries else f"a known {self.kind}",
            fix=meant(name, self._entries),
        )
