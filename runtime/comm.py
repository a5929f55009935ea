"""Collectives between ranks, behind one small interface.

Programs talk to a `Communicator` and never to torch.distributed, so that the same program runs on
one device (`SoloCommunicator`), on processes (`comm_torch`) and on threads (`comm_threads`).
The public methods check, make contiguous, skip groups of one and count bytes; implementations
only move data.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, final

import torch
from torch import Tensor

from autopar.errors import RankError
from autopar.runtime.handles import Done, Handle, then

__all__ = ["Channel", "Communicator", "Done", "Handle", "Operation", "Ranks", "SoloCommunicator"]

T = TypeVar("T")
Ranks = tuple[int, ...]
Channel = tuple[int, int]
Operation = Literal["sum", "max", "min"]


class Communicator(abc.ABC):
    """Collectives over subsets of ranks.

    Every `ranks` argument is the ascending tuple of global ranks that take part, this one
    included; all of them must call, in the same order. A group of one moves nothing. Tensors may
    have any strides, dtype and number of dims; results are contiguous. Nothing is recorded for
    autograd.

    Attributes:
        rank: This rank, from 0.
        world_size: Number of ranks.
        device: Device on which this rank computes.
        traffic: Bytes this rank sends, by kind of collective, as theory has it: ``2(N-1)/N`` of
            the tensor for an all-reduce, ``(N-1)/N`` of the whole for gather and reduce-scatter,
            what leaves the rank for all-to-all and messages (kind ``send``). `take_traffic` reads
            and clears it.
        report: Tells a picklable value, such as progress, to whoever started the ranks.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.traffic: dict[str, int] = {}
        self.report: Callable[[object], None] = _report_to_nobody
        self._checked: set[Ranks] = set()

    @final
    @torch.no_grad()
    def all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation = "sum") -> Tensor:
        """Reduce `tensor` over `ranks` into a new tensor of the same shape.

        Args:
            tensor: Equal shape and dtype on all ranks; for bool, sum and max mean "any".
            ranks: The group.
            op: The reduction.
        """
        if self._alone(ranks):
            return _copy(tensor)
        self._count_all_reduce(tensor, ranks)
        result = self._all_reduce(_plain(tensor), ranks, _plain_op(tensor, op))
        return _as_dtype(result, tensor.dtype)

    @final
    @torch.no_grad()
    def all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation = "sum") -> Handle:
        """Start to reduce `tensor` over `ranks` in place; it must not be touched until `wait`.

        Returns:
            A handle whose ``wait()`` returns `tensor`, reduced.
        """
        if self._alone(ranks):
            return Done(tensor)
        self._count_all_reduce(tensor, ranks)
        if tensor.dtype in _PLAIN_DTYPE or not tensor.is_contiguous():
            copy = _plain(tensor)
            copy = copy.clone() if copy is tensor else copy
            handle = self._all_reduce_start(copy, ranks, _plain_op(tensor, op))
            return then(handle, tensor.detach().copy_)
        return self._all_reduce_start(tensor.detach(), ranks, op)

    @final
    @torch.no_grad()
    def all_gather(self, tensor: Tensor, ranks: Ranks) -> Tensor:
        """Stack the tensors of all ranks.

        Args:
            tensor: Equal shape on all ranks (callers pad).
            ranks: The group.

        Returns:
            Shape ``(len(ranks), *tensor.shape)``, in rank order.
        """
        if self._alone(ranks):
            return _copy(tensor)[None]
        self._count_all_gather(tensor, ranks)
        return self._all_gather(tensor.contiguous(), ranks, None, False).wait()

    @final
    @torch.no_grad()
    def all_gather_start(self, tensor: Tensor, ranks: Ranks, out: Tensor | None = None) -> Handle:
        """Start `all_gather`; `tensor` must not be written until `wait`.

        Args:
            tensor: Equal shape on all ranks.
            ranks: The group.
            out: Where the result goes, contiguous; by default a new tensor.

        Returns:
            A handle whose ``wait()`` returns the result. It keeps `tensor` alive until then.
        """
        _check_out(out, (len(ranks), *tensor.shape), tensor.dtype)
        if self._alone(ranks):
            return Done(_copy(tensor)[None] if out is None else out.copy_(tensor[None]))
        self._count_all_gather(tensor, ranks)
        return self._all_gather(tensor.contiguous(), ranks, out, True)

    @final
    @torch.no_grad()
    def reduce_scatter(self, tensor: Tensor, ranks: Ranks, op: Operation = "sum") -> Tensor:
        """Reduce over ranks and keep this rank's row.

        Args:
            tensor: Shape ``(len(ranks), *s)`` on all ranks.
            ranks: The group.
            op: The reduction; for bool, sum and max mean "any".

        Returns:
            Shape ``s``: row ``ranks.index(self.rank)``, reduced over ranks.
        """
        return self._reduce_scatter_any(tensor, ranks, None, op, False).wait()

    @final
    @torch.no_grad()
    def reduce_scatter_start(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None = None, *, op: Operation = "sum"
    ) -> Handle:
        """Start `reduce_scatter`; `tensor` must not be written until `wait`.

        Args:
            tensor: Shape ``(len(ranks), *s)`` on all ranks.
            ranks: The group.
            out: Where the result goes, contiguous, shape ``s``; by default a new tensor.
            op: The reduction.

        Returns:
            A handle whose ``wait()`` returns the result. It keeps `tensor` alive until then.
        """
        return self._reduce_scatter_any(tensor, ranks, out, op, True)

    @final
    @torch.no_grad()
    def all_to_all(
        self, tensors: Sequence[Tensor], ranks: Ranks, shapes: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Send ``tensors[i]`` to ``ranks[i]`` and receive one tensor from each rank.

        Args:
            tensors: One per rank, any shapes (also empty), one dtype.
            ranks: The group.
            shapes: Shape to receive from each rank.

        Returns:
            One tensor per rank, in rank order.
        """
        assert len(tensors) == len(shapes) == len(ranks), (len(tensors), len(shapes), ranks)
        if self._alone(ranks):
            return [_copy(tensors[0])]
        flat = torch.cat([item.reshape(-1) for item in tensors])
        sizes = [math.prod(shape) for shape in shapes]
        received = self.all_to_all_flat(flat, ranks, [item.numel() for item in tensors], sizes)
        return [
            piece.view(tuple(shape))
            for piece, shape in zip(received.split(sizes), shapes, strict=True)
        ]

    @final
    @torch.no_grad()
    def all_to_all_flat(
        self, flat: Tensor, ranks: Ranks, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Tensor:
        """Send consecutive pieces of a flat tensor, receive consecutive pieces of another.

        Args:
            flat: Shape ``(sum(send_sizes),)``.
            ranks: The group.
            send_sizes: Elements for each rank, in rank order.
            receive_sizes: Elements from each rank.

        Returns:
            Shape ``(sum(receive_sizes),)``.
        """
        if self._all_to_all_alone(flat, ranks, send_sizes, receive_sizes):
            return _copy(flat)
        sizes = list(send_sizes), list(receive_sizes)
        return self._all_to_all(flat.contiguous(), ranks, *sizes, False).wait()

    @final
    @torch.no_grad()
    def all_to_all_start(
        self, flat: Tensor, ranks: Ranks, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Handle:
        """Start `all_to_all_flat`; `flat` must not be written until `wait`.

        Returns:
            A handle whose ``wait()`` returns the result. It keeps `flat` alive until then.
        """
        if self._all_to_all_alone(flat, ranks, send_sizes, receive_sizes):
            return Done(_copy(flat))
        sizes = list(send_sizes), list(receive_sizes)
        return self._all_to_all(flat.contiguous(), ranks, *sizes, True)

    @final
    @torch.no_grad()
    def broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        """The tensor of global rank `source`, as a new tensor; shapes must be equal."""
        assert source in ranks, (source, ranks)
        if self._alone(ranks):
            return _copy(tensor)
        if self.rank == source:
            self._count("broadcast", _size_bytes(tensor))
        return self._broadcast(_copy(tensor), ranks, source)

    @final
    @torch.no_grad()
    def send_start(self, tensor: Tensor, to: int, tag: int = 0) -> Handle:
        """Start to send `tensor` to one rank; it must not be written until `wait`.

        Messages between two ranks in one direction with equal tags arrive in the order in which
        they were sent. NCCL ignores tags: there, both ends must agree on the order of all
        messages of one direction.

        Args:
            tensor: Any strides, also empty.
            to: The receiving rank, which calls `receive_start` with the same tag.
            tag: From 0 to 2**31 - 1.

        Returns:
            A handle whose ``wait()`` returns `tensor` when its memory may be written again, which
            may be when the receiver has it. It keeps `tensor` alive until then.

        Raises:
            RankError: If `to` is this rank or outside of the job.
        """
        self._check_other(to, tag)
        self._count("send", _size_bytes(tensor))
        return self._send(tensor.detach().contiguous(), to, tag)

    @final
    @torch.no_grad()
    def receive_start(
        self, shape: Sequence[int], dtype: torch.dtype, source: int, tag: int = 0
    ) -> Handle:
        """Start to receive a tensor from one rank; see `send_start`.

        Args:
            shape: Shape of what was sent.
            dtype: Dtype of what was sent.
            source: The sending rank.
            tag: The tag it sends with.

        Returns:
            A handle whose ``wait()`` returns the new tensor, on `device`.

        Raises:
            RankError: If `source` is this rank or outside of the job.
        """
        self._check_other(source, tag)
        out = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        return self._receive(out, source, tag)

    @final
    def take_traffic(self) -> dict[str, int]:
        """Bytes sent since the last call by kind, and start counting anew."""
        taken, self.traffic = self.traffic, {}
        return taken

    @abc.abstractmethod
    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks, in rank order, on every rank. Values must be picklable."""

    @abc.abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abc.abstractmethod
    def prepare(self, groups: Sequence[Ranks], channels: Sequence[Channel] = ()) -> None:
        """Create groups; all ranks call with the same lists, which need not be sorted.

        Args:
            groups: Groups of collectives.
            channels: Sender and receiver of every message there will be.

        Raises:
            RankError: If ranks disagree on the groups.
        """

    @abc.abstractmethod
    def _all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        """Reduce a contiguous tensor, which must not change."""

    @abc.abstractmethod
    def _all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Handle:
        """Start to reduce a contiguous tensor in place."""

    @abc.abstractmethod
    def _all_gather(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        """Stack contiguous tensors, into `out` if given; if not asynchronous, wait comes next."""

    @abc.abstractmethod
    def _reduce_scatter(
        self, tensor: Tensor, ranks: Ranks, op: Operation, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        """Reduce a contiguous tensor, keep a row, in `out` if given."""

    @abc.abstractmethod
    def _all_to_all(
        self,
        flat: Tensor,
        ranks: Ranks,
        send_sizes: list[int],
        receive_sizes: list[int],
        asynchronous: bool,
    ) -> Handle:
        """Exchange consecutive pieces of a flat tensor; sizes count elements."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        """Broadcast into a contiguous tensor that may be overwritten."""

    @abc.abstractmethod
    def _send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        """Start to send a contiguous tensor."""

    @abc.abstractmethod
    def _receive(self, out: Tensor, source: int, tag: int) -> Handle:
        """Start to receive into `out`."""

    def _reduce_scatter_any(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None, op: Operation, asynchronous: bool
    ) -> Handle:
        assert tensor.ndim >= 1 and tensor.shape[0] == len(ranks), (tensor.shape, ranks)
        _check_out(out, tensor.shape[1:], tensor.dtype)
        if self._alone(ranks):
            return Done(_copy(tensor[0]) if out is None else out.copy_(tensor[0]))
        self._count("reduce_scatter", (len(ranks) - 1) * _size_bytes(tensor) // len(ranks))
        plain, op = _plain(tensor), _plain_op(tensor, op)
        if plain.dtype == tensor.dtype:
            return self._reduce_scatter(plain, ranks, op, out, asynchronous)
        handle = self._reduce_scatter(plain, ranks, op, None, asynchronous)
        return then(handle, out.copy_ if out is not None else lambda row: row.to(tensor.dtype))

    def _all_to_all_alone(
        self, flat: Tensor, ranks: Ranks, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> bool:
        """Check and count; whether this rank is the whole group."""
        assert len(send_sizes) == len(receive_sizes) == len(ranks), (send_sizes, ranks)
        assert flat.shape == (sum(send_sizes),), (flat.shape, send_sizes)
        if self._alone(ranks):
            return True
        elements = flat.numel() - send_sizes[ranks.index(self.rank)]
        self._count("all_to_all", elements * flat.element_size())
        return False

    def _check_other(self, other: int, tag: int) -> None:
        assert 0 <= tag < 2**31, tag
        if other == self.rank or not 0 <= other < self.world_size:
            raise RankError(
                f"rank {self.rank} cannot exchange messages with rank {other}",
                expected=f"another rank from 0 to {self.world_size - 1}",
            )

    def _alone(self, ranks: Ranks) -> bool:
        if ranks not in self._checked:
            if tuple(sorted(set(ranks))) != ranks or self.rank not in ranks:
                raise RankError(
                    f"rank {self.rank} cannot take part in a collective over {ranks!r}",
                    expected="an ascending tuple of ranks that includes this one",
                )
            if ranks[-1] >= self.world_size or ranks[0] < 0:
                raise RankError(
                    f"collective over {ranks!r} in a job of {self.world_size} ranks",
                    expected=f"ranks from 0 to {self.world_size - 1}",
                )
            self._checked.add(ranks)
        return len(ranks) == 1

    def _count(self, kind: str, size_bytes: int) -> None:
        self.traffic[kind] = self.traffic.get(kind, 0) + size_bytes

    def _count_all_gather(self, tensor: Tensor, ranks: Ranks) -> None:
        self._count("all_gather", (len(ranks) - 1) * _size_bytes(tensor))

    def _count_all_reduce(self, tensor: Tensor, ranks: Ranks) -> None:
        self._count("all_reduce", 2 * (len(ranks) - 1) * _size_bytes(tensor) // len(ranks))


@final
class SoloCommunicator(Communicator):
    """The only rank of its job: every group is a group of one."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(0, 1, device or torch.device("cpu"))

    def gather_objects(self, value: T) -> list[T]:
        """The value itself."""
        return [value]

    def barrier(self) -> None:
        """Nothing to wait for."""

    def prepare(self, groups: Sequence[Ranks], channels: Sequence[Channel] = ()) -> None:
        """Only groups of rank 0 alone exist."""
        for ranks in groups:
            self._alone(ranks)

    def _nothing_moves(self, *_: Any) -> Any:
        raise AssertionError("a group of one moves nothing")

    _never: Any = _nothing_moves
    _all_reduce = _all_reduce_start = _all_gather = _never
    _reduce_scatter = _all_to_all = _broadcast = _send = _receive = _never


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _check_out(out: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> None:
    if out is not None:
        assert out.is_contiguous(), out.stride()
        assert out.shape == tuple(shape) and out.dtype == dtype, (out.shape, out.dtype, shape)


def _report_to_nobody(value: object) -> None:
    """Ranks that nobody started have nobody to tell."""


# Reductions of bool run on bytes: backends and torch.sum disagree on what a sum of bools is.
_PLAIN_DTYPE = {torch.bool: torch.uint8}


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    dtype = _PLAIN_DTYPE.get(tensor.dtype)
    return tensor if dtype is None else tensor.to(dtype)


def _plain_op(tensor: Tensor, op: Operation) -> Operation:
    return "max" if tensor.dtype == torch.bool and op == "sum" else op


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
