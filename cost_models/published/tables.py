"""Kernels of many jobs as columns, so that a fit prices all of them at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from autopar.cost_models.work import Kernel

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

MATMUL, GROUPED, BATCHED, ATTENTION, ELEMENT = range(5)
"""What decides the speed of a kernel: a product, one per expert, one per head, fused attention,
or the bytes it moves."""
BLOCK, SPARSE, FIRST, LAST = range(4)
"""Which part of the model a kernel belongs to: one dense block, one block of experts, what comes
before the blocks, what comes after."""
_TILE = 64
_FEATURES = (
    "kind", "part", "backward", "flops", "moved", "m", "n", "k", "head_dim", "keys", "launches",
    "low", "core",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One kernel of one part of the model.

    Attributes:
        kind: One of the five kinds.
        part: One of the four parts.
        backward: Whether it runs in backward.
        flops: Floating point operations of all its runs.
        moved: Bytes they read and write.
        m: Rows of the product (of one of its products).
        n: Columns.
        k: What is summed over.
        head_dim: Features of a head of attention.
        keys: Keys that a query may see.
        launches: Device kernels.
        low: Whether it runs in fp8 where the job does.
        core: Whether it is the core of attention: scores, softmax and their product with values.
    """

    kind: int
    part: int
    backward: bool
    flops: float
    moved: float
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    head_dim: float = 0.0
    keys: float = 0.0
    launches: float = 1.0
    low: bool = False
    core: bool = False


def entry_of(kernel: Kernel, part: int, core: bool) -> Entry:
    """The entry of a kernel that the graph implies.

    Args:
        kernel: The kernel.
        part: The part of the model that it belongs to.
        core: Whether it is the core of attention.
    """
    count, product, attention = kernel.count, kernel.matmul, kernel.attention
    plain = Entry(
        kind=ELEMENT,
        part=part,
        backward=kernel.phase in ("input_gradient", "weight_gradient"),
        flops=float(kernel.flops * count),
        moved=float((kernel.read_bytes + kernel.write_bytes) * count),
        launches=float(kernel.launches * count),
        core=core,
    )
    if kernel.kind == "attention" and attention is not None and attention.fused:
        seen = 0.5 if attention.causal else 1.0  # blocks above the diagonal are skipped
        return replace(
            plain, kind=ATTENTION, flops=plain.flops * seen, head_dim=float(attention.head_dim),
            keys=float(attention.seq_k),
        )  # fmt: skip
    if product is None or not kernel.flops:
        return plain
    kind = GROUPED if kernel.kind == "grouped_matmul" else MATMUL
    if kind == MATMUL and product.batch > 1:
        kind = BATCHED
    return replace(
        plain, kind=kind, m=float(product.m), n=float(product.n), k=float(product.k),
        low=kind != BATCHED, head_dim=float(min(product.n, product.k)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The kernels of many jobs, one column per property, one row per kernel.

    Attributes:
        job: Place of the kernel's job among the jobs.
        columns: The properties of `Entry`, by name.
        jobs: Number of jobs.
    """

    job: Integers
    columns: dict[str, Floats]
    jobs: int

    @classmethod
    def of(cls, entries: Sequence[Iterable[Entry]]) -> Table:
        """The table of the entries of every job."""
        flat = [(place, entry) for place, found in enumerate(entries) for entry in found]
        return cls(
            job=np.array([place for place, _ in flat], dtype=np.int64),
            columns={
                name: np.array([getattr(entry, name) for _, entry in flat], dtype=np.float64)
                for name in _FEATURES
            },
            jobs=len(entries),
        )

    def is_(self, name: str, value: int) -> Flags:
        """Which kernels have a value in a column."""
        return self.columns[name] == value

    @property
    def misaligned(self) -> Flags:
        """Which products have a side that is no multiple of a tile."""
        sides = (np.mod(self.columns[name], _TILE) != 0 for name in ("m", "n", "k"))
        return np.logical_or.reduce(tuple(sides)) & self.is_("kind", MATMUL)

    def total(self, seconds: Floats, mask: Flags) -> Floats:
        """Sum of `seconds` over the kernels of `mask`, per job."""
        found = np.bincount(self.job[mask], seconds[mask], minlength=self.jobs)
        return found.astype(np.float64)
