"""Collectives as nodes of a graph: operators of the namespace ``autopar`` and their async forms.

Every function here means the same whether it is called or is the target of an fx node: it runs on
the calling thread's current communicator (`use_communicator`), and on fake tensors it only says
what the result looks like. A compiled program binds its communicator once instead (`bind`).
Results are contiguous and never share memory with an argument; nothing is differentiable, since
backward collectives are nodes of their own.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from autopar.runtime.comm import Communicator, Done, Handle, Operation

_SCHEMAS = (
    "all_reduce(Tensor x, int[] ranks, str op) -> Tensor",
    "all_gather(Tensor x, int[] ranks) -> Tensor",
    "reduce_scatter(Tensor x, int[] ranks, str op) -> Tensor",
    "all_to_all(Tensor flat, int[] send_sizes, int[] receive_sizes, int[] ranks) -> Tensor",
    "microbatch_sum(Tensor x, int count) -> Tensor",
)


class _Current(threading.local):
    """The communicator of this thread; ranks may be threads."""

    communicator: Communicator | None = None


_current = _Current()


@contextmanager
def use_communicator(comm: Communicator) -> Iterator[None]:
    """Run the collectives that this thread calls inside the block on `comm`."""
    previous = _current.communicator
    _current.communicator = comm
    try:
        yield
    finally:
        _current.communicator = previous


def current_communicator() -> Communicator:
    """The communicator given to the innermost `use_communicator` of this thread."""
    comm = _current.communicator
    assert comm is not None, "a collective ran outside of `use_communicator`"
    return comm


def start_all_reduce(x: Tensor, ranks: Sequence[int], op: Operation) -> Handle:
    """Start ``autopar::all_reduce``.

    Args:
        x: Equal shape and dtype on all ranks; not to be written before `wait`.
        ranks: The group, ascending.
        op: ``"sum"``, ``"max"`` or ``"min"``.

    Returns:
        A handle for `wait`; the result is a new tensor.
    """
    if isinstance(x, FakeTensor):
        return Done(_like(x))
    return _start_all_reduce(current_communicator(), x, ranks, op)


def start_all_reduce_(
    bucket: Tensor, ranks: Sequence[int], op: Operation, *members: Tensor
) -> Handle:
    """Start to reduce `bucket` in place; see `start_all_reduce`.

    Args:
        bucket: What is reduced; neither read nor written before `wait`.
        ranks: The group, ascending.
        op: The reduction.
        members: Views of `bucket` that must have been written before; only dependencies.

    Returns:
        A handle for `wait`; the result is `bucket` itself.
    """
    if isinstance(bucket, FakeTensor):
        return Done(bucket)
    return _start_all_reduce_in_place(current_communicator(), bucket, ranks, op, *members)


def start_all_gather(x: Tensor, ranks: Sequence[int]) -> Handle:
    """Start ``autopar::all_gather``: the result has shape ``(len(ranks), *x.shape)``."""
    if isinstance(x, FakeTensor):
        return Done(_stacked(x, ranks))
    return _start_all_gather(current_communicator(), x, ranks)


def start_reduce_scatter(x: Tensor, ranks: Sequence[int], op: Operation) -> Handle:
    """Start ``autopar::reduce_scatter``: `x` has shape ``(len(ranks), *s)``, the result ``s``."""
    if isinstance(x, FakeTensor):
        return Done(_row(x, ranks, op))
    return _start_reduce_scatter(current_communicator(), x, ranks, op)


def start_all_to_all(
    flat: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: Sequence[int]
) -> Handle:
    """Start ``autopar::all_to_all``: pieces of a flat tensor change places.

    Args:
        flat: Shape ``(sum(send_sizes),)``: what goes to each rank, in rank order.
        send_sizes: Elements for each rank.
        receive_sizes: Elements from each rank.
        ranks: The group, ascending.

    Returns:
        A handle for `wait`; the result has shape ``(sum(receive_sizes),)``.
    """
    if isinstance(flat, FakeTensor):
        return Done(_received(flat, send_sizes, receive_sizes, ranks))
    return _start_all_to_all(current_communicator(), flat, send_sizes, receive_sizes, ranks)


def wait(handle: Handle) -> Tensor:
    """Finish the collective behind `handle` and return its result."""
    return handle.wait()


def bind(target: Any, comm: Communicator) -> Callable[..., Any]:
    """What `target` does on `comm`, with the dispatcher and the thread's communicator left out.

    Args:
        target: The target of an fx node: ``torch.ops.autopar.*.default`` or a function of this
            module.
        comm: The communicator to run on.

    Raises:
        KeyError: If `target` is no collective.
    """
    if target in _FREE:
        return _FREE[target]
    return functools.partial(_BOUND[target], comm)


def is_collective(target: Any) -> bool:
    """Whether `target` moves data between ranks: `wait` and ``microbatch_sum`` do not."""
    return target in _BOUND


def _all_reduce(comm: Communicator, x: Tensor, ranks: Sequence[int], op: Operation) -> Tensor:
    return comm.all_reduce(x, tuple(ranks), op)


def _all_gather(comm: Communicator, x: Tensor, ranks: Sequence[int]) -> Tensor:
    return comm.all_gather(x, tuple(ranks))


def _reduce_scatter(comm: Communicator, x: Tensor, ranks: Sequence[int], op: Operation) -> Tensor:
    return comm.reduce_scatter(x, tuple(ranks), op)


def _all_to_all(
    comm: Communicator,
    flat: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    ranks: Sequence[int],
) -> Tensor:
    return comm.all_to_all_flat(flat, tuple(ranks), send_sizes, receive_sizes)


def _start_all_reduce(comm: Communicator, x: Tensor, ranks: Sequence[int], op: Operation) -> Handle:
    copy = x.detach().clone(memory_format=torch.contiguous_format)
    return comm.all_reduce_start(copy, tuple(ranks), op)


def _start_all_reduce_in_place(
    comm: Communicator, bucket: Tensor, ranks: Sequence[int], op: Operation, *_members: Tensor
) -> Handle:
    return comm.all_reduce_start(bucket, tuple(ranks), op)


def _start_all_gather(comm: Communicator, x: Tensor, ranks: Sequence[int]) -> Handle:
    return comm.all_gather_start(x, tuple(ranks))


def _start_reduce_scatter(
    comm: Communicator, x: Tensor, ranks: Sequence[int], op: Operation
) -> Handle:
    return comm.reduce_scatter_start(x, tuple(ranks), op=op)


def _start_all_to_all(
    comm: Communicator,
    flat: Tensor,
    send_sizes: Sequence[int],
    receive_sizes: Sequence[int],
    ranks: Sequence[int],
) -> Handle:
    return comm.all_to_all_start(flat, tuple(ranks), send_sizes, receive_sizes)


def _microbatch_sum(x: Tensor, count: int) -> Tensor:
    """A sum over microbatches, estimated as `count` times this one's; for bool, "any"."""
    copy = x.clone(memory_format=torch.contiguous_format)
    return copy if x.dtype == torch.bool else copy.mul_(count)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _stacked(x: Tensor, ranks: Sequence[int]) -> Tensor:
    return x.new_empty((len(ranks), *x.shape))


