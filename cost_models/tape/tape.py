"""A tape: the steps of forward and backward as torch would run them, on shapes alone.

Ops are written with `Tape.emit`, which notes what a step reads and makes, and `Tape.record`, which
notes how the gradient comes back. `Tape.backward` then does what autograd does: it walks from the
last op to the first, reduces gradients of what was broadcast, and adds up those that meet. The
steps are those that the runtime captures (`autopar.runtime.programs.capture`), so that what is
kept for backward and what lives when can be read off them without tracing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.implementation import Implementation
from autopar.cost_models.tape.tensors import (
    Local,
    Memory,
    Shape,
    plain,
    pointwise_strides,
)
from autopar.cost_models.work import Attention, KernelKind, Matmul, MoveKind
from autopar.graph.ir import ITEM_BYTES

AGAIN = -2
"""Maker of what backward always makes again instead of keeping it."""

Gradients = Sequence["Local | None"]
Backward = Callable[[list["Local | None"]], Gradients]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a step that communicates moves; see `autopar.cost_models.work.Move`."""

    kind: MoveKind
    size_bytes: int
    axes: tuple[int, ...]
    group: int
    dtype: str


class Step:
    """One op on local tensors.

    Attributes:
        op: What it is called.
        kind: What decides its speed.
        origin: Which node of the stage it serves, by its place in the stage.
        maker: Which node of the stage its value belongs to: that of a sum of gradients is the one
            that the gradient before came from, that of a reshard is the one that made
            what it moves, -1 if that was there before; `AGAIN` if it is never kept.
        forward: Whether it is part of forward.
        reads: Memory it reads.
        writes: Memory it makes.
        flops: Floating point operations.
        read_bytes: Bytes it reads.
        write_bytes: Bytes it writes.
        dtype: Dtype it computes in.
        launches: Device kernels.
        detail: `Matmul` or `Attention` sizes, or what is transferred.
        random: Whether it draws numbers that cannot be drawn again but by restoring the state of a
            generator, as activation checkpointing does.
    """

    __slots__ = (
        "detail", "dtype", "flops", "forward", "kind", "launches", "maker", "op", "origin",
        "random", "read_bytes", "reads", "write_bytes", "writes",
    )  # fmt: skip

    def __init__(
        self, op: str, kind: KernelKind | str, origin: int, forward: bool, reads: Sequence[Local]
    ) -> None:
        self.op, self.kind, self.origin, self.forward = op, kind, origin, forward
        self.maker = origin
        self.reads: tuple[Memory, ...] = tuple([item.memory for item in reads])
        self.writes: tuple[Memory, ...] = ()
        self.flops = 0
        self.read_bytes = sum([item.traffic_bytes for item in reads])
        self.write_bytes = 0
        self.dtype = ""
        self.launches = 1
        self.detail: Matmul | Attention | Transfer | None = None
        self.random = False

    def __repr__(self) -> str:
        return f"{self.op}@{self.origin}{'' if self.forward else ' backward'}"


class Grad:
    """A recorded op: takes gradients of its results, gives those of its operands."""

    __slots__ = ("backward", "inputs", "origin", "pending", "sources", "width")

    def __init__(
        self, inputs: Sequence[Local | None], width: int, backward: Backward, origin: int
    ) -> None:
        self.inputs, self.backward, self.origin, self.width = inputs, backward, origin, width
        self.pending: dict[int, Local] = {}
        self.sources: dict[int, int] = {}  # which node the last gradient of a result came from

    def forget(self) -> None:
        """Let go of tensors that hold it: what needs the garbage collector makes all else slow."""
        self.inputs, self.backward = (), _given


def _given(gradients: Sequence[Local | None]) -> Sequence[Local | None]:
    raise AssertionError("gradients have come back already")


Maker = tuple[Grad, int]
"""Which result of which recorded op a tensor is."""


