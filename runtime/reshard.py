"""Reshard steps executed on real tensors, forward and backward.

The steps are planned by `autopar.sharding.reshard.plan_steps`; this module only carries them out.
Every step sees the local tensor as ``(outer, factor, inner)`` around the factor it acts on, so
strided and uneven shards need no cases of their own.
"""

from __future__ import annotations

import math
from itertools import product

import torch
from torch import Tensor, nn

from autopar.runtime.mesh import MeshContext
from autopar.runtime.microbatch import TimeStep
from autopar.sharding.placement import Grid, Pair, Placements, Shard, dim_factors, nested_chunk
from autopar.sharding.reshard import Step, plan_steps, split_time


def _chunks(
    grid: Grid, shard: Shard, outer_axes: tuple[int, ...], axes: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Start and length, within this rank's outer part, of the chunk of every rank along `axes`."""
    length = grid.extent(shard.size, outer_axes)[1]
    parts = tuple(grid.sizes[axis] for axis in axes)
    return [nested_chunk(length, parts, index) for index in product(*map(range, parts))]


def _outer_axes(placements: Placements, shard: Shard, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Axes outside `axes` that split the factor too."""
    for factor in dim_factors(placements, shard.dim):
        if (factor.stride, factor.size) == (shard.stride, shard.size):
            return tuple(axis for axis in factor.axes if axis not in axes)
    return ()


def _view(shape: tuple[int, ...], dim: int, current: int, inner: int) -> tuple[int, int, int]:
    """The (outer, factor, inner) sizes of a local tensor around a factor of `dim`."""
    after = inner * math.prod(shape[dim + 1 :])
    before = math.prod(shape[:dim]) * (shape[dim] // (current * inner)) if current * inner else 0
    return before, current, after


class StepRunner:
    """One step bound to a rank and a global shape."""

    def __init__(self, step: Step, shape: tuple[int, ...], context: MeshContext) -> None:
        self.step, self.context = step, context
        self.ranks = context.ranks(step.axes)
        grid = context.grid
        self.shape_before = grid.local_shape(shape, step.before)
        self.shape_after = grid.local_shape(shape, step.after)
        self.index = self.ranks.index(context.comm.rank)
        if step.source is not None:
            outer = _outer_axes(step.before, step.source, step.axes)
            self.source_chunks = _chunks(grid, step.source, outer, step.axes)
            self.source_inner = grid.inner(step.before, step.source)
        if step.target is not None:
            outer = _outer_axes(step.after, step.target, step.axes)
            self.target_chunks = _chunks(grid, step.target, outer, step.axes)
            self.target_inner = grid.inner(step.after, step.target)
            self.target_length = grid.extent(step.target.size, outer)[1]
        self.run = getattr(self, f"_{step.kind}")

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return self.context.comm.all_reduce(tensor, self.ranks)

    def _mask(self, tensor: Tensor) -> Tensor:
        # Of equal strides on all ranks: these decide the order of sums in backward kernels, and
        # replicated gradients must be equal to the last bit.
        return tensor.contiguous() if self.index == 0 else tensor.new_zeros(tensor.shape)

    def _slice(self, tensor: Tensor) -> Tensor:
        target = self.step.target
        assert target is not None
        sizes = _view(self.shape_before, target.dim, self.target_length, self.target_inner)
        start, length = self.target_chunks[self.index]
        return tensor.reshape(sizes).narrow(1, start, length).reshape(self.shape_after)

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        target = self.step.target
        assert target is not None
        sizes = _view(self.shape_before, target.dim, self.target_length, self.target_inner)
        pieces = self._pieces(tensor.reshape(sizes), self.target_chunks)
        out = self.context.comm.reduce_scatter(pieces, self.ranks)
        mine = out.narrow(1, 0, self.target_chunks[self.index][1])
        # Dense where there was padding to cut off too, for the reason given in `_mask`.
        return mine.reshape(self.shape_after).contiguous()

    @staticmethod
    def _pieces(view: Tensor, chunks: list[tuple[int, int]]) -> Tensor:
        """Chunks along dim 1, padded to the longest and stacked in front."""
        longest = max(length for _, length in chunks)
        if all(length == longest for _, length in chunks):
            outer, _, inner = view.shape
            return view.reshape(outer, len(chunks), longest, inner).transpose(0, 1).contiguous()
        pieces = view.new_zeros(len(chunks), view.shape[0], longest, view.shape[2])
        for piece, (start, length) in zip(pieces, chunks, strict=True):
            piece[:, :length] = view[:, start : start + length]
        return pieces

    def _all_gather(self, tensor: Tensor) -> Tensor:
        source = self.step.source
        assert source is not None
        length = self.source_chunks[self.index][1]
        view = tensor.reshape(_view(self.shape_before, source.dim, length, self.source_inner))
        longest = max(size for _, size in self.source_chunks)
        if length < longest:
            view = nn.functional.pad(view, (0, 0, 0, longest - length))
        gathered = self.context.comm.all_gather(view.contiguous(), self.ranks)
        if all(size == longest for _, size in self.source_chunks):
            return gathered.transpose(0, 1).reshape(self.shape_after)
        pieces = zip(gathered, self.source_chunks, strict=True)
        return torch.cat([part[:, :size] for part, (_, size) in pieces], 1).reshape(
            self.shape_after
        )

    def _all_to_all(self, tensor: Tensor) -> Tensor:
        source, target = self.step.source, self.step.target
        assert source is not None and target is not None
        grid = self.context.grid
        inner = grid.inner(self.step.before, target)
        view = tensor.reshape(_view(self.shape_before, target.dim, self.target_length, inner))
        send = [view.narrow(1, start, size).contiguous() for start, size in self.target_chunks]
        mine = self.source_chunks[self.index][1]
        per_item = send[self.index].numel() // mine if mine else 0
        shapes = [(per_item * size,) for _, size in self.source_chunks]
        flat = [piece.reshape(-1) for piece in send]
        received = self.context.comm.all_to_all(flat, self.ranks, shapes)
        parts = []
        for piece, (_, size) in zip(received, self.source_chunks, strict=True):
            shape = list(self.shape_after)
            total = sum(length for _, length in self.source_chunks)
            shape[source.dim] = shape[source.dim] // total * size
            sizes = _view(tuple(shape), source.dim, size, grid.inner(self.step.after, source))
            parts.append(piece.reshape(sizes))
        return torch.cat(parts, 1).reshape(self.shape_after)


Runner = StepRunner | TimeStep


def bind_steps(
    source: Placements, target: Placements, shape: tuple[int, ...], context: MeshContext
) -> tuple[Runner, ...]:
    """The steps from `source` to `target` for a tensor of global `shape`, bound to a rank.

    Raises:
        PlanError: If a step needs values of several microbatches at once.
    """
    runners: list[Runner] = []
    for step in plan_steps(source, target):
        for part in split_time(step, context.time):
            if part.axes == (context.time,):
                runners.append(TimeStep(part, shape, context))
            else:
                runners.append(StepRunner(part, shape, context))
    return tuple(runners)


def run_steps(steps: tuple[Runner, ...], tensor: Tensor) -> Tensor:
    """Apply bound steps in order."""
    for step in steps:
        tensor = step.run(tensor)
    return tensor


class _Apply(torch.autograd.Function):
    """Forward steps forward, gradient steps backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: Tensor, owner: Reshard) -> Tensor:
        ctx.owner = owner  # type: ignore[attr-defined]
        out = run_steps(owner.forward_steps, tensor)
        return tensor.view_as(tensor) if out is tensor else out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        owner: Reshard = ctx.owner  # type: ignore[attr-defined]
        return run_steps(owner.gradient_steps, grads[0]), None


class Reshard(nn.Module):
    """Carries a value from its producer's pair to its consumer's.

    Forward steps lead from `have.forward` to `want.forward`; in backward the gradient goes from
    `want.gradient` to `have.gradient`.
    """

    def __init__(
        self, have: Pair, want: Pair, shape: tuple[int, ...], context: MeshContext
    ) -> None:
        super().__init__()
        self.have, self.want = have, want
        self.forward_steps = bind_steps(have.forward, want.forward, shape, context)
        self.gradient_steps = bind_steps(want.gradient, have.gradient, shape, context)

    def forward(self, tensor: Tensor) -> Tensor:
        """Reshard a local tensor."""
        if tensor.requires_grad and torch.is_grad_enabled():
            return _Apply.apply(tensor, self)
        return run_steps(self.forward_steps, tensor)

    def extra_repr(self) -> str:
        """Steps in both directions, for people."""
        ahead, back = (
            "; ".join(runner.step.text(runner.context.mesh.names) for runner in runners)
            for runners in (self.forward_steps, self.gradient_steps)
        )
        return f"forward: {ahead or 'none'} | backward: {back or 'none'}"
