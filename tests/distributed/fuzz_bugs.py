"""Mistakes to inject: each is one a person could make in rules, reshards, lowerings or sync."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from autopar.plan.parts import ZeroPlan
from autopar.runtime import execution, lower, parameters, reshard, unit
from autopar.runtime.comm_threads import ThreadCommunicator
from autopar.runtime.handles import Done, Handle
from autopar.runtime.programs.buckets import Bucket
from autopar.runtime.reshard import StepRunner
from autopar.runtime.special import base, bind, losses
from autopar.runtime.special.base import SpecialCall
from autopar.sharding import choices, placement
from autopar.sharding.placement import PARTIAL, REPLICATE, Grid, Shard
from autopar.sharding.rule import OpRule
from tests.distributed.fuzz import NO_ZERO
from tests.distributed.fuzz_models import Subject

Inject = Callable[[MonkeyPatch], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A mistake.

    Attributes:
        model: A model whose plans can show it.
        inject: Puts it into the code.
        rule: For mistakes in a rule: the op, and the rule from the right one.
        programs: Whether only explicit programs can show it.
        zero: With which ZeRO; without axes it divides nothing.
    """

    model: str
    inject: Inject = lambda patch: None
    rule: tuple[str, Callable[[OpRule], OpRule]] | None = None
    programs: bool = False
    zero: ZeroPlan = NO_ZERO

    def subject(self, right: Subject) -> Subject:
        """The model with the wrong rule."""
        if self.rule is None:
            return right
        op, change = self.rule
        nodes, rules = right.traced.graph.nodes, right.factors.rules
        wrong = tuple(
            change(rule) if node.op == op and rule is not None else rule
            for node, rule in zip(nodes, rules, strict=True)
        )
        assert wrong != rules, f"{right.name} has no {op} that the mistake could change"
        return replace(right, factors=replace(right.factors, rules=wrong))


class _Alone(base.Axes):
    """Collectives that each rank does for itself."""

    def total(self, tensor: Tensor, axes: base.AxisIds) -> Tensor:
        return tensor.clone() if axes else tensor

    def complete(self, tensor: Tensor, axes: base.AxisIds) -> Tensor:
        return tensor.clone() if axes else tensor

    def maximum(self, tensor: Tensor, axes: base.AxisIds) -> Tensor:
        return tensor.clone() if axes else tensor

    def repeats(self, axes: base.AxisIds) -> int:
        return 1

    def only_in_time(self, axes: base.AxisIds) -> bool:
        return False


def around(name: str, wrap: Callable[..., Any]) -> Inject:
    """Run the special lowering of ops called `name` as ``wrap(function, call, *operands)``."""

    def inject(patch: MonkeyPatch) -> None:
        right = base.special_for

        def wrong(op: str) -> base.SpecialFunction:
            function = right(op)
            if name not in op:
                return function
            return lambda call, *operands: wrap(function, call, *operands)

        patch.setattr(bind, "special_for", wrong)

    return inject


def attribute(owner: object, name: str, wrong: Callable[..., Any]) -> Inject:
    """Replace a function; `wrong` takes the right one first."""

    def inject(patch: MonkeyPatch) -> None:
        right = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return inject


def unsynced(name: str) -> Inject:
    """No collective in the special lowering of ops called `name`."""
    return around(name, lambda run, call, *operands: run(replace(call, axes=_Alone()), *operands))


def _bias_on_every_rank(
    right: Any, rule: OpRule, choice: Any, slot: int, contracted: bool
) -> tuple[Any, Any]:
    if choice.unit is not None and slot in rule.additive and contracted:
        return REPLICATE, PARTIAL
    return right(rule, choice, slot, contracted)


def _local_positions(
    right: Any, call: SpecialCall, slot: int, dim: int, device: Any, **options: Any
) -> Tensor:
    if "attention" not in call.node.op:
        return right(call, slot, dim, device, **options)
    return torch.arange(len(right(call, slot, dim, device, **options)), device=device)


def _reversed_extent(right: Any, grid: Grid, size: int, axes: tuple[int, ...]) -> tuple[int, int]:
    return right(grid, size, axes[::-1])


