"""A stage's parameters on one rank: their memory, gradients, ZeRO shards and optimizer.

Gradients live in flat buckets that backward programs write into. What ZeRO (arXiv 1910.02054)
leaves on a rank, for a bucket of P elements over N data-parallel ranks:

    stage   parameters   gradients   optimizer state    bytes sent per step, in parameters
    0       P            P           P                  2 (N-1)/N   all-reduce
    1       P            P           P/N                2 (N-1)/N   reduce-scatter, all-gather
    2       P            P/N         P/N                2 (N-1)/N   the same, bucket by bucket
    3       P/N          P/N         P/N                3 (N-1)/N   gather twice, reduce-scatter

A parameter whose gradient is a sum along other axes, too, has its shards summed along these after
the last microbatch. One that no data-parallel axis divides (an op that a plan replicates along
these takes it) is one shard of its own, summed in the same way.

A parameter that several stages use is kept whole by each of them, and so is its state; its
gradients are summed over the stages before the update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autopar.runtime.comm import Communicator, Handle
from autopar.runtime.programs.buckets import Bucket, Member

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A parameter as this rank holds it.

    Attributes:
        name: Name of its value in the graph.
        fqn: Fully qualified name.
        shape: Local shape.
        dtype: Dtype.
        trainable: Whether it wants a gradient.
        ranks: Over which ranks its gradient is summed, this one included.
        zero_ranks: Those of them over which ZeRO divides it.
        rest_ranks: Those that hold the same part of it then, over which that is summed.
        alone: This rank.
        shared: Whether other stages use it too.
    """

    name: str
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    ranks: tuple[int, ...]
    zero_ranks: tuple[int, ...]
    rest_ranks: tuple[int, ...]
    alone: tuple[int, ...]
    shared: bool = False


@dataclass(slots=True)
class Piece:
    """What the optimizer sees: a parameter, or this rank's part of one.

    Attributes:
        name: Name of the parameter's value in the graph.
        parameter: What the optimizer updates in place.
        start: First element of the flattened local parameter that it covers.
        gradient: Its gradient's memory, known when there is one.
    """

    name: str
    parameter: nn.Parameter
    start: int
    gradient: Tensor | None = None


@dataclass(slots=True)
class Held:
    """A bucket's memory on this rank.

    Attributes:
        bucket: What is in it.
        zero: ZeRO stage; 0 for a bucket of one rank.
        rest: Ranks over which the shard (the whole, of a bucket of one rank) is summed.
        parameters: Flat parameters: all (ZeRO-1, 2), this rank's shard (ZeRO-3), or none (each has
            its own memory).
        gradients: Flat gradients: all (ZeRO-0, 1) or this rank's shard.
        handle: The reduction under way.
        pieces: What the optimizer sees of it.
    """

    bucket: Bucket
    zero: int
    rest: tuple[int, ...]
    parameters: Tensor | None
    gradients: Tensor
    handle: Handle | None = None
    reduced: Tensor | None = None
    pieces: list[Piece] = field(default_factory=list)

    def shard_range(self, comm: Communicator) -> tuple[int, int]:
        """Start and end of this rank's shard."""
        size = self.bucket.numel // len(self.bucket.ranks)
        start = self.bucket.ranks.index(comm.rank) * size
        return start, start + size