class Tape:
    """Steps in the order in which they run.

    Args:
        implementation: How ops are carried out.

    Attributes:
        steps: What has been emitted.
        origin: What is emitted now serves this node of the stage.
        maker: If not None, the node that values made now belong to.
        forward: Whether forward is being emitted.
    """

    def __init__(self, implementation: Implementation) -> None:
        self.implementation = implementation
        self.steps: list[Step] = []
        self.origin = -1
        self.maker: int | None = None
        self.forward = True
        self._grads: list[Grad] = []

    # Steps

    def emit(
        self,
        op: str,
        kind: KernelKind | str,
        reads: Sequence[Local],
        shape: Shape,
        dtype: str,
        *,
        strides: Shape | None = None,
        flops: int = 0,
    ) -> Local:
        """A step with one result.

        Args:
            op: What to call it.
            kind: What decides its speed.
            reads: What it reads.
            shape: Of the result.
            dtype: Of the result.
            strides: Of the result; None for contiguous.
            flops: Floating point operations.
        """
        step = Step(op, kind, self.origin, self.forward, reads)
        size = ITEM_BYTES[dtype]
        for length in shape:
            size *= length
        memory = Memory(size, step)
        step.writes = (memory,)
        step.write_bytes = size
        step.dtype = dtype
        step.flops = flops
        if self.maker is not None:
            step.maker = self.maker
        self.steps.append(step)
        return Local(shape, dtype, memory, strides)

    def emit_many(
        self,
        op: str,
        kind: KernelKind | str,
        reads: Sequence[Local],
        results: Iterable[tuple[Shape, str] | None],
        *,
        names: Sequence[str] = (),
        strides: Sequence[Shape | None] = (),
        flops: int = 0,
        dtype: str = "",
    ) -> list[Local]:
        """A step with several results.

        Args:
            op: What to call it.
            kind: What decides its speed.
            reads: What it reads.
            results: Shape and dtype of each; None leaves one out.
            names: What each is, for by-products.
            strides: Of each; contiguous by default.
            flops: Floating point operations.
            dtype: Dtype it computes in, by default that of the first result.
        """
        step = Step(op, kind, self.origin, self.forward, reads)
        made: list[Local] = []
        for place, result in enumerate(results):
            if result is None:
                continue
            shape, result_dtype = result
            size = ITEM_BYTES[result_dtype]
            for length in shape:
                size *= length
            memory = Memory(size, step)
            if place < len(names):
                memory.what = names[place]
            step.write_bytes += size
            layout = strides[place] if place < len(strides) else None
            made.append(Local(shape, result_dtype, memory, layout))
        step.writes = tuple([item.memory for item in made])
        step.dtype = dtype or (made[0].dtype if made else "float32")
        step.flops = flops
        if self.maker is not None:
            step.maker = self.maker
        self.steps.append(step)
        return made

    def last(self) -> Step:
        """The step emitted last."""
        return self.steps[-1]

    # Gradients

    def record(
        self, results: Sequence[Local], operands: Sequence[Local | None], backward: Backward
    ) -> None:
        """Note how gradients come back, if any operand needs one.

        Args:
            results: What was made.
            operands: What it was made of.
            backward: Takes a gradient per result (None for none) and gives one per operand.
        """
        if not self.forward or not any(x is not None and x.maker is not None for x in operands):
            return
        grad = Grad(operands, len(results), backward, self.origin)
        self._grads.append(grad)
        for place, result in enumerate(results):
            if result.is_floating:
                result.maker = (grad, place)

    def leaf(self, value: Local) -> None:
        """Let `value` need a gradient, to be asked of `backward`."""
        value.maker = (Grad((), 1, _given, self.origin), 0)

    def backward(self, ends: Sequence[tuple[Local, Local]]) -> None:
        """Emit backward.

        Args:
            ends: Results that need a gradient, and that gradient.
        """
        self.forward = False
        for value, tangent in ends:
            if value.maker is not None:
                self._arrive(value, tangent)
        for grad in reversed(self._grads):
            pending = grad.pending
            if not pending:
                continue
            self.origin = grad.origin
            given = grad.backward([pending.get(place) for place in range(grad.width)])
            for operand, gradient in zip(grad.inputs, given, strict=True):
                if operand is not None and gradient is not None and operand.maker is not None:
                    self._arrive(operand, gradient)
            grad.pending = {}
        for grad in self._grads:
            grad.forget()
        self._grads = []

    def gradient(self, leaf: Local) -> Local | None:
        """The gradient of a leaf after `backward`, None if nothing leads to it."""
        return leaf.maker[0].pending.get(0) if leaf.maker is not None else None

    def _arrive(self, value: Local, gradient: Local) -> None:
        """Add a gradient to what has come for `value`, as autograd's engine does."""
        assert value.maker is not None
        if gradient.shape != value.shape:
            gradient = self.sum_to(gradient, value.shape)
        if gradient.dtype != value.dtype:
            gradient = self.pointwise("_to_copy", (gradient,), value.dtype)
        grad, place = value.maker
        before = grad.pending.get(place)
        if before is not None:
            gradient = self.pointwise("add", (before, gradient), before.dtype)
            assert gradient.memory.step is not None
            gradient.memory.step.maker = grad.sources[place]
        grad.pending[place], grad.sources[place] = gradient, self.origin

    # What nearly every op needs; nothing here is recorded.

    def pointwise(
        self,
        op: str,
        operands: Sequence[Local],
        dtype: str,
        *,
        shape: Shape | None = None,
        kind: KernelKind = "elementwise",
    ) -> Local:
        """A pointwise op on operands that are broadcast.

        Args:
            op: What to call it.
            operands: Tensors.
            dtype: Of the result.
            shape: Of the result, if not that of the only operand or the broadcast one.
            kind: What decides its speed.
        """
        if shape is None:
            shape = operands[0].shape
            for operand in operands[1:]:
                if operand.shape != shape:
                    shape = _broadcast(operands)
                    break
        numel = 1
        for size in shape:
            numel *= size
        strides = None
        for operand in operands:
            if operand.strides is not None:
                strides = pointwise_strides(operands, shape)
                break
        return self.emit(op, kind, operands, shape, dtype, strides=strides, flops=numel)

    def sum_to(self, value: Local, shape: Shape) -> Local:
        """Sum over what `shape` was broadcast along."""
        lead = value.ndim - len(shape)
        dims = [
            dim
            for dim, size in enumerate(value.shape)
            if dim < lead or (shape[dim - lead] == 1 and size != 1)
        ]
        if not dims:
            return self.view(value, shape)
        kept = tuple(1 if dim in dims else size for dim, size in enumerate(value.shape))
        total = self.emit("sum", "reduction", (value,), kept, value.dtype, flops=value.numel)
        return total if kept == shape else Local(shape, total.dtype, total.memory)

    def view(self, value: Local, shape: Shape, strides: Shape | None = None) -> Local:
        """The same memory seen otherwise."""
        return Local(shape, value.dtype, value.memory, plain(shape, strides))


def _broadcast(operands: Sequence[Local]) -> Shape:
    from autopar.cost_models.tape.tensors import broadcast

    return broadcast([operand.shape for operand in operands])


def anything(*values: Any) -> None:
    """Nothing: a backward that gives nothing."""