def _local_mean(function: Any, call: SpecialCall, source: Tensor) -> Tensor:
    return function(call, source) * (call.operands[0].numel / source.numel())


def _local_count(right: Any, call: SpecialCall, counted: Tensor | None) -> Tensor:
    return right(replace(call, axes=_Alone()), counted)


def _average_sync(patch: MonkeyPatch) -> None:
    right = parameters.Parameters.finish_reduce

    def wrong(self: parameters.Parameters) -> None:
        right(self)
        for held in self.held.values():
            held.gradients.div_(len(held.bucket.ranks))

    patch.setattr(parameters.Parameters, "finish_reduce", wrong)


def _no_sync(patch: MonkeyPatch) -> None:
    right = unit.reduce_buckets
    patch.setattr(unit, "reduce_buckets", lambda program, made, how: right(program, made, "none"))


def _drop_gradient_sums(patch: MonkeyPatch) -> None:
    right = reshard.Reshard.__init__

    def wrong(self: reshard.Reshard, *args: Any) -> None:
        right(self, *args)
        self.gradient_steps = tuple(
            step for step in self.gradient_steps if step.step.kind != "all_reduce"
        )

    patch.setattr(reshard.Reshard, "__init__", wrong)


def _all_rows_owned(
    right: Any, call: SpecialCall, letter: str, index: Tensor
) -> tuple[Tensor, Tensor]:
    local, owned = right(call, letter, index)
    return local, torch.ones_like(owned) if "embedding" in call.node.op else owned


def _contiguous(
    right: Any, shape: tuple[int, ...], dim: int, current: int, inner: int
) -> tuple[int, int, int]:
    before, current, after = right(shape, dim, current, inner)
    lead = math.prod(shape[:dim])
    return lead, current, before * after // max(lead, 1)


def _local_index(
    right: Any, call: SpecialCall, slot: int, device: Any, dims: int | None = None
) -> Tensor:
    found = right(call, slot, device, dims)
    return torch.arange(found.numel(), dtype=found.dtype, device=device).view(found.shape)


def _backwards(
    right: Any, comm: Any, flat: Tensor, ranks: Any, send: Any, receive: Any, later: bool
) -> Handle:
    found = right(comm, flat, ranks, send, receive, later).wait()
    equal = len(set(receive)) == 1
    return Done(torch.cat(found.split(receive)[::-1]) if equal else found)


def _pieces_backwards(patch: MonkeyPatch) -> None:
    right = StepRunner._pieces
    patch.setattr(
        StepRunner, "_pieces", staticmethod(lambda view, chunks: right(view, chunks).flip(0))
    )


def _padded_gather(right: Any, runner: StepRunner, tensor: Tensor) -> Tensor:
    source = runner.step.source
    assert source is not None
    sizes = [size for _, size in runner.source_chunks]
    if len(set(sizes)) == 1:
        return right(runner, tensor)
    length = sizes[runner.index]
    view = reshard._view(runner.shape_before, source.dim, length, runner.source_inner)
    padded = torch.nn.functional.pad(tensor.reshape(view), (0, 0, 0, max(sizes) - length))
    parts = runner.context.comm.all_gather(padded.contiguous(), runner.ranks)
    return torch.cat(list(parts), 1)[:, : sum(sizes)].reshape(runner.shape_after)


