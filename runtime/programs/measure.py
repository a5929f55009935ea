"""Measured live bytes: what a program allocates while it runs, seen from outside.

Every storage that an op returns is watched by a weak reference; its bytes count until it is freed.
Nothing is predicted, so this checks `liveness`. Scratch memory inside an op is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.programs.program import Boxed


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Live bytes of one call, less what is resident.

    Attributes:
        start_bytes: What was handed over.
        peak_bytes: At the high-water mark.
        end_bytes: On return.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int

    @property
    def peak_above_start_bytes(self) -> int:
        """Most bytes live during the call, less those live when it started."""
        return self.peak_bytes - self.start_bytes

    @property
    def net_bytes(self) -> int:
        """Bytes live after the call, less those live when it started."""
        return self.end_bytes - self.start_bytes


class Tracker(TorchDispatchMode):
    """Counts the bytes of live storages while it is entered, on the thread that entered it.

    Args:
        resident: Tensors whose storages do not count, nor do views of them.

    Attributes:
        live_bytes: Now.
        peak_bytes: Most so far.
    """

    def __init__(self, resident: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._resident = {storage._cdata for storage in _storages(resident)}
        self._watched: dict[int, weakref.ref[Any]] = {}

    def watch(self, values: Any) -> None:
        """Count the storages of tensors in `values`, once each, until they are freed."""
        for storage in _storages(tree_leaves(values)):
            key = storage._cdata
            if key not in self._resident and key not in self._watched:
                size_bytes = storage.nbytes()
                self.live_bytes += size_bytes
                self._watched[key] = weakref.ref(storage, self._forget(key, size_bytes))
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, size_bytes: int) -> Any:
        def forget(_: object) -> None:
            del self._watched[key]
            self.live_bytes -= size_bytes

        return forget

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an op and watch what it returns."""
        result = func(*args, **(kwargs or {}))
        self.watch(result)
        return result


def measure_peak(
    function: Boxed, values: list[Any], resident: Iterable[Tensor] = ()
) -> tuple[Measured, list[Any]]:
    """Call a compiled program and measure its live bytes.

    Args:
        function: What `Program.compile` returns.
        values: Its inputs. The list is emptied, so that nothing else holds what is handed over.
        resident: Tensors that live anyway, such as parameters and gradient buffers.

    Returns:
        The figures, and the results.
    """
    tracker = Tracker(resident)
    tracker.watch(values)
    start_bytes = tracker.live_bytes
    with tracker, torch.no_grad():
        results = function(values)
    # What no op returned, such as an input handed back.
    tracker.watch([result for result in results if isinstance(result, Tensor)])
    measured = Measured(
        start_bytes=start_bytes, peak_bytes=tracker.peak_bytes, end_bytes=tracker.live_bytes
    )
    return measured, results


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.untyped_storage()
