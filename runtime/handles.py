"""Handles of collectives and messages under way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, final

from torch import Tensor


class Handle(Protocol):
    """A collective or message under way."""

    def wait(self) -> Tensor:
        """Finish it and return its result; further calls return the same."""
        ...

    def done(self) -> bool:
        """Whether it is known to have finished, so that `wait` returns at once.

        A hint for freeing memory early; it may stay False until `wait`.
        """
        ...


@final
class Done:
    """Handle of what has already finished."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        """Return the result."""
        return self._tensor

    def done(self) -> bool:
        """True."""
        return True


@final
class Lazy:
    """Handle of something that is finished by the one who waits.

    Args:
        finish: Finishes it and returns the result; called once, dropped after that.
    """

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self._finish: Callable[[], Tensor] | None = finish
        self._result: Tensor

    def wait(self) -> Tensor:
        """Finish and return the result."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result

    def done(self) -> bool:
        """Whether somebody has waited."""
        return self._finish is None


def then(handle: Handle, finish: Callable[[Tensor], Tensor]) -> Handle:
    """A handle whose result is made from that of another when it is waited for."""
    return Lazy(lambda: finish(handle.wait()))


@final
class Work:
    """Handle over a work of torch.distributed.

    Args:
        work: The work, or None if it has finished.
        tensor: The result.
        keep: What the work reads, kept alive until it has finished.
    """

    def __init__(self, work: Any, tensor: Tensor, keep: Tensor | None = None) -> None:
        self._work, self._tensor, self._keep = work, tensor, keep

    def wait(self) -> Tensor:
        """Wait (CPU), or make the current stream wait (CUDA), and return the tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = self._keep = None
        return self._tensor

    def done(self) -> bool:
        """Whether the work has finished."""
        return self._work is None or self._work.is_completed()


@final
class Sent:
    """Handle of a message over gloo, which says that it has left only to the one who waits.

    Args:
        work: The work of torch.distributed; only one may wait for it.
        tensor: What is sent.
        waiter: Who waits from the first question on whether it is done.
    """

    def __init__(self, work: Any, tensor: Tensor, waiter: Waiter) -> None:
        self._work, self._tensor, self._waiter = work, tensor, waiter
        self._future: Future[None] | None = None

    def wait(self) -> Tensor:
        """Wait and return what was sent."""
        if self._future is not None:
            self._future.result()
        elif self._work is not None:
            self._work.wait()
            self._work = None
        return self._tensor

    def done(self) -> bool:
        """Whether the message has left."""
        if self._future is None:
            if self._work is None:
                return True
            self._future = self._waiter.watch(self._work)
            self._work = None
        return self._future.done()


@final
class Waiter:
    """A thread that waits for works, one after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[Any, Future[None]]] = queue.SimpleQueue()
        # A daemon: a receiver that died must not keep this process.
        threading.Thread(target=_wait_for_all, args=(self._works,), daemon=True).start()

    def watch(self, work: Any) -> Future[None]:
        """A future that is done when `work` is."""
        future: Future[None] = Future()
        self._works.put((work, future))
        return future


def _wait_for_all(works: queue.SimpleQueue[tuple[Any, Future[None]]]) -> None:
    while True:
        work, future = works.get()
        try:
            work.wait()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del work, future
