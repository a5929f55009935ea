"""What a special lowering is given: the call, how its letters are split, and collectives."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.graph.ir import Arg, Node, Ref, TensorSpec, Token
from autopar.registry import Registry
from autopar.runtime.microbatch import get_microbatch, take_rows
from autopar.runtime.operators import constant, resolve
from autopar.sharding.choices import CallPlacement
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.losses import NONE, SUM

AxisIds = tuple[int, ...]


class Axes(abc.ABC):
    """Collectives over mesh axes that autograd sees through.

    All keep the shape and return a new tensor; over no axes they return the input. The ranks of
    one reduction are those that differ in the given axes only.
    """

    @abc.abstractmethod
    def total(self, tensor: Tensor, axes: AxisIds) -> Tensor:
        """Sum over the ranks; the gradient is summed too.

        For a value that every rank goes on to use in its own part of the result (a mean, a
        softmax denominator).
        """

    @abc.abstractmethod
    def complete(self, tensor: Tensor, axes: AxisIds) -> Tensor:
        """Sum over the ranks; the gradient passes unchanged (Partial to Replicate).

        For a value that every rank uses alike, so that its gradient is already whole.
        """

    @abc.abstractmethod
    def maximum(self, tensor: Tensor, axes: AxisIds) -> Tensor:
        """Elementwise maximum over the ranks, without gradient.

        Raises:
            PlanError: If the axes contain that of the microbatches.
        """

    @abc.abstractmethod
    def repeats(self, axes: AxisIds) -> int:
        """Number of microbatches if `axes` contains their axis, else 1."""

    @abc.abstractmethod
    def only_in_time(self, axes: AxisIds) -> bool:
        """Whether `axes` has no axis but that of the microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterSplit:
    """This rank's part of one factor of a letter.

    Attributes:
        letter: Name of the letter in the rule.
        stride: Stride of the factor in the letter.
        size: Size of the factor.
        axes: Mesh axes that split it, outer first.
        start: First position along the factor that this rank owns in microbatch 0.
        length: Number of positions owned.
        per_microbatch: By how much the start moves from one microbatch to the next.
    """

    letter: str
    stride: int
    size: int
    axes: AxisIds
    start: int
    length: int
    per_microbatch: int = 0

    @property
    def first(self) -> int | Tensor:
        """First position that this rank owns in the running microbatch."""
        if not self.per_microbatch:
            return self.start
        return get_microbatch() * self.per_microbatch + self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialCall:
    """One op call on local operands.

    Attributes:
        node: The call with its global arguments.
        rule: Its sharding rule.
        operands: Global specs of ``node.operands``.
        outputs: Global specs of ``node.outputs``.
        splits: Every split factor of every letter of the call.
        placement: Pairs of the operands and outputs.
        axes: Collectives.
        seed: Gives the seed of the step, a number or a 0-dim int64 tensor.
    """

    node: Node
    rule: OpRule
    operands: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    splits: tuple[LetterSplit, ...]
    placement: CallPlacement
    axes: Axes
    seed: Callable[[], int | Tensor]

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at `position` of the schema, or given by keyword `name`."""
        if position < len(self.node.args):
            return self.node.args[position]
        return dict(self.node.kwargs).get(name, default)

    def number(self, position: int, name: str, default: float) -> float:
        """A numeric argument; `default` when absent or None."""
        value = self.arg(position, name, default)
        return value if isinstance(value, (int, float)) else default

    def is_split(self, *letters: str) -> bool:
        """Whether any of the letters is split."""
        return any(split.letter in letters for split in self.splits)

    def axes_of(self, letters: Iterable[str]) -> AxisIds:
        """Mesh axes that split any of the letters, each once, in mesh order."""
        wanted = set(letters)
        return tuple(sorted({a for s in self.splits if s.letter in wanted for a in s.axes}))

    def letters_in(self, slot: int, dims: Iterable[int] | None = None) -> tuple[str, ...]:
        """Letters of an operand, of some of its dims when given."""
        wanted = None if dims is None else set(dims)
        return tuple(
            letter.name
            for letter in self.rule.letters
            for place in letter.operands
            if place.slot == slot and (wanted is None or place.dim in wanted)
        )

    def global_size(self, letter: str) -> int:
        """Global size of a letter; 1 when the rule does not have it."""
        return next((x.size for x in self.rule.letters if x.name == letter), 1)

    def local_size(self, letter: str) -> int:
        """Number of positions of a letter that this rank owns."""
        size = self.global_size(letter)
        for split in self._outer_first(letter):
            size = size // split.size * split.length
        return size

    def positions(self, letter: str, device: torch.device) -> Tensor:
        """Global positions along a letter that this rank owns, ascending, int64."""
        steps = [(s.stride, s) for s in self._outer_first(letter)]
        return _owned(self.global_size(letter), steps, device)

    def last_position(self, letter: str) -> int:
        """The greatest global position along a letter that this rank owns."""
        last = self.global_size(letter) - 1
        for split in self._outer_first(letter):
            coordinate = last // split.stride % split.size
            assert not split.per_microbatch, f"{letter} is split over microbatches"
            last += (split.start + split.length - 1 - coordinate) * split.stride
        return last

    def localize(self, letter: str, index: Tensor) -> tuple[Tensor, Tensor]:
        """Local positions of global `index` along a letter, and which of them are owned.

        Positions that are not owned (or are out of range) give some valid local position.
        """
        owned = (index >= 0) & (index < self.global_size(letter))
        local = torch.zeros_like(index)
        rest, above = index, self.global_size(letter)
        for split in self._outer_first(letter):
            block = split.stride * split.size
            outer = (rest // block) % max(above // block, 1)
            local = local * (above // block) + outer
            inside = (rest // split.stride) % split.size
            first = split.first
            owned = owned & (inside >= first) & (inside < first + split.length)
            local = local * split.length + (inside - first).clamp(0, split.length - 1)
            above = split.stride
        return local * above + rest % above, owned

    def dim_positions(
        self, slot: int, dim: int, device: torch.device, *, output: bool = True
    ) -> Tensor:
        """Global positions along a dim of an output (or operand) that this rank owns."""
        spec = (self.outputs if output else self.operands)[slot]
        steps = []
        for letter in self.rule.letters:
            for place in letter.outputs if output else letter.operands:
                if (place.slot, place.dim) == (slot, dim):
                    steps += [
                        (place.stride * split.stride, split)
                        for split in self.splits
                        if split.letter == letter.name
                    ]
        steps.sort(key=lambda step: -step[0])
        return _owned(spec.shape[dim], steps, device)

    def global_index(self, slot: int, device: torch.device, dims: int | None = None) -> Tensor:
        """Row-major global index of every local element of an output.

        Args:
            slot: Which output.
            device: Where to make it.
            dims: Only index the first `dims` dims; the result has size 1 in the others.

        Returns:
            Integers of the output's local shape (int32 when they fit, else int64).
        """
        shape = self.outputs[slot].shape
        dtype = torch.int32 if math.prod(shape) < 2**31 else torch.int64
        index = torch.zeros((1,) * len(shape), dtype=dtype, device=device)
        stride = 1
        for dim in reversed(range(len(shape) if dims is None else dims)):
            along = self.dim_positions(slot, dim, device).to(dtype) * stride
            index = index + along.view(-1, *(1,) * (len(shape) - 1 - dim))
            stride *= shape[dim]
        return index

    def run(
        self, *operands: Tensor | None, op: str = "", **changed: tuple[int, Arg]
    ) -> Tensor | tuple[Tensor, ...]:
        """The plain op on these operands.

        Args:
            *operands: One per operand slot.
            op: Another op to call with the same arguments.
            **changed: Arguments to change: name to (position in the schema, value).
        """
        pending = iter(operands)
        device = next((t.device for t in operands if t is not None), torch.device("cpu"))

        def convert(arg: Arg) -> object:
            if isinstance(arg, Ref):
                return next(pending)
            if isinstance(arg, Token):
                return device if arg.kind == "device" else constant(arg)
            if isinstance(arg, tuple):
                return [convert(item) for item in arg]
            return arg

        args = [convert(arg) for arg in self.node.args]
        kwargs = {key: convert(arg) for key, arg in self.node.kwargs}
        for name, (position, value) in changed.items():
            if position < len(args):
                args[position] = convert(value)
            else:
                kwargs[name] = convert(value)
        result = resolve(op or self.node.op)(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else result

    def run_sum(self, *operands: Tensor, position: int) -> Tensor:
        """The plain loss with its ``reduction`` (at `position` of the schema) set to a sum.

        Half precision is summed in float32: a sum that is yet to be divided may overflow.
        """
        half = any(t.dtype in (torch.float16, torch.bfloat16) for t in operands)
        result = self.run(*operands, reduction=(position, NONE if half else SUM))
        assert isinstance(result, Tensor)
        return working(result).sum() if half else result

    def _outer_first(self, letter: str) -> list[LetterSplit]:
        found = [split for split in self.splits if split.letter == letter]
        return sorted(found, key=lambda split: -split.stride)


def _owned(size: int, steps: list[tuple[int, LetterSplit]], device: torch.device) -> Tensor:
    positions = torch.arange(size, device=device)
    for stride, split in steps:
        blocks = positions.view(-1, split.size, stride)
        positions = take_rows(blocks, 1, split.first, split.length).flatten()
    return positions


SpecialFunction = Callable[..., Tensor | tuple[Tensor, ...]]
SPECIALS = Registry[SpecialFunction]("special lowering", error=PlanError)


def special(ops: str) -> Callable[[SpecialFunction], SpecialFunction]:
    """Register a function as the special lowering of ops (names separated by blanks).

    ``aten.`` and ``.default`` may be left out.
    """

    def enter(function: SpecialFunction) -> SpecialFunction:
        for op in ops.split():
            full = op if op.count(".") == 2 else f"aten.{op}" + ("" if "." in op else ".default")
            SPECIALS.add(full, function)
        return function

    return enter


def special_for(op: str) -> SpecialFunction:
    """The special lowering of `op`.

    Raises:
        PlanError: It has none.
    """
    return SPECIALS[op]


def working(tensor: Tensor) -> Tensor:
    """`tensor` in the precision that statistics are computed in: at least float32."""
    small = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if small else tensor
