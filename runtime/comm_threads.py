"""Ranks as threads of one process: the whole job in one debugger, started in microseconds.

Torch's grad mode is per thread, its default random generator is not: seed explicit generators.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from autopar.errors import AutoparError, RankError
from autopar.runtime.comm import Channel, Communicator, Operation, Ranks
from autopar.runtime.handles import Done, Handle, Lazy

T = TypeVar("T")


class _AbortedError(Exception):
    """Another rank failed; this one only stops."""


@dataclass(frozen=True, slots=True, order=True)
class _Message:
    """Number `index` of the messages from one rank to another with one tag."""

    source: int
    to: int
    tag: int
    index: int

    def __str__(self) -> str:
        return f"message {self.index} of rank {self.source} to rank {self.to} with tag {self.tag}"


@final
class _Meeting:
    """Where the ranks of one job hand each other payloads."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._rooms: dict[tuple[Ranks, int], dict[int, tuple[str, Any]]] = {}
        self._left: dict[tuple[Ranks, int], int] = {}
        self._sent: dict[_Message, Tensor] = {}
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

    def post(self, rank: int, ranks: Ranks, turn: int, kind: str, payload: Any) -> None:
        """Give `payload` to collective `turn` of the group."""
        with self._condition:
            room = self._rooms.setdefault((ranks, turn), {})
            room[rank] = (kind, payload)
            if len(room) == len(ranks):
                self._condition.notify_all()

    def collect(self, rank: int, ranks: Ranks, turn: int, kind: str) -> list[Any]:
        """Everybody's payloads in rank order, once all have posted."""
        key = (ranks, turn)
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            room = self._rooms[key]
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

    def send(self, message: _Message, tensor: Tensor) -> None:
        """Put `tensor` where the receiver of `message` will find it."""
        with self._condition:
            self._sent[message] = tensor
            self._condition.notify_all()

    def receive(self, message: _Message) -> Tensor:
        """Take what was sent as `message`, once it is there."""
        deadline = time.monotonic() + self._timeout_s
        with self._condition:
            while message not in self._sent:
                if self._failed:
                    raise _AbortedError
                remaining_s = deadline - time.monotonic()
                if message.source in self._gone or not self._condition.wait(max(0.0, remaining_s)):
                    raise RankError(
                        f"rank {message.to} waited for {message}, which rank {message.source} did "
                        f"not send before it finished or within {self._timeout_s:g} s",
                        expected="a send for every receive, with the same tag",
                    )
            if self._failed:
                raise _AbortedError
            return self._sent.pop(message)

    def check_received(self) -> None:
        """Refuse messages that nobody took.

        Raises:
            RankError: Naming the first of them.
        """
        for message in sorted(self._sent):
            raise RankError(
                f"{message} was never received by rank {message.to}",
                expected="a receive for every send, with the same tag",
            )

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
        self._messages: dict[tuple[int, int, int], int] = {}

    def gather_objects(self, value: T) -> list[T]:
        """See `Communicator.gather_objects`."""
        return self._exchange(tuple(range(self.world_size)), "gather_objects", value)

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self._exchange(tuple(range(self.world_size)), "barrier", None)

    def prepare(self, groups: Sequence[Ranks], channels: Sequence[Channel] = ()) -> None:
        """See `Communicator.prepare`; threads need no preparation, only agreement."""
        wanted = (sorted({tuple(ranks) for ranks in groups}), sorted(set(channels)))
        self._exchange(tuple(range(self.world_size)), f"prepare {wanted}", None)

    def _exchange(self, ranks: Ranks, kind: str, payload: Any) -> list[Any]:
        return self._exchange_start(ranks, kind, payload)()

    def _exchange_start(self, ranks: Ranks, kind: str, payload: Any) -> Callable[[], list[Any]]:
        """Post `payload`; the function returned waits for that of the others."""
        turn = self._turns.get(ranks, 0)
        self._turns[ranks] = turn + 1
        self._meeting.post(self.rank, ranks, turn, kind, payload)
        return lambda: self._meeting.collect(self.rank, ranks, turn, kind)

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        return self._all_reduce_start(tensor.clone(), ranks, op).wait()

    def _all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Handle:
        label = f"all_reduce {op} {tuple(tensor.shape)} {tensor.dtype}"
        collect = self._exchange_start(ranks, label, tensor.clone())
        return Lazy(lambda: tensor.copy_(_reduce(torch.stack(collect()), op)))

    def _all_gather(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        label = f"all_gather {tuple(tensor.shape)} {tensor.dtype}"
        collect = self._exchange_start(ranks, label, tensor.clone())
        return Lazy(lambda: torch.stack(collect(), out=out))

    def _reduce_scatter(
        self, tensor: Tensor, ranks: Ranks, op: Operation, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        label = f"reduce_scatter {op} {tuple(tensor.shape)} {tensor.dtype}"
        collect = self._exchange_start(ranks, label, tensor.clone())
        mine = ranks.index(self.rank)

        def finish() -> Tensor:
            row = _reduce(torch.stack([item[mine] for item in collect()]), op)
            return row if out is None else out.copy_(row)

        return Lazy(finish)

    def _all_to_all(
        self,
        flat: Tensor,
        ranks: Ranks,
        send_sizes: list[int],
        receive_sizes: list[int],
        asynchronous: bool,
    ) -> Handle:
        pieces = flat.clone().split(send_sizes)
        collect = self._exchange_start(ranks, f"all_to_all {flat.dtype}", pieces)
        return Lazy(lambda: self._received(collect(), ranks, receive_sizes))

    def _received(
        self, everyone: list[tuple[Tensor, ...]], ranks: Ranks, sizes: list[int]
    ) -> Tensor:
        received = [pieces[ranks.index(self.rank)] for pieces in everyone]
        for other, piece, size in zip(ranks, received, sizes, strict=True):
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

    def _send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        self._meeting.send(self._next_message(self.rank, to, tag), tensor.clone())
        return Done(tensor)

    def _receive(self, out: Tensor, source: int, tag: int) -> Handle:
        message = self._next_message(source, self.rank, tag)

        def finish() -> Tensor:
            tensor = self._meeting.receive(message)
            if tensor.shape != out.shape or tensor.dtype != out.dtype:
                raise RankError(
                    f"{message} is a {tensor.dtype} of shape {tuple(tensor.shape)}, but rank "
                    f"{self.rank} expects a {out.dtype} of shape {tuple(out.shape)}",
                    fix="make both ends agree on what is sent, and in which order",
                )
            return out.copy_(tensor)

        return Lazy(finish)

    def _next_message(self, source: int, to: int, tag: int) -> _Message:
        index = self._messages.get((source, to, tag), 0)
        self._messages[source, to, tag] = index + 1
        return _Message(source, to, tag, index)


def _reduce(rows: Tensor, op: Operation) -> Tensor:
    if op == "sum":
        return rows.sum(0, dtype=rows.dtype)
    return rows.amax(0) if op == "max" else rows.amin(0)


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
        RankError: Naming the rank, when it failed with anything else; or when a message was sent
            and never received.
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
    meeting.check_received()
    return results
