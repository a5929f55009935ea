"""Parameters of a stage on a rank: their buckets, what ZeRO leaves of them, how they are kept even.

Buckets are laid out as `autopar.runtime.programs.buckets` and `autopar.runtime.unit` lay them out:
gradients in the order in which they are finished, up to 25 MiB together, members at multiples of 64
bytes, padded to equal shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Literal

from autopar.cost_models.ops.call import Rank
from autopar.cost_models.work import Move, MoveKind, Phase
from autopar.graph.ir import ITEM_BYTES, TensorSpec
from autopar.sharding.placement import Pair

Per = Literal["microbatch", "step"]

LIMIT_BYTES = 25 * 2**20
"""Bucket size; torch's DistributedDataParallel has the same (bucket_cap_mb=25)."""
FIRST_BYTES = 2**20
"""The first bucket is small, so that communication starts early."""
ALIGN_BYTES = 64
"""What torch aligns memory of its own to on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalParameter:
    """A parameter as a rank holds it.

    Attributes:
        name: Name of its value in the graph.
        numel: Local elements.
        dtype: Dtype.
        trainable: Whether it wants a gradient.
        made_by: Action kind of the program that makes its gradient; ``""`` if none does.
        axes: Mesh axes along which its gradient is summed.
        zero_axes: Those of them over which ZeRO divides it.
        users: Number of stages that use it.
        places: Number of pipeline ranks that hold these.
    """

    name: str
    numel: int
    dtype: str
    trainable: bool
    made_by: str
    axes: tuple[int, ...]
    zero_axes: tuple[int, ...]
    users: int = 1
    places: int = 1

    @property
    def size_bytes(self) -> int:
        """Local bytes."""
        return self.numel * ITEM_BYTES[self.dtype]

    def renamed(self, name: str) -> LocalParameter:
        """A parameter that is equal but for its name."""
        return LocalParameter(
            name=name, numel=self.numel, dtype=self.dtype, trainable=self.trainable,
            made_by=self.made_by, axes=self.axes, zero_axes=self.zero_axes, users=self.users,
            places=self.places,
        )  # fmt: skip

    @property
    def rest_axes(self) -> tuple[int, ...]:
        """Axes along which ranks hold the same part after ZeRO has divided it."""
        return tuple(axis for axis in self.axes if axis not in self.zero_axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A flat tensor that holds gradients (with ZeRO parameters, too) of several parameters.

    Attributes:
        made_by: Action kind of the program that fills it.
        members: The parameters, in order.
        offsets: First element of each.
        numel: Elements, padding included: a multiple of the number of ranks.
        dtype: Of all members.
        axes: Axes of the group that communicates it; none for a group of one.
        group: Its number of ranks.
        rest_axes: Axes along which shards (the whole, of a group of one) are summed besides.
        zero: ZeRO stage; 0 for a group of one.
    """

    made_by: str
    members: tuple[LocalParameter, ...]
    offsets: tuple[int, ...]
    numel: int
    dtype: str
    axes: tuple[int, ...]
    group: int
    rest_axes: tuple[int, ...]
    zero: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole."""
        return self.numel * ITEM_BYTES[self.dtype]

    @property
    def shard_bytes(self) -> int:
        """Bytes of one rank's shard."""
        return self.size_bytes // self.group

    def cuts(self, position: int) -> list[tuple[LocalParameter, int]]:
        """Members with elements in the shard of the rank at `position`, and how many."""
        size = self.numel // self.group
        start, end = position * size, (position + 1) * size
        parts = (
            (item, min(end, offset + item.numel) - max(start, offset))
            for item, offset in zip(self.members, self.offsets, strict=True)
        )
        return [(item, numel) for item, numel in parts if numel > 0]


def local_parameter(
    name: str,
    spec: TensorSpec,
    pair: Pair,
    rank: Rank,
    *,
    made_by: str,
    zero_axes: frozenset[str],
    users: int = 1,
    places: int = 1,
) -> LocalParameter:
    """A parameter as `rank` holds it; see `LocalParameter`."""
    numel = 1
    for size in rank.grid.local_shape(spec.shape, pair.forward):
        numel *= size
    axes = tuple(
        axis
        for axis, (have, want) in enumerate(zip(pair.gradient, pair.forward, strict=True))
        if have != want and axis != rank.time and rank.grid.sizes[axis] > 1
    )
    return LocalParameter(
        name=name,
        numel=numel,
        dtype=spec.dtype,
        trainable=spec.requires_grad,
        made_by=made_by if spec.requires_grad else "",
        axes=axes,
        zero_axes=tuple(axis for axis in axes if rank.names[axis] in zero_axes),
        users=users,
        places=places,
    )


def make_buckets(
    parameters: Sequence[LocalParameter],
    uses: Sequence[str],
    zero: int,
    rank: Rank,
    *,
    limit_bytes: int = LIMIT_BYTES,
    first_bytes: int = FIRST_BYTES,
) -> tuple[Bucket, ...]:
    """Put the parameters of a stage into buckets.

    Args:
        parameters: All of them.
        uses: Their names in the order of first uses.
        zero: ZeRO stage.
        rank: The rank.
        limit_bytes: A bucket is full at this size.
        first_bytes: The first one, and the last one, at this size.
    """
    place = {name: number for number, name in enumerate(uses)}
    ready = sorted(
        (item for item in parameters if item.made_by),
        key=lambda item: -place.get(item.name, -1),
    )
    found: list[Bucket] = []
    for kind in ("B", "I", "W"):
        groups: dict[tuple[int, ...] | None, list[LocalParameter]] = {}
        for item in ready:
            if item.made_by == kind and (item.users == 1 or zero >= 2):
                key = None if not zero or item.users > 1 else item.rest_axes
                groups.setdefault(key, []).append(item)
        made = [
            bucket
            for members in groups.values()
            for bucket in _group(members, kind, zero, rank, first_bytes, limit_bytes)
        ]
        # In the order in which they are full, whatever their group: they start one by one.
        order = {item.name: number for number, item in enumerate(ready)}
        found += sorted(made, key=lambda bucket: order[bucket.members[-1].name])
    return tuple(found)


