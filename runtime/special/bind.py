"""From a planned call to a `SpecialCall` on this rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.graph.ir import Node, TensorSpec
from autopar.runtime.mesh import MeshContext
from autopar.runtime.microbatch import even_part, get_seed, microbatch_sum
from autopar.runtime.special.base import Axes, AxisIds, LetterSplit, SpecialCall, special_for
from autopar.sharding.choices import CallPlacement, Choices
from autopar.sharding.rule import OpRule


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.reduce = reduce
        return reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.reduce(gradients[0]), None


class _Complete(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
        return reduce(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


@final
class MeshAxes(Axes):
    """Collectives among the ranks that differ along some axes of a mesh.

    Along the microbatch axis a sum is one over time, see `autopar.runtime.microbatch`.
    """

    def __init__(self, context: MeshContext) -> None:
        self._context = context

    def total(self, tensor: Tensor, axes: AxisIds) -> Tensor:
        """See `Axes.total`."""
        return self._apply(_Total, tensor, axes)

    def complete(self, tensor: Tensor, axes: AxisIds) -> Tensor:
        """See `Axes.complete`."""
        return self._apply(_Complete, tensor, axes)

    def maximum(self, tensor: Tensor, axes: AxisIds) -> Tensor:
        """See `Axes.maximum`."""
        if not axes:
            return tensor
        if self._context.time in axes:
            raise PlanError(
                "a maximum over the batch is needed with all microbatches at once",
                fix="plan with microbatches=1",
            )
        return self._context.comm.all_reduce(tensor.detach(), self._context.ranks(axes), "max")

    def _apply(self, function: Any, tensor: Tensor, axes: AxisIds) -> Tensor:
        if not axes:
            return tensor
        context = self._context
        ranks = context.ranks(context.without_time(axes))

        def reduce(value: Tensor) -> Tensor:
            if len(ranks) > 1 or context.time not in axes:
                value = context.comm.all_reduce(value, ranks)
            if context.time in axes:
                value = microbatch_sum(value, context.num_microbatches)
            return value

        result: Tensor = function.apply(tensor, reduce)
        return result

    def repeats(self, axes: AxisIds) -> int:
        """See `Axes.repeats`."""
        return self._context.num_microbatches if self._context.time in axes else 1

    def only_in_time(self, axes: AxisIds) -> bool:
        """See `Axes.only_in_time`."""
        return not self._context.without_time(axes)


def bind_special(
    node: Node,
    rule: OpRule,
    choices: Choices,
    placement: CallPlacement,
    spec: Callable[[str], TensorSpec],
    context: MeshContext,
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The special lowering of a call as a function of this rank's local operands.

    Args:
        node: The call.
        rule: Its rule.
        choices: What it does along every mesh axis.
        placement: Pairs of its operands and outputs, as the choices fix them.
        spec: Global specs of values by name.
        context: The mesh as this rank sees it.

    Returns:
        A function of the local operands, one per slot, that gives the local result, or a tuple
        of them for an op with several outputs.
    """
    units = dict.fromkeys(choice.unit for choice in choices if choice.unit is not None)
    splits = []
    for unit in units:
        axes = tuple(axis for axis, choice in enumerate(choices) if choice.unit == unit)
        start, length = context.grid.extent(unit.size, axes)
        in_time = context.time in axes
        splits.append(
            LetterSplit(
                letter=unit.letter,
                stride=unit.stride,
                size=unit.size,
                axes=axes,
                start=start,
                length=length,
                per_microbatch=even_part(unit.size, context.num_microbatches) if in_time else 0,
            )
        )
    call = SpecialCall(
        node=node,
        rule=rule,
        operands=tuple(spec(name) for name in node.operands),
        outputs=tuple(value.spec for value in node.outputs),
        splits=tuple(splits),
        placement=placement,
        axes=MeshAxes(context),
        seed=get_seed,
    )
    function = special_for(node.op)

    dtypes: list[torch.dtype] = [getattr(torch, value.spec.dtype) for value in node.outputs]

    def lowered(*operands: Tensor) -> Tensor | tuple[Tensor, ...]:
        with _context(node):
            result = function(call, *operands)
        # Statistics and sums are worked out in float32, whatever the dtype of the result.
        if isinstance(result, Tensor):
            return result.to(dtypes[0])
        return tuple(part.to(dtype) for part, dtype in zip(result, dtypes, strict=True))

    return lowered


def _context(node: Node) -> AbstractContextManager[object]:
    """The autocast region that a call stands in, if any."""
    if not node.context:
        return nullcontext()
    _, device, dtype = node.context
    return torch.autocast(device, dtype=getattr(torch, dtype))
