"""How a tensor lies on a mesh: one `Placement` per mesh axis, forward and gradient.

A dim of size N is an ordered product of factors. A factor occupies ``(stride, size)``: reshape
the dim to ``(N / (size * stride), size, stride)`` and it is the middle one. `Shard` splits one
factor over one mesh axis, into balanced consecutive chunks (sizes differ by at most one). Several
axes may split one factor; the axis that comes first in the mesh is then the outer one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.errors import PlanError


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the whole value."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial:
    """The sum over the ranks along the axis is the value."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True)
class Shard:
    """Each rank along the axis holds a chunk of the factor ``(stride, size)`` of `dim`."""

    dim: int
    stride: int
    size: int

    def __str__(self) -> str:
        return f"S({self.dim},{self.stride},{self.size})"

    def overlaps(self, other: Shard) -> bool:
        """Whether both factors share index positions of one dim."""
        return (
            self.dim == other.dim
            and self.stride < other.stride * other.size
            and other.stride < self.stride * self.size
        )


Placement = Replicate | Partial | Shard
Placements = tuple[Placement, ...]
REPLICATE, PARTIAL = Replicate(), Partial()


@dataclass(frozen=True, slots=True)
class Pair:
    """Placements of a value and of its gradient, one per mesh axis each."""

    forward: Placements
    gradient: Placements

    def __str__(self) -> str:
        return f"{format_placements(self.forward)}/{format_placements(self.gradient)}"


def format_placements(placements: Placements) -> str:
    """Text form, e.g. ``"[R, S(0,1,8)]"``."""
    return "[" + ", ".join(map(str, placements)) + "]"


_ITEM = re.compile(r"R|P|S\((\d+),(\d+),(\d+)\)")


def parse_placements(text: str) -> Placements:
    """Inverse of `format_placements`.

    Raises:
        PlanError: If the text is no list of placements.
    """
    body = text.strip()
    found: list[Placement] = []
    rest = body[1:-1] if body.startswith("[") and body.endswith("]") else "?"
    while rest:
        match = _ITEM.match(rest)
        if match is None:
            raise PlanError(
                f"cannot read the placements {text!r}",
                expected='a list such as "[R, P, S(dim,stride,size)]", one entry per mesh axis',
            )
        if match[0] == "R":
            found.append(REPLICATE)
        elif match[0] == "P":
            found.append(PARTIAL)
        else:
            found.append(Shard(int(match[1]), int(match[2]), int(match[3])))
        rest = rest[match.end() :].lstrip(", ")
    return tuple(found)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of chunk `index` of `size` items in `parts` balanced chunks."""
    base, extra = divmod(size, parts)
    return index * base + min(index, extra), base + (index < extra)


def nested_chunk(size: int, parts: tuple[int, ...], index: tuple[int, ...]) -> tuple[int, int]:
    """Start and length of the chunk reached by splitting `size` by each of `parts` in turn."""
    start, length = 0, size
    for part, position in zip(parts, index, strict=True):
        offset, length = chunk(length, part, position)
        start += offset
    return start, length


@dataclass(frozen=True, slots=True)
class DimFactor:
    """A factor of a dim and the mesh axes that split it, outer first."""

    stride: int
    size: int
    axes: tuple[int, ...]


def dim_factors(placements: Placements, dim: int) -> tuple[DimFactor, ...]:
    """The split factors of `dim`, ordered by stride."""
    found: dict[tuple[int, int], list[int]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            found.setdefault((placement.stride, placement.size), []).append(axis)
    return tuple(
        DimFactor(stride, size, tuple(axes)) for (stride, size), axes in sorted(found.items())
    )


@dataclass(frozen=True, slots=True)
class Grid:
    """Sizes of the mesh axes and the position of one rank on them."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...]

    def extent(self, size: int, axes: tuple[int, ...]) -> tuple[int, int]:
        """Start and length of this rank's part of a factor of `size` split over `axes`."""
        return nested_chunk(
            size,
            tuple(self.sizes[axis] for axis in axes),
            tuple(self.coordinate[axis] for axis in axes),
        )

    def local_dim(self, size: int, placements: Placements, dim: int) -> int:
        """Local size of a dim of global `size`."""
        for factor in dim_factors(placements, dim):
            size = size // factor.size * self.extent(factor.size, factor.axes)[1]
        return size

    def local_shape(self, shape: tuple[int, ...], placements: Placements) -> tuple[int, ...]:
        """Local shape of a tensor of global `shape`."""
        split = {p.dim for p in placements if isinstance(p, Shard)}
        return tuple(
            self.local_dim(size, placements, dim) if dim in split else size
            for dim, size in enumerate(shape)
        )

    def inner(self, placements: Placements, shard: Shard) -> int:
        """Local number of positions inside (below) the factor `shard` of its dim."""
        size = shard.stride
        for factor in dim_factors(placements, shard.dim):
            if factor.stride * factor.size <= shard.stride:
                size = size // factor.size * self.extent(factor.size, factor.axes)[1]
        return size


def legal(placements: Placements, shape: tuple[int, ...], sizes: tuple[int, ...]) -> str | None:
    """Why `placements` cannot hold a tensor of `shape` on axes of `sizes`; None if they can."""
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        block = placement.stride * placement.size
        if placement.dim >= len(shape) or shape[placement.dim] % block:
            return f"{placement} does not fit shape {shape}"
        for other in placements[axis + 1 :]:
            if isinstance(other, Shard) and other != placement and other.overlaps(placement):
                return f"{placement} and {other} overlap"
        parts = math.prod(s for s, p in zip(sizes, placements, strict=True) if p == placement)
        if placement.size < parts:
            return f"a factor of {placement.size} cannot be split over {parts} ranks"
    return None