def _group(
    members: Sequence[LocalParameter],
    kind: str,
    zero: int,
    rank: Rank,
    first_bytes: int,
    limit_bytes: int,
) -> list[Bucket]:
    together: dict[tuple[tuple[int, ...], str], list[LocalParameter]] = {}
    for item in members:
        axes = () if item.users > 1 else (item.zero_axes if zero else item.axes)
        together.setdefault((axes, item.dtype), []).append(item)
    found = []
    for (axes, dtype), items in together.items():
        start = 0
        for length in _lengths([item.size_bytes for item in items], first_bytes, limit_bytes):
            part = items[start : start + length]
            start += length
            found.append(_bucket(part, kind, zero, rank, axes, dtype))
    # In the order in which they are full.
    place = {item.name: number for number, item in enumerate(members)}
    return sorted(found, key=lambda bucket: place[bucket.members[-1].name])


def _bucket(
    members: Sequence[LocalParameter],
    kind: str,
    zero: int,
    rank: Rank,
    axes: tuple[int, ...],
    dtype: str,
) -> Bucket:
    unit = ALIGN_BYTES // ITEM_BYTES[dtype]
    offsets, end = [], 0
    for item in members:
        offsets.append(-(-end // unit) * unit)
        end = offsets[-1] + item.numel
    group = rank.group(axes)
    divided = zero if group > 1 else 0
    return Bucket(
        made_by=kind,
        members=tuple(members),
        offsets=tuple(offsets),
        numel=-(-end // group) * group,
        dtype=dtype,
        axes=axes if group > 1 else (),
        group=group,
        # What stages share is summed over these, too, one by one.
        rest_axes=members[0].rest_axes if zero and members[0].users == 1 else (),
        zero=divided,
    )


def _lengths(sizes: Sequence[int], first: int, limit: int) -> list[int]:
    """Numbers of consecutive tensors per bucket; the last bucket is as small as the first."""
    head = _fill(sizes, chain([first], repeat(sum(sizes) + 1)))[0]
    doubling = (min(first << number, limit) for number in count())
    return [head, *reversed(_fill(sizes[head:][::-1], doubling))]


def _fill(sizes: Sequence[int], bounds: Iterator[int]) -> list[int]:
    lengths: list[int] = []
    length = total = 0
    bound = next(bounds)
    for size in sizes:
        length, total = length + 1, total + size
        if total >= bound:
            lengths.append(length)
            length, total, bound = 0, 0, next(bounds)
    return [*lengths, length] if length else lengths


def sync_moves(
    parameters: Sequence[LocalParameter],
    buckets: Sequence[Bucket],
    rank: Rank,
    pipeline: str = "pp",
) -> list[Move]:
    """Communication that keeps parameters and gradients even, as the runtime does it.

    Args:
        parameters: The parameters of a stage.
        buckets: Their buckets.
        rank: The rank.
        pipeline: Name of the pipeline's axis.

    Returns:
        Per microbatch what ZeRO-2 scatters and ZeRO-3 gathers; all else per step.
    """
    found: list[Move] = []
    for bucket in buckets:
        found += _bucket_moves(bucket, rank)
    names = rank.names
    for item in parameters:
        group = rank.group(item.axes) * item.places
        if item.users > 1 and item.made_by and group > 1:
            # Gradients of what several stages use are summed over these, too.
            along = tuple(names[axis] for axis in item.axes)
            found.append(
                Move(
                    kind="all_reduce",
                    size_bytes=item.size_bytes,
                    axes=(pipeline, *along) if item.places > 1 else along,
                    group=group,
                    phase="weight_gradient",
                    per="step",
                    node=item.name,
                    dtype=item.dtype,
                )
            )
    return found


def _bucket_moves(bucket: Bucket, rank: Rank) -> list[Move]:
    names = rank.names

    def move(kind: MoveKind, phase: Phase, per: Per, axes: tuple[int, ...], size: int) -> Move:
        return Move(
            kind=kind,
            size_bytes=size,
            axes=tuple(names[axis] for axis in axes),
            group=rank.group(axes),
            phase=phase,
            per=per,
            node=bucket.members[0].name,
            dtype=bucket.dtype,
        )

    whole, axes, rest = bucket.size_bytes, bucket.axes, bucket.rest_axes
    if bucket.group > 1 and bucket.zero == 0:
        return [move("all_reduce", "weight_gradient", "step", axes, whole)]
    often: Per = "step" if bucket.zero == 1 else "microbatch"
    found: list[Move] = []
    if bucket.zero == 3:
        found.append(move("all_gather", "forward", "microbatch", axes, whole))
        found.append(move("all_gather", "recompute", "microbatch", axes, whole))
    if bucket.zero:
        found.append(move("reduce_scatter", "weight_gradient", often, axes, whole))
    if rank.group(rest) > 1:
        found.append(move("all_reduce", "weight_gradient", "step", rest, bucket.shard_bytes))
    if bucket.zero in (1, 2):
        found.append(move("all_gather", "update", "step", axes, whole))
    return found
