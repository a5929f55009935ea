"""From what was timed on a machine to the figures of a cluster file.

The figures are fitted with the very formulas that price plans: samples become kernels and
collectives, and the constants are those with the least mean of |log(predicted / measured)|, within
the catalogue's plausible ranges. That mean does not care for outliers, which a machine that others
use as well has.

    peak          the fastest product of each dtype, if endless   measured
    products      matmul_share, matmul_size                       fitted, float32
    convolution   convolution_share                               fitted
    attention     attention_share                                 fitted
    bandwidth     the fastest stream                              measured
    streams       memory_share                                    fitted
    update        bandwidth of what is still in cache             measured
    launch        between compiled programs of few and many ops   measured
    collectives   link_share, latency and start                   fitted
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.collectives import Kind, Price, axis_price, send_prices, sent_bytes
from autopar.cost_models.compute import device_seconds, sides
from autopar.cost_models.evaluate import UPDATE_PASSES, update_bandwidth
from autopar.cost_models.hardware import canonical_name, figure_at, plausible, value_of
from autopar.cost_models.work import Attention, Kernel, Matmul, Phase
from autopar.errors import ClusterError
from autopar.graph.ir import ITEM_BYTES
from autopar.sharding.mesh import Mesh
from autopar.units import GB, GIB, TB

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

How = Literal["measured", "fitted"]

COLLECTIVES: tuple[Kind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"
)  # fmt: skip
_SHORT = {
    "float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"
}  # fmt: skip
_HEADROOM = 1.05
"""Peak over the rate of a product with endless sides: no product reaches the peak, and a share near
its limit of 1 would stop the search. The largest product that was timed is not endless, so what the
size term takes from it comes on top; without that no share could say the rate of larger ones."""
_PRODUCT_ROUNDS = 2  # what sides take follows from the size, which is fitted under a peak
_LINK_PATHS = (
    "link.start_us", "link.all_to_all_start_us", "link.latency_us", "efficiency.link_share"
)  # fmt: skip
_FOLLOW = (0.25, 0.5, 0.75)
"""Samples that are met exactly, as quantiles of the error, where a share follows another figure."""
_LINK_HEADROOM = 2.0
"""The figure over the fastest transfer: what was timed includes start and latency."""
_LINK_ROUNDS, _REWEIGHTS, _SWEEPS = 3, 8, 40
_KERNELS = frozenset(("matmul", "convolution", "attention", "stream"))
_REACHES, _STEPS, _FINE, _SMALLEST = (100.0, 10.0, 3.0, 3.0, 1.3, 1.3, 1.05, 1.05), 25, 5.0, 0.05
"""A fit tries so many values, up to these factors away; a figure of 0 starts at the smallest."""


class Timed(Protocol):
    """One thing that was timed; see `autopar.runtime.measure.Sample`."""

    @property
    def work(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def sizes(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def backward(self) -> bool: ...  # noqa: D102
    @property
    def ranks(self) -> int: ...  # noqa: D102
    @property
    def seconds(self) -> float: ...  # noqa: D102


class MachineLike(Protocol):
    """A machine, measured; see `autopar.runtime.measure.Machine`."""

    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def ranks(self) -> int: ...  # noqa: D102
    @property
    def ranks_per_node(self) -> int: ...  # noqa: D102
    @property
    def cores(self) -> int: ...  # noqa: D102
    @property
    def memory_bytes(self) -> int: ...  # noqa: D102
    @property
    def host_bytes(self) -> int: ...  # noqa: D102
    @property
    def samples(self) -> Sequence[Timed]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A figure that was found.

    Attributes:
        path: Such as ``"efficiency.matmul_share"``.
        value: In the unit of the key.
        how: Whether it is a measured number, or fitted to several.
        at_edge: Whether a fit ended at the end of the plausible range.
    """

    path: str
    value: float
    how: How
    at_edge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well the samples of a kind are met.

    Attributes:
        work: Their kind.
        count: Samples.
        mean_error: Mean of |predicted / measured - 1|.
        max_error: Its maximum.
        worst: Name of the sample with the maximum.
    """

    work: str
    count: int
    mean_error: float
    max_error: float
    worst: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A machine as a cluster, and how well that fits what was timed.

    Attributes:
        cluster: The cluster.
        constants: What was found.
        fits: For every kind of sample.
    """

    cluster: ClusterSpec
    constants: tuple[Constant, ...]
    fits: tuple[Fit, ...]


