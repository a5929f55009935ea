"""Ranks as threads of one process: the whole job in one debugger, started in microseconds.

Torch's grad mode is per thread, its default random generator is not: seed explicit generators.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from autopar.errors import AutoparError, RankError
from autopar.runtime.comm import Communicator, Done, Handle, Operation, Ranks

T = TypeVar("T")


class _AbortedError(Exception):
    """Another rank failed; this one only stops."""


@final
class _Meeting:
    """Where the ranks of one job hand each other payloads."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._rooms: dict[tuple[Ranks, int], dict[int, tuple[str, Any]]] = {}
        self._left: dict[tuple[Ranks, int], int] = {}
        self._gone: set[int] = set()
        self._failed = False

    def leave(self, rank: int) -> None:
        """Note that `rank` has finished and joins no further collective."""
        with self._condition:
            self._gone.add(rank)
            self._condition.notify_all()

    def abort(self) -> None:
        """Wake and stop every waiting rank."""
        with self._condition:
            self._failed = True
            self._condition.notify_all()

    def exchange(self, rank: int, ranks: Ranks, turn: int, kind: str, payload: Any) -> list[Any]:
        """Give `payload`, get everybody's in rank order."""
        key = (ranks, turn)
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            room = self._rooms.setdefault(key, {})
            room[rank] = (kind, payload)
            if len(room) == len(ranks):
                self._condition.notify_all()
            while len(room) < len(ranks):
                if self._failed:
                    raise _AbortedError
                if self._gone.intersection(ranks).difference(room):
                    raise self._left_alone(rank, ranks, kind, room)
                if not self._condition.wait(max(0.0, deadline - time.monotonic())):
                    raise self._left_alone(rank, ranks, kind, room)
            if self._failed:
                raise _AbortedError
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == len(ranks):
                del self._rooms[key], self._left[key]
        for other in ranks:
            if room[other][0] != kind:
                raise RankError(
                    f"ranks {rank} and {other} meet in different collectives: "
                    f"{kind} and {room[other][0]}",
                    expected="the same collectives in the same order on every rank of a group",
                    where=f"group {ranks}, collective {turn}",
                )
        return [room[other][1] for other in ranks]

    def _left_alone(self, rank: int, ranks: Ranks, kind: str, room: dict[int, Any]) -> RankError:
        missing = [other for other in ranks if other not in room]
        return RankError(
            f"rank {rank} waited in {kind} for ranks {missing}, which have finished or did not "
            f"come within {self._timeout_s:g} s",
            expected="every rank of the group to join",
            where=f"group {ranks}",
        )


@final
class ThreadCommunicator(Communicator):
    """One rank of a job whose ranks are threads; made by `run_threads`."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, meeting.world_size, torch.device("cpu"))
        self._meeting = meeting
        self._turns: dict[Ranks, int] = {}

    def gather_objects(self, value: T) -> list[T]:
        """See `Communicator.gather_objects`."""
        return self._exchange(tuple(range(self.world_size)), "gather_objects", value)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._exchange(tuple(range(self.world_size)), "barrier", None)

    def prepare(self, groups: Sequence[Ranks]) -> None:
        """See `Communicator.prepare`; threads need no preparation, only agreement."""
        wanted = sorted({tuple(ranks) for ranks in groups})
        self._exchange(tuple(range(self.world_size)), f"prepare {wanted}", None)

    def _exchange(self, ranks: Ranks, kind: str, payload: Any) -> list[Any]:
        turn = self._turns.get(ranks, 0)
        self._turns[ranks] = turn + 1
        return self._meeting.exchange(self.rank, ranks, turn, kind, payload)

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        rows = self._all_gather(tensor, ranks, f"all_reduce {op}")
        if op == "sum":
            return rows.sum(0, dtype=tensor.dtype)
        return rows.amax(0) if op == "max" else rows.amin(0)

    def _all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Handle:
        tensor.copy_(self._all_reduce(tensor, ranks, op))
        return Done(tensor)

    def _all_gather(self, tensor: Tensor, ranks: Ranks, kind: str = "all_gather") -> Tensor:
        label = f"{kind} {tuple(tensor.shape)} {tensor.dtype}"
        return torch.stack(self._exchange(ranks, label, tensor.clone()))

    def _reduce_scatter(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        label = f"reduce_scatter {op} {tuple(tensor.shape)} {tensor.dtype}"
        everyone = self._exchange(ranks, label, tensor.clone())
        rows = torch.stack([item[ranks.index(self.rank)] for item in everyone])
        return rows.sum(0, dtype=tensor.dtype) if op == "sum" else rows.amax(0)

    def _all_to_all(
        self, flat: Tensor, ranks: Ranks, send_sizes: list[int], receive_sizes: list[int]
    ) -> Tensor:
        everyone = self._exchange(ranks, f"all_to_all {flat.dtype}", flat.split(send_sizes))
        received = [pieces[ranks.index(self.rank)] for pieces in everyone]
        for other, piece, size in zip(ranks, received, receive_sizes, strict=True):
            if piece.numel() != size:
                raise RankError(
                    f"rank {other} sends {piece.numel()} elements to rank {self.rank}, "
                    f"which expects {size}",
                    where=f"all_to_all over {ranks}",
                )
        return torch.cat(received)

    def _broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        label = f"broadcast from {source} {tuple(tensor.shape)} {tensor.dtype}"
        payload = tensor.clone() if self.rank == source else None
        return tensor.copy_(self._exchange(ranks, label, payload)[ranks.index(source)])


def run_threads(
    world_size: int, function: Callable[..., T], *args: Any, timeout_s: float = 60.0
) -> list[T]:
    """Run ``function(communicator, *args)`` on `world_size` threads.

    Args:
        world_size: Number of ranks.
        function: What every rank runs; `args` are shared, not copied.
        args: Further arguments.
        timeout_s: Seconds a rank may wait in one collective.

    Returns:
        The results, in rank order.

    Raises:
        AutoparError: The error of the lowest rank that failed with one.
        RankError: Naming the rank, when it failed with anything else.
    """
    meeting = _Meeting(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    failures: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = function(ThreadCommunicator(rank, meeting), *args)
            meeting.leave(rank)
        except _AbortedError:
            pass
        except BaseException as error:
            failures[rank] = error
            meeting.abort()

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        rank, error = min(failures.items())
        if isinstance(error, AutoparError):
            raise error
        raise RankError(
            f"rank {rank} failed: {type(error).__name__}: {error}", where=f"rank {rank}"
        ) from error
    return results
