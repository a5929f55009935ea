"""Reshards on local tensors: the steps of `autopar.sharding.reshard`, as the runtime runs them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from autopar.cost_models.ops.call import Rank, reduce_over, transfer
from autopar.cost_models.tape.basic import (
    cloned,
    joined,
    narrowed,
    only,
    permuted,
    reshaped,
)
from autopar.cost_models.tape.tape import AGAIN, Tape
from autopar.cost_models.tape.tensors import Local, Shape
from autopar.sharding.placement import (
    Grid,
    Pair,
    Placements,
    Shard,
    dim_factors,
    nested_chunk,
)
from autopar.sharding.reshard import Step, plan_steps, split_time


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bound:
    """A step for one rank and one global shape.

    Attributes:
        step: The step.
        before: Local shape before it.
        after: Local shape after it.
        view: Sizes outside, along and inside the factor that is gathered or split.
        mine: Positions along it that this rank has, or gets.
        longest: Most positions that any rank has, or gets.
        even: Whether all have as many.
    """

    step: Step
    before: Shape
    after: Shape
    view: tuple[int, int, int] = (1, 1, 1)
    mine: int = 0
    longest: int = 0
    even: bool = True


def reshard(tape: Tape, rank: Rank, value: Local, have: Pair, want: Pair, shape: Shape) -> Local:
    """Carry a value to another pair, and its gradient back.

    Args:
        tape: Where to note it.
        rank: The rank.
        value: The local value.
        have: How it lies, and its gradient.
        want: How it shall lie.
        shape: Its global shape.
    """
    maker = tape.maker
    if tape.implementation.regather and _gathers(have, want):
        tape.maker = AGAIN
    out = run_steps(tape, rank, value, have.forward, want.forward, shape)
    tape.maker = maker
    if value.maker is None:
        return out
    if out is value:
        out = Local(value.shape, value.dtype, value.memory, value.strides)
    out.maker = None

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        return (run_steps(tape, rank, only(grads), want.gradient, have.gradient, shape),)

    tape.record((out,), (value,), backward)
    return out


def _gathers(have: Pair, want: Pair) -> bool:
    return any(step.kind == "all_gather" for step in plan_steps(have.forward, want.forward))


def run_steps(
    tape: Tape, rank: Rank, value: Local, source: Placements, target: Placements, shape: Shape
) -> Local:
    """Carry a local tensor from one placement to another; not recorded."""
    if source == target:
        return value
    for bound in _bound(rank.grid, rank.time, source, target, shape):
        value = _run(tape, rank, value, bound)
    return value


@lru_cache(maxsize=65536)
def _bound(
    grid: Grid, time: int | None, source: Placements, target: Placements, shape: Shape
) -> tuple[_Bound, ...]:
    return tuple(
        _bind(grid, part, shape)
        for step in plan_steps(source, target)
        for part in split_time(step, time)
    )


def _bind(grid: Grid, step: Step, shape: Shape) -> _Bound:
    before, after = grid.local_shape(shape, step.before), grid.local_shape(shape, step.after)
    split = step.target if step.kind != "all_gather" else step.source
    if split is None:
        return _Bound(step=step, before=before, after=after)
    placed = step.after if step.kind != "all_gather" else step.before
    outer = _outer_axes(placed, split, step.axes)
    length = grid.extent(split.size, outer)[1]
    parts = tuple(grid.sizes[axis] for axis in step.axes)
    chunks = [nested_chunk(length, parts, index) for index in product(*map(range, parts))]
    place = 0
    for axis in step.axes:
        place = place * grid.sizes[axis] + grid.coordinate[axis]
    mine, longest = chunks[place][1], max(size for _, size in chunks)
    inner = grid.inner(step.before, split)
    current = mine if step.kind == "all_gather" else length
    return _Bound(
        step=step,
        before=before,
        after=after,
        view=_view(before, split.dim, current, inner),
        mine=mine,
        longest=longest,
        even=all(size == longest for _, size in chunks),
    )


def _outer_axes(placements: Placements, shard: Shard, axes: tuple[int, ...]) -> tuple[int, ...]:
    for factor in dim_factors(placements, shard.dim):
        if (factor.stride, factor.size) == (shard.stride, shard.size):
            return tuple(axis for axis in factor.axes if axis not in axes)
    return ()


def _view(shape: Shape, dim: int, current: int, inner: int) -> tuple[int, int, int]:
    after = inner * math.prod(shape[dim + 1 :])
    before = math.prod(shape[:dim]) * (shape[dim] // (current * inner)) if current * inner else 0
    return before, current, after


def _run(tape: Tape, rank: Rank, value: Local, bound: _Bound) -> Local:
    step = bound.step
    if step.axes == (rank.time,):
        return _in_time(tape, rank, value, bound)
    if step.kind == "all_reduce":
        return reduce_over(tape, rank, value, step.axes)
    if step.kind == "mask":
        first = all(rank.grid.coordinate[axis] == 0 for axis in step.axes)
        if first:
            return cloned(tape, value) if value.strides is not None else value
        return tape.emit("new_zeros", "elementwise", (), value.shape, value.dtype)
    if step.kind == "slice":
        part = narrowed(reshaped(tape, value, bound.view), 1, bound.mine)
        return reshaped(tape, part, bound.after)
    if step.kind == "reduce_scatter":
        return _reduce_scatter(tape, rank, value, bound)
    if step.kind == "all_gather":
        return _all_gather(tape, rank, value, bound)
    return _all_to_all(tape, rank, value, bound)


def _in_time(tape: Tape, rank: Rank, value: Local, bound: _Bound) -> Local:
    """Steps along the axis in time (`autopar.runtime.microbatch.TimeStep`)."""
    kind = bound.step.kind
    if kind in ("all_reduce", "reduce_scatter"):
        value = tape.pointwise("microbatch_sum", (value,), value.dtype)
    elif kind == "mask":
        return tape.pointwise("div", (value,), value.dtype)
    if kind == "all_reduce":
        return value
    outer, _, inner = bound.view
    rows = tape.emit(
        "index_select", "copy", (reshaped(tape, value, bound.view),),
        (outer, bound.mine, inner), value.dtype,
    )  # fmt: skip
    tape.last().read_bytes = rows.memory.size_bytes
    return reshaped(tape, rows, bound.after)


def _reduce_scatter(tape: Tape, rank: Rank, value: Local, bound: _Bound) -> Local:
    outer, _, inner = bound.view
    count = rank.group(bound.step.axes)
    shape = (count, outer, bound.longest, inner)
    if bound.even:
        wide = reshaped(tape, value, (outer, count, bound.longest, inner))
        pieces = permuted(wide, (1, 0, 2, 3))
        if pieces.strides is not None:
            pieces = cloned(tape, pieces)
    else:
        pieces = tape.emit("new_zeros", "copy", (value,), shape, value.dtype)
    out = transfer(tape, "reduce_scatter", pieces, shape[1:], bound.step.axes, rank)
    mine = reshaped(tape, narrowed(out, 1, bound.mine), bound.after)
    return cloned(tape, mine) if mine.strides is not None else mine


def _all_gather(tape: Tape, rank: Rank, value: Local, bound: _Bound) -> Local:
    outer, _, inner = bound.view
    count = rank.group(bound.step.axes)
    part = reshaped(tape, value, bound.view)
    if bound.mine < bound.longest:
        part = tape.emit("pad", "copy", (part,), (outer, bound.longest, inner), value.dtype)
    elif part.strides is not None:
        part = cloned(tape, part)
    shape = (count, outer, bound.longest, inner)
    whole = transfer(tape, "all_gather", part, shape, bound.step.axes, rank)
    if bound.even:
        return reshaped(tape, permuted(whole, (1, 0, 2, 3)), bound.after)
    return tape.emit("cat", "copy", (whole,), bound.after, value.dtype)


def _all_to_all(tape: Tape, rank: Rank, value: Local, bound: _Bound) -> Local:
    pieces = value
    if value.strides is not None or bound.view[0] > 1:
        pieces = cloned(tape, value)
    flat = joined(tape, [reshaped(tape, pieces, (pieces.numel,))], 0)
    numel = math.prod(bound.after)
    received = transfer(tape, "all_to_all", flat, (numel,), bound.step.axes, rank)
    return tape.emit("cat", "copy", (received,), bound.after, value.dtype)
