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

Two figures are only for CPUs, and only measured: ``memory.cache_tb_per_s`` and ``node.cores``.

The efficiency parameters are the only figures that a fit may move; each has a range in which it
stays plausible:

==========================  =====================================================================
matmul_share                share of the dense peak that a large, aligned matmul reaches
matmul_size                 elements d in 1 / (1 + d (2/sqrt(m n) + 1/(2 k))): sides at which tiles,
                            waves and the pipeline over k are well filled
misaligned_matmul           time factor of a matmul with a side that is no multiple of a tile
attention_share             share of the dense peak of fused attention with heads of 128
misaligned_head             time factor of attention with a head dim that is no multiple of 8
low_precision_share         share of the fp8 or fp4 peak relative to that of bf16
grouped_matmul_share        share of a grouped matmul relative to a plain one of its mean size
convolution_share           rate of a convolution relative to the matmul it equals
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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autopar.cost_models.device import Device, Efficiency, Link, Machine, Rates, Source
from autopar.cost_models.figures import Figure, Table, read_yaml
from autopar.errors import ClusterError

__all__ = [
    "SECTIONS", "Device", "Efficiency", "Figures", "Link", "Machine", "Rates", "Source", "aliases",
    "canonical_name", "device_names", "figure_at", "load_device", "override", "plausible",
    "read_device", "read_figures", "value_of",
]  # fmt: skip

FOLDER = Path(__file__).parent / "devices"
Figures = tuple[tuple[str, float], ...]
"""``(section.key, value in the unit of the key)`` pairs."""
_MARKS = ("prior:", "fitted on", "measured on")


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
        Figure(key="cache_tb_per_s", low=0.001, high=1000, required=False),
    ),
    "link": (
        Figure(key="gb_per_s_per_direction", low=0.01, high=10000),
        Figure(key="peer_gb_per_s_per_direction", low=0.01, high=10000),
        Figure(key="latency_us", low=0.01, high=10000),
        Figure(key="start_us", low=0, high=100000),
        Figure(key="all_to_all_start_us", low=0, high=100000),
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
        Figure(key="cores", low=1, high=4096, required=False, whole=True),
    ),
    "efficiency": (
        _share("matmul_share"),
        Figure(key="matmul_size", low=0, high=10000),
        Figure(key="misaligned_matmul", low=1, high=100),
        _share("attention_share"),
        Figure(key="misaligned_head", low=1, high=100),
        _share("low_precision_share"),
        _share("grouped_matmul_share"),
        Figure(key="convolution_share", low=0.01, high=2.0),
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


def load_device(name: str) -> Device:
    """The device called `name`, an alias being as good.

    Raises:
        ClusterError: If there is no such device, or its file is malformed.
    """
    return _load(canonical_name(name))


@functools.cache
def _load(name: str) -> Device:
    return read_device(FOLDER / f"{name}.yaml")


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
        extra = _WORDS if section == "link" else {}
        required = [figure.key for figure in figures if figure.required]
        part.check_keys((*(figure.key for figure in figures), *extra), (*required, *extra))
        values[section] = {key: _read_word(part, key, extra[key]) for key in extra}
        for figure in figures:
            if figure.key in part:
                value, origin = _read_figure(part, figure, known, section == "efficiency")
                values[section][figure.name] = value
                origins[f"{section}.{figure.key}"] = origin
    kind = _read_word(table, "kind", ("gpu", "cpu"))
    return _build(table.text("name"), kind, values, origins)


# What a link has besides figures, and what that may be.
_WORDS = {"kind": ("nvlink", "xgmi", "pcie", "memory"), "spans_nodes": (True, False)}


def _read_word(part: Table, key: str, allowed: tuple[Any, ...]) -> Any:
    value = part.entries[key]
    if not isinstance(value, str | bool) or value not in allowed:
        expected = " or ".join(str(word).lower() for word in allowed)
        raise ClusterError(f"{key} is {value!r}", expected=expected, where=part.where(key))
    return value


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
    if isinstance(bounds, list) and len(bounds) == 2:
        low, high = (figure.read(bound, where=entry.where("range")) for bound in bounds)
        if low <= value <= high:
            return value, Source(text=text, low=low, high=high)
    raise ClusterError(
        f"range of {figure.key} is {bounds!r}",
        expected="[low, high] around the value",
        where=entry.where("range"),
    )


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
        cache_bytes_per_s=memory.get("cache_bytes_per_s", 0.0),
        link=Link(**values["link"]),
        host_bytes_per_s=values["host"]["bytes_per_s"],
        host_latency_s=values["host"]["latency_s"],
        node=Machine(**values["node"]),
        efficiency=Efficiency(**values["efficiency"]),
        sources=dict(origins),
    )


