"""One op call on local tensors, and the registry of what ops do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.cost_models.tape.basic import apply, total
from autopar.cost_models.tape.tape import Tape, Transfer
from autopar.cost_models.tape.tensors import Local, Shape
from autopar.graph.ir import Arg, Node, TensorSpec, iter_refs
from autopar.sharding.choices import CallPlacement, Choices
from autopar.sharding.mesh import MICROBATCH, Mesh
from autopar.sharding.placement import Grid
from autopar.sharding.rule import OpRule


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank's place on the mesh of a sharded graph.

    Attributes:
        names: Names of its axes.
        grid: Their sizes and the rank's coordinate.
    """

    names: tuple[str, ...]
    grid: Grid

    @classmethod
    def of(cls, mesh: Mesh, coordinate: Sequence[int] | None = None) -> Rank:
        """The rank at `coordinate`; by default the first, which has the largest parts."""
        place = tuple(coordinate) if coordinate is not None else (0,) * len(mesh.shape)
        return cls(mesh.names, Grid(mesh.shape, place))

    @property
    def time(self) -> int | None:
        """Index of the axis that runs over microbatches, None without."""
        return 0 if self.names[:1] == (MICROBATCH,) else None

    @property
    def num_microbatches(self) -> int:
        """Size of that axis."""
        return 1 if self.time is None else self.grid.sizes[0]

    def group(self, axes: Iterable[int]) -> int:
        """Number of ranks that differ along `axes`."""
        found, sizes = 1, self.grid.sizes
        for axis in axes:
            found *= sizes[axis]
        return found


@dataclass(slots=True)
class OpCall:
    """One op call.

    Attributes:
        tape: Where to note what it does.
        node: The call, with global arguments.
        operands: Local tensors, one per operand slot.
        outputs: Local shape and dtype of every output.
        rule: Its sharding rule.
        choices: What it does along every axis.
        placement: Pairs of operands and outputs.
        specs: Global specs of the operands.
        rank: The rank.
    """

    tape: Tape
    node: Node
    operands: tuple[Local, ...]
    outputs: tuple[tuple[Shape, str], ...]
    rule: OpRule | None
    choices: Choices
    placement: CallPlacement
    specs: tuple[TensorSpec, ...]
    rank: Rank

    # Arguments

    def arg(self, position: int, name: str, default: Arg = None) -> Arg:
        """The argument at `position` of the schema, or given by keyword `name`."""
        if position < len(self.node.args):
            return self.node.args[position]
        for key, value in self.node.kwargs:
            if key == name:
                return value
        return default

    def number(self, position: int, name: str, default: float) -> float:
        """A numeric argument; `default` when absent or None."""
        value = self.arg(position, name, default)
        return value if isinstance(value, (int, float)) else default

    def dims(self, position: int, name: str) -> tuple[int, ...]:
        """A dim or list of dims of the first operand, non-negative; all when absent or empty."""
        ndim = self.operands[0].ndim
        value = self.arg(position, name)
        if value is None or value == ():
            return tuple(range(ndim))
        values = value if isinstance(value, tuple) else (value,)
        return tuple([v % max(ndim, 1) for v in values if isinstance(v, int)])

    def tensor(self, position: int, name: str) -> Local | None:
        """The local tensor given as an argument, None when absent."""
        start = 0
        for place, value in enumerate(self.node.args):
            count = sum(1 for _ in iter_refs(value))
            if place == position:
                return self.operands[start] if count else None
            start += count
        for key, value in self.node.kwargs:
            count = sum(1 for _ in iter_refs(value))
            if key == name:
                return self.operands[start] if count else None
            start += count
        return None

    # Splits

    @property
    def base(self) -> str:
        """Name of the op without namespace and overload."""
        return self.node.op.split(".")[1]

    def axes_of(self, letters: Iterable[str]) -> tuple[int, ...]:
        """Mesh axes that split any of the letters, in mesh order."""
        wanted = set(letters)
        return tuple(
            [
                axis
                for axis, choice in enumerate(self.choices)
                if choice.unit is not None and choice.unit.letter in wanted
            ]
        )

    def letters_of(self, slot: int, dims: Iterable[int] | None = None) -> tuple[str, ...]:
        """Letters of an operand, of some of its dims when given."""
        wanted = None if dims is None else set(dims)
        rule = self.rule
        return tuple(
            letter.name
            for letter in (rule.letters if rule is not None else ())
            for place in letter.operands
            if place.slot == slot and (wanted is None or place.dim in wanted)
        )

    def is_split(self, *letters: str) -> bool:
        """Whether any of the letters is split."""
        return bool(self.axes_of(letters))

    @property
    def special(self) -> bool:
        """Whether the runtime lowers the call in a way of its own."""
        rule = self.rule
        if rule is None:
            return False
        if rule.special:
            return True
        split = {choice.unit.letter for choice in self.choices if choice.unit is not None}
        return any(letter.special and letter.name in split for letter in rule.letters)

    # Results

    @property
    def shape(self) -> Shape:
        """Local shape of the first output."""
        return self.outputs[0][0]

    @property
    def dtype(self) -> str:
        """Dtype of the first output."""
        return self.outputs[0][1]

    # Collectives of special lowerings, as `autopar.runtime.special.base.Axes` has them

    def total(self, value: Local, axes: tuple[int, ...]) -> Local:
        """Sum over ranks; the gradient is summed too."""
        return self._all_reduce(value, axes, back=True)

    def complete(self, value: Local, axes: tuple[int, ...]) -> Local:
        """Sum over ranks; the gradient passes unchanged."""
        return self._all_reduce(value, axes, back=False)

    def _all_reduce(self, value: Local, axes: tuple[int, ...], *, back: bool) -> Local:
        if not axes:
            return value
        out = reduce_over(self.tape, self.rank, value, axes)
        if out is value:
            return value

        def backward(grads: list[Local | None]) -> Sequence[Local | None]:
            (grad,) = grads
            assert grad is not None
            return (reduce_over(self.tape, self.rank, grad, axes) if back else grad,)

        self.tape.record((out,), (value,), backward)
        return out


