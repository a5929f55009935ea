"""Every figure that a file may hold is moved, and the right quantity moves the right way.

`FIELDS` names, for each, the loaded quantity, what one unit of its key is in SI, and a prediction
that must rise (+1) or fall (-1) with it. A new figure without an entry fails the first test.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from autopar.cost_models import cluster as cluster_module
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.collectives import axis_price, send_prices
from autopar.cost_models.evaluate import update_bandwidth
from autopar.cost_models.figures import Figure, split_key
from autopar.cost_models.hardware import FOLDER, SECTIONS, Device, read_device
from autopar.errors import ClusterError
from autopar.sharding.mesh import Mesh

BASE = "B200"  # has every figure
PAYLOAD = 1e8


@dataclass(frozen=True)
class Field:
    loaded: Callable[[Device], float]
    si: float
    predicted: Callable[[ClusterSpec], float]
    sign: int


def in_node(spec: ClusterSpec) -> float:
    return axis_price("all_reduce", PAYLOAD, spec, Mesh.parse("dp=2,tp=8"), ("tp",)).seconds


def between_experts(spec: ClusterSpec) -> float:
    return axis_price("all_to_all", PAYLOAD, spec, Mesh.parse("dp=2,ep=8"), ("ep",)).seconds


def of_pair(spec: ClusterSpec) -> float:
    return send_prices(PAYLOAD, spec, Mesh.parse("pp=2,dp=8"), "pp")[0].seconds


def between_nodes(spec: ClusterSpec) -> float:
    return axis_price("all_gather", PAYLOAD, spec, Mesh.parse("dp=2,tp=8"), ("dp",)).seconds


def in_halves(spec: ClusterSpec) -> float:
    """Across the domains of a node, which are made half as large."""
    spec = spec.with_figures({"link.domain_devices": 4}, source="test")
    return axis_price("all_gather", PAYLOAD, spec, Mesh.parse("tp=16"), ("tp",)).seconds


def in_double_node(spec: ClusterSpec) -> float:
    group = cluster_module.NodeGroup(
        device=BASE, devices_per_node=16, figures=spec.groups[0].figures
    )
    wide = ClusterSpec(groups=(group,))
    return axis_price("all_gather", PAYLOAD, wide, Mesh.parse("tp=16"), ("tp",)).seconds


def wired_pair(spec: ClusterSpec) -> float:
    return axis_price("all_gather", PAYLOAD, spec, Mesh.parse("dp=8,tp=2"), ("tp",)).seconds


def of_device(quantity: Callable[[Device], float]) -> Callable[[ClusterSpec], float]:
    return lambda spec: quantity(spec.hardware())


def matmul_s(number: str) -> Callable[[ClusterSpec], float]:
    return of_device(lambda device: 1e12 / device.peak(number))


def peak(number: str, si: float = 1e12) -> Field:
    return Field(lambda device: device.peak_flops_per_s[number], si, matmul_s(number), -1)


def efficiency(name: str, si: float = 1.0) -> Field:
    read = lambda device: getattr(device.efficiency, name)  # noqa: E731
    return Field(read, si, of_device(read), 1)


def machine(name: str, si: float = 1.0) -> Field:
    read = lambda device: getattr(device.node, name)  # noqa: E731
    return Field(read, si, of_device(read), 1)


FIELDS: dict[str, Field] = {
    **{f"peak_dense.{n}_tflop_per_s": peak(n)
       for n in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4")},
    "peak_dense.int8_top_per_s": peak("int8"),
    "memory.memory_gib": Field(
        lambda d: d.memory_bytes, 2**30, of_device(lambda d: d.usable_bytes), 1),
    "memory.driver_mib": Field(
        lambda d: d.driver_bytes, 2**20, of_device(lambda d: d.usable_bytes), -1),
    "memory.bandwidth_tb_per_s": Field(
        lambda d: d.memory_bytes_per_s, 1e12, of_device(lambda d: 1 / d.memory_bytes_per_s), -1),
    "link.gb_per_s_per_direction": Field(lambda d: d.link.bytes_per_s, 1e9, in_node, -1),
    "link.peer_gb_per_s_per_direction": Field(
        lambda d: d.link.peer_bytes_per_s, 1e9, wired_pair, -1),
    "link.latency_us": Field(lambda d: d.link.latency_s, 1e-6, in_node, 1),
    "link.start_us": Field(lambda d: d.link.start_s, 1e-6, in_node, 1),
    "link.all_to_all_start_us": Field(
        lambda d: d.link.all_to_all_start_s, 1e-6, between_experts, 1),
    "link.domain_devices": Field(lambda d: d.link.domain_devices, 1, in_double_node, -1),
    "host.gb_per_s_per_direction": Field(lambda d: d.host_bytes_per_s, 1e9, in_halves, -1),
    "host.latency_us": Field(lambda d: d.host_latency_s, 1e-6, in_halves, 1),
    "node.devices": machine("devices"),
    "node.nics": Field(lambda d: d.node.nics, 1, between_nodes, -1),
    "node.nic_gbit_per_s": Field(lambda d: d.node.nic_bytes_per_s, 1e9 / 8, of_pair, -1),
    "node.network_latency_us": Field(lambda d: d.node.network_latency_s, 1e-6, of_pair, 1),
    "node.memory_gib": machine("memory_bytes", 2**30),
    "node.nvme_tb": machine("nvme_bytes", 1e12),
    "node.nvme_read_gb_per_s": machine("nvme_read_bytes_per_s", 1e9),
    "node.nvme_write_gb_per_s": machine("nvme_write_bytes_per_s", 1e9),
    **{f"efficiency.{name}": efficiency(name)
       for name in ("matmul_share", "matmul_size", "misaligned_matmul", "attention_share",
                    "misaligned_head", "low_precision_share", "grouped_matmul_share",
                    "convolution_share", "memory_share")},
    "efficiency.launch_us": efficiency("launch_s", 1e-6),
    "efficiency.link_share": Field(lambda d: d.efficiency.link_share, 1, in_node, -1),
    "efficiency.network_share": Field(lambda d: d.efficiency.network_share, 1, between_nodes, -1),
}  # fmt: skip
FIGURES = {
    f"{section}.{figure.key}": figure for section in SECTIONS for figure in SECTIONS[section]
}


# Figures that only measured machines have, none of them a GPU.
MEASURED = {
    "memory.cache_tb_per_s": Field(
        lambda d: d.cache_bytes_per_s, 1e12, of_device(lambda d: 1 / update_bandwidth(d)), -1),
    "node.cores": machine("cores"),
}  # fmt: skip


def test_every_figure_has_an_entry():
    assert set(FIELDS) | set(MEASURED) == set(FIGURES)


@pytest.mark.parametrize("path", MEASURED)
def test_a_measured_figure_moves_what_it_should(path: str):
    field, value = MEASURED[path], 2 if FIGURES[path].whole else 0.02
    specs = [
        ClusterSpec.parse("4xcpu").with_figures({path: value * factor}, source="test")
        for factor in (1, 2)
    ]
    loaded = [field.loaded(spec.hardware()) for spec in specs]
    assert loaded == pytest.approx([value * field.si, 2 * value * field.si], rel=1e-9)
    assert (field.predicted(specs[1]) - field.predicted(specs[0])) * field.sign > 0


def moved(path: str, old: float) -> float:
    figure = FIGURES[path]
    if figure.whole:
        return 2 * old
    # A peer cannot get more than all links together, which is what it has here.
    up = 1.1 * old <= figure.high and path != "link.peer_gb_per_s_per_direction"
    return round(1.1 * old if up else 0.9 * old, 12)


@pytest.mark.parametrize("path", FIELDS)
def test_a_figure_moves_what_it_should(path: str, tmp_path: Path):
    section, key = path.split(".")
    field, text = FIELDS[path], (FOLDER / f"{BASE}.yaml").read_text()
    head, part = text.split(f"\n{section}:\n")
    found = re.search(rf"^  {key}: \{{value: ([\d.]+)", part, re.MULTILINE)
    assert found is not None
    old = float(found[1])
    if FIGURES[path].whole:
        old = int(old)
    new = moved(path, old)
    file = tmp_path / f"{BASE}.yaml"
    changed = part[: found.start(1)] + repr(new) + part[found.end(1) :]
    # A range that is too narrow for the change is made wider.
    narrow = rf"(  {key}: .*range: )\[[^]]*\]"
    changed = re.sub(narrow, rf"\1[{min(old, new)}, {max(old, new)}]", changed)
    file.write_text(f"{head}\n{section}:\n{changed}")
    before, after = read_device(FOLDER / f"{BASE}.yaml"), read_device(file)
    assert field.loaded(before) == pytest.approx(old * field.si, rel=1e-9)
    assert field.loaded(after) == pytest.approx(new * field.si, rel=1e-9)
    spec = ClusterSpec.parse(f"2x8x{BASE}")
    given = spec.with_figures({path: new}, source="test")
    assert field.loaded(given.hardware()) == pytest.approx(new * field.si, rel=1e-9)
    change = field.predicted(given) - field.predicted(spec)
    assert change * field.sign * (new - old) > 0, (field.predicted(spec), field.predicted(given))


@pytest.mark.parametrize("path", FIELDS)
def test_another_unit_is_refused_with_the_right_key(path: str, tmp_path: Path):
    section, key = path.split(".")
    stem, unit = split_key(key)
    wrong = {
        "tflop_per_s": "gflop_per_s", "top_per_s": "tflops", "gib": "gb", "mib": "mb", "tb": "gib",
        "tb_per_s": "gb_per_s", "gb_per_s_per_direction": "gb_per_s", "us": "ms",
        "gbit_per_s": "gb_per_s", "gb_per_s": "gbps", "": "percent",
    }[unit]  # fmt: skip
    name = "_".join(part for part in (stem, wrong) if part)
    file = tmp_path / "cluster.yaml"
    file.write_text(f"device: {BASE}\ndevices_per_node: 8\n{section}:\n  {name}: 1\n")
    with pytest.raises(ClusterError, match=f"unknown key '{name}'") as caught:
        ClusterSpec.load(file)
    assert caught.value.where == f"{file}:4 ({section}.{name})"
    assert caught.value.fix is not None and repr(key) in caught.value.fix


TIERED = """
device: {device}
devices_per_node: {devices_per_node}
nodes: {nodes}
node_usd_per_hour: {price}
tiers:
  - nodes: {tier}
    oversubscription: {oversubscription}
    latency_us: {latency}
