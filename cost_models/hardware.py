"""The hardware catalogue: one file per device in ``devices/``, every figure with its source.

A file says what the vendor says, in the vendor's units, each unit at the end of its key::

    name: H100-SXM
    kind: gpu
    sources:
      sheet: NVIDIA H100 Tensor Core GPU datasheet 2430615, May 2023
    peak_dense:
      bf16_tflop_per_s: {value: 989.4, source: sheet}
    memory:
      memory_gib: {value: 80, source: sheet}
    efficiency:
      matmul_share: {value: 0.69, range: [0.5, 0.9], source: "fitted on ..."}

`source` is a key of ``sources``, or text that begins with ``prior:``, ``fitted on`` or ``measured
on``. `load_device` converts to SI; nothing else does. A new device is a new file.

The efficiency parameters are the only figures that a fit may move; each has a range in which it
stays plausible:

==========================  =====================================================================
matmul_share                share of the dense peak that a large, aligned matmul reaches
matmul_size                 elements d in 1 / (1 + d (1/m + 1/n + 1/k)): the sides at which tiles,
                            waves and the pipeline over k are well filled
misaligned_matmul           time factor of a matmul with a side that is no multiple of a tile
attention_share             share of the dense peak of fused attention with heads of 128
misaligned_head             time factor of attention with a head dim that is no multiple of 8
low_precision_share         share of the fp8 or fp4 peak relative to that of bf16
grouped_matmul_share        share of a grouped matmul relative to a plain one of its mean size
convolution_share           share of a convolution relative to the matmul it equals
memory_share                share of the memory bandwidth that streaming kernels reach
launch_us                   time a kernel takes when it has nothing to do
link_share                  share of the device link's bandwidth that large collectives reach
network_share               share of the network's bandwidth that large collectives reach
==========================  =====================================================================
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.cost_models.figures import Figure, Table, read_yaml
from autopar.errors import ClusterError

FOLDER = Path(__file__).parent / "devices"
_MARKS = ("prior:", "fitted on", "measured on")


class Rates(Mapping[str, float]):
    """A read-only, hashable mapping of names to numbers."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, float]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> float:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Rates({self._items!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins a device to its neighbours, without leaving the domain of the link.

    Attributes:
        kind: ``"nvlink"``, ``"xgmi"``, ``"pcie"`` or ``"memory"``.
        bytes_per_s: What one device can send, all its links together, in one direction.
        peer_bytes_per_s: What one device can send to one other; less than `bytes_per_s` where
            devices are wired pair by pair instead of through a switch.
        latency_s: One hop of a collective: the step of a ring over the link.
        start_s: What a collective takes before its first byte moves: launch and set-up.
        domain_devices: The most devices that one domain of the link joins.
        spans_nodes: Whether a domain may cover several nodes (NVL72).
    """

    kind: str
    bytes_per_s: float
    peer_bytes_per_s: float
    latency_s: float
    start_s: float
    domain_devices: int
    spans_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDefaults:
    """The usual machine around a device, for a cluster given by its short form.

    Attributes:
        devices: Devices of such a node; a node with more or fewer has the rest in proportion.
        nics: Network cards per node.
        nic_bytes_per_s: Of one card, in one direction.
        network_latency_s: One hop of a collective over the network.
        memory_bytes: Host memory of a node.
        nvme_bytes: Local storage of a node; 0 where there is none.
        nvme_read_bytes_per_s: Of all drives of a node together.
        nvme_write_bytes_per_s: Of all drives of a node together.
    """

    devices: int
    nics: int
    nic_bytes_per_s: float
    network_latency_s: float
    memory_bytes: int
    nvme_bytes: int
    nvme_read_bytes_per_s: float
    nvme_write_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What real kernels reach; see the table in the module's docstring.

    Shares are of the figure they belong to, factors multiply time, and `matmul_size` is in
    elements.
    """

    matmul_share: float
    matmul_size: float
    misaligned_matmul: float
    attention_share: float
    misaligned_head: float
    low_precision_share: float
    grouped_matmul_share: float
    convolution_share: float
    memory_share: float
    launch_s: float
    link_share: float
    network_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a figure comes from.

    Attributes:
        text: Datasheet and date, or ``prior:``, ``fitted on`` or ``measured on`` something.
        low: Smallest plausible value in SI, where the figure states a range.
        high: Largest plausible value in SI, where the figure states a range.
    """

    text: str
    low: float | None = None
    high: float | None = None

    @property
    def fitted(self) -> bool:
        """Whether a fit set the value."""
        return self.text.startswith("fitted on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of the catalogue, in SI units.

    Attributes:
        name: Name in the catalogue.
        kind: ``"gpu"`` or ``"cpu"``.
        peak_flops_per_s: Number format (``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"fp8"``,
            ``"fp4"``, ``"int8"``, ``"fp64"``) to dense peak rate; formats the device lacks are
            absent.
        memory_bytes: Device memory as installed.
        driver_bytes: What of it the driver keeps, before any process starts.
        memory_bytes_per_s: Peak memory bandwidth.
        link: The device-to-device link.
        host_bytes_per_s: Link to the host, in one direction.
        host_latency_s: One transfer over the link to the host.
        node: The usual machine around it.
        efficiency: What real kernels reach.
        sources: Dotted figure, e.g. ``"memory.memory_gib"``, to its source.
    """

    name: str
    kind: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: int
    driver_bytes: int
    memory_bytes_per_s: float
    link: Link
    host_bytes_per_s: float
    host_latency_s: float
    node: NodeDefaults
    efficiency: Efficiency
    sources: Mapping[str, Source] = field(compare=False, repr=False, default_factory=dict)

    @property
    def usable_bytes(self) -> int:
        """Device memory that processes can have."""
        return self.memory_bytes - self.driver_bytes

    def peak(self, number: str) -> float:
        """Dense peak rate in flop/s for a number format or a torch dtype.

        A format that the device lacks runs in the next wider one it has.

        Args:
            number: ``"bf16"``, ``"bfloat16"``, ``"float8_e4m3fn"``, ...

        Raises:
            ClusterError: If the format is unknown.
        """
        wanted = number.removeprefix("torch.")
        wanted = _DTYPES.get(wanted, "fp8" if wanted.startswith("float8") else wanted)
        if wanted not in _WIDER:
            raise ClusterError(
                f"unknown number format {number!r}", expected="one of " + ", ".join(_WIDER)
            )
        while wanted not in self.peak_flops_per_s:
            wanted = _WIDER[wanted]
        return self.peak_flops_per_s[wanted]


