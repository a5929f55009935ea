"""Collectives over torch.distributed: NCCL for CUDA tensors, gloo for CPU tensors."""

from __future__ import annotations

import atexit
import datetime
import os
from collections.abc import Sequence
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import ClusterError, RankError
from autopar.runtime import compat
from autopar.runtime.comm import Channel, Communicator, Operation, Ranks, SoloCommunicator
from autopar.runtime.environment import JobEnvironment, local_rank, read_environment
from autopar.runtime.handles import Done, Handle, Sent, Waiter, Work, then

T = TypeVar("T")

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


@final
class TorchCommunicator(Communicator):
    """Ranks are processes of an initialised torch.distributed job.

    Groups must be created by `prepare` before use; the group of all ranks always exists. So must
    the channels of CUDA tensors; messages of CPU tensors go through the group of all ranks.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), device)
        self._groups: dict[Ranks, Any] = {tuple(range(self.world_size)): dist.group.WORLD}
        self._channels: dict[Channel, Any] = {}
        self._waiter: Waiter | None = None

    def leave(self) -> None:
        """End the job of this process: nothing can be sent afterwards.

        The threads of a process group let go of tensors, and of Python objects with them. They
        must have ended before the interpreter does, and do so with the last reference to it.
        """
        self._groups.clear()
        self._channels.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def gather_objects(self, value: T) -> list[T]:
        """See `Communicator.gather_objects`."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        dist.barrier()

    def prepare(self, groups: Sequence[Ranks], channels: Sequence[Channel] = ()) -> None:
        """See `Communicator.prepare`."""
        wanted = sorted({tuple(ranks) for ranks in groups if len(ranks) > 1})
        pairs = sorted(set(channels))
        everyone = self.gather_objects((wanted, pairs))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise RankError(
                    f"ranks 0 and {rank} ask for different groups: {everyone[0]} and {theirs}",
                    expected="the same plan on every rank",
                    fix="check that all ranks load the same plan and the same model",
                )
        for ranks in wanted:
            if ranks not in self._groups:
                self._groups[ranks] = dist.new_group(list(ranks))
        if self.device.type != "cuda":
            return
        # NCCL runs what one group does one after the other: two ranks that each send before they
        # receive would wait for each other. With a group per direction they do not.
        for pair in pairs:
            if pair not in self._channels:
                self._channels[pair] = dist.new_group(sorted(pair))

    def _channel(self, source: int, to: int) -> Any:
        try:
            return self._channels[source, to]
        except KeyError:
            raise RankError(
                f"messages from rank {source} to rank {to} were not prepared",
                fix="call prepare() on every rank with all channels before the first message",
            ) from None

    def _group(self, ranks: Ranks) -> Any:
        try:
            return self._groups[ranks]
        except KeyError:
            raise RankError(
                f"group {ranks} was not prepared",
                fix="call prepare() on every rank with all groups before the first collective",
            ) from None

    def _all_reduce(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Tensor:
        result = tensor.clone()
        dist.all_reduce(result, _OPERATIONS[op], group=self._group(ranks))
        return result

    def _all_reduce_start(self, tensor: Tensor, ranks: Ranks, op: Operation) -> Handle:
        group = self._group(ranks)
        work = dist.all_reduce(tensor, _OPERATIONS[op], group=group, async_op=True)
        return Work(work, tensor)

    def _all_gather(
        self, tensor: Tensor, ranks: Ranks, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        result = tensor.new_empty((len(ranks), *tensor.shape)) if out is None else out
        work = compat.all_gather_single(
            result.view(-1), tensor.view(-1), group=self._group(ranks), async_op=asynchronous
        )
        return Work(work, result, tensor)

    def _reduce_scatter(
        self, tensor: Tensor, ranks: Ranks, op: Operation, out: Tensor | None, asynchronous: bool
    ) -> Handle:
        if not tensor.is_cuda:
            # Gloo's own sends twice as much (12 MB over 2 ranks: 31 ms against 12 ms, over 3
            # ranks 46 ms against 15 ms; measured on torch 2.13 and two cores).
            sizes = [tensor[0].numel()] * len(ranks)
            rows = self._all_to_all(tensor.view(-1), ranks, sizes, sizes, asynchronous)
            shape = tensor.shape  # not the tensor: the inner handle keeps and drops it
            return then(rows, lambda flat: _reduce_rows(flat.view(shape), op, out))
        result = tensor.new_empty(tensor.shape[1:]) if out is None else out
        work = compat.reduce_scatter_single(
            result.view(-1),
            tensor.view(-1),
            _OPERATIONS[op],
            group=self._group(ranks),
            async_op=asynchronous,
        )
        return Work(work, result, tensor)

    def _all_to_all(
        self,
        flat: Tensor,
        ranks: Ranks,
        send_sizes: list[int],
        receive_sizes: list[int],
        asynchronous: bool,
    ) -> Handle:
        result = flat.new_empty(sum(receive_sizes))
        work = compat.all_to_all_single(
            result,
            flat,
            receive_sizes,
            send_sizes,
            group=self._group(ranks),
            async_op=asynchronous,
        )
        return Work(work, result, flat)

    def _broadcast(self, tensor: Tensor, ranks: Ranks, source: int) -> Tensor:
        dist.broadcast(tensor, source, group=self._group(ranks))
        return tensor

    def _send(self, tensor: Tensor, to: int, tag: int) -> Handle:
        if tensor.numel() == 0:  # both ends know
            return Done(tensor)
        if tensor.is_cuda:
            group = self._channel(self.rank, to)
            return Work(dist.isend(tensor, to, group=group, tag=tag), tensor)
        if self._waiter is None:
            self._waiter = Waiter()
        return Sent(dist.isend(tensor, to, tag=tag), tensor, self._waiter)

    def _receive(self, out: Tensor, source: int, tag: int) -> Handle:
        if out.numel() == 0:
            return Done(out)
        group = self._channel(source, self.rank) if out.is_cuda else None
        return Work(dist.irecv(out, source, group=group, tag=tag), out)


def _reduce_rows(rows: Tensor, op: Operation, out: Tensor | None) -> Tensor:
    """Reduce over the leading dim in rank order, in the dtype of `rows`."""
    if op == "sum":
        return torch.sum(rows, 0, dtype=rows.dtype, out=out)
    return torch.amax(rows, 0, out=out) if op == "max" else torch.amin(rows, 0, out=out)


def from_environment(
    device: str | torch.device | None = None, *, timeout_s: float = 1800.0
) -> Communicator:
    """The communicator of the job this process belongs to.

    Joins an initialised torch.distributed job, else one announced by torchrun's or Slurm's
    variables (see `autopar.runtime.environment`), else is alone.

    Args:
        device: ``"cpu"``, ``"cuda"`` or a device; by default this rank's GPU if there is one.
        timeout_s: Seconds after which a collective that a rank does not join fails.

    Raises:
        ClusterError: If the variables are incomplete or contradict each other, or there are fewer
            GPUs than local ranks.
    """
    if dist.is_initialized():
        return TorchCommunicator(_choose_device(device, local_rank(os.environ)))
    job = read_environment(os.environ)
    if job is None:
        return SoloCommunicator(_choose_device(device, 0))
    # Slurm may show every task only the GPU it is bound to.
    bound = job.launcher == "slurm" and torch.cuda.device_count() == 1
    chosen = _choose_device(device, 0 if bound else job.local_rank)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    _join(job, chosen, timeout_s)
    joined = TorchCommunicator(chosen)
    atexit.register(joined.leave)
    return joined


def _join(job: JobEnvironment, device: torch.device, timeout_s: float) -> None:
    # torchrun's own agent may already listen on the port, which env:// knows of.
    method = "env://" if job.launcher == "torchrun" else f"tcp://{job.address}:{job.port}"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=method,
        rank=job.rank,
        world_size=job.world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )


def _choose_device(device: str | torch.device | None, local_rank: int) -> torch.device:
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type != "cuda" or chosen.index is not None:
        return chosen
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise ClusterError(
            f"local rank {local_rank} has no GPU: this machine shows {count}",
            expected="at most one rank per GPU",
            fix='start fewer ranks per machine, or pass device="cpu"',
        )
    return torch.device("cuda", local_rank)