def calibrate(machine: MachineLike, *, source: str) -> Calibration:
    """Fit the figures of a cluster of the ranks that measured.

    Args:
        machine: What was timed.
        source: Where the figures come from: ``"measured by autopar profile on 2026-01-31"``.

    Raises:
        ClusterError: If there are too few samples, or a measured figure is not plausible.
    """
    name = "cpu" if machine.device == "cpu" else _catalogued(machine.device)
    nodes = -(-machine.ranks // machine.ranks_per_node)
    cluster = ClusterSpec.parse(f"{nodes}x{machine.ranks_per_node}x{name}")
    state = _State(cluster, machine.samples, source)
    _memory(state, machine)
    _launch(state)
    _bandwidth(state)
    _products(state)
    _links(state)
    kinds = dict.fromkeys(sample.work for sample in machine.samples)
    fits = tuple(_quality(work, state) for work in kinds)
    return Calibration(cluster=state.cluster, constants=tuple(state.constants.values()), fits=fits)


def _catalogued(device: str) -> str:
    """The device of the catalogue that CUDA calls `device`."""
    words = device.replace("NVIDIA", "").replace("Tesla", "").split()
    for count in range(len(words), 0, -1):
        try:
            return canonical_name("-".join(words[:count]))
        except ClusterError:
            continue
    for word in words:
        try:
            return canonical_name(word)
        except ClusterError:
            continue
    raise ClusterError(
        f"the catalogue has no device {device!r}",
        fix="add a file for it beside those of cost_models/devices",
    )


class _State:
    """The cluster as far as it is known, the samples, and what was found."""

    def __init__(self, cluster: ClusterSpec, samples: Iterable[Timed], source: str) -> None:
        self.cluster, self.source = cluster, source
        self.samples = tuple(samples)
        self.constants: dict[str, Constant] = {}

    def of(self, *works: str) -> list[Timed]:
        return [sample for sample in self.samples if sample.work in works]

    def put(self, path: str, value: float, how: How = "measured", *, edge: bool = False) -> None:
        """Note a figure, in the unit of its key, and price with it from now on."""
        figure = figure_at(path)
        inside = min(max(value, figure.low), figure.high)
        shown = round(inside) if figure.whole else float(f"{inside:.6g}")
        self.cluster = self.changed({path: shown})
        edge = edge or inside != value
        self.constants[path] = Constant(path=path, value=shown, how=how, at_edge=edge)

    def fit(self, paths: Sequence[str], samples: Sequence[Timed]) -> None:
        """Find the figures at `paths` with which `samples` are met best, in turns.

        The first is a share of a rate, and may follow each of the others: a mean of absolute errors
        has edges from which no step along one figure leads on.
        """
        if not samples:
            return
        measured = np.array([sample.seconds for sample in samples])
        device = self.cluster.hardware(0)
        bounds = {path: plausible(device, path) for path in paths}
        best = {path: _within(value_of(device, path), bounds[path]) for path in paths}

        def errors(figures: Mapping[str, float]) -> Floats:
            return np.log(predicted(samples, self.changed(figures)) / measured)

        def followed(path: str, value: float) -> list[dict[str, float]]:
            """`path` at a value, alone and with the first path following it."""
            moved = {**best, path: value}
            if path == paths[0]:
                return [moved]
            wanted = moved[paths[0]] * np.exp(np.quantile(errors(moved), _FOLLOW))
            return [
                moved,
                *({**moved, paths[0]: _within(v, bounds[paths[0]])} for v in wanted.tolist()),
            ]

        def loss(figures: Mapping[str, float]) -> float:
            return float(np.mean(np.abs(errors(figures))))

        for reach in _REACHES:
            for path in paths:
                values = _grid(best[path], bounds[path], reach)
                trials = [figures for value in values for figures in followed(path, value)]
                losses = [loss(figures) for figures in trials]
                best = trials[int(np.argmin(losses))]
        for path, value in best.items():
            low, high = bounds[path]
            edge = value <= low * (1 + 1e-6) or value >= high * (1 - 1e-6)
            self.put(path, value, "fitted", edge=edge)

    def changed(self, figures: Mapping[str, float]) -> ClusterSpec:
        """The cluster with other figures."""
        group = self.cluster.groups[0]
        group = replace(
            group, figures=tuple({**dict(group.figures), **figures}.items()), source=self.source
        )
        return ClusterSpec(groups=(group,))


def _within(value: float, bounds: tuple[float, float]) -> float:
    return min(max(value, bounds[0]), bounds[1])


def _grid(value: float, bounds: tuple[float, float], reach: float) -> list[float]:
    """Values to try: factors up to `reach` both ways, and what little else a 0 can become."""
    steps = np.linspace(-1, 1, _STEPS)
    around = max(value, bounds[0], _SMALLEST)
    tried = [_within(around * reach**step, bounds) for step in steps.tolist()]
    return sorted({value, *tried, *((bounds[0],) if reach > _FINE else ())})


def _memory(state: _State, machine: MachineLike) -> None:
    for path, size_bytes in (
        ("memory.memory_gib", machine.memory_bytes),
        ("node.memory_gib", machine.host_bytes),
    ):
        state.put(path, math.floor(size_bytes / GIB * 100) / 100)
    if machine.cores:
        state.put("memory.driver_mib", 0)
        state.put("node.cores", machine.cores)


def _launch(state: _State) -> None:
    """The slope between programs of few and of many kernels: what a step takes once is left out."""
    found = sorted((sample.sizes[0], sample.seconds) for sample in state.of("launch"))
    if len(found) < 2:
        return
    (few, short), (many, long) = found[0], found[-1]
    low, high = plausible(state.cluster.hardware(0), "efficiency.launch_us")
    each = (long - short) / (many - few) * 1e6
    state.put("efficiency.launch_us", _within(each, (low, high)), edge=not low < each < high)


def _bandwidth(state: _State) -> None:
    streams = state.of("stream")
    if streams:
        fastest = max(sample.sizes[0] / sample.seconds for sample in streams)
        state.put("memory.bandwidth_tb_per_s", fastest / TB)
        state.fit(("efficiency.memory_share",), streams)
    update = state.of("update")
    if update and state.cluster.hardware(0).kind == "cpu":
        moved = [UPDATE_PASSES["single"] * item.sizes[0] / item.seconds for item in update]
        state.put("memory.cache_tb_per_s", max(moved) / TB)


def _products(state: _State) -> None:
    products = state.of("matmul")
    usual = "float32" if state.cluster.hardware(0).kind == "cpu" else "bfloat16"
    trained = usual if any(item.dtype == usual for item in products) else "float32"
    wanted = [item for item in products if item.dtype == trained]
    for _ in range(_PRODUCT_ROUNDS):
        size = state.cluster.hardware(0).efficiency.matmul_size
        for dtype, short in _SHORT.items():
            rates = [_endless_rate(item, size) for item in products if item.dtype == dtype]
            if rates:
                peak = max(rates)[1] * _HEADROOM
                state.put(f"peak_dense.{short}_tflop_per_s", peak / TB)
        state.fit(("efficiency.matmul_share", "efficiency.matmul_size"), wanted)
    state.fit(("efficiency.convolution_share",), state.of("convolution"))
    state.fit(("efficiency.attention_share",), state.of("attention"))


def _endless_rate(product: Timed, size: float) -> tuple[float, float]:
    """FLOP/s that a product reached, and that it would reach with endless sides."""
    m, n, k = product.sizes
    rate = 2 * m * n * k / product.seconds
    return rate, rate * (1 + size * float(sides(m, n, k)))


def _links(state: _State) -> None:
    """Twice the fastest transfer is the link's figure, a share of it what collectives reach.

    Messages are left out of the fit where cores copy what moves: one rank only sends, the other
    only receives, so that large ones are several times as fast as a collective of as many bytes.
    """
    samples = state.of(*COLLECTIVES)
    if not samples:
        return
    sent = [sent_bytes(_kind(item), item.sizes[0], item.ranks) / item.seconds for item in samples]
    if state.cluster.hardware(0).kind == "cpu":
        samples = [item for item in samples if item.work != "send"]
    for key in ("gb_per_s_per_direction", "peer_gb_per_s_per_direction"):
        state.put(f"link.{key}", _LINK_HEADROOM * max(sent) / GB)
    for _ in range(_LINK_ROUNDS):  # the best algorithm follows from the figures, and back
        device = state.cluster.hardware(0)
        old = np.array([value_of(device, path) for path in _LINK_PATHS])
        bounds = [plausible(device, path) for path in _LINK_PATHS]
        parts = np.array([_parts(item, state.cluster) for item in samples])
        # Seconds are linear in starts, latency and the inverse of the share.
        inverted = [*bounds[:3], (1 / bounds[3][1], 1 / bounds[3][0])]
        units = np.maximum(np.array([*old[:3], 1 / old[3]]), _SMALLEST)
        measured = np.array([item.seconds for item in samples])
        best = least(parts / units / measured[:, None], inverted)
        values = [*best[:3], 1 / best[3]]
        for path, value, (low, high) in zip(_LINK_PATHS, values, bounds, strict=True):
            edge = value <= low * (1 + 1e-6) or value >= high * (1 - 1e-6)
            state.put(path, _within(value, (low, high)), "fitted", edge=edge)


def _parts(item: Timed, cluster: ClusterSpec) -> tuple[float, ...]:
    """Seconds of a collective due to each of `_LINK_PATHS`."""
    found = _collective(item, cluster)
    whole = item.work == "all_to_all"
    start = found.start_s
    return 0.0 if whole else start, start if whole else 0.0, found.latency_s, found.transfer_s


def least(rows: Floats, bounds: Sequence[tuple[float, float]]) -> Floats:
    """The x within bounds with the least sum of |rows @ x - 1|, by reweighted least squares.

    Args:
        rows: A row for each sample, over what was measured.
        bounds: Lowest and highest value of each element of x.
    """
    count = rows.shape[1]
    scale = np.maximum(np.abs(rows).mean(axis=0), 1e-30)
    lows = np.array([low for low, _ in bounds]) * scale
    highs = np.array([high for _, high in bounds]) * scale
    rows = rows / scale
    found, weights = np.clip(np.full(count, 0.5), lows, highs), np.ones(len(rows))
    for _ in range(_REWEIGHTS):
        matrix = (rows * weights[:, None]).T @ rows
        aim = (rows * weights[:, None]).sum(axis=0)
        for _ in range(_SWEEPS):
            for place in range(count):
                if matrix[place, place] > 0:
                    rest = aim[place] - matrix[place] @ found + matrix[place, place] * found[place]
                    step = rest / matrix[place, place]
                    found[place] = min(max(step, lows[place]), highs[place])
        weights = 1 / np.maximum(np.abs(rows @ found - 1), 0.01)
    return np.asarray(found / scale)


def _kind(item: Timed) -> Kind:
    return next(kind for kind in COLLECTIVES if kind == item.work)


def predicted(samples: Sequence[Timed], cluster: ClusterSpec) -> Floats:
    """Seconds of each of `samples` by the formulas that price plans."""
    device = cluster.hardware(0)
    found = np.zeros(len(samples))
    kernels = {place: _kernel(item) for place, item in enumerate(samples) if item.work in _KERNELS}
    if kernels:
        found[list(kernels)] = device_seconds(list(kernels.values()), device)
    for place, item in enumerate(samples):
        if item.work in COLLECTIVES:
            found[place] = _collective(item, cluster).seconds
        elif item.work == "launch":
            found[place] = item.sizes[0] * device.efficiency.launch_s
        elif item.work == "update":
            found[place] = UPDATE_PASSES["single"] * item.sizes[0] / update_bandwidth(device)
    return found


def _collective(item: Timed, cluster: ClusterSpec) -> Price:
    """All groups of `item.ranks` neighbours at the same time."""
    count = cluster.num_devices
    mesh = Mesh((("rest", count // item.ranks), ("group", item.ranks)))
    if item.work == "send":
        found = send_prices(item.sizes[0], cluster, mesh, "group")
        return max(found, key=lambda price: price.seconds)
    return axis_price(_kind(item), item.sizes[0], cluster, mesh, ("group",))


def _kernel(item: Timed) -> Kernel:
    width = ITEM_BYTES[item.dtype]
    phase: Phase = "input_gradient" if item.backward else "forward"
    if item.work == "stream":
        return Kernel(
            node="", op=item.name, kind="elementwise", phase=phase, flops=0,
            read_bytes=item.sizes[0], write_bytes=0, dtype=item.dtype,
        )  # fmt: skip
    if item.work == "attention":
        batch, heads, seq, dim = item.sizes
        whole = batch * heads * seq * dim * width
        # Two products forward and five backward.
        return Kernel(
            node="", op=item.name, kind="attention", phase=phase, dtype=item.dtype,
            flops=(5 if item.backward else 2) * 2 * batch * heads * seq * seq * dim,
            read_bytes=(6 if item.backward else 3) * whole,
            write_bytes=(3 if item.backward else 1) * whole,
            attention=Attention(
                batch=batch, heads=heads, kv_heads=heads, seq_q=seq, seq_k=seq, head_dim=dim,
                value_dim=dim, causal=True,
            ),
        )  # fmt: skip
    m, n, k, *rest = item.sizes
    passes, moved_bytes = rest or (1, (m * k + k * n + m * n) * width)
    return Kernel(
        node="", op=item.name, kind="conv" if item.work == "convolution" else "matmul",
        phase=phase, dtype=item.dtype, flops=passes * 2 * m * n * k,
        read_bytes=moved_bytes, write_bytes=0,
        launches=passes, matmul=Matmul(batch=1, m=m, n=n, k=k),
    )  # fmt: skip


def _quality(work: str, state: _State) -> Fit:
    samples = state.of(work)
    measured = np.array([sample.seconds for sample in samples])
    errors = np.abs(predicted(samples, state.cluster) / measured - 1)
    return Fit(
        work=work,
        count=len(samples),
        mean_error=float(errors.mean()),
        max_error=float(errors.max()),
        worst=samples[int(errors.argmax())].name,
    )
