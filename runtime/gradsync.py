"""Gradient sync: each parameter's Partial gradient is reduced once per step, in buckets.

Buckets fill in the order in which backward makes gradients (last used first); a full bucket's
all-reduce starts at once and runs beside the rest of backward. Afterwards gradients are views of
the buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from autopar.runtime.comm import Handle
from autopar.runtime.reshard import MeshContext, StepRunner, bind_steps, run_steps
from autopar.sharding.placement import Pair, Placements

BUCKET_BYTES = 25 * 1024**2
"""Bucket size, the default of torch's DistributedDataParallel (bucket_cap_mb=25)."""
FIRST_BUCKET_BYTES = 1024**2
"""The first bucket is small, so that communication starts early (as in DDP)."""


@dataclass(frozen=True, slots=True)
class _Member:
    parameter: nn.Parameter
    offset: int
    numel: int


class _Bucket:
    """Gradients reduced together."""

    def __init__(self, ranks: tuple[int, ...], members: list[nn.Parameter]) -> None:
        self.ranks = ranks
        self.members: list[_Member] = []
        offset = 0
        for parameter in members:
            self.members.append(_Member(parameter, offset, parameter.numel()))
            offset += parameter.numel()
        first = members[0]
        self.buffer = torch.zeros(offset, dtype=first.dtype, device=first.device)
        self.missing = len(members)
        self.handle: Handle | None = None


class GradientSync:
    """Reduces the gradients of one rank's parameters.

    Args:
        parameters: ``(parameter, pair, global shape)`` in the order of first use in forward.
        context: The rank.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Parameter, Pair, tuple[int, ...]]],
        context: MeshContext,
    ) -> None:
        self.context = context
        self.buckets: list[_Bucket] = []
        self.where: dict[int, tuple[_Bucket, _Member]] = {}
        # On a CPU, freeing each gradient as soon as it is copied makes the C allocator give pages
        # back and fault them in again: 3,277 faults and 4 % of a step's CPU time for a GPT of 10 M
        # parameters (measured 2026-11-29, tests/bench/bench_ddp.py's model, 2 ranks).
        self.keep = context.comm.device.type == "cpu"
        self.kept: list[Tensor] = []
        self.odd: list[tuple[nn.Parameter, tuple[StepRunner, ...]]] = []
        groups: dict[tuple[tuple[int, ...], torch.dtype], list[nn.Parameter]] = {}
        for parameter, pair, shape in reversed(parameters):
            if not parameter.requires_grad or pair.gradient == reduced(pair):
                continue
            steps = bind_steps(pair.gradient, reduced(pair), shape, context)
            if len(steps) == 1 and steps[0].step.kind == "all_reduce":
                key = (steps[0].ranks, parameter.dtype)
                groups.setdefault(key, []).append(parameter)
            else:
                self.odd.append((parameter, steps))
        for (ranks, _), members in groups.items():
            self._fill(ranks, members)
        for bucket in self.buckets:
            for member in bucket.members:
                self.where[id(member.parameter)] = (bucket, member)
                member.parameter.register_post_accumulate_grad_hook(self._ready)

    def _fill(self, ranks: tuple[int, ...], members: list[nn.Parameter]) -> None:
        current: list[nn.Parameter] = []
        size_bytes, limit = 0, FIRST_BUCKET_BYTES
        for parameter in members:
            current.append(parameter)
            size_bytes += parameter.numel() * parameter.element_size()
            if size_bytes >= limit:
                self.buckets.append(_Bucket(ranks, current))
                current, size_bytes, limit = [], 0, BUCKET_BYTES
        if current:
            self.buckets.append(_Bucket(ranks, current))

    def start_step(self) -> None:
        """Forget the last step; call before backward, with gradients cleared."""
        self.kept.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.members)
            bucket.handle = None

    @torch.no_grad()
    def _ready(self, parameter: Tensor) -> None:
        bucket, member = self.where[id(parameter)]
        grad = parameter.grad
        assert grad is not None
        view = bucket.buffer[member.offset : member.offset + member.numel].view(grad.shape)
        view.copy_(grad)
        if self.keep:
            self.kept.append(grad)
        parameter.grad = view
        bucket.missing -= 1
        if bucket.missing == 0:
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        bucket.handle = self.context.comm.all_reduce_start(bucket.buffer, bucket.ranks)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for all reductions; gradients are complete afterwards."""
        for bucket in self.buckets:
            if bucket.handle is None:
                if bucket.missing == len(bucket.members):
                    continue
                for member in bucket.members:
                    if member.parameter.grad is None:
                        bucket.buffer[member.offset : member.offset + member.numel].zero_()
                self._start(bucket)
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
        for parameter, steps in self.odd:
            if parameter.grad is not None:
                parameter.grad = run_steps(steps, parameter.grad)


def reduced(pair: Pair) -> Placements:
    """Where a parameter's gradient lies after sync: exactly as the parameter itself."""
    return pair.forward
