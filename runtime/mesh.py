"""A rank's view of the mesh it computes on."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.runtime.comm import Communicator
from autopar.sharding.mesh import MICROBATCH, Mesh
from autopar.sharding.placement import Grid


@dataclass(frozen=True, slots=True)
class MeshContext:
    """The mesh, and where this rank is on it.

    Attributes:
        mesh: The (sub-)axes that placements speak of. The first may be the microbatch axis, which
            runs over time: every rank is at all its positions, one after the other.
        comm: Communicator of all ranks.
        grid: Axis sizes and this rank's coordinate; 0 along the microbatch axis.
        devices: Axes of all ranks, those of `mesh` without the microbatch axis and those of the
            pipeline.
    """

    mesh: Mesh
    comm: Communicator
    grid: Grid
    devices: Mesh

    @classmethod
    def create(cls, mesh: Mesh, comm: Communicator, devices: Mesh | None = None) -> MeshContext:
        """Context of this rank.

        Args:
            mesh: The axes of placements.
            comm: Communicator of all ranks.
            devices: Axes of all ranks; those of `mesh` that are not in time when None.
        """
        if devices is None:
            devices = Mesh(tuple(axis for axis in mesh.axes if axis[0] != MICROBATCH))
        here = dict(zip(devices.names, devices.coordinate(comm.rank), strict=True))
        here[MICROBATCH] = 0
        coordinate = tuple(here[name] for name in mesh.names)
        return cls(mesh, comm, Grid(mesh.shape, coordinate), devices)

    @property
    def time(self) -> int | None:
        """Index of the microbatch axis, None when there is none."""
        names = self.mesh.names
        return names.index(MICROBATCH) if MICROBATCH in names else None

    @property
    def num_microbatches(self) -> int:
        """Size of the microbatch axis."""
        return 1 if self.time is None else self.mesh.shape[self.time]

    def ranks(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """Ranks that differ from this one only along `axes`, in coordinate order."""
        names = tuple(self.mesh.names[axis] for axis in axes)
        return self.devices.ranks_along(names, self.comm.rank)

    def without_time(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """`axes` but the microbatch axis."""
        return tuple(axis for axis in axes if axis != self.time)
