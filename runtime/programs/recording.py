"""A communicator that moves nothing: its collectives become nodes of the graph being traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, final

import torch
from torch import Tensor

from autopar.runtime.comm import Channel, Communicator, Done, Handle, Operation, Ranks
from autopar.runtime.programs import ops

T = TypeVar("T")


@final
class RecordingCommunicator(Communicator):
    """One rank of a job that need not exist, for tracing its programs and for dry runs.

    Collectives call the operators of `autopar.runtime.programs.ops`, so a tracer sees them and fake
    tensors pass through. Traffic is counted as if they ran. Questions to the other ranks are
    answered as if all of them held what this one holds.

    Args:
        rank: The rank to be, from 0.
        world_size: Number of ranks of the job.
        device: Device on which the rank would compute.

    Attributes:
        groups: Every group asked of `prepare`.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        assert 0 <= rank < world_size, (rank, world_size)
        super().__init__(rank, world_size, device)
        self.groups: set[Ranks] = set()

    def gather_objects(self, value: T) -> list[T]:
        """`value` once per rank: checks that ranks agree pass, as they must in a dry run."""
        return [value] * self.world_size

    def barrier(self) -> None:
        """Nobody to wait for."""

    def prepare(self, groups: Sequence[Ranks], channels: Sequence[Channel] = ()) -> None:
        """Note the groups; those of this rank are checked."""
        for ranks in groups:
            if self.rank in ranks:
                self._alone(tuple(ranks))
            self.groups.add(tuple(ranks))

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        return ops.ALL_REDUCE(tensor, list(ranks), op)

    def _all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Handle:
        return Done(tensor.copy_(self._all_reduce(tensor, ranks, op)))

    def _all_gather(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        return _done(ops.ALL_GATHER(tensor, list(ranks)), out)

    def _reduce_scatter(
        self, tensor: Tensor, ranks: Ranks, op: Operation, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        return _done(ops.REDUCE_SCATTER(tensor, list(ranks), op), out)

    def _all_to_all(
        self,
        flat: Tensor,
        ranks: Ranks,
        send_sizes: list[int],
        receive_sizes: list[int],
        asynchronous: bool,
    ) -> Handle:
        return Done(ops.ALL_TO_ALL(flat, send_sizes, receive_sizes, list(ranks)))

    def _broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        # Used before training, never in a program: what this rank holds stands for the source's.
        return tensor

    def _send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        # Messages are actions of a schedule, never nodes of a program.
        return Done(tensor)

    def _receive(self, out: Tensor, source: int, tag: int) -> Handle:
        return Done(out.zero_())


def _done(result: Tensor, out: Tensor | None) -> Handle:
    return Done(result if out is None else out.copy_(result))