_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "uint8": "int8",
}
# A format -> the next one that can stand in for it. Devices all have fp32; double precision
# without a figure is taken as fp32, which flatters it.
_WIDER = {
    "fp4": "fp8", "fp8": "bf16", "int8": "fp16", "bf16": "fp32", "fp16": "fp32",
    "tf32": "fp32", "fp64": "fp32", "fp32": "fp32",
}  # fmt: skip


def _share(key: str) -> Figure:
    return Figure(key=key, low=0.01, high=1.0)


SECTIONS: dict[str, tuple[Figure, ...]] = {
    "peak_dense": (
        Figure(key="fp32_tflop_per_s", low=0.001, high=1e3),
        *(
            Figure(key=f"{name}_tflop_per_s", low=0.001, high=1e5, required=False)
            for name in ("fp64", "tf32", "bf16", "fp16", "fp8", "fp4")
        ),
        Figure(key="int8_top_per_s", low=0.001, high=1e5, required=False),
    ),
    "memory": (
        Figure(key="memory_gib", low=0.25, high=65536),
        Figure(key="driver_mib", low=0, high=16384),
        Figure(key="bandwidth_tb_per_s", low=0.001, high=100),
    ),
    "link": (
        Figure(key="gb_per_s_per_direction", low=0.01, high=10000),
        Figure(key="peer_gb_per_s_per_direction", low=0.01, high=10000),
        Figure(key="latency_us", low=0.01, high=10000),
        Figure(key="start_us", low=0, high=100000),
        Figure(key="domain_devices", low=1, high=100000, whole=True),
    ),
    "host": (
        Figure(key="gb_per_s_per_direction", low=0.01, high=10000),
        Figure(key="latency_us", low=0, high=10000),
    ),
    "node": (
        Figure(key="devices", low=1, high=1024, whole=True),
        Figure(key="nics", low=1, high=64, whole=True),
        Figure(key="nic_gbit_per_s", low=0.1, high=10000),
        Figure(key="network_latency_us", low=0.01, high=100000),
        Figure(key="memory_gib", low=0.25, high=65536),
        Figure(key="nvme_tb", low=0, high=1000),
        Figure(key="nvme_read_gb_per_s", low=0, high=1000),
        Figure(key="nvme_write_gb_per_s", low=0, high=1000),
    ),
    "efficiency": (
        _share("matmul_share"),
        Figure(key="matmul_size", low=0, high=10000),
        Figure(key="misaligned_matmul", low=1, high=100),
        _share("attention_share"),
        Figure(key="misaligned_head", low=1, high=100),
        _share("low_precision_share"),
        _share("grouped_matmul_share"),
        _share("convolution_share"),
        _share("memory_share"),
        Figure(key="launch_us", low=0, high=1000),
        _share("link_share"),
        _share("network_share"),
    ),
}
"""Sections of a device file, and the figures each must or may have."""


