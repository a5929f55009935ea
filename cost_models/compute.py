"""Seconds of kernels on a device: a roofline with efficiencies that depend on sizes.

    product      max(flops / (peak * share / (1 + d (2/sqrt(m n) + 1/(2 k)))), bytes / bandwidth)
                 times a factor where a side is no multiple of a tile
    per head     max(flops / (peak * share * BATCHED_SHARE), bytes / bandwidth)
                 times a factor where a head is no multiple of 8 features, or smaller than 128
    attention    flops / (peak * share * f(head size, keys, direction, generation of the kernel))
    all else     bytes / bandwidth, longer for softmax and dropout of scores

Bandwidth is the device's times its share. Where the host computes as well, launches come on top,
and what cores are slow at: convolutions lay out operands anew, and a few kernels go element by
element.
Elsewhere the host launches ahead of the device, and a program takes the time of the slower of the
two: `host_seconds` and `race`. All is pure and works on columns: a fit prices thousands of kernels
at once, with constants that may differ from kernel to kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from autopar.cost_models.device import Device
from autopar.cost_models.work import Kernel, KernelKind, Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Flags = NDArray[np.bool_]
    Numbers = float | Floats

Generation = Literal["flash1", "flash2", "flash3"]
ATTENTION_SPEED: Mapping[Generation, float] = {"flash1": 0.6, "flash2": 1.0, "flash3": 1.4}
"""Rate of a generation of fused attention kernels against the second (arXiv 2307.08691, figure 5:
1.6 to 2 times the first; 2407.08608: the third 1.5 to 2 times the second)."""
ATTENTION_BACKWARD = 0.85
"""Rate of the backward of fused attention against its forward (2307.08691, figures 4 and 6)."""
HALF_RATE_HEAD: Mapping[Generation, float] = {"flash1": 0.0, "flash2": 64.0, "flash3": 64.0}
"""Head features at which fused attention loses half of what small heads can lose; a head of 128
has the full rate, as in the share of the catalogue (2307.08691, figure 5: the first generation is
as fast with heads of 64)."""
FULL_RATE_HEAD = 128.0
SHORT_KEYS = 200.0
"""Keys at which a row of attention takes as long to begin and end as to compute."""
BATCHED_SHARE = 0.55
"""Rate of many small products, one a head, against one large."""
ODD_HEAD = 1.1
"""Time factor of such products when a head is a multiple of 8 but not of 64 features."""
SOFTMAX_TIME = 1.3
"""Time of softmax and dropout of scores over that of moving their bytes: exponentials, reductions
and random numbers, in kernels that do nothing else. Unfused attention moves 40.3 GB in 41.7 ms on
an A100-40 (arXiv 2205.14135, figure 2): 0.62 of its bandwidth, of which plain kernels reach 0.8."""
TILE = 64
"""Sides that are a multiple of it fill the tiles of a matrix product (NVIDIA, Matrix Multiplication
Background User's Guide, section 3: 128 bytes)."""
HEAD_TILE = 8
"""The same of the features of a head, in 16-bit numbers 16 bytes."""
VECTOR_BYTES = 16
"""What products read at a time, if rows of matrices are a multiple of it."""
UNALIGNED_MATMUL = 2.5
"""Time factor of a product of which they are not, such as the logits of 50257 tokens: the kernels
left are those of an older generation, at half the rate (pegainfer-project/pegainfer pull request
1046 on an A100) or 3.5 times as slow (m87-labs/kestrel pull request 143 on Hopper)."""
CAST_BYTES = 1.5
"""Bytes that casting moves per element of an operand of a product in 8 or 4 bits: 2 are read and 1
is written, for half of the operands, as each is used twice."""
DYNAMIC_CAST_BYTES = 2.0
"""The same of activations where weights were cast before they were gathered: by a scale that is
known only once they are made, so that no compiler fuses it with that; 2 are read, and 1 is written
in rows and in columns, for two products."""
RACE = 3.0
"""Power mean of the times of host and device; infinity is the plain maximum. Where both take about
as long, each waits for the other now and then: with 3, a quarter longer when they are equal."""
LAID_OUT, LAID_OUT_BACKWARD = 2.0, 3.0
"""How often a convolution on cores moves its operands and results besides computing: they are read
and written again in blocks of channels (oneDNN), or as columns (BLAS). A gradient is filled with
zeros before, or summed over samples. On a core with 110 Gflop/s for convolutions, 40 of 3 to 2048
channels and 32 to 16384 positions are met within 7 % on average forward, and 12 % backward."""
ONE_BY_ONE: Mapping[str, float] = {"max_pool": 1.0, "var_mean": 0.4, "std_mean": 0.4}
"""Kernels that torch does not vectorise on cores, and elements that they go through per flop:
maxima of windows with their places, and Welford's mean and variance (four flops an element), where
an element takes 1.6 times as long (5.7 and 3.4 ns on one core)."""
ELEMENT_FLOPS = 350.0
"""Flops at the peak in the time of such an element: some 11 cycles of 32 flops."""
COLLECTIVE_LAUNCHES = 2.0
"""Launches that a collective takes the host: NCCL's kernel, and the events between streams with
torch's bookkeeping (``ProcessGroupNCCL::collective``)."""
LOW_FORMATS = frozenset(("fp8", "fp4"))

MATMUL, BATCHED, GROUPED, CONVOLUTION, ATTENTION, STREAM = range(6)
"""What decides the time of a kernel."""
_KINDS: Mapping[KernelKind, int] = {
    "matmul": MATMUL,
    "grouped_matmul": GROUPED,
    "conv": CONVOLUTION,
    "attention": ATTENTION,
}
_BACKWARD: frozenset[Phase] = frozenset(("input_gradient", "weight_gradient"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Kernels as columns, one row each; sizes are those of one run.

    Attributes:
        kind: What decides the time.
        backward: Whether it is part of backward.
        flops: Floating point operations that are done: a fused kernel skips what a causal mask or a
            window hides.
        moved_bytes: Bytes read and written.
        m: Rows of a product.
        n: Columns.
        k: What is summed over.
        head_dim: Features of a head.
        keys: Keys that a query may see.
        row_bytes: Greatest common divisor of the bytes of rows of a product's matrices.
        slow: Whether it is a softmax or a dropout of scores, which moves its bytes more slowly.
        elements: What cores go through one by one.
        launches: Device kernels.
        count: Runs.
        dtypes: Dtype of each.
        phases: When each runs.
    """

    kind: NDArray[np.int64]
    backward: Flags
    flops: Floats
    moved_bytes: Floats
    m: Floats
    n: Floats
    k: Floats
    head_dim: Floats
    keys: Floats
    row_bytes: NDArray[np.int64]
    slow: Flags
    elements: Floats
    launches: Floats
    count: Floats
    dtypes: tuple[str, ...]
    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, kernels: Iterable[Kernel]) -> Columns:
        """The columns of kernels."""
        listed = list(kernels)
        rows = np.array([_row(kernel) for kernel in listed], dtype=np.float64).reshape(-1, 12)
        return cls(
            kind=rows[:, 0].astype(np.int64),
            backward=rows[:, 1] > 0,
            flops=rows[:, 2],
            moved_bytes=rows[:, 3],
            m=rows[:, 4],
            n=rows[:, 5],
            k=rows[:, 6],
            head_dim=rows[:, 7],
            keys=rows[:, 8],
            row_bytes=rows[:, 9].astype(np.int64),
            slow=np.array([_slow(kernel) for kernel in listed], dtype=bool),
            elements=np.array([_elements(kernel) for kernel in listed], dtype=np.float64),
            launches=rows[:, 10],
            count=rows[:, 11],
            dtypes=tuple(kernel.dtype for kernel in listed),
            phases=tuple(kernel.phase for kernel in listed),
        )

    @property
    def misaligned(self) -> Flags:
        """Which products have a side that is no multiple of a tile."""
        odd = np.zeros(len(self.kind), dtype=bool)
        for side in (self.m, self.n, self.k):
            odd |= np.mod(side, TILE) != 0
        return odd & (self.kind == MATMUL)

    @property
    def unaligned(self) -> Flags:
        """Which products read or write matrices whose rows are no multiple of 16 bytes."""
        return (self.row_bytes % VECTOR_BYTES != 0) & (self.kind == MATMUL)

    @property
    def operands(self) -> Floats:
        """Elements of both operands of products."""
        products = self.flops / (2 * self.m * self.n * self.k)
        return np.asarray(products * self.k * (self.m + self.n), dtype=np.float64)


def _slow(kernel: Kernel) -> bool:
    return kernel.kind == "softmax" or kernel.op.startswith("score_dropout")


def _elements(kernel: Kernel) -> float:
    return kernel.flops * ONE_BY_ONE.get(kernel.op, 0.0)


def _row(kernel: Kernel) -> tuple[float, ...]:
    product, attention = kernel.matmul, kernel.attention
    kind, flops = _KINDS.get(kernel.kind, STREAM), float(kernel.flops)
    m = n = k = head_dim = keys = 1.0
    row_bytes = VECTOR_BYTES
    if attention is not None:
        head_dim, keys = attention.head_dim, attention.seq_k
        flops *= seen_share(
            attention.seq_q, attention.seq_k, causal=attention.causal, window=attention.window
        )
    elif product is not None:
        m, n, k = product.m, product.n, product.k
        head_dim = min(n, k)
        # Tokens are no rows' length: they are m, or what a gradient of weights sums over.
        inner = product.m if kernel.phase == "weight_gradient" else product.k
        row_bytes = math.gcd(product.n, inner) * (4 if kernel.dtype == "float32" else 2)
        if kind == MATMUL and product.batch > 1:
            kind = BATCHED
    elif kind != STREAM:
        kind = STREAM
    return (
        kind, kernel.phase in _BACKWARD, flops, kernel.read_bytes + kernel.write_bytes, m, n, k,
        head_dim, keys, row_bytes, kernel.launches, kernel.count,
    )  # fmt: skip


def seen_share(seq_q: int, seq_k: int, *, causal: bool, window: int = 0) -> float:
    """Share of all pairs of a query and a key that a fused kernel looks at.

    Args:
        seq_q: Queries.
        seq_k: Keys; the last query sees the last key.
        causal: Whether keys after a query are hidden.
        window: Keys that a query sees at most, 0 for no limit.
    """
    if not seq_q or not seq_k:
        return 0.0
    share = 0.5 if causal else 1.0
    if window and window < seq_k:
        # Of a causal triangle a band along the diagonal.
        wide = window / seq_k
        share = wide - wide * wide / 2 if causal else wide
    return share


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What kernels reach: one number for all, or one for each.

    Attributes:
        peak_flops_per_s: Dense peak rate for each kernel's numbers.
        bytes_per_s: Peak memory bandwidth.
        matmul_share: See `autopar.cost_models.hardware`, as for all that follow.
        matmul_size: In elements.
        misaligned_matmul: Time factor.
        attention_share: Share.
        misaligned_head: Time factor.
        grouped_matmul_share: Share.
        convolution_share: Share.
        memory_share: Share.
        launch_s: Seconds.
        attention_speed: Rate of the attention kernel against flash-attention 2.
        half_rate_head: See `HALF_RATE_HEAD`.
        cast_bytes: Bytes per element of an operand that a product casts.
        element_factor: Bytes moved over those that the graph implies, except by products.
        host_computes: Whether launches take the time of the device that computes.
        core_flops_per_s: Where it does, the peak rate of single precision.
    """

    peak_flops_per_s: Numbers
    bytes_per_s: Numbers
    matmul_share: Numbers
    matmul_size: Numbers
    misaligned_matmul: Numbers
    attention_share: Numbers
    misaligned_head: Numbers
    grouped_matmul_share: Numbers
    convolution_share: Numbers
    memory_share: Numbers
    launch_s: Numbers
    attention_speed: Numbers = 1.0
    half_rate_head: Numbers = HALF_RATE_HEAD["flash2"]
    cast_bytes: Numbers = 0.0
    element_factor: Numbers = 1.0
    host_computes: bool = False
    core_flops_per_s: float = 1.0

    @classmethod
    def of(
        cls,
        device: Device,
        columns: Columns,
        *,
        formats: Mapping[str, str] | None = None,
        generation: Generation = "flash2",
        element_factor: float = 1.0,
    ) -> Speeds:
        """What a device reaches.

        Args:
            device: The device.
            columns: The kernels.
            formats: Number format in which products of a dtype run if not in their own, such as
                ``{"float32": "tf32"}`` or ``{"bfloat16": "fp8"}``.
            generation: Of the attention kernel.
            element_factor: See the attributes.
        """
        found, formats = device.efficiency, formats or {}
        peaks, cast = [], []
        for dtype, kind in zip(columns.dtypes, columns.kind.tolist(), strict=True):
            narrow = format_of(dtype, kind, formats)
            low = narrow in LOW_FORMATS
            # Bytes decide the time of all but products, whatever the numbers are.
            peak = 1.0 if kind == STREAM else device.peak(narrow)
            peaks.append(peak * (found.low_precision_share if low else 1.0))
            cast.append(CAST_BYTES if low else 0.0)
        return cls(
            peak_flops_per_s=np.array(peaks),
            bytes_per_s=device.memory_bytes_per_s,
            matmul_share=found.matmul_share,
            matmul_size=found.matmul_size,
            misaligned_matmul=found.misaligned_matmul,
            attention_share=found.attention_share,
            misaligned_head=found.misaligned_head,
            grouped_matmul_share=found.grouped_matmul_share,
            convolution_share=found.convolution_share,
            memory_share=found.memory_share,
            launch_s=found.launch_s,
            attention_speed=ATTENTION_SPEED[generation],
            half_rate_head=HALF_RATE_HEAD[generation],
            cast_bytes=np.array(cast),
            element_factor=element_factor,
            host_computes=device.kind == "cpu",
            core_flops_per_s=device.peak("fp32"),
        )


_PRODUCTS = frozenset((MATMUL, GROUPED, CONVOLUTION))


def format_of(dtype: str, kind: int, formats: Mapping[str, str]) -> str:
    """The number format in which a kernel of a kind multiplies numbers of `dtype`.

    Formats of 8 and 4 bits are for products with weights: scores of attention stay wider.
    """
    narrow = formats.get(dtype, dtype)
    wide = kind == STREAM or (kind not in _PRODUCTS and narrow in LOW_FORMATS)
    return dtype if wide else narrow


def seconds_of(columns: Columns, speeds: Speeds) -> Floats:
    """Seconds of all runs of every kernel.

    Args:
        columns: The kernels.
        speeds: What they reach.
    """
    kind = columns.kind
    bandwidth = np.asarray(speeds.bytes_per_s) * speeds.memory_share
    moving = columns.moved_bytes / bandwidth
    rate = np.asarray(speeds.peak_flops_per_s) * speeds.matmul_share
    product = columns.flops / rate * _sides(columns, speeds)
    product = np.where(kind == GROUPED, product / speeds.grouped_matmul_share, product)
    product = np.where(kind == CONVOLUTION, product / speeds.convolution_share, product)
    product = product * np.where(columns.misaligned, speeds.misaligned_matmul, 1.0)
    if not speeds.host_computes:
        product = product * np.where(columns.unaligned, UNALIGNED_MATMUL, 1.0)
    per_head = np.maximum(columns.flops / (rate * BATCHED_SHARE), moving)
    attention = np.asarray(speeds.peak_flops_per_s) * speeds.attention_share
    attention = attention * speeds.attention_speed
    if not speeds.host_computes:  # cores have no pipeline to fill
        attention = attention * _attention_rate(columns, speeds)
    cast = np.asarray(speeds.cast_bytes) * columns.operands / bandwidth
    streaming = moving * speeds.element_factor
    packed = product + moving  # cores read and write operands in panels first, see `_sides`
    product = np.maximum(product, moving) + cast
    if speeds.host_computes:
        one_by_one = columns.elements * ELEMENT_FLOPS / speeds.core_flops_per_s
        streaming = np.maximum(streaming, one_by_one)
        laid_out = product + moving * _laid_out(columns)
        product = np.where(kind == CONVOLUTION, laid_out, packed + cast)
    else:
        per_head = per_head * _fill(columns)
        streaming = streaming * np.where(columns.slow, SOFTMAX_TIME, 1.0)
    seconds = np.select(
        [kind == ATTENTION, kind == BATCHED, kind == STREAM],
        [columns.flops / attention, per_head * _head_factor(columns, speeds), streaming],
        product,
    )
    if speeds.host_computes:
        seconds = seconds + columns.launches * speeds.launch_s
    return np.asarray(seconds * columns.count, dtype=np.float64)


def host_seconds(columns: Columns, speeds: Speeds) -> Floats:
    """Seconds that the host takes to launch all runs of every kernel, beside the device."""
    seconds = columns.launches * columns.count * speeds.launch_s
    return np.asarray(0.0 * seconds if speeds.host_computes else seconds, dtype=np.float64)


def race(device: Numbers, host: Numbers) -> Floats:
    """Seconds of work that the host launches ahead of the device: those of the slower, or more.

    Args:
        device: Seconds of the device.
        host: Seconds of the host.
    """
    found = (np.asarray(device) ** RACE + np.asarray(host) ** RACE) ** (1 / RACE)
    return np.asarray(found, dtype=np.float64)


def _sides(columns: Columns, speeds: Speeds) -> Floats:
    """Time factor of a product that fills waves of tiles, and their pipelines, only in part.

    Rows and columns count by their product: a long thin result has as many tiles as a square one.
    What is summed counts half of a side: it fills a pipeline, but makes no wave of tiles. Cores
    have neither: BLAS packs operands into panels before it multiplies, which takes as long as
    moving them (20 products of 64 to 1024 rows, weights not in cache, are met within 4.0 %, 6.8 %
    if moving is hidden behind the product; what is fitted of sides is then 0).
    """
    found = sides(columns.m, columns.n, columns.k)
    return np.asarray(1 + speeds.matmul_size * found, dtype=np.float64)


def sides(m: Numbers, n: Numbers, k: Numbers) -> Floats:
    """What `matmul_size` multiplies, of products with `m` rows, `n` columns and sums over `k`."""
    return np.asarray(2 / np.sqrt(np.asarray(m) * n) + 0.5 / np.asarray(k), dtype=np.float64)


def _laid_out(columns: Columns) -> Floats:
    return np.where(columns.backward, LAID_OUT_BACKWARD, LAID_OUT)


def _attention_rate(columns: Columns, speeds: Speeds) -> Floats:
    heads, half = columns.head_dim, np.asarray(speeds.half_rate_head)
    wide = heads / (heads + half) * (FULL_RATE_HEAD + half) / FULL_RATE_HEAD
    long = 1 / (1 + SHORT_KEYS / columns.keys)
    return np.asarray(wide * long * np.where(columns.backward, ATTENTION_BACKWARD, 1.0))


def _fill(columns: Columns) -> Floats:
    """Time factor of products of heads that are smaller than those of the full rate.

    Loading and storing tiles of scores takes as long as summing over that many features.
    """
    heads = np.minimum(columns.head_dim, FULL_RATE_HEAD)
    return np.asarray((1 + FULL_RATE_HEAD / heads) / 2)


def _head_factor(columns: Columns, speeds: Speeds) -> Floats:
    odd = np.mod(columns.head_dim, HEAD_TILE) != 0
    half = ~odd & (np.mod(columns.head_dim, TILE) != 0)
    return np.where(odd, speeds.misaligned_head, np.where(half, ODD_HEAD, 1.0))


def device_seconds(
    kernels: Sequence[Kernel],
    device: Device,
    *,
    formats: Mapping[str, str] | None = None,
    generation: Generation = "flash2",
    element_factor: float = 1.0,
) -> Floats:
    """Seconds of all runs of each of `kernels` on a device, launches aside; see `Speeds.of`.

    Example:
        >>> from autopar.cost_models.hardware import load_device
        >>> from autopar.cost_models.work import Matmul
        >>> product = Kernel(
        ...     node="x", op="mm", kind="matmul", phase="forward", flops=2 * 4096**3,
        ...     read_bytes=4 * 4096**2, write_bytes=2 * 4096**2, dtype="bfloat16",
        ...     matmul=Matmul(batch=1, m=4096, n=4096, k=4096),
        ... )
        >>> bool(0.4e-3 < device_seconds([product], load_device("A100-80-SXM"))[0] < 0.8e-3)
        True
    """
    columns = Columns.of(kernels)
    speeds = Speeds.of(
        device, columns, formats=formats, generation=generation, element_factor=element_factor
    )
    return seconds_of(columns, speeds)
