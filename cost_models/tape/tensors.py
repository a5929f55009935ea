"""Tensors without numbers: shape, strides, dtype, and which memory they lie in.

Views share memory, so what is kept is counted by memory and not by tensor. Layouts follow torch
(2.13): whether a reshape is a view (``computeStride`` in ``aten/src/ATen/TensorUtils.cpp``) and how
a pointwise op lays out its result (``reorder_dimensions`` in ``TensorIterator.cpp``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.graph.ir import FLOATING, ITEM_BYTES

if TYPE_CHECKING:
    from autopar.cost_models.tape.tape import Maker, Step

Shape = tuple[int, ...]


class Memory:
    """A piece of memory.

    Attributes:
        size_bytes: Its size.
        step: What made it, None if it was there before.
        kind: What it holds if it was there before: ``parameter``, ``buffer``, ``constant``,
            ``input``, ``boundary`` or ``tangent``; ``""`` for what a step made.
        name: Name of the value that it holds if it was there before.
        what: What it is of all that its step made, such as ``"rstd"``; ``"value"`` by default.
    """

    __slots__ = ("kind", "name", "size_bytes", "step", "what")

    def __init__(
        self, size_bytes: int, step: Step | None = None, kind: str = "", name: str = ""
    ) -> None:
        self.size_bytes = size_bytes
        self.step = step
        self.kind = kind
        self.name = name
        self.what = "value"


class Local:
    """A tensor of one rank.

    Attributes:
        shape: Sizes.
        strides: Strides in elements; None if it is contiguous.
        dtype: Name of its dtype.
        memory: Where it lies.
        maker: What takes its gradient, None if it needs none.
    """

    __slots__ = ("dtype", "maker", "memory", "shape", "strides")

    def __init__(
        self, shape: Shape, dtype: str, memory: Memory, strides: Shape | None = None
    ) -> None:
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.memory = memory
        self.maker: Maker | None = None

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether it can have a gradient."""
        return self.dtype in FLOATING

    @property
    def trains(self) -> bool:
        """Whether it needs a gradient."""
        return self.maker is not None

    @property
    def traffic_bytes(self) -> int:
        """Bytes that reading it once moves; what is expanded is read once."""
        size = math.prod(self.shape) * ITEM_BYTES[self.dtype]
        if self.strides is not None and 0 in self.strides:
            for length, stride in zip(self.shape, self.strides, strict=True):
                if stride == 0 and length > 1:
                    size //= length
        return size

    def full_strides(self) -> Shape:
        """Strides, also if it is contiguous."""
        return contiguous_strides(self.shape) if self.strides is None else self.strides

    def __repr__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Strides of a contiguous tensor."""
    found: list[int] = []
    stride = 1
    for size in reversed(shape):
        found.append(stride)
        stride *= max(size, 1)
    found.reverse()
    return tuple(found)


def plain(shape: Shape, strides: Shape | None) -> Shape | None:
    """`strides`, or None if a tensor of `shape` is contiguous with them."""
    if strides is None:
        return None
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return strides
            expected *= size
    return None


def view_strides(shape: Shape, strides: Shape | None, target: Shape) -> Shape | bool | None:
    """Strides with which a tensor can be viewed as `target`.

    Args:
        shape: Its sizes.
        strides: Its strides, None if it is contiguous.
        target: Sizes wanted, of as many elements.

    Returns:
        Strides (None for contiguous), or False if only a copy has that shape.
    """
    if strides is None or not shape or 0 in shape:
        return None
    found = [0] * len(target)
    place = len(target) - 1
    base, run, seen = strides[-1], 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        run *= shape[dim]
        if dim and (shape[dim - 1] == 1 or strides[dim - 1] == run * base):
            continue
        while place >= 0 and (seen < run or target[place] == 1):
            found[place] = seen * base
            seen *= target[place]
            place -= 1
        if seen != run:
            return False
        if dim:
            base, run, seen = strides[dim - 1], 1, 1
    if place >= 0:
        return False
    return plain(target, tuple(found))


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape to which all `shapes` are broadcast."""
    width = max(map(len, shapes), default=0)
    found = [1] * width
    for shape in shapes:
        for place, size in enumerate(shape, width - len(shape)):
            if size != 1:
                found[place] = size
    return tuple(found)


def _aligned(operand: Local, shape: Shape) -> Shape:
    """Strides of an operand that is broadcast to `shape`."""
    lead = len(shape) - operand.ndim
    strides = operand.full_strides()
    own = (
        0 if size == 1 and shape[lead + dim] != 1 else strides[dim]
        for dim, size in enumerate(operand.shape)
    )
    return (*(0,) * lead, *own)


def pointwise_strides(operands: Sequence[Local], shape: Shape) -> Shape | None:
    """Strides of what a pointwise op makes of `operands`; None for contiguous."""
    if all(operand.strides is None or not operand.shape for operand in operands):
        return None
    if len(shape) < 2:
        return None
    rows = [_aligned(operand, shape) for operand in operands if operand.shape]

    def before(first: int, second: int) -> int:
        for row in rows:
            a, b = row[first], row[second]
            if a == 0 or b == 0 or a == b:
                if a and a == b and shape[first] > shape[second]:
                    return 1
                continue
            return -1 if a < b else 1
        return 0

    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        here = start
        for other in range(start - 1, -1, -1):
            turn = before(order[other], order[here])
            if turn > 0:
                order[other], order[here] = order[here], order[other]
                here = other
            elif turn < 0:
                break
    strides = [0] * len(shape)
    stride = 1
    for dim in order:
        strides[dim] = stride
        stride *= shape[dim]
    return plain(shape, tuple(strides))
