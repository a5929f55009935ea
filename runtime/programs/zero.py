"""ZeRO: gradients and parameters of a data-parallel group live in shards, one per rank.

Stage 1 needs no pass of its own: `buckets.reduce_buckets` with ``"reduce_scatter"``. In stage 2
(`scatter_gradients`) a bucket of gradients is memory made inside the backward program, whose sum is
scattered and added to an owned shard, so that no full gradient outlives its bucket. In stage 3
(`gather_parameters`) parameters are shards, too, gathered right before their first use; the
gathered tensors are to be recomputed, so that backward gathers again and nothing is kept.

Reference: Rajbhandari et al., ZeRO, https://arxiv.org/abs/1910.02054, section 5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.runtime.programs import ops
from autopar.runtime.programs.buckets import (
    Bucket,
    after,
    device_of,
    lay_members,
    start_reduction,
)
from autopar.runtime.programs.edit import Editor, last_uses
from autopar.runtime.programs.program import Joint, Program, Slot

aten = torch.ops.aten


def scatter_gradients(
    program: Program,
    buckets: Sequence[Bucket],
    *,
    first: bool,
    in_flight: int = 1,
    dtype: torch.dtype | None = None,
    without: Collection[str] = (),
) -> Program:
    """Give each rank its shard of the summed gradients of this microbatch (ZeRO-2).

    Args:
        program: Overwrites a ``gradient`` input for every member, as made by `accumulate` with
            ``first=True``; not changed.
        buckets: Of gradients.
        first: Overwrite the shards; otherwise add to them.
        in_flight: How many buckets may be under way before one is waited for.
        dtype: Dtype of the shards; None for that of the bucket.
        without: Members that have no gradient in any program; their part of the shards is zero.

    Returns:
        The program with one ``shard`` input per bucket, a buffer of ``bucket.shard_numel``
        elements, in place of the members.
    """
    assert in_flight >= 1, in_flight
    editor = Editor(program)
    flats = [_make(editor, bucket, frozenset(without)) for bucket in buckets]
    last = last_uses(editor.graph)
    started: list[tuple[Bucket, fx.Node]] = []
    for bucket, flat in zip(buckets, flats, strict=True):
        place = after(last[flat], started[-1][1] if started else None)
        started.append((bucket, start_reduction(editor, place, bucket, flat, (), "reduce_scatter")))
    accumulators = {
        bucket.name: editor.add_input(
            Slot("shard", bucket.name),
            editor.empty((bucket.shard_numel,), dtype or bucket.dtype, handle.meta["val"].device),
        )
        for bucket, handle in started
    }
    op = aten.copy_.default if first else aten.add_.Tensor
    pending: deque[tuple[Bucket, fx.Node]] = deque()

    def take(place: fx.Node) -> None:
        bucket, handle = pending.popleft()
        shard = editor.call(place, ops.wait, handle)
        editor.call(place, op, accumulators[bucket.name], shard)

    for bucket, handle in started:
        if len(pending) == in_flight:
            take(handle)
        pending.append((bucket, handle))
    while pending:
        take(editor.end)
    return editor.finish(program)


def gather_parameters(joint: Joint, buckets: Sequence[Bucket]) -> Joint:
    """Replace parameters by shards that are gathered before their first use (ZeRO-3).

    Args:
        joint: Takes the members of the buckets as ``parameter`` inputs; not changed.
        buckets: Of parameters. Buckets of their gradients must have the same layout
            (`gradient_buckets`), since the update works on shards of both.

    Returns:
        The graph with one ``shard`` input per bucket in place of the members. The origin of all
        that is gathered is the name of the bucket: give the names to `split.split` as values to
        recompute, and backward gathers again.
    """
    editor = Editor(joint)
    for bucket in buckets:
        slots = [Slot("parameter", member.name) for member in bucket.members]
        holders = [editor.inputs[slot] for slot in slots if slot in editor.inputs]
        assert holders, f"{joint.name}: no parameter of bucket {bucket.name} is an input"
        place = min((user for holder in holders for user in holder.users), default=editor.end)
        _gather(editor, place, bucket, holders[0].meta["val"].device)
    return editor.finish(joint)


def _gather(editor: Editor, place: fx.Node, bucket: Bucket, device: torch.device) -> None:
    def call(target: Any, *args: Any) -> fx.Node:
        node = editor.call(place, target, *args)
        node.meta |= {"origin": bucket.name, "phase": place.meta.get("phase", "forward")}
        return node

    value = editor.empty((bucket.shard_numel,), bucket.dtype, device)
    shard = editor.add_input(Slot("shard", bucket.name), value)
    flat = call(aten.view.default, call(ops.ALL_GATHER, shard, list(bucket.ranks)), [bucket.numel])
    for member in bucket.members:
        slot = Slot("parameter", member.name)
        if slot in editor.inputs:
            found = editor.inputs[slot].meta["val"]
            assert (tuple(found.shape), found.dtype) == (member.shape, bucket.dtype), (
                member,
                found,
            )
            piece = call(aten.slice.Tensor, flat, 0, member.offset, member.offset + member.numel)
            editor.substitute(slot, call(aten.view.default, piece, list(member.shape)))


def gradient_buckets(buckets: Sequence[Bucket], prefix: str = "gradients") -> tuple[Bucket, ...]:
    """Buckets for the gradients of bucketed parameters, in the same layout."""
    return tuple(
        replace(bucket, name=f"{prefix}.{number}") for number, bucket in enumerate(buckets)
    )


def _make(editor: Editor, bucket: Bucket, without: frozenset[str]) -> fx.Node:
    """Make a bucket's memory right before the first gradient is written to it."""
    device = device_of(editor, bucket)
    holders = [
        editor.inputs[Slot("gradient", member.name)]
        for member in bucket.members
        if member.name not in without
    ]
    place = min(user for holder in holders for user in holder.users)
    flat = editor.call(
        place,
        aten.empty.memory_format,
        [bucket.numel],
        dtype=bucket.dtype,
        device=device,
        pin_memory=False,
    )
    views = lay_members(editor, place, bucket, flat)
    for name in (member.name for member in bucket.members if member.name in without):
        editor.call(place, aten.zero_.default, views[name])
    for start, end in bucket.gaps:
        # What lies behind the last member is summed and kept like all else: no stray NaN in it.
        rest = editor.call(place, aten.slice.Tensor, flat, 0, start, end)
        editor.call(place, aten.zero_.default, rest)
    return flat
