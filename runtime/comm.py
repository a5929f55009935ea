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
from typing import Any, Literal, Protocol, TypeVar, final

import torch
from torch import Tensor

from autopar.errors import RankError

T = TypeVar("T")
Ranks = tuple[int, ...]
Operation = Literal["sum", "max", "min"]


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> Tensor:
        """Finish the collective and return its result."""
        ...


@final
class Done:
    """Handle of a collective that has already finished."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> Tensor:
        """Return the result."""
        return self._tensor


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
            what leaves the rank for all-to-all. `take_traffic` reads and clears it.
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
    def all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation = "sum") -> Tensor:
        """Reduce `tensor` over `ranks` into a new tensor of the same shape.

        Args:
            tensor: Equal shape and dtype on all ranks; for bool, sum and max mean "any".
            ranks: The group.
            op: The reduction.
        """
        if self._alone(ranks):
            return tensor.detach().clone()
        self._count_all_reduce(tensor, ranks)
        result = self._all_reduce(_plain(tensor), ranks, _plain_op(tensor, op))
        return _as_dtype(result, tensor.dtype)

    @final
    def all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation = "sum") -> Handle:
        """Start to reduce `tensor` over `ranks` in place; it must not be touched until `wait`.

        Returns:
            A handle whose ``wait()`` returns `tensor`, reduced.
        """
        if self._alone(ranks):
            return Done(tensor)
        self._count_all_reduce(tensor, ranks)
        if tensor.dtype in _PLAIN_DTYPE or not tensor.is_contiguous():
            result = self._all_reduce(_plain(tensor), ranks, _plain_op(tensor, op))
            tensor.detach().copy_(_as_dtype(result, tensor.dtype))
            return Done(tensor)
        return self._all_reduce_start(tensor.detach(), ranks, op)

    @final
    def all_gather(self, tensor: Tensor, ranks: Ranks) -> Tensor:
        """Stack the tensors of all ranks.

        Args:
            tensor: Equal shape on all ranks (callers pad).
            ranks: The group.

        Returns:
            Shape ``(len(ranks), *tensor.shape)``, in rank order.
        """
        if self._alone(ranks):
            return tensor.detach().clone(memory_format=torch.contiguous_format)[None]
        self._count("all_gather", (len(ranks) - 1) * _size_bytes(tensor))
        return self._all_gather(tensor.detach().contiguous(), ranks)

    @final
    def reduce_scatter(self, tensor: Tensor, ranks: Ranks) -> Tensor:
        """Sum over ranks and keep this rank's row.

        Args:
            tensor: Shape ``(len(ranks), *s)`` on all ranks.
            ranks: The group.

        Returns:
            Shape ``s``: the sum over ranks of row ``ranks.index(self.rank)``.
        """
        assert tensor.ndim >= 1 and tensor.shape[0] == len(ranks), (tensor.shape, ranks)
        if self._alone(ranks):
            return tensor.detach()[0].clone(memory_format=torch.contiguous_format)
        self._count("reduce_scatter", (len(ranks) - 1) * _size_bytes(tensor) // len(ranks))
        result = self._reduce_scatter(_plain(tensor), ranks, _plain_op(tensor, "sum"))
        return _as_dtype(result, tensor.dtype)

    @final
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
            return [tensors[0].detach().clone(memory_format=torch.contiguous_format)]
        me = ranks.index(self.rank)
        sent = sum(_size_bytes(item) for i, item in enumerate(tensors) if i != me)
        self._count("all_to_all", sent)
        flat = torch.cat([item.detach().reshape(-1) for item in tensors])
        sizes = [math.prod(shape) for shape in shapes]
        received = self._all_to_all(flat, ranks, [item.numel() for item in tensors], sizes)
        return [
            piece.view(tuple(shape))
            for piece, shape in zip(received.split(sizes), shapes, strict=True)
        ]

    @final
    def broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        """The tensor of global rank `source`, as a new tensor; shapes must be equal."""
        assert source in ranks, (source, ranks)
        if self._alone(ranks):
            return tensor.detach().clone()
        if self.rank == source:
            self._count("broadcast", _size_bytes(tensor))
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        return self._broadcast(copy, ranks, source)

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
    def prepare(self, groups: Sequence[Ranks]) -> None:
        """Create groups; all ranks call with the same list, which need not be sorted.

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
    def _all_gather(self, tensor: Tensor, ranks: Ranks) -> Tensor:
        """Stack contiguous tensors."""

    @abc.abstractmethod
    def _reduce_scatter(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        """Reduce a contiguous tensor, keep a row."""

    @abc.abstractmethod
    def _all_to_all(
        self, flat: Tensor, ranks: Ranks, send_sizes: list[int], receive_sizes: list[int]
    ) -> Tensor:
        """Exchange consecutive pieces of a flat tensor; sizes count elements."""

    @abc.abstractmethod
    def _broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        """Broadcast into a contiguous tensor that may be overwritten."""

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

    def prepare(self, groups: Sequence[Ranks]) -> None:
        """Only groups of rank 0 alone exist."""
        for ranks in groups:
            self._alone(ranks)

    def _nothing_moves(self, *_: Any) -> Any:
        raise AssertionError("a group of one moves nothing")

    _never: Any = _nothing_moves
    _all_reduce = _all_reduce_start = _all_gather = _never
    _reduce_scatter = _all_to_all = _broadcast = _never


def _report_to_nobody(value: object) -> None:
    """Ranks that nobody started have nobody to tell."""


# Reductions of bool run on bytes: backends and torch.sum disagree on what a sum of bools is.
_PLAIN_DTYPE = {torch.bool: torch.uint8}


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().contiguous()
    dtype = _PLAIN_DTYPE.get(tensor.dtype)
    return tensor if dtype is None else tensor.to(dtype)


def _plain_op(tensor: Tensor, op: Operation) -> Operation:
    return "max" if tensor.dtype == torch.bool and op == "sum" else op


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
