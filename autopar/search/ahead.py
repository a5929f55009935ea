"""A second process that works out ahead what a search will ask for.

What it finds is what the search would have found itself, only earlier: a plan does not depend on
how fast either is. Answers come through a file that has no name and a pipe that says where in it,
so that neither process ever waits for the other to read.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import IO, Any

SLOTS = 1 << 16
"""Most questions."""
PATIENCE_S = 5.0
"""Seconds after which a value that the other process works out is worked out here, too."""
_FREE, _MINE, _ITS = 0, 1, 2
_RECORD = struct.Struct("<qq")


@dataclass(slots=True)
class _Mailbox:
    """Objects from one process to the other, in order."""

    file: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    ends: tuple[int, int] = field(default_factory=os.pipe)
    written: int = 0

    def put(self, value: object) -> None:
        text = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        place = 0
        while place < len(text):
            place += os.pwrite(self.file.fileno(), text[place:], self.written + place)
        os.write(self.ends[1], _RECORD.pack(self.written, len(text)))
        self.written += len(text)

    def get(self, wait_s: float | None) -> list[Any]:
        """What has come; waits for the first, for ever if `wait_s` is None."""
        found = list[Any]()
        while select.select([self.ends[0]], [], [], 0 if found else wait_s)[0]:
            record = os.read(self.ends[0], _RECORD.size)  # of a pipe never in part
            if not record:
                break
            start, size = _RECORD.unpack(record)
            text = b""
            while len(text) < size:
                text += os.pread(self.file.fileno(), size - len(text), start + len(text))
            found.append(pickle.loads(text))
        return found

    def only(self, *, reads: bool) -> None:
        """Close the end that is the other process's."""
        os.close(self.ends[reads])

    def close(self, *, reads: bool) -> None:
        os.close(self.ends[not reads])
        self.file.close()


class Ahead:
    """Values of a pure function, worked out ahead by a copy of this process.

    Args:
        work: The function; it must not print, and its values must be picklable.

    Raises:
        OSError: If there is no room for another process.
    """

    def __init__(self, work: Callable[[Any], object]) -> None:
        self._slots: dict[Hashable, int] = {}
        self._values: dict[int, Any] = {}
        self._work, self._asked = work, list[tuple[int, Any]]()
        self._orders, self._answers = _Mailbox(), _Mailbox()
        self._state = mmap.mmap(-1, SLOTS)
        gc.freeze()  # else each collection would copy what both share
        with warnings.catch_warnings():
            # Threads of number libraries may be there; the copy has no use for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._process = os.fork()
            except OSError:
                self._discard()
                raise
        if not self._process:
            _serve(work, self._orders, self._answers, self._state)
        self._orders.only(reads=False)
        self._answers.only(reads=True)
        self._open = True

    def _discard(self) -> None:
        """Close everything, where there is no other process."""
        for box in (self._orders, self._answers):
            box.only(reads=True)
            box.close(reads=True)
        self._state.close()
        gc.unfreeze()

    def ask(self, keys: Iterable[Hashable]) -> None:
        """Say what will be needed, the earliest first; what was asked for before is dropped."""
        found = []
        for key in keys:
            slot = self._slots.setdefault(key, len(self._slots))
            if slot < SLOTS and self._state[slot] == _FREE:
                found.append((slot, key))
        self._asked = found[::-1]
        with contextlib.suppress(OSError):  # it has ended, or there is no room for questions
            self._orders.put(found)

    def value(self, key: Hashable) -> tuple[Any] | None:
        """The value of a key; None if this process has to work it out."""
        slot = self._slots.get(key)
        if slot is None or slot >= SLOTS:
            return None
        self._values.update(self._answers.get(0))
        while slot not in self._values:
            if self._state[slot] != _ITS:
                self._state[slot] = _MINE
                return None
            more = self._answers.get(0)
            if not more and not self._help():
                more = self._answers.get(PATIENCE_S)
                if not more:  # it has ended, or hangs
                    self._state[slot] = _MINE
            self._values.update(more)
        return (self._values.pop(slot),)

    def _help(self) -> bool:
        """Answer the question after the next, as that is the other process's; whether there is."""
        skipped = None
        while self._asked:
            slot, key = self._asked.pop()
            if self._state[slot] != _FREE:
                continue
            if skipped is None:
                skipped = slot, key
                continue
            self._asked.append(skipped)
            self._state[slot] = _MINE
            self._values[slot] = self._work(key)
            return True
        return False

    def close(self) -> None:
        """End the other process."""
        if not self._open:
            return
        self._open = False
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        self._orders.close(reads=False)
        self._answers.close(reads=True)
        self._state.close()
        gc.unfreeze()


def _serve(
    work: Callable[[Any], object], orders: _Mailbox, answers: _Mailbox, state: mmap.mmap
) -> None:
    """Work until the other process ends."""
    try:
        gc.disable()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        orders.only(reads=True)
        answers.only(reads=False)
        parent, left = os.getppid(), list[tuple[int, Any]]()
        while os.getppid() == parent:
            news = orders.get(0 if left else None)
            if news:
                left = news[-1][::-1]
            elif not left:
                break
            if left:
                slot, key = left.pop()
                if state[slot] == _FREE:
                    state[slot] = _ITS
                    answers.put((slot, work(key)))
    finally:  # whatever went wrong, the other process does the rest
        os._exit(0)


def is_possible() -> bool:
    """Whether there is a second core, and this process can be copied safely."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return cores > 1 and sys.platform == "linux" and threading.active_count() == 1
