"""Kernels of many jobs as columns, so that a fit prices all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.compute import Columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from autopar.cost_models.work import Kernel, Move

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

BLOCK, SPARSE, FIRST, LAST = range(4)
"""Which part of the model a kernel belongs to: one dense block, one block of experts, what comes
before the blocks, what comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One kernel of one part of the model.

    Attributes:
        kernel: The kernel; its count is that within one such part.
        part: One of the four parts.
        core: Whether it is the core of attention: scores, softmax and their product with values.
        rotary: Whether it rotates queries and keys by their positions.
    """

    kernel: Kernel
    part: int
    core: bool
    rotary: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One collective over the tensor ranks.

    Attributes:
        move: The collective; its count is that within one such part.
        part: One of the four parts.
    """

    move: Move
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The kernels of many jobs, one row each.

    Attributes:
        job: Place of the kernel's job among the jobs.
        part: Its part of the model.
        core: Whether it is the core of attention.
        product: Whether it is a product of matrices outside of that.
        weights: Whether it is one that makes a gradient of weights.
        columns: What its price depends on.
        jobs: Number of jobs.
    """

    job: Integers
    part: Integers
    core: Flags
    product: Flags
    weights: Flags
    columns: Columns
    jobs: int

    @classmethod
    def of(cls, pieces: Sequence[Iterable[Piece]]) -> Table:
        """The table of the kernels of every job."""
        flat = [(place, piece) for place, found in enumerate(pieces) for piece in found]
        product = np.array(
            [not piece.core and piece.kernel.matmul is not None for _, piece in flat], dtype=bool
        )
        of_weights = [piece.kernel.phase == "weight_gradient" for _, piece in flat]
        return cls(
            job=np.array([place for place, _ in flat], dtype=np.int64),
            part=np.array([piece.part for _, piece in flat], dtype=np.int64),
            core=np.array([piece.core for _, piece in flat], dtype=bool),
            product=product,
            weights=product & np.array(of_weights, dtype=bool),
            columns=Columns.of(piece.kernel for _, piece in flat),
            jobs=len(pieces),
        )

    def total(self, seconds: Floats, mask: Flags) -> Floats:
        """Sum of `seconds` over the kernels of `mask`, per job."""
        found = np.bincount(self.job[mask], seconds[mask], minlength=self.jobs)
        return found.astype(np.float64)