class Parameters:
    """The parameters of one stage on one rank.

    Args:
        items: All of them.
        values: Their local initial values, by name; taken over.
        buckets: The trainable ones that are not shared, bucket by bucket.
        absent: Names of trainable parameters that no gradient reaches.
        zero: ZeRO stage of the buckets.
        comm: Communicator of all ranks.
    """

    def __init__(
        self,
        items: Iterable[Item],
        values: Mapping[str, Tensor],
        buckets: Iterable[Bucket],
        absent: Iterable[str],
        zero: int,
        comm: Communicator,
    ) -> None:
        self.items = {item.name: item for item in items}
        self.comm, self.zero = comm, zero
        self.absent = frozenset(absent)
        self.values: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self.held: dict[str, Held] = {}
        self._places: dict[str, tuple[Held, Member]] = {}
        self.pieces: list[Piece] = []
        for bucket in buckets:
            self._hold(bucket, values)
        for name, item in self.items.items():
            if name in self._places:
                continue
            parameter = nn.Parameter(values[name].clone(), item.trainable)
            self.values[name] = parameter
            if item.trainable:
                piece = Piece(name, parameter, 0)
                if name not in self.absent:
                    piece.gradient = self.gradients[name] = torch.zeros_like(parameter).detach()
                self.pieces.append(piece)

    def _hold(self, bucket: Bucket, values: Mapping[str, Tensor]) -> None:
        zero = self.zero if len(bucket.ranks) > 1 else 0
        device = values[bucket.members[0].name].device
        shard = bucket.numel // len(bucket.ranks)
        gradients = torch.zeros(
            bucket.numel if zero < 2 else shard, dtype=bucket.dtype, device=device
        )
        held = Held(bucket, zero, self._rest(bucket), None, gradients)
        self.held[bucket.name] = held
        self._places |= {member.name: (held, member) for member in bucket.members}
        if zero == 0:
            for member in bucket.members:
                parameter = nn.Parameter(values[member.name].clone())
                self.values[member.name] = parameter
                grad = self._view(gradients, member.offset, member.shape)
                self.gradients[member.name] = grad
                held.pieces.append(Piece(member.name, parameter, 0, grad))
        else:
            flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
            for member in bucket.members:
                view = self._view(flat, member.offset, member.shape)
                view.copy_(values[member.name])
                if zero < 3:
                    self.values[member.name] = view
                if zero < 2:
                    self.gradients[member.name] = self._view(gradients, member.offset, member.shape)
            start, end = held.shard_range(self.comm)
            held.parameters = flat if zero < 3 else flat[start:end].clone()
            self._cut_pieces(held)
        self.pieces += held.pieces

    def _rest(self, bucket: Bucket) -> tuple[int, ...]:
        """Ranks over which a bucket's shard is summed besides; all members have the same."""
        first = self.items[bucket.members[0].name]
        # Without ZeRO a bucket's ranks are all; what stages share is summed over these, too, later.
        return first.rest_ranks if self.zero and not first.shared else (self.comm.rank,)

    def _cut_pieces(self, held: Held) -> None:
        """The parts of members that lie in this rank's shard."""
        assert held.parameters is not None
        start, end = held.shard_range(self.comm)
        base = held.parameters[start:end] if held.zero < 3 else held.parameters
        for member, low, high in self._cuts(held):
            parameter = nn.Parameter(base[low - start : high - start])
            piece = Piece(member.name, parameter, low - member.offset)
            if held.zero >= 2:
                piece.gradient = held.gradients[low - start : high - start]
            held.pieces.append(piece)

    @staticmethod
    def _view(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
        return flat[offset : offset + math.prod(shape)].view(shape)

    def finish_reduce(self) -> None:
        """Wait for the reductions that backward programs started; finish those of shards."""
        for held in self.held.values():
            if held.handle is not None:
                result, held.handle = held.handle.wait(), None
                held.reduced = result if held.zero == 1 else None
        handles = []
        for held in self.held.values():
            if len(held.rest) > 1:
                shard = held.reduced if held.zero == 1 else held.gradients
                assert shard is not None
                handles.append(self.comm.all_reduce_start(shard, held.rest))
        for handle in handles:
            handle.wait()
        for held in self.held.values():
            if held.zero == 1 and held.reduced is not None:
                start, end = held.shard_range(self.comm)
                for piece, (_, low, high) in zip(held.pieces, self._cuts(held), strict=True):
                    piece.gradient = held.reduced[low - start : high - start]
                    assert high <= end, (low, high, end)

    def _cuts(self, held: Held) -> list[tuple[Member, int, int]]:
        """Members with a part in this rank's shard, and its start and end in the bucket."""
        start, end = held.shard_range(self.comm)
        parts = (
            (member, max(start, member.offset), min(end, member.offset + member.numel))
            for member in held.bucket.members
        )
        return [(member, low, high) for member, low, high in parts if low < high]

    def gather(self) -> None:
        """After an update: bring the parameters that ZeRO-1 and 2 updated elsewhere back."""
        handles = []
        for held in self.held.values():
            if held.zero in (1, 2):
                assert held.parameters is not None
                start, end = held.shard_range(self.comm)
                ranks = held.bucket.ranks
                whole = held.parameters.view(len(ranks), -1)
                handles.append(
                    self.comm.all_gather_start(held.parameters[start:end], ranks, out=whole)
                )
        for handle in handles:
            handle.wait()

    def drop_reduced(self) -> None:
        """Forget gradients that an update has used and that have no memory of their own."""
        for held in self.held.values():
            if held.zero == 1:
                held.reduced = None
                for piece in held.pieces:
                    piece.gradient = None

    def present(self) -> list[str]:
        """Names of the parameters that get a gradient."""
        return [n for n, item in self.items.items() if item.trainable and n not in self.absent]

    def renew(self) -> None:
        """Give every parameter new memory of equal value; who holds the old keeps it."""
        for held in self.held.values():
            if held.parameters is None:
                continue
            assert held.zero == 1, "shards of gradients or parameters have no versions"
            held.parameters = held.parameters.clone()
            for member in held.bucket.members:
                self.values[member.name] = self._view(held.parameters, member.offset, member.shape)
            for piece, (_, low, high) in zip(held.pieces, self._cuts(held), strict=True):
                piece.parameter.data = held.parameters[low:high]
        for piece in self.pieces:
            if isinstance(self.values.get(piece.name), nn.Parameter):
                piece.parameter.data = piece.parameter.data.clone()

    def whole_value(self, name: str) -> Tensor:
        """A parameter's local value, gathered over its data-parallel ranks if need be."""
        if name in self.values:
            return self.values[name].detach()
        return self._gathered(name, lambda held: held.parameters)

    def whole_gradient(self, name: str) -> Tensor | None:
        """A parameter's reduced local gradient, None if there is none."""
        if name in self.absent or not self.items[name].trainable:
            return None
        if name not in self._places or not self._places[name][0].zero:
            return self.gradients[name]
        return self._gathered(name, lambda h: h.reduced if h.zero == 1 else h.gradients)

    def _gathered(self, name: str, part: Callable[[Held], Tensor | None]) -> Tensor:
        held, member = self._places[name]
        shard = part(held)
        assert shard is not None
        flat = self.comm.all_gather(shard, held.bucket.ranks).view(-1)
        return self._view(flat, member.offset, member.shape)

    @torch.no_grad()
    def load(self, name: str, value: Tensor) -> None:
        """Take a new local value."""
        if name in self.values:
            self.values[name].copy_(value)
            return
        held, _ = self._places[name]
        start, _ = held.shard_range(self.comm)
        assert held.parameters is not None
        for member, low, high in self._cuts(held):
            if member.name == name:
                piece = value.reshape(-1)[low - member.offset : high - member.offset]
                held.parameters[low - start : high - start].copy_(piece)
