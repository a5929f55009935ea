"""Live bytes of a rank by kind, their high-water mark, and what they were action by action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # numpy: not for those who only look at a plan
    import numpy as np
    from numpy.typing import NDArray

KINDS = (
    "parameters", "gradients", "optimizer", "buffers", "inputs", "saved", "boundary", "outputs",
    "collective", "temporary",
)  # fmt: skip
"""What memory is for, as in a dry run."""
NOTHING = -(2**62)
"""A high-water mark below all others."""
_INDEX = {name: place for place, name in enumerate(KINDS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Live bytes over one action.

    Attributes:
        what: The action as text.
        peak_bytes: Most that was live during it.
        live_bytes: What is live after it.
    """

    what: str
    peak_bytes: int
    live_bytes: int


class Change:
    """What something does to live bytes: their course as rows over `KINDS`.

    Args:
        start: Bytes that it takes.
        peak: Bytes at its high-water mark.
        end: Bytes that it leaves.
        where: The place of that mark.
    """

    __slots__ = ("above", "net", "peak", "rows", "where")

    def __init__(
        self, start: Mapping[str, int], peak: Mapping[str, int], end: Mapping[str, int], where: str
    ) -> None:
        before = _row(start)
        self.peak = [a - b for a, b in zip(_row(peak), before, strict=True)]
        self.rows = [a - b for a, b in zip(_row(end), before, strict=True)]
        self.above, self.net, self.where = sum(self.peak), sum(self.rows), where


def _row(counted: Mapping[str, int]) -> list[int]:
    row = [0] * len(KINDS)
    for name, size in counted.items():
        row[_INDEX[name]] += size
    return row


class Live:
    """Live bytes.

    Args:
        start: Bytes by kind at first.
        notes: Whether to note them action by action.

    Attributes:
        total: All bytes.
        where: The place of the high-water mark.
        moments: Every action, if noted.
    """

    def __init__(self, start: Mapping[str, int], *, notes: bool) -> None:
        self.rows, self.notes = _row(start), notes
        self.total = sum(self.rows)
        self.top, self.where = self.total, ""
        self.moments: list[Moment] = []
        self._peak = list(self.rows)
        self._what, self._high, self._after = "", 0, -1

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind at the high-water mark."""
        return {kind: size for kind, size in zip(KINDS, self._peak, strict=True) if size}

    def begin(self, what: str) -> None:
        """An action begins."""
        if self.notes:
            self._note()
            self._what, self._high, self._after = what, self.total, -1

    def end(self) -> None:
        """The action is over, though what comes now still belongs to its high-water mark."""
        if self._after < 0:
            self._after = self.total

    def _note(self) -> None:
        if self._what:
            after = self._after if self._after >= 0 else self.total
            self.moments.append(
                Moment(what=self._what, peak_bytes=max(self._high, after), live_bytes=after)
            )

    def add(self, kind: str, size: int) -> None:
        """Bytes appear, or are freed."""
        self.rows[_INDEX[kind]] += size
        self.total += size
        if size > 0:
            self.look()

    def apart(self) -> Live:
        """Nothing yet, to see what something does that depends on nothing before."""
        found = Live({}, notes=False)
        found.top = NOTHING
        return found

    def follow(self, changes: Sequence[Live], numbers: NDArray[np.int64]) -> None:
        """Several changes, one after the other.

        Args:
            changes: What happens, each from nothing.
            numbers: Which of them, in order.
        """
        import numpy as np

        if not len(numbers):
            return
        nets = np.array([item.total for item in changes], dtype=np.int64)[numbers]
        tops = np.array([item.top for item in changes], dtype=np.int64)[numbers]
        before = self.total + np.cumsum(nets) - nets
        rows = np.array([item.rows for item in changes], dtype=np.int64)

        def after(count: int) -> list[int]:
            times = np.bincount(numbers[:count], minlength=len(changes))
            return [a + b for a, b in zip(self.rows, (times @ rows).tolist(), strict=True)]

        highest = int(np.argmax(before + tops))
        top = int(before[highest] + tops[highest])
        if top > self.top:
            item = changes[int(numbers[highest])]
            self.top, self.where = top, item.where
            self._peak = [a + b for a, b in zip(after(highest), item._peak, strict=True)]
        self.rows = after(len(numbers))
        self.total = sum(self.rows)

    def move(self, kind: str, other: str, size: int) -> None:
        """Bytes are now for something else."""
        self.rows[_INDEX[kind]] -= size
        self.rows[_INDEX[other]] += size

    def look(self, above: int = 0, kind: str = "temporary", where: str = "") -> None:
        """For a moment there is more than is live before and after."""
        total = self.total + above
        self._high = max(self._high, total)
        if total > self.top:
            self.top, self.where = total, where
            self._peak = list(self.rows)
            self._peak[_INDEX[kind]] += above

    def change(self, change: Change, name: str) -> None:
        """A program runs."""
        total = self.total + change.above
        self._high = max(self._high, total)
        if total > self.top:
            self.top, self.where = total, f"{name}: {change.where}"
            self._peak = [a + b for a, b in zip(self.rows, change.peak, strict=True)]
        self.rows = [a + b for a, b in zip(self.rows, change.rows, strict=True)]
        self.total += change.net