def _gather_inner_first(right: Any, runner: StepRunner, tensor: Tensor) -> Tensor:
    found = right(runner, tensor)
    source, axes = runner.step.source, runner.step.axes
    assert source is not None
    sizes = [runner.context.grid.sizes[axis] for axis in axes]
    if len(axes) < 2 or len({size for _, size in runner.source_chunks}) > 1:
        return found
    length = sum(size for _, size in runner.source_chunks)
    view = reshard._view(runner.shape_after, source.dim, length, runner.source_inner)
    parts = found.reshape(view[0], *sizes, length // math.prod(sizes), view[2])
    order = (0, *range(len(sizes), 0, -1), len(sizes) + 1, len(sizes) + 2)
    return parts.permute(order).reshape(runner.shape_after)


def _sum_gradients_of_complete(patch: MonkeyPatch) -> None:
    patch.setattr(bind, "_Complete", bind._Total)


def _keep_total_gradients(patch: MonkeyPatch) -> None:
    patch.setattr(bind, "_Total", bind._Complete)


def _global_sizes(right: Any, state: Any, node: Any, call: Any) -> list[int]:
    specs = [value.spec for value in node.outputs]
    if node.op == "aten.split_with_sizes.default":
        return right(state, node, call)
    return list(specs[0].shape)


def _linear_too(rule: OpRule) -> OpRule:
    return replace(rule, linear=(frozenset({0}),))


def _plain(letters: str) -> Callable[[OpRule], OpRule]:
    """The rule with letters that claim to need no special lowering."""

    def change(rule: OpRule) -> OpRule:
        return replace(
            rule,
            letters=tuple(
                replace(letter, special=letter.special and letter.name not in letters.split())
                for letter in rule.letters
            ),
        )

    return change


def _left_as_sum(name: str) -> Callable[[OpRule], OpRule]:
    """The rule with a letter whose result claims to be Partial."""

    def change(rule: OpRule) -> OpRule:
        return replace(
            rule,
            letters=tuple(
                replace(letter, missing="partial") if letter.name == name else letter
                for letter in rule.letters
            ),
        )

    return change


def _swap_strides(first: str, second: str) -> Callable[[OpRule], OpRule]:
    """The rule with two letters of one dim in the wrong order, in operand 0 only."""

    def change(rule: OpRule) -> OpRule:
        if first not in {letter.name for letter in rule.letters}:
            return rule
        sizes = {name: rule.letter(name).size for name in (first, second)}
        strides = {first: 1, second: sizes[first]}

        def moved(name: str, places: Any) -> Any:
            if name not in strides:
                return places
            return tuple(
                replace(place, stride=strides[name]) if place.slot == 0 else place
                for place in places
            )

        return replace(
            rule,
            letters=tuple(
                replace(letter, operands=moved(letter.name, letter.operands))
                for letter in rule.letters
            ),
        )

    return change


def _merge_backwards(rule: OpRule) -> OpRule:
    """A reshape that claims that the inner of two joined dims is the outer one."""
    inside = [x for x in rule.letters if any(p.stride > 1 for p in x.outputs)]
    if len(inside) != 1:
        return rule
    outer = inside[0].outputs[0]
    inner = next(
        x for x in rule.letters if any(p.dim == outer.dim and p.stride == 1 for p in x.outputs)
    )
    strides = {inside[0].name: 1, inner.name: inside[0].size}
    return replace(
        rule,
        letters=tuple(
            replace(x, outputs=tuple(replace(p, stride=strides[x.name]) for p in x.outputs))
            if x.name in strides
            else x
            for x in rule.letters
        ),
    )


def _sum_whole_gradients(patch: MonkeyPatch) -> None:
    right = execution.Execution._item

    def wrong(self: execution.Execution, name: str, fqn: str, context: Any) -> Any:
        placed = self.sharded.inputs[name].forward
        axes = tuple(axis for axis, p in enumerate(placed) if not isinstance(p, Shard))
        return replace(right(self, name, fqn, context), ranks=context.ranks(axes))

    patch.setattr(execution.Execution, "_item", wrong)


def _only_shards_summed(patch: MonkeyPatch) -> None:
    right = parameters.Parameters._rest

    def wrong(self: parameters.Parameters, bucket: Bucket) -> tuple[int, ...]:
        return right(self, bucket) if len(bucket.ranks) > 1 else (self.comm.rank,)

    patch.setattr(parameters.Parameters, "_rest", wrong)


BUGS: dict[str, Bug] = {
    "bias added on every rank": Bug(
        model="gpt", inject=attribute(choices, "_operand", _bias_on_every_rank)
    ),
    "split queries see keys from their local position": Bug(
        model="gpt", inject=attribute(SpecialCall, "dim_positions", _local_positions)
    ),
    "causal attention without its lowering": Bug(
        model="gpt",
        rule=("aten.scaled_dot_product_attention.default",
              lambda rule: replace(_plain("s")(rule), special=False)),
    ),
    "axes that split one factor nest inside out": Bug(
        model="unet", inject=attribute(placement.Grid, "extent", _reversed_extent)
    ),
    "gather over several axes in the wrong order": Bug(
        model="gpt", inject=attribute(StepRunner, "_all_gather", _gather_inner_first)
    ),
    "batch statistics of the local batch": Bug(
        model="resnet", inject=unsynced("_native_batch_norm")
    ),
    "softmax of the local part": Bug(model="moe", inject=unsynced("softmax")),
    "cross-entropy over the local classes": Bug(
        model="gpt", inject=around(
            "cross_entropy",
            lambda run, call, *xs: run(
                replace(call, axes=_Alone()) if call.is_split("v") else call, *xs
            ),
        ),
    ),
    "cross-entropy divides by the local count": Bug(
        model="llama", inject=attribute(losses, "_count", _local_count)
    ),
    "mean divides by the local count": Bug(model="moe", inject=around("mean", _local_mean)),
    "squared error divides by the local count": Bug(
        model="unet", rule=("aten.mse_loss.default", _plain("d0 d1 d2 d3"))
    ),
    "layer norm of the local features": Bug(model="gpt", inject=unsynced("layer_norm")),
    "group norm of the local positions": Bug(model="unet", inject=unsynced("group_norm")),
    "gradients of parameters never reduced": Bug(
        model="moe", inject=_no_sync, programs=True
    ),
    "gradients of parameters averaged": Bug(
        model="moe", inject=_average_sync, programs=True
    ),
    "whole gradients of parameters reduced again": Bug(
        model="moe", inject=_sum_whole_gradients, programs=True
    ),
    "what ZeRO does not divide is not summed": Bug(
        model="moe", inject=_only_shards_summed, programs=True,
        zero=ZeroPlan(stage=1),
    ),
    "Partial gradients pass a reshard unsummed": Bug(model="moe", inject=_drop_gradient_sums),
    "rows of other ranks looked up": Bug(
        model="moe", inject=attribute(SpecialCall, "localize", _all_rows_owned)
    ),
    "strided shard cut as a contiguous one": Bug(
        model="llama", inject=attribute(reshard, "_view", _contiguous)
    ),
    "mask keeps the value on all ranks": Bug(
        model="resnet", inject=attribute(StepRunner, "_mask", lambda right, self, tensor: tensor)
    ),
    "dropout keyed by the local index": Bug(
        model="moe", inject=attribute(SpecialCall, "global_index", _local_index)
    ),
    "all-to-all puts chunks in the wrong order": Bug(
        model="gpt", inject=attribute(ThreadCommunicator, "_all_to_all", _backwards)
    ),
    "uneven gather keeps the padding": Bug(
        model="llama", inject=attribute(StepRunner, "_all_gather", _padded_gather)
    ),
    "reduce-scatter hands out pieces in the wrong order": Bug(
        model="gpt", inject=_pieces_backwards
    ),
    "sizes of reshape and expand stay global": Bug(
        model="unet", inject=attribute(lower._Lowering, "sizes", _global_sizes)
    ),
    "gradient of a shared sum not summed": Bug(model="gpt", inject=_keep_total_gradients),
    "gradient of a completed sum summed again": Bug(
        model="gpt", inject=_sum_gradients_of_complete
    ),
    "an activation taken as linear": Bug(
        model="resnet", rule=("aten.relu.default", _linear_too)
    ),
    "a scalar added to every Partial": Bug(
        model="llama", rule=("aten.add.Tensor", _linear_too)
    ),
    "cross-entropy over split classes taken as Partial": Bug(
        model="moe", rule=("aten.cross_entropy_loss.default", _left_as_sum("v"))
    ),
    "query heads counted group first": Bug(
        model="moe",
        rule=("aten.scaled_dot_product_attention.default", _swap_strides("g", "r")),
    ),
    "groups of a convolution stay global": Bug(
        model="resnet", rule=("aten.conv2d.default", _plain("g"))
    ),
    "a slice by its global bounds": Bug(model="llama", rule=("aten.slice.Tensor", _plain("p"))),
    "merged dims in the wrong order": Bug(
        model="llama", rule=("aten.reshape.default", _merge_backwards)
    ),
}  # fmt: skip
