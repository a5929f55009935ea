"""What a rank computes, moves and keeps: data, priced elsewhere.

Everything is for one rank and one microbatch of one stage, at the local shapes of the rank with the
largest part. Equal ops of equal layers are one entry with a count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KernelKind = Literal[
    "matmul",
    "grouped_matmul",
    "attention",
    "conv",
    "norm",
    "softmax",
    "loss",
    "embedding",
    "reduction",
    "elementwise",
    "copy",
    "random",
]
Phase = Literal["forward", "recompute", "input_gradient", "weight_gradient", "update"]
"""When work is done. ``recompute`` is forward work that backward does again; ``update`` is what
follows an optimizer step (ZeRO brings parameters back)."""
PHASES: tuple[Phase, ...] = (
    "forward",
    "recompute",
    "input_gradient",
    "weight_gradient",
    "update",
)
MoveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """Sizes of ``batch`` products of an ``m x k`` by a ``k x n`` matrix.

    A grouped product has one of ``batch`` groups with ``m`` rows on average.
    """

    batch: int
    m: int
    n: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Sizes of a scaled dot product attention.

    Attributes:
        batch: Independent sequences.
        heads: Query heads.
        kv_heads: Key and value heads.
        seq_q: Queries.
        seq_k: Keys.
        head_dim: Size of a query and a key.
        value_dim: Size of a value.
        causal: Whether keys after the query are masked, by flag or by a mask known to be so.
        window: Keys that a query sees at most, 0 for no limit.
        dropout: Whether probabilities are dropped.
        fused: Whether one kernel does all, so that scores never lie in memory.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int
    value_dim: int
    causal: bool
    window: int = 0
    dropout: bool = False
    fused: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One op of the graph in one phase, or several pointwise ops that were fused.

    Attributes:
        node: Name of the graph node; the first of a fused group.
        op: Its operator; of a fused group the operators joined by ``+``.
        kind: What decides its speed.
        phase: When it runs.
        flops: Floating point operations of one run; a multiply and an add are two.
        read_bytes: Bytes that one run reads from memory.
        write_bytes: Bytes that one run writes.
        dtype: Dtype it computes in.
        matmul: Sizes if it multiplies matrices (a convolution: as the product it amounts to).
        attention: Sizes if it is attention.
        launches: Device kernels of one run.
        count: Runs, one for each equal layer.
        module: Path of the module that calls it (the first of the equal layers).
    """

    node: str
    op: str
    kind: KernelKind
    phase: Phase
    flops: int
    read_bytes: int
    write_bytes: int
    dtype: str
    matmul: Matmul | None = None
    attention: Attention | None = None
    launches: int = 1
    count: int = 1
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One collective or message.

    Attributes:
        kind: What it does.
        size_bytes: Payload on this rank: of an all-reduce the tensor, of an all-gather the whole
            result, of a reduce-scatter the whole operand, of an all-to-all what the rank holds
            (its own part included), of a send the tensor.
        axes: Names of the mesh axes that the group varies, outermost first (sub-axes of the plan's
            mesh, see `autopar.plan.strategies.fine_axes`).
        group: Number of ranks in the group.
        phase: When it happens; a parameter's gradient is summed in ``weight_gradient``.
        per: Whether it happens once per microbatch or once per step (update).
        node: Name of the value that moves, or of the op whose special lowering moves it.
        dtype: Dtype of what moves.
        count: How often, one for each equal layer.
        module: Path of the module that wants it (the first of the equal layers).
    """

    kind: MoveKind
    size_bytes: int
    axes: tuple[str, ...]
    group: int
    phase: Phase
    per: Literal["microbatch", "step"] = "microbatch"
    node: str
    dtype: str
    count: int = 1
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Memory that forward leaves for backward.

    Attributes:
        node: Name of the value, or of the op of which it is a by-product (statistics, masks).
        what: ``"value"``, or the by-product: ``"rstd"``, ``"logsumexp"``, ``"mask"`` ...
        size_bytes: Bytes of one storage.
        count: Storages, one for each equal layer.
        module: Path of the module that made it (the first of the equal layers).
    """

    node: str
    what: str
    size_bytes: int
    count: int = 1
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWork:
    """Everything one stage asks of one rank.

    Attributes:
        stage: Number of the stage.
        kernels: Computation per microbatch.
        moves: Communication inside the stage, per microbatch and per step.
        saved: What forward leaves for backward, per microbatch.
    """

    stage: int
    kernels: tuple[Kernel, ...]
    moves: tuple[Move, ...]
    saved: tuple[Saved, ...]

    def flops(self, *phases: Phase) -> int:
        """Floating point operations of `phases` (all by default) for one microbatch."""
        return total_flops(self.kernels, *phases)

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward leaves for backward, for one microbatch."""
        return sum(item.size_bytes * item.count for item in self.saved)


def total_flops(kernels: Iterable[Kernel], *phases: Phase) -> int:
    """Floating point operations of `kernels` in `phases` (all by default), counts included."""
    wanted = phases or PHASES
    return sum(kernel.flops * kernel.count for kernel in kernels if kernel.phase in wanted)
