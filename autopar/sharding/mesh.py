"""The mesh: named axes over ranks, numbered row by row (the first axis is outermost)."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

from autopar.errors import ClusterError, PlanError, meant
from autopar.units import counted

MICROBATCH = "microbatch"
"""Name of the axis that runs over time: its positions are the microbatches of a step."""

_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLE = 'text such as "dp=2,tp=2"'


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named axes and their sizes.

    Rank ``r`` sits at the coordinate whose mixed-radix number, first axis most significant, is r.

    Attributes:
        axes: ``(name, size)`` pairs, outermost first.

    Raises:
        PlanError: For a bad name, a duplicate or a size below 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for name, size in self.axes:
            if not _AXIS.fullmatch(name):
                raise PlanError(f"mesh axis name {name!r} is not an identifier", expected=_EXAMPLE)
            if name in seen:
                raise PlanError(
                    f"mesh axis {name!r} is given twice", expected="every axis name once"
                )
            if type(size) is not int or size < 1:
                raise PlanError(
                    f"mesh axis {name!r} has size {size!r}", expected="a whole number from 1"
                )
            seen.add(name)

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """The mesh written as ``"dp=2,tp=2"``.

        Raises:
            PlanError: If the text is no mesh.
        """
        axes: list[tuple[str, int]] = []
        for part in text.split(","):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not re.fullmatch(r"[+-]?\d+", size):
                raise PlanError(f"cannot read {part.strip()!r} in mesh {text!r}", expected=_EXAMPLE)
            axes.append((name, int(size)))
        return cls(tuple(axes))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes, outermost first."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape)

    def axis_size(self, name: str) -> int:
        """Size of axis `name`.

        Raises:
            PlanError: If there is no such axis.
        """
        return self.shape[self._position(name)]

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Coordinate of `rank`, one number per axis.

        Raises:
            ClusterError: If the mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise ClusterError(
                f"rank {rank} is not in mesh {self}", expected=f"a rank from 0 to {self.size - 1}"
            )
        coordinate: list[int] = []
        for size in reversed(self.shape):
            rank, index = divmod(rank, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        """Rank at `coordinate`."""
        rank = 0
        for index, size in zip(coordinate, self.shape, strict=True):
            assert 0 <= index < size, (coordinate, self)
            rank = rank * size + index
        return rank

    def ranks_along(self, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """The group of `rank` that varies `axes` and keeps every other coordinate.

        Args:
            axes: Axis names, in any order.
            rank: A rank of the mesh.

        Returns:
            Ranks in ascending order, which is the lexicographic order of their coordinates in
            mesh order.

        Raises:
            PlanError: If an axis is unknown.
        """
        moving = {self._position(name) for name in axes}
        here = self.coordinate(rank)
        spans = [
            range(size) if position in moving else (here[position],)
            for position, size in enumerate(self.shape)
        ]
        return tuple(self.rank(point) for point in itertools.product(*spans))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups that vary `axes`: a partition of the ranks, ordered by first rank."""
        return tuple(sorted({self.ranks_along(axes, rank) for rank in range(self.size)}))

    def check_world_size(self, world_size: int) -> None:
        """Refuse a job with another number of ranks.

        Raises:
            ClusterError: If `world_size` differs from the mesh's size.
        """
        if world_size != self.size:
            raise ClusterError(
                f"mesh {self} has {counted(self.size, 'rank')}, but the job runs {world_size}",
                expected=f"{counted(self.size, 'rank')}, or a mesh whose sizes multiply to "
                f"{world_size}",
                fix=f"start it with `torchrun --nproc-per-node {self.size}` or "
                f"`autopar run -n {self.size}`, or plan for {world_size} ranks",
            )

    def check_devices(self, num_devices: int) -> None:
        """Refuse a cluster with another number of devices.

        Raises:
            PlanError: If `num_devices` differs from the mesh's size.
        """
        if num_devices != self.size:
            raise PlanError(
                f"mesh {self} needs {counted(self.size, 'device')}, and the cluster has"
                f" {num_devices}",
                expected=f"a mesh whose sizes multiply to {num_devices}",
                fix=f"or name a cluster of {counted(self.size, 'device')}",
                where="mesh",
            )

    def _position(self, name: str) -> int:
        try:
            return self.names.index(name)
        except ValueError:
            raise PlanError(
                f"unknown mesh axis {name!r}",
                expected="one of " + (", ".join(self.names) or "no axes (the mesh is empty)"),
                fix=meant(name, self.names),
            ) from None