def device_names() -> tuple[str, ...]:
    """Names of all devices of the catalogue, sorted."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "aliases"))


@functools.cache
def aliases() -> Mapping[str, str]:
    """Friendly names and the devices they stand for, such as ``H100`` for ``H100-SXM``."""
    table = read_yaml(FOLDER / "aliases.yaml", kind="list of aliases")
    return {name: table.text(name) for name in table}


@functools.cache
def canonical_name(name: str) -> str:
    """Name in the catalogue of a device or an alias, upper and lower case being the same.

    Raises:
        ClusterError: If there is no such device, with the names that are close.
    """
    names = device_names()
    if name in names:
        return name
    by_lower = {alias.lower(): device for alias, device in aliases().items()}
    by_lower |= {device.lower(): device for device in names}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    close = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.5)
    meant = sorted({by_lower[match] for match in close})
    raise ClusterError(
        f"unknown device {name!r}",
        expected="one of " + ", ".join(names),
        fix="did you mean " + " or ".join(map(repr, meant)) + "?" if meant else None,
    )


@functools.cache
def load_device(name: str) -> Device:
    """The device called `name`, an alias being as good.

    Raises:
        ClusterError: If there is no such device, or its file is malformed.
    """
    device = canonical_name(name)
    return read_device(FOLDER / f"{device}.yaml")


def read_device(path: Path) -> Device:
    """The device that a file of the catalogue's format describes.

    Raises:
        ClusterError: If the file is missing or malformed; with its line.
    """
    table = read_yaml(path, kind="device file")
    keys = ("name", "kind", "sources", *SECTIONS)
    table.check_keys(keys, keys)
    sources = table.table("sources")
    known = {key: sources.text(key) for key in sources}
    values: dict[str, dict[str, Any]] = {}
    origins: dict[str, Source] = {}
    for section, figures in SECTIONS.items():
        part = table.table(section)
        extra = _EXTRA.get(section, ())
        required = [figure.key for figure in figures if figure.required]
        part.check_keys((*(figure.key for figure in figures), *extra), (*required, *extra))
        values[section] = {key: part.entries[key] for key in extra}
        for figure in figures:
            if figure.key in part:
                value, origin = _read_figure(part, figure, known, section == "efficiency")
                values[section][figure.name] = value
                origins[f"{section}.{figure.key}"] = origin
    name, kind = table.text("name"), table.text("kind")
    if kind not in ("gpu", "cpu"):
        raise ClusterError(f"kind is {kind!r}", expected="gpu or cpu", where=table.where("kind"))
    return _build(name, kind, values, origins)


_EXTRA = {"link": ("kind", "spans_nodes")}


def _read_figure(
    part: Table, figure: Figure, known: Mapping[str, str], ranged: bool
) -> tuple[float, Source]:
    entry = part.table(figure.key)
    allowed = ("value", "source", "range") if ranged else ("value", "source")
    entry.check_keys(allowed, allowed)
    text = entry.text("source")
    if text in known:
        text = known[text]
    elif not text.startswith(_MARKS):
        raise ClusterError(
            f"source of {figure.key} is {text!r}",
            expected=f"one of {', '.join(known)}, or text that begins with {' or '.join(_MARKS)}",
            where=entry.where("source"),
        )
    value = entry.number(figure, "value")
    if not ranged:
        return value, Source(text=text)
    bounds = entry.entries["range"]
    if not (isinstance(bounds, list) and len(bounds) == 2) or not (
        bounds[0] <= entry.entries["value"] <= bounds[1]
    ):
        raise ClusterError(
            f"range of {figure.key} is {bounds!r}",
            expected="[low, high] around the value",
            where=entry.where("range"),
        )
    return value, Source(text=text, low=figure.to_si(bounds[0]), high=figure.to_si(bounds[1]))


def _build(
    name: str, kind: str, values: Mapping[str, Mapping[str, Any]], origins: Mapping[str, Source]
) -> Device:
    peaks = {key.removesuffix("_flops_per_s"): rate for key, rate in values["peak_dense"].items()}
    memory = values["memory"]
    return Device(
        name=name,
        kind=kind,
        peak_flops_per_s=Rates(peaks),
        memory_bytes=memory["memory_bytes"],
        driver_bytes=memory["driver_bytes"],
        memory_bytes_per_s=memory["bandwidth_bytes_per_s"],
        link=Link(**values["link"]),
        host_bytes_per_s=values["host"]["bytes_per_s"],
        host_latency_s=values["host"]["latency_s"],
        node=NodeDefaults(**values["node"]),
        efficiency=Efficiency(**values["efficiency"]),
        sources=dict(origins),
    )


def override(device: Device, table: Table) -> Device:
    """`device` with the figures of `table` in place of its own.

    Args:
        device: A device of the catalogue.
        table: Sections and keys as in a device file, the values being plain numbers.

    Raises:
        ClusterError: If a section, a key or a value is wrong; with its line.
    """
    table.check_keys(SECTIONS)
    origins = dict(device.sources)
    for section in table:
        part = table.table(section)
        part.check_keys(figure.key for figure in SECTIONS[section])
        changed = {
            figure.name: part.number(figure) for figure in SECTIONS[section] if figure.key in part
        }
        for key in part:
            old = origins.get(f"{section}.{key}")
            origins[f"{section}.{key}"] = Source(
                text=f"measured on this cluster: {part.where(key)}",
                low=old.low if old else None,
                high=old.high if old else None,
            )
        device = _replace_section(device, section, changed)
    return dataclasses.replace(device, sources=origins)


def _replace_section(device: Device, section: str, changed: Mapping[str, Any]) -> Device:
    if section == "peak_dense":
        peaks = {key.removesuffix("_flops_per_s"): rate for key, rate in changed.items()}
        rates = Rates({**device.peak_flops_per_s, **peaks})
        return dataclasses.replace(device, peak_flops_per_s=rates)
    if section in ("link", "node", "efficiency"):
        part = dataclasses.replace(getattr(device, section), **changed)
        return dataclasses.replace(device, **{section: part})
    return dataclasses.replace(
        device, **{_FLAT[f"{section}.{key}"]: value for key, value in changed.items()}
    )


_FLAT = {
    "memory.memory_bytes": "memory_bytes",
    "memory.driver_bytes": "driver_bytes",
    "memory.bandwidth_bytes_per_s": "memory_bytes_per_s",
    "host.bytes_per_s": "host_bytes_per_s",
    "host.latency_s": "host_latency_s",
}
