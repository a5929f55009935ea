"""The catalogue: what its files say, what is loaded, and what is refused."""

from __future__ import annotations

import pickle
import time

import pytest

from autopar.cost_models import hardware
from autopar.cost_models.figures import Figure, split_key
from autopar.cost_models.hardware import SECTIONS, Device, load_device, read_device
from autopar.errors import ClusterError

NAMES = hardware.device_names()
WANTED = {
    "V100-SXM2-16", "V100-SXM2-32", "T4", "A10G", "L4", "L40S", "RTX-3090", "RTX-4090",
    "A100-40-PCIe", "A100-40-SXM", "A100-80-PCIe", "A100-80-SXM", "A800-80-SXM", "H100-PCIe",
    "H100-SXM", "H100-SXM-96", "H800-SXM", "H200-SXM", "GH200", "B200", "GB200", "GB300", "MI250X",
    "MI300X", "cpu",
}  # fmt: skip
# Independent of the files: Tflop/s of bf16 (or fp16) dense, GB/s of memory, GB/s of all links to
# other devices in both directions, as the vendors' pages advertise them.
ADVERTISED = {
    "V100-SXM2-32": (125, 900, 300),
    "A100-40-SXM": (312, 1555, 600),
    "A100-80-SXM": (312, 2039, 600),
    "A800-80-SXM": (312, 2039, 400),
    "H100-SXM": (1979 / 2, 3350, 900),
    "H800-SXM": (1979 / 2, 3350, 400),
    "H200-SXM": (1979 / 2, 4800, 900),
    "B200": (4500 / 2, 7700, 1800),
    "GB200": (360_000 / 72 / 2, 576_000 / 72, 130_000 / 72),
    "GB300": (360_000 / 72 / 2, 576_000 / 72, 130_000 / 72),
    "MI300X": (1307.4, 5300, 896),
    "H100-PCIe": (1513 / 2, 2000, 128),
    "RTX-4090": (165.2, 1008, 64),
}


def test_the_catalogue_is_complete():
    assert set(NAMES) == WANTED


@pytest.mark.parametrize("name", NAMES)
def test_every_device_is_plausible(name):
    device = load_device(name)
    peaks = device.peak_flops_per_s
    assert device.name == name
    assert 0.85 * device.memory_bytes < device.usable_bytes <= device.memory_bytes
    assert peaks.get("bf16", peaks["fp32"]) >= peaks["fp32"]
    assert peaks.get("tf32", peaks["fp32"]) <= peaks.get("bf16", peaks["fp32"])
    if "fp8" in peaks:
        assert peaks["fp8"] == pytest.approx(2 * peaks["bf16"], rel=0.02)
    assert device.link.peer_bytes_per_s <= device.link.bytes_per_s
    assert device.node.nvme_write_bytes_per_s <= device.node.nvme_read_bytes_per_s
    # What is read is what has a source, and what may be fitted has a range around its value.
    figures = {f"{name}.{figure.key}": figure for name, part in SECTIONS.items() for figure in part}
    needed = {path for path, figure in figures.items() if figure.required}
    assert {path for path in needed if "peak_dense" not in path} <= set(device.sources)
    assert set(device.sources) <= set(figures)
    for path, source in device.sources.items():
        assert len(source.text) > 5, path
        assert path.startswith("efficiency") == (source.low is not None), path
    for figure in SECTIONS["efficiency"]:
        source = device.sources[f"efficiency.{figure.key}"]
        assert source.low <= getattr(device.efficiency, figure.name) <= source.high
        assert source.fitted or source.text.startswith(("prior:", "measured on"))


@pytest.mark.parametrize("name", ADVERTISED)
def test_figures_are_the_advertised_ones(name):
    tflop, memory, links = ADVERTISED[name]
    device = load_device(name)
    assert device.peak("bfloat16" if "bf16" in device.peak_flops_per_s else "float16") == (
        pytest.approx(tflop * 1e12, rel=1e-3)
    )
    assert device.memory_bytes_per_s == pytest.approx(memory * 1e9, rel=1e-3)
    assert 2 * device.link.bytes_per_s == pytest.approx(links * 1e9, rel=5e-3)


def test_names_are_friendly():
    assert load_device("A100") is load_device("a100-sxm4") is load_device("A100-80-SXM")
    assert load_device("h100").name == "H100-SXM"
    assert not {alias.lower() for alias in hardware.aliases()} & {name.lower() for name in NAMES}
    for device in hardware.aliases().values():
        assert device in NAMES
    with pytest.raises(ClusterError, match="unknown device 'H10O'") as caught:
        load_device("H10O")
    assert "H100-SXM" in caught.value.fix
    with pytest.raises(ClusterError, match="unknown device 'abacus'"):
        load_device("abacus")


