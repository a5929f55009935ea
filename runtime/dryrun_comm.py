"""One rank of a job that need not exist, on fake tensors, with the memory its communicator uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from autopar.runtime.comm import Channel, Communicator, Operation, Ranks
from autopar.runtime.dryrun_ledger import Ledger
from autopar.runtime.handles import Done, Handle, Lazy

T = TypeVar("T")


@final
class _Sent:
    """Handle of a message: holds its tensor until it has surely arrived."""

    def __init__(self, tensor: Tensor, arrived: Callable[[], bool]) -> None:
        self._tensor, self._arrived = tensor, arrived

    def wait(self) -> Tensor:
        return self._tensor

    def done(self) -> bool:
        return self._arrived()


@final
class DryCommunicator(Communicator):
    """Answers with tensors of the right size, and holds what a real communicator would hold.

    Args:
        rank: The rank to be.
        world_size: Number of ranks.
        device: Device of the fake tensors.
        ledger: Where received tensors are counted.
        gloo: Whether memory is used as gloo needs it; else as NCCL does.

    Attributes:
        arrived: Makes the question whether a message of the running action has arrived.
    """

    def __init__(
        self, rank: int, world_size: int, device: torch.device, ledger: Ledger, *, gloo: bool
    ) -> None:
        super().__init__(rank, world_size, device)
        self.ledger, self.gloo = ledger, gloo
        self.arrived: Callable[[], Callable[[], bool]] = lambda: lambda: True

    def gather_objects(self, value: T) -> list[T]:
        """`value` once per rank."""
        return [value] * self.world_size

    def barrier(self) -> None:
        """Nobody to wait for."""

    def prepare(self, groups: Sequence[Ranks], channels: Sequence[Channel] = ()) -> None:
        """Nothing to prepare."""

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        return torch.empty_like(tensor)

    def _all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Handle:
        return Done(tensor)

    def _all_gather(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        result = tensor.new_empty((len(ranks), *tensor.shape)) if out is None else out
        return holding(result, tensor)

    def _reduce_scatter(
        self, tensor: Tensor, ranks: Ranks, op: Operation, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        if self.gloo:
            return _gloo_reduce_scatter(tensor, out)
        return holding(tensor.new_empty(tensor.shape[1:]) if out is None else out, tensor)

    def _all_to_all(
        self,
        flat: Tensor,
        ranks: Ranks,
        send_sizes: list[int],
        receive_sizes: list[int],
        asynchronous: bool,
    ) -> Handle:
        return holding(flat.new_empty(sum(receive_sizes)), flat)

    def _broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        return tensor

    def _send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        self.ledger.label([tensor], "boundary")
        return _Sent(tensor, self.arrived())

    def _receive(self, out: Tensor, source: int, tag: int) -> Handle:
        self.ledger.label([out], "boundary")
        return Done(out)


def _gloo_reduce_scatter(tensor: Tensor, out: Tensor | None) -> Handle:
    """Rows are exchanged, then the operand is let go, then they are added up."""
    held = [tensor]
    rows, shape = torch.empty_like(tensor), tensor.shape[1:]

    def finish() -> Tensor:
        held.clear()
        return rows.new_empty(shape) if out is None else out

    del tensor
    return Lazy(finish)


def holding(result: Tensor, *operands: Any) -> Handle:
    """A handle that keeps operands alive until it is waited for."""
    kept: tuple[Any, ...] = (result, *operands)
    return Lazy(lambda: kept[0])
