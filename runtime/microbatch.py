"""The microbatch axis: a mesh axis that runs over time.

What is split over it is computed microbatch by microbatch by one program, which learns the number
of the microbatch as a tensor. A tensor that is Partial over it is a sum over time: gradients are
accumulated, losses added up. Steps along it move no bytes:

    slice           rows of this microbatch
    mask            an equal share of the value for every microbatch, 1/M
    all_reduce      the sum over microbatches. Of a value that depends on inputs only it is known
                    before the first microbatch (the prologue); of others, such as batch
                    statistics, it is estimated as M times this microbatch's value, which makes
                    what follows a quantity of the microbatch (as gradient accumulation has it).
    reduce_scatter  both

Gathers and exchanges over time would need all microbatches at once: they are refused.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.runtime.programs.ops import MICROBATCH_SUM
from autopar.sharding.reshard import Step

if TYPE_CHECKING:
    from autopar.runtime.mesh import MeshContext


class _Moment(threading.local):
    """Seed and microbatch of what runs now; per thread, because ranks may be threads."""

    seed: int | Tensor = 0
    microbatch: int | Tensor = 0


_MOMENT = _Moment()


def set_seed(seed: int | Tensor) -> None:
    """Set the seed of all random ops this rank runs from now on, once per step."""
    _MOMENT.seed = seed


def get_seed() -> int | Tensor:
    """The seed of the running step."""
    return _MOMENT.seed


def set_microbatch(number: int | Tensor) -> None:
    """Set the number of the microbatch that this rank runs from now on."""
    _MOMENT.microbatch = number


def get_microbatch() -> int | Tensor:
    """The number of the running microbatch, from 0."""
    return _MOMENT.microbatch


def set_moment(seed: Tensor, microbatch: Tensor) -> None:
    """Set both, from the arguments of a program."""
    set_seed(seed)
    set_microbatch(microbatch)


def microbatch_sum(tensor: Tensor, count: int) -> Tensor:
    """The sum over all microbatches of a value, as far as this microbatch can know it."""
    summed: Tensor = MICROBATCH_SUM(tensor, count)
    return summed


def take_rows(tensor: Tensor, dim: int, start: int | Tensor, length: int) -> Tensor:
    """``tensor.narrow(dim, start, length)`` for a start that may be a 0-dim tensor."""
    if isinstance(start, int):
        return tensor.narrow(dim, start, length)
    return tensor.index_select(dim, torch.arange(length, device=tensor.device) + start)


@final
class TimeStep:
    """A step along the microbatch axis bound to a rank and a global shape.

    Raises:
        PlanError: If the step needs several microbatches at once.
    """

    def __init__(self, step: Step, shape: tuple[int, ...], context: MeshContext) -> None:
        self.step, self.context = step, context
        self.count = context.num_microbatches
        if step.kind in ("all_gather", "all_to_all"):
            raise PlanError(
                f"a tensor of shape {list(shape)} is needed with all microbatches at once",
                expected="ops that treat the samples of a batch apart, sums over the batch, or "
                "batch statistics",
                fix="plan with microbatches=1",
            )
        if step.target is not None:
            self.shape_before = context.grid.local_shape(shape, step.before)
            self.shape_after = context.grid.local_shape(shape, step.after)
            self.length = even_part(step.target.size, self.count)
            inner = context.grid.inner(step.before, step.target)
            dim, size = step.target.dim, step.target.size
            self.view = (
                math.prod(self.shape_before[:dim])
                * (self.shape_before[dim] // max(size * inner, 1)),
                size,
                inner * math.prod(self.shape_before[dim + 1 :]),
            )
        self.run = getattr(self, f"_{step.kind}")

    def _all_reduce(self, tensor: Tensor) -> Tensor:
        return microbatch_sum(tensor, self.count)

    def _mask(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor / self.count
        first = torch.as_tensor(get_microbatch(), device=tensor.device) == 0
        return tensor.where(first, torch.zeros_like(tensor))

    def _slice(self, tensor: Tensor) -> Tensor:
        start = get_microbatch() * self.length
        rows = take_rows(tensor.reshape(self.view), 1, start, self.length)
        return rows.reshape(self.shape_after)

    def _reduce_scatter(self, tensor: Tensor) -> Tensor:
        return self._slice(self._all_reduce(tensor))


def even_part(size: int, count: int) -> int:
    """Size of each of `count` equal parts.

    Raises:
        PlanError: If they cannot be equal.
    """
    if size % count:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        near = sorted(divisors, key=lambda n: (abs(n - count), n))[:2]
        raise PlanError(
            f"a batch of {size} does not divide into {count} equal microbatches",
            fix="use " + " or ".join(map(str, near)) + " microbatches",
        )
    return size // count