def test_a_format_the_device_lacks_runs_in_the_next_wider_one():
    v100, a100, cpu = load_device("V100"), load_device("A100"), load_device("cpu")
    assert a100.peak("float8_e4m3fn") == a100.peak("bf16") == 312e12
    assert v100.peak("bf16") == v100.peak("fp32") == 15.7e12
    assert cpu.peak("torch.float16") == cpu.peak("float32")
    assert load_device("B200").peak("fp4") == 2 * load_device("B200").peak("fp8")
    with pytest.raises(ClusterError, match="unknown number format 'int3'"):
        a100.peak("int3")


def test_devices_are_values():
    device = load_device("H100")
    assert pickle.loads(pickle.dumps(device)) == device
    assert hash(device) == hash(pickle.loads(pickle.dumps(device)))
    assert "bf16" in repr(device.peak_flops_per_s)
    assert device != load_device("H200")


def test_loading_takes_milliseconds():
    load_device("A100")  # imports yaml
    times = []
    for name in ("H100-SXM", "B200", "MI300X", "cpu"):
        start = time.process_time()
        read_device(hardware.FOLDER / f"{name}.yaml")
        times.append(time.process_time() - start)
    assert min(times) < 0.010


@pytest.mark.parametrize(
    ("old", "new", "message", "fix"),
    [
        ("bandwidth_tb_per_s:", "bandwidth_gb_per_s:", "unknown key 'bandwidth_gb_per_s'",
         "write 'bandwidth_tb_per_s', and give the value in TB/s"),
        ("memory_gib: {value: 80", "memory_gib: {value: 85899345920", "not plausible", None),
        ("memory_gib: {value: 80", "memory_gib: {value: eighty", "memory_gib is 'eighty'", None),
        ("domain_devices: {value: 8", "domain_devices: {value: 8.5", "domain_devices is 8.5", None),
        ("memory_gib: {value: 80, source: sheet}", "memory_gib: 80", "memory_gib is 80", None),
        ("source: sheet}", "source: hearsay}", "source of .* is 'hearsay'", None),
        ("range: [0.4, 1.0]", "range: [0.9, 1.0]", r"range of matmul_share is \[0.9, 1.0\]", None),
        ("range: [0.4, 1.0]", "range: 3", "range of matmul_share is 3", None),
        ("kind: gpu", "kind: toaster", "kind is 'toaster'", None),
        ("launch_us:", "launch_ms:", "unknown key 'launch_ms'", "write 'launch_us'"),
        ("  link_share:", "  #", "missing key 'link_share'", None),
        ("spans_nodes: false", "spans_nodes: 3", "spans_nodes is 3", None),
        ("name: H100-SXM", "name: H100-SXM\nname: H", "key 'name' is given twice", None),
        ("name: H100-SXM", "name: [", "is no YAML", None),
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line(tmp_path, old, new, message, fix):
    text = (hardware.FOLDER / "H100-SXM.yaml").read_text()
    assert old in text
    file = tmp_path / "device.yaml"
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ClusterError, match=message) as caught:
        read_device(file)
    assert caught.value.where is not None and str(file) in caught.value.where
    if fix:
        assert caught.value.fix is not None and fix in caught.value.fix


def test_keys_carry_their_unit():
    assert split_key("launch_us") == ("launch", "us")
    assert split_key("gb_per_s_per_direction") == ("", "gb_per_s_per_direction")
    assert split_key("matmul_share") == ("matmul_share", "")
    figure = Figure(key="nic_gbit_per_s", low=0, high=1e4)
    assert (figure.name, figure.to_si(400)) == ("nic_bytes_per_s", 50e9)
    assert figure.from_si(50e9) == 400
    memory = Figure(key="memory_gib", low=0, high=1e4)
    assert (memory.name, memory.to_si(0.5), type(memory.to_si(0.5))) == ("memory_bytes", 2**29, int)
    assert memory.from_si(2**29) == 0.5
    share = Figure(key="link_share", low=0, high=1)
    assert (share.name, share.to_si(0.7), share.from_si(0.7)) == ("link_share", 0.7, 0.7)


def test_figures_can_be_replaced():
    device = load_device("A100")
    other = hardware.override(
        device,
        (("memory.bandwidth_tb_per_s", 1.7), ("peak_dense.fp8_tflop_per_s", 600),
         ("host.latency_us", 3), ("efficiency.matmul_share", 0.5)),
        "measured on this cluster",
    )  # fmt: skip
    assert isinstance(other, Device)
    assert (other.memory_bytes_per_s, other.peak("fp8")) == (1.7e12, 600e12)
    assert (other.host_latency_s, other.efficiency.matmul_share) == (3e-6, 0.5)
    assert other.sources["efficiency.matmul_share"].text == "measured on this cluster"
    assert other.sources["efficiency.matmul_share"].high == 1.0
    assert (other.memory_bytes, other.peak("bf16")) == (device.memory_bytes, device.peak("bf16"))
    with pytest.raises(ClusterError, match=r"unknown figure 'memory\.memory_gb'") as caught:
        hardware.override(device, (("memory.memory_gb", 3),), "x")
    assert caught.value.fix == "did you mean 'memory.memory_gib'?"
    with pytest.raises(ClusterError, match="not plausible"):
        hardware.override(device, (("efficiency.link_share", 1.5),), "x")
