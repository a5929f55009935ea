"""Clusters: short form, files, unequal nodes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from autopar.cost_models import cluster as cluster_module
from autopar.cost_models.cluster import ClusterSpec, NodeGroup, Tier
from autopar.cost_models.hardware import load_device
from autopar.errors import ClusterError

FULL = """
groups:
  - device: A100-80-SXM
    nodes: 16
    devices_per_node: 8
    node_usd_per_hour: 12.5
    source: measured on a rented cluster
    node: {nics: 4, nic_gbit_per_s: 100, memory_gib: 1024}
    efficiency: {network_share: 0.7}
  - device: V100-16
    devices_per_node: 4
    node_usd_per_hour: 3
tiers:
  - {nodes: 4, oversubscription: 2, latency_us: 18}
  - {nodes: 8, oversubscription: 1.5, latency_us: 21.5}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


@pytest.mark.parametrize(
    "text", ["8x8xH100-SXM", "4xcpu", "2x8xA100+4xV100", "2xRTX4090", "18x4xGB200"]
)
def test_text_and_file_both_ways(text: str, file: Path):
    spec = ClusterSpec.parse(text)
    assert ClusterSpec.parse(str(spec)) == spec
    spec.save(file)
    assert ClusterSpec.load(file) == spec
    assert hash(ClusterSpec.load(file)) == hash(spec)


def test_names_of_one_device_are_one_cluster():
    assert ClusterSpec.parse("8x8xH100") == ClusterSpec.parse("8x8xh100-80GB")
    assert ClusterSpec.parse("8x8xH100") != ClusterSpec.parse("8x8xH200")
    assert ClusterSpec.parse("8xA100") != ClusterSpec.parse("2x4xA100")


def test_a_file_with_everything(file: Path):
    file.write_text(FULL)
    spec = ClusterSpec.load(file)
    assert (spec.num_devices, spec.nodes, str(spec)) == (132, 17, "16x8xA100-80-SXM+4xV100-16")
    assert spec.usd_per_hour == 16 * 12.5 + 3
    assert not spec.is_uniform
    device = spec.hardware(127)
    assert device.name == "A100-80-SXM"
    assert (device.node.nics, device.node.nic_bytes_per_s) == (4, 12.5e9)
    assert device.node.memory_bytes == 2**40
    assert device.efficiency.network_share == 0.7
    assert device.sources["node.nics"].text == "measured on a rented cluster"
    assert spec.hardware(128).name == "V100-SXM2-16"
    assert [spec.node_of(rank) for rank in (0, 7, 8, 127, 128, 131)] == [0, 0, 1, 15, 16, 16]
    assert spec.tiers == (
        Tier(nodes=4, oversubscription=2, latency_s=18e-6),
        Tier(nodes=8, oversubscription=1.5, latency_s=21.5e-6),
    )
    spec.save(file)
    assert ClusterSpec.load(file) == spec
    assert yaml.safe_load(file.read_text())["tiers"][1] == {
        "nodes": 8, "oversubscription": 1.5, "latency_us": 21.5,
    }  # fmt: skip


def test_json_is_yaml(file: Path):
    file.write_text('{"device": "cpu", "devices_per_node": 4, "node": {"nics": 2}}')
    assert ClusterSpec.load(file).hardware().node.nics == 2


def test_the_short_form_takes_the_usual_machine_in_proportion():
    full, half = (ClusterSpec.parse(f"2x{n}xH100").hardware().node for n in (8, 4))
    assert (full.nics, full.nic_bytes_per_s) == (8, 50e9)
    assert (half.nics, half.nic_bytes_per_s, half.devices) == (4, 50e9, 4)
    assert half.memory_bytes == full.memory_bytes // 2
    assert half.nvme_bytes == full.nvme_bytes // 2
    assert ClusterSpec.local(1).hardware().node.nics == 1
    assert full == load_device("H100").node
    assert ClusterSpec.parse("8xH100").usd_per_hour is None


def test_unequal_nodes_have_no_one_device():
    spec = ClusterSpec.parse("2x8xA100+4xV100")
    for name in ("device", "devices_per_node"):
        with pytest.raises(ClusterError, match=f"{name} differs between the nodes"):
            getattr(spec, name)
    more = ClusterSpec.parse("8xA100+2x8xA100-80-SXM")
    assert more.is_uniform
    assert (more.devices_per_node, more.nodes) == (8, 3)


