"""Buckets: tensors that are communicated together lie in one flat tensor.

Gradients of the last microbatch are written straight into their bucket; the program starts the
bucket's all-reduce after the last write to it, and the handle is an output, to be waited for before
the update. The start takes all members as arguments: writes into a bucket go through views, and a
start that named the bucket alone could be moved above one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Literal

import torch
from torch import fx

from autopar.runtime.comm import Ranks
from autopar.runtime.programs import ops
from autopar.runtime.programs.edit import Editor, last_uses
from autopar.runtime.programs.program import Program, Slot

aten = torch.ops.aten

LIMIT_BYTES = 25 * 1024**2
"""Bucket size, the default of torch's DistributedDataParallel (bucket_cap_mb=25)."""
FIRST_BYTES = 1024**2
"""The first bucket is small, so that communication starts early (as in DDP)."""

ALIGN_BYTES = 64
"""What torch aligns memory of its own to. Matrix products into memory that is aligned otherwise may
differ in the last bit, and copies of a gradient on several ranks must not, although parts of uneven
size lie before it."""

Reduction = Literal["none", "all_reduce", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A tensor in a bucket.

    Attributes:
        name: The parameter.
        shape: Its local shape.
        offset: Where it starts, in elements.
    """

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A flat tensor that holds several.

    Attributes:
        name: Unique among the buckets of a stage.
        members: What it holds, in order; each starts at a multiple of `ALIGN_BYTES`.
        numel: Its length in elements: a multiple of the number of ranks, so that it can be cut
            into equal shards; the elements between and after members are padding.
        dtype: Of all members.
        ranks: The group that communicates it.
    """

    name: str
    members: tuple[Member, ...]
    numel: int
    dtype: torch.dtype
    ranks: Ranks

    def __post_init__(self) -> None:
        end, unit = 0, ALIGN_BYTES // self.dtype.itemsize
        for member in self.members:
            assert member.offset % unit == 0, (self.name, member)
            assert end <= member.offset < end + unit, (self.name, member)
            end = member.offset + member.numel
        assert self.numel % len(self.ranks) == 0, (self.name, self.numel, self.ranks)
        assert end <= self.numel < end + len(self.ranks), (self.name, end, self.numel)

    @property
    def used(self) -> int:
        """Number of elements that are no padding."""
        return sum(member.numel for member in self.members)

    @property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """Start and end of every run of padding."""
        ends = [0, *(member.offset + member.numel for member in self.members)]
        starts = [*(member.offset for member in self.members), self.numel]
        return tuple((a, b) for a, b in zip(ends, starts, strict=True) if a < b)

    @property
    def shard_numel(self) -> int:
        """Length of one rank's shard in elements."""
        return self.numel // len(self.ranks)

    @property
    def size_bytes(self) -> int:
        """Size of the whole bucket."""
        return self.numel * self.dtype.itemsize


def make_buckets(
    order: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    groups: Mapping[str, Ranks],
    *,
    prefix: str = "gradients",
    first_bytes: int = FIRST_BYTES,
    limit_bytes: int = LIMIT_BYTES,
    small_end: bool = False,
) -> tuple[Bucket, ...]:
    """Put parameters of equal group and dtype into buckets.

    Args:
        order: Parameters in the order in which their tensors are ready (gradients, see
            `accumulate.finish_order`) or needed (ZeRO-3); those without a group are left out.
        shapes: Their local shapes.
        dtypes: The dtypes of the bucketed tensors.
        groups: The ranks that communicate each; parameters that need none are absent.
        prefix: Buckets are named ``prefix.0``, ``prefix.1``, ... in the order of their ends.
        first_bytes: A group's first bucket is full at this size.
        limit_bytes: Any other bucket is full at this size.
        small_end: Let a group's last bucket be as small as the first, and those before it twice as
            large each: nothing is left to compute while the last one is communicated.
    """
    together: dict[tuple[Ranks, torch.dtype], list[str]] = {}
    for name in order:
        if name in groups:
            together.setdefault((groups[name], dtypes[name]), []).append(name)
    runs: list[tuple[tuple[Ranks, torch.dtype], list[str]]] = []
    for key, names in together.items():
        sizes = [math.prod(shapes[name]) * dtypes[name].itemsize for name in names]
        start = 0
        for length in _lengths(sizes, first_bytes, limit_bytes, small_end):
            runs.append((key, names[start : start + length]))
            start += length
    place = {name: position for position, name in enumerate(order)}
    runs.sort(key=lambda run: place[run[1][-1]])
    return tuple(
        _bucket(f"{prefix}.{number}", names, shapes, *key)
        for number, (key, names) in enumerate(runs)
    )


def _lengths(sizes: Sequence[int], first: int, limit: int, small_end: bool) -> list[int]:
    """Numbers of consecutive tensors per bucket."""
    if not small_end:
        return _fill(sizes, chain([first], repeat(limit)))
    head = _fill(sizes, chain([first], repeat(sum(sizes) + 1)))[0]
    doubling = (min(first << number, limit) for number in count())
    return [head, *reversed(_fill(sizes[head:][::-1], doubling))]


def _fill(sizes: Sequence[int], bounds: Iterator[int]) -> list[int]:
    """Numbers of consecutive tensors that reach one bound after the other."""
    lengths: list[int] = []
    length = total = 0
    bound = next(bounds)
    for size in sizes:
        length, total = length + 1, total + size
        if total >= bound:
            lengths.append(length)
            length, total, bound = 0, 0, next(bounds)
    return [*lengths, length] if length else lengths


def reduce_buckets(program: Program, buckets: Sequence[Bucket], kind: Reduction) -> Program:
    """Let gradients be written into buckets, and reduce these.

    Args:
        program: Has ``gradient`` inputs, written in place; not changed.
        buckets: Of gradients; members that are no inputs are written by an earlier program.
        kind: ``"none"`` only lays gradients into their buckets (all microbatches but the last).
            ``"all_reduce"`` sums buckets over their ranks in place. ``"reduce_scatter"`` gives each
            rank its shard of the sum (ZeRO-1); what the bucket holds afterwards is of no use.
            Reductions start in the order of `buckets`.

    Returns:
        The program with one ``bucket`` input per bucket, flat, in place of the members, and, unless
        `kind` is ``"none"``, one ``handle`` output per bucket.
    """
    editor = Editor(program)
    holders: list[fx.Node] = []
    for bucket in buckets:
        flat = editor.empty((bucket.numel,), bucket.dtype, device_of(editor, bucket))
        holders.append(editor.add_input(Slot("bucket", bucket.name), flat))
    begin = editor.begin
    laid = [
        (bucket, holder, lay_members(editor, begin, bucket, holder))
        for bucket, holder in zip(buckets, holders, strict=True)
    ]
    last = last_uses(editor.graph)
    handle: fx.Node | None = None
    for bucket, holder, views in laid if kind != "none" else ():
        place = after(last[holder], handle)
        handle = start_reduction(editor, place, bucket, holder, tuple(views.values()), kind)
        editor.outputs[Slot("handle", bucket.name)] = handle
    return editor.finish(program)


def after(node: fx.Node, start: fx.Node | None) -> fx.Node:
    """The place right behind `node` and `start`.

    Buckets start in their order, whatever the order of their last writes: that may differ from
    rank to rank where parts are uneven, and the order of collectives must not.
    """
    return node.next if start is None or start < node else start.next


def device_of(editor: Editor, bucket: Bucket) -> torch.device:
    """Where the members of a bucket are; at least one must be an input of the program."""
    for member in bucket.members:
        node = editor.inputs.get(Slot("gradient", member.name))
        if node is not None:
            return node.meta["val"].device
    raise AssertionError(f"{editor.program.name}: no gradient of bucket {bucket.name} is an input")


def start_reduction(
    editor: Editor,
    place: fx.Node,
    bucket: Bucket,
    holder: fx.Node,
    views: Sequence[fx.Node],
    kind: Reduction,
) -> fx.Node:
    """Insert the start of a bucket's reduction before `place`.

    Args:
        editor: The program.
        place: Comes after all writes.
        bucket: What to reduce.
        holder: Its node.
        views: The nodes of its members.
        kind: How.
    """
    ranks = list(bucket.ranks)
    if kind == "all_reduce":
        return editor.call(place, ops.start_all_reduce_, holder, ranks, "sum", *views)
    rows = editor.call(place, aten.view.default, holder, [len(ranks), bucket.shard_numel])
    return editor.call(place, ops.start_reduce_scatter, rows, ranks, "sum")


def lay_members(
    editor: Editor, place: fx.Node, bucket: Bucket, holder: fx.Node
) -> dict[str, fx.Node]:
    """Let views of a flat bucket take the places of the ``gradient`` inputs of its members.

    Args:
        editor: The program.
        place: Where to insert the views; before any use of the inputs.
        bucket: The layout.
        holder: The flat tensor.

    Returns:
        The view of each member by name, also of those that are no inputs.
    """
    views: dict[str, fx.Node] = {}
    for member in bucket.members:
        end = member.offset + member.numel
        piece = editor.call(place, aten.slice.Tensor, holder, 0, member.offset, end)
        views[member.name] = editor.call(place, aten.view.default, piece, list(member.shape))
        slot = Slot("gradient", member.name)
        if slot in editor.inputs:
            value = editor.inputs[slot].meta["val"]
            assert tuple(value.shape) == member.shape, (bucket.name, member, value.shape)
            assert value.dtype == bucket.dtype, (bucket.name, member, value.dtype)
            editor.substitute(slot, views[member.name])
    return views


def _bucket(
    name: str,
    names: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    ranks: Ranks,
    dtype: torch.dtype,
) -> Bucket:
    members: list[Member] = []
    end = 0
    unit = ALIGN_BYTES // dtype.itemsize
    for member in names:
        offset = -(-end // unit) * unit
        members.append(Member(name=member, shape=tuple(shapes[member]), offset=offset))
        end = offset + members[-1].numel
    numel = -(-end // len(ranks)) * len(ranks)
    return Bucket(name=name, members=tuple(members), numel=numel, dtype=dtype, ranks=ranks)