def _row(x: Tensor, ranks: Sequence[int], _op: str) -> Tensor:
    assert x.ndim >= 1 and x.shape[0] == len(ranks), (x.shape, ranks)
    return x.new_empty(x.shape[1:])


def _received(
    flat: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int], ranks: Sequence[int]
) -> Tensor:
    assert len(send_sizes) == len(receive_sizes) == len(ranks), (send_sizes, receive_sizes, ranks)
    assert flat.shape == (sum(send_sizes),), (flat.shape, send_sizes)
    return flat.new_empty((sum(receive_sizes),))


def _on_current(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: function(current_communicator(), *args)


def _define(library: torch.library.Library) -> None:
    kernels: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "all_reduce": (_on_current(_all_reduce), _like),
        "all_gather": (_on_current(_all_gather), _stacked),
        "reduce_scatter": (_on_current(_reduce_scatter), _row),
        "all_to_all": (_on_current(_all_to_all), _received),
        "microbatch_sum": (_microbatch_sum, _like),
    }
    for schema in _SCHEMAS:
        name = schema.partition("(")[0]
        real, fake = kernels[name]
        library.define(schema)
        library.impl(name, real, "CompositeExplicitAutograd")
        torch.library.register_fake(f"autopar::{name}", fake, lib=library)


_LIBRARY = torch.library.Library("autopar", "FRAGMENT")
_define(_LIBRARY)

# Targets of fx nodes.
ALL_REDUCE = torch.ops.autopar.all_reduce.default
ALL_GATHER = torch.ops.autopar.all_gather.default
REDUCE_SCATTER = torch.ops.autopar.reduce_scatter.default
ALL_TO_ALL = torch.ops.autopar.all_to_all.default
MICROBATCH_SUM = torch.ops.autopar.microbatch_sum.default

_BOUND: dict[Any, Callable[..., Any]] = {
    ALL_REDUCE: _all_reduce,
    ALL_GATHER: _all_gather,
    REDUCE_SCATTER: _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
    start_all_reduce: _start_all_reduce,
    start_all_reduce_: _start_all_reduce_in_place,
    start_all_gather: _start_all_gather,
    start_reduce_scatter: _start_reduce_scatter,
    start_all_to_all: _start_all_to_all,
}
# Those that need no communicator.
_FREE: dict[Any, Callable[..., Any]] = {wait: wait, MICROBATCH_SUM: _microbatch_sum}