"""
USUAL = {
    "device": BASE, "devices_per_node": 8, "nodes": 8, "price": 10, "tier": 2,
    "oversubscription": 2, "latency": 20,
}  # fmt: skip


def flat(spec: ClusterSpec) -> float:
    mesh = Mesh((("dp", spec.num_devices),))
    return axis_price("all_gather", PAYLOAD, spec, mesh, ("dp",)).seconds


def across(spec: ClusterSpec) -> float:
    """Between halves of the cluster, every device with its counterpart."""
    mesh = Mesh((("pp", 2), ("dp", spec.num_devices // 2)))
    return axis_price("all_gather", PAYLOAD, spec, mesh, ("pp",)).seconds


def neighbours(spec: ClusterSpec) -> float:
    """Between nodes 0 and 2, 1 and 3, ..."""
    mesh = Mesh((("rest", spec.num_devices // 32), ("dp", 2), ("tp", 16)))
    return axis_price("all_gather", PAYLOAD, spec, mesh, ("dp",)).seconds


CLUSTER_FIELDS: dict[str, tuple[str, object, Callable[[ClusterSpec], float], int]] = {
    "device": ("device", "H100", flat, 1),
    "devices_per_node": ("devices_per_node", 16, lambda s: s.num_devices, 1),
    "nodes": ("nodes", 16, flat, 1),
    "node_usd_per_hour": ("price", 12, lambda s: s.usd_per_hour or 0.0, 1),
    "tiers.nodes": ("tier", 4, neighbours, -1),
    "tiers.oversubscription": ("oversubscription", 4, across, 1),
    "tiers.latency_us": ("latency", 30, across, 1),
}


def test_every_field_of_a_cluster_has_an_entry():
    declared: list[Figure] = [
        cluster_module.DEVICES_PER_NODE, cluster_module.NODES, cluster_module.PRICE
    ]  # fmt: skip
    keys = {figure.key for figure in declared} | {f"tiers.{f.key}" for f in cluster_module.TIER}
    assert set(CLUSTER_FIELDS) == keys | {"device"}
    assert set(cluster_module._GROUP_KEYS) == {"source", "device", *SECTIONS} | {
        figure.key for figure in declared
    }


@pytest.mark.parametrize("name", CLUSTER_FIELDS)
def test_a_field_of_a_cluster_moves_what_it_should(name: str, tmp_path: Path):
    key, new, predicted, sign = CLUSTER_FIELDS[name]
    file = tmp_path / "cluster.yaml"
    results = []
    for values in (USUAL, {**USUAL, key: new}):
        file.write_text(TIERED.format(**values))
        results.append(predicted(ClusterSpec.load(file)))
    assert (results[1] - results[0]) * sign > 0, results