def figure_at(path: str) -> Figure:
    """The figure called ``"section.key"``, such as ``"memory.bandwidth_tb_per_s"``.

    Raises:
        ClusterError: If there is no such figure.
    """
    section, _, key = path.partition(".")
    for figure in SECTIONS.get(section, ()):
        if figure.key == key:
            return figure
    known = [f"{name}.{figure.key}" for name, figures in SECTIONS.items() for figure in figures]
    close = difflib.get_close_matches(path, known, n=1)
    raise ClusterError(
        f"unknown figure {path!r}",
        expected='a section and a key of a device file, e.g. "memory.memory_gib"',
        fix=f"did you mean {close[0]!r}?" if close else None,
    )


def value_of(device: Device, path: str) -> float:
    """A figure of a device by its ``"section.key"``, in the unit of the key; 0 if it has none.

    Raises:
        ClusterError: If there is no such figure.
    """
    section, _, _ = path.partition(".")
    figure = figure_at(path)
    if section == "peak_dense":
        name = figure.name.removesuffix("_flops_per_s")
        return figure.from_si(device.peak_flops_per_s.get(name, 0.0))
    flat = _FLAT.get(f"{section}.{figure.name}")
    holder, name = (device, flat) if flat else (getattr(device, section), figure.name)
    return figure.from_si(getattr(holder, name))


def plausible(device: Device, path: str) -> tuple[float, float]:
    """Smallest and largest plausible value of a figure of a device, in the unit of its key.

    Raises:
        ClusterError: If there is no such figure.
    """
    figure, source = figure_at(path), device.sources.get(path)
    low = figure.low if source is None or source.low is None else figure.from_si(source.low)
    high = figure.high if source is None or source.high is None else figure.from_si(source.high)
    return low, high


def read_figures(table: Table, sections: Iterable[str]) -> Figures:
    """The figures that a cluster file gives instead of a device's own.

    Args:
        table: A mapping that may hold sections as in a device file, the values plain numbers.
        sections: Keys of `table` to read.

    Raises:
        ClusterError: If a key or a value is wrong; with its line.
    """
    found: list[tuple[str, float]] = []
    for section in sections:
        part = table.table(section)
        part.check_keys(figure.key for figure in SECTIONS[section])
        for figure in SECTIONS[section]:
            if figure.key in part:
                part.number(figure)
                found.append((f"{section}.{figure.key}", part.entries[figure.key]))
    return tuple(found)


def override(device: Device, figures: Figures, source: str) -> Device:
    """`device` with other `figures`.

    Args:
        device: A device of the catalogue.
        figures: ``(section.key, value in the unit of the key)`` pairs.
        source: Where they come from.

    Raises:
        ClusterError: If there is no such figure, or its value is not plausible.
    """
    origins = dict(device.sources)
    changed: dict[str, dict[str, float]] = {}
    for path, value in figures:
        figure = figure_at(path)
        changed.setdefault(path.partition(".")[0], {})[figure.name] = figure.read(value, where=path)
        old = origins.get(path)
        origins[path] = Source(
            text=source, low=old.low if old else None, high=old.high if old else None
        )
    for section, values in changed.items():
        device = _replace_section(device, section, values)
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
    "memory.cache_bytes_per_s": "cache_bytes_per_s",
    "host.bytes_per_s": "host_bytes_per_s",
    "host.latency_s": "host_latency_s",
}