def test_figures_can_be_replaced_by_measured_ones(file: Path):
    spec = ClusterSpec.parse("2x8xA100+4xV100")
    other = spec.with_figures({"efficiency.link_share": 0.5, "link.start_us": 12}, source="fit")
    assert {other.hardware(rank).efficiency.link_share for rank in (0, 19)} == {0.5}
    assert other.hardware(0).link.start_s == pytest.approx(12e-6)
    assert other.hardware(0).memory_bytes == spec.hardware(0).memory_bytes
    again = other.with_figures({"link.start_us": 13}, source="second fit")
    assert again.hardware(0).efficiency.link_share == 0.5
    assert again.groups[0].source == "fit; second fit"
    again.save(file)
    assert ClusterSpec.load(file) == again
    with pytest.raises(ClusterError, match=r"unknown figure 'efficiency\.speed'"):
        spec.with_figures({"efficiency.speed": 3}, source="x")
    with pytest.raises(ClusterError, match="not plausible"):
        spec.with_figures({"efficiency.link_share": 3}, source="x")


@pytest.mark.parametrize(
    ("content", "what", "where", "fix"),
    [
        ("device: A100\ndevices_per_node: 8\nnics: 4", "unknown key 'nics'", ":3", "under 'node'"),
        ("device: A100\ndevices_per_node: 8\nnode: 4", "node is 4", ":3", None),
        ("device: A100\ndevices_per_node: 8\nnode:\n  nic_gbps: 4", "unknown key 'nic_gbps'",
         ":4 (node.nic_gbps)", "'nic_gbit_per_s', and give the value in Gbit/s"),
        ("device: A100\ndevices_per_node: 8\nmemory:\n  memory_gib: 8.6e10", "not plausible",
         ":4 (memory.memory_gib)", None),
        ("device: A10O\ndevices_per_node: 8", "unknown device 'A10O'", ":1 (device)", "A10G"),
        ("device: A100\ndevices_per_node: 0", "devices_per_node is 0", ":2", None),
        ("device: A100\ndevices_per_node: 8\nnodes: 1.5", "nodes is 1.5", ":3", None),
        ("device: A100\ndevices_per_node: true", "devices_per_node is True", ":2", None),
        ("device: A100\ndevices_per_node: 8\nnode:\n  nics: .nan", "nics is nan", ":4", None),
        ("groups: 5", "groups is no list", ":1", None),
        ("groups: [5]", "groups is no list", ":1", None),
        ("groups: []", "a cluster without nodes", None, None),
        ("groups:\n- device: cpu\n  devices_per_node: 2\n  racks: 2", "unknown key 'racks'",
         ":4 (groups[0].racks)", None),
        ("device: cpu\ndevices_per_node: 2\ntiers: [{nodes: 2}]", "missing key 'oversubscription'",
         ":3 (tiers[0])", None),
        ("device: cpu\ndevices_per_node: 2\ntiers:\n"
         "- {nodes: 4, oversubscription: 1, latency_us: 9}\n"
         "- {nodes: 6, oversubscription: 1, latency_us: 9}", "a tier of 6 nodes above one of 4",
         None, None),
        ("device: cpu\ndevices_per_node: 2\nsource: ''", "source is ''", ":3", None),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused(file: Path, content, what, where, fix):
    file.write_text(content)
    with pytest.raises(ClusterError) as caught:
        ClusterSpec.load(file)
    assert what in caught.value.what
    if where:
        assert caught.value.where is not None and f"{file}{where}" in caught.value.where
    if fix:
        assert caught.value.fix is not None and fix in caught.value.fix


def test_other_mistakes_are_explained(tmp_path: Path):
    spec = ClusterSpec.local(2)
    with pytest.raises(ClusterError, match="rank 2 is not in cluster 2xcpu"):
        spec.hardware(2)
    with pytest.raises(ClusterError, match="rank -1"):
        spec.node_of(-1)
    with pytest.raises(ClusterError, match="cannot write cluster file"):
        spec.save(tmp_path / "none" / "cluster.yaml")
    with pytest.raises(ClusterError, match="device is 5"):
        NodeGroup(device=5, devices_per_node=2)
    with pytest.raises(ClusterError, match="cannot read cluster"):
        ClusterSpec.parse("2x8xA100+")


def test_the_documented_file_loads(file: Path):
    text = cluster_module.__doc__
    assert text is not None
    blocks = [part.strip("\n").split("\n\n")[0] for part in text.split("::\n")[1:]]
    for block in blocks:
        file.write_text(block)
        spec = ClusterSpec.load(file)
        assert spec.num_devices in (128, 20)
        spec.save(file)
        assert ClusterSpec.load(file) == spec
    assert len(blocks) == 2