def reduce_over(tape: Tape, rank: Rank, value: Local, axes: tuple[int, ...]) -> Local:
    """A sum over axes, the one in time included; not recorded."""
    there = tuple([axis for axis in axes if axis != rank.time])
    group = rank.group(there)
    if group > 1 or rank.time not in axes:
        if value.strides is not None:
            value = tape.emit("clone", "copy", (value,), value.shape, value.dtype)
        value = transfer(tape, "all_reduce", value, value.shape, there, rank)
    if rank.time is not None and rank.time in axes:
        value = tape.pointwise("microbatch_sum", (value,), value.dtype)
    return value


def transfer(
    tape: Tape,
    kind: str,
    value: Local,
    shape: Shape,
    axes: tuple[int, ...],
    rank: Rank,
) -> Local:
    """A step that communicates; a group of one copies."""
    group = rank.group(axes)
    if group == 1:
        return tape.emit(kind, "copy", (value,), shape, value.dtype)
    out = tape.emit(kind, "transfer", (value,), shape, value.dtype)
    size = value.numel * value.itemsize
    if kind == "all_gather":
        size = out.memory.size_bytes
    tape.last().detail = Transfer(kind, size, axes, group, value.dtype)  # type: ignore[arg-type]
    return out


Expansion = Callable[[OpCall], Sequence[Local]]

EXPANSIONS: dict[str, Expansion] = {}
"""What ops do, by operator or by its name without the overload."""


def expansion(names: str | Iterable[str]) -> Callable[[Expansion], Expansion]:
    """Register what ops do, by names separated by blanks.

    ``aten.`` may be left out; a name without an overload stands for all overloads that have no
    entry of their own.
    """

    def enter(function: Expansion) -> Expansion:
        for name in names.split() if isinstance(names, str) else names:
            assert name not in EXPANSIONS, f"{name} is registered twice"
            EXPANSIONS[name] = function
        return function

    return enter


def find(op: str) -> Expansion | None:
    """What `op` does, None if nobody has said."""
    found = EXPANSIONS.get(op)
    if found is None:
        _, name, overload = op.split(".", 2)
        found = EXPANSIONS.get(f"{name}.{overload}") or EXPANSIONS.get(name)
    return found


def unknown(call: OpCall) -> Sequence[Local]:
    """An op that nobody has described: it reads all operands once and keeps them."""
    tape, operands = call.tape, call.operands
    results = tape.emit_many(
        call.base, "elementwise", operands, call.outputs,
        flops=sum([math.prod(shape) for shape, _ in call.outputs]),
    )  # fmt: skip

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        reads = [grad for grad in grads if grad is not None] + list(operands)
        wanted = [
            (operand.shape, operand.dtype) if operand.trains else None for operand in operands
        ]
        made = iter(tape.emit_many(call.base + "_backward", "elementwise", reads, wanted))
        return [next(made) if item is not None else None for item in wanted]

    tape.record(results, operands, backward)
    return results


def mean_of(call: OpCall, source: Local) -> Local:
    """Sum of all local elements divided by a count."""
    dtype = working_dtype(source.dtype)
    summed = total(call.tape, apply_cast(call, source, dtype), range(source.ndim))
    return apply(call.tape, "div", (summed,), dtype, {0: "g"})


def apply_cast(call: OpCall, source: Local, dtype: str) -> Local:
    """`source` in `dtype`, with its gradient."""
    if source.dtype == dtype:
        return source
    return apply(call.tape, "_to_copy", (source,), dtype, {0: ""})


def working_dtype(dtype: str) -> str:
    """The precision that statistics are computed in: at least float32."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype
