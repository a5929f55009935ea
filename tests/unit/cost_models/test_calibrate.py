"""Constants are found again from what they predict, and a cluster file keeps them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autopar.cost_models.calibrate import COLLECTIVES, Calibration, calibrate, predicted
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import ClusterError

SOURCE = "measured by autopar profile on 2026-01-31"


@dataclass(frozen=True, kw_only=True)
class Sample:
    work: str
    name: str = "x"
    sizes: tuple[int, ...]
    dtype: str = "float32"
    backward: bool = False
    ranks: int = 1
    seconds: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    samples: tuple[Sample, ...]
    device: str = "cpu"
    ranks: int = 4
    ranks_per_node: int = 4
    cores: int = 2
    memory_bytes: int = 2**32
    host_bytes: int = 2**34


def samples() -> list[Sample]:
    sides = (64, 256, 1024)
    found = [Sample(work="matmul", sizes=(m, 512, k)) for m in sides for k in sides]
    found.append(Sample(work="matmul", sizes=(4096, 4096, 4096)))
    for backward in (False, True):
        found += [
            Sample(
                work="convolution",
                sizes=(m, 128, 1152, 1 + backward, 1024 * m + 600_000),
                backward=backward,
            )
            for m in sides
        ]
        found += [
            Sample(work="attention", sizes=(4, 8, seq, 64), backward=backward) for seq in sides
        ]
    found += [Sample(work="stream", sizes=(size * 2**20,)) for size in (1, 4, 16)]
    found += [Sample(work="update", sizes=(2**22,))]
    found += [Sample(work="launch", sizes=(count,)) for count in (20, 120)]
    found += [
        Sample(work=kind, sizes=(size,), ranks=ranks)
        for kind in COLLECTIVES for ranks in (2, 4) for size in (4096, 65536, 2**20, 2**24)
    ]  # fmt: skip
    return found


def timed(figures: dict[str, float], noise: np.ndarray | None = None) -> Machine:
    """A machine with these figures, timed without error, or with factors `noise`."""
    cluster = ClusterSpec.local(4).with_figures(figures, source="truth")
    listed = samples()
    seconds = predicted(listed, cluster)
    if noise is not None:
        seconds = seconds * noise[: len(seconds)]
    return Machine(
        samples=tuple(
            Sample(**{**vars(item), "seconds": float(took)})
            for item, took in zip(listed, seconds, strict=True)
        )
    )


TRUTH = {
    "peak_dense.fp32_tflop_per_s": 0.1,
    "memory.bandwidth_tb_per_s": 0.02,
    "memory.cache_tb_per_s": 0.04,
    "efficiency.memory_share": 0.9,
    "efficiency.matmul_share": 0.9,
    "efficiency.matmul_size": 20.0,
    "efficiency.convolution_share": 0.6,
    "efficiency.attention_share": 0.3,
    "efficiency.launch_us": 8.0,
    "efficiency.link_share": 0.5,
    "link.start_us": 200.0,
    "link.latency_us": 60.0,
    "link.all_to_all_start_us": 300.0,
}


def close(found: Calibration, machine: Machine, tolerance: float) -> None:
    again = predicted(machine.samples, found.cluster)
    errors = again / np.array([item.seconds for item in machine.samples]) - 1
    assert np.abs(errors).mean() < tolerance, [
        (item.work, item.sizes, round(float(error), 3))
        for item, error in zip(machine.samples, errors, strict=True)
        if abs(error) > tolerance
    ]


@settings(max_examples=3)
@given(
    peak=st.floats(0.02, 2.0),
    size=st.floats(5, 60),
    attention=st.floats(0.1, 0.8),
    convolution=st.floats(0.3, 0.9),
    start=st.floats(20, 900),
    latency=st.floats(5, 200),
)
# Only two products of these are bound by the rate alone.
@example(peak=1.0, size=35.0, attention=0.5, convolution=0.5, start=20.0, latency=5.0)
def test_constants_are_found_again(
    peak: float, size: float, attention: float, convolution: float, start: float, latency: float
):
    machine = timed(
        {
            **TRUTH,
            "peak_dense.fp32_tflop_per_s": peak,
            "efficiency.matmul_size": size,
            "efficiency.attention_share": attention,
            "efficiency.convolution_share": convolution,
            "link.start_us": start,
            "link.latency_us": latency,
        }
    )
    found = calibrate(machine, source=SOURCE)
    close(found, machine, 0.05)
    device = found.cluster.hardware(0)
    assert device.link.start_s * 1e6 == pytest.approx(start, rel=0.1)
    assert device.link.latency_s * 1e6 == pytest.approx(latency, rel=0.1)
    rate = device.peak("float32") * device.efficiency.matmul_share
    assert rate == pytest.approx(peak * 1e12 * TRUTH["efficiency.matmul_share"], rel=0.05)
    assert device.efficiency.launch_s * 1e6 == pytest.approx(8, rel=1e-3)


def test_outliers_do_not_matter():
    """A machine that others use is slow now and then."""
    rng = np.random.default_rng(0)
    noise = np.where(rng.random(200) < 0.1, 5.0, 1 + 0.02 * rng.standard_normal(200))
    machine = timed(TRUTH, noise)
    found, exact = calibrate(machine, source=SOURCE), timed(TRUTH)
    wanted = [item for item in exact.samples if item.work != "launch"]
    again = predicted(wanted, found.cluster)
    errors = np.abs(again / np.array([item.seconds for item in wanted]) - 1)
    assert np.median(errors) < 0.05


def test_a_file_keeps_what_was_found(tmp_path: Path):
    found = calibrate(timed(TRUTH), source=SOURCE)
    file = tmp_path / "cluster.yaml"
    found.cluster.save(file)
    loaded = ClusterSpec.load(file)
    assert loaded == found.cluster
    assert loaded.groups[0].source == SOURCE
    device = loaded.hardware(0)
    assert (device.memory_bytes, device.node.memory_bytes) == (2**32, 2**34)
    assert (device.node.cores, device.node.devices) == (2, 4)
    assert device.sources["efficiency.matmul_share"].text == SOURCE
    assert {item.path for item in found.constants} == set(dict(loaded.groups[0].figures))


def test_what_leaves_its_range_is_said():
    machine = timed({**TRUTH, "efficiency.convolution_share": 0.2})
    slow = tuple(
        Sample(**{**vars(item), "seconds": item.seconds * 4})
        if item.work == "convolution"
        else item
        for item in machine.samples
    )
    found = calibrate(Machine(samples=slow), source=SOURCE)
    constants = {item.path: item for item in found.constants}
    assert constants["efficiency.convolution_share"].at_edge
    assert not constants["efficiency.attention_share"].at_edge
    errors = {fit.work: fit.mean_error for fit in found.fits}
    assert errors["convolution"] > 0.5 > 0.1 > errors["attention"]


def test_one_rank_has_no_links():
    alone = tuple(item for item in timed(TRUTH).samples if item.work not in COLLECTIVES)
    found = calibrate(Machine(samples=alone, ranks=1, ranks_per_node=1), source=SOURCE)
    assert not any(item.path.startswith("link") for item in found.constants)


def test_a_gpu_is_found_in_the_catalogue():
    found = calibrate(Machine(samples=(), device="NVIDIA H100 80GB HBM3", cores=0), source=SOURCE)
    assert found.cluster.device.startswith("H100")
    with pytest.raises(ClusterError, match="no device 'NVIDIA Nonsense'"):
        calibrate(Machine(samples=(), device="NVIDIA Nonsense", cores=0), source=SOURCE)


def test_messages_of_cores_do_not_move_what_collectives_reach():
    """They copy half as much: one rank only sends, the other only receives."""
    machine = timed(TRUTH)
    fast = tuple(
        Sample(**{**vars(item), "seconds": item.seconds / 3}) if item.work == "send" else item
        for item in machine.samples
    )
    wanted = [item for item in machine.samples if item.work in COLLECTIVES and item.work != "send"]
    found = calibrate(Machine(samples=fast), source=SOURCE)
    again = predicted(wanted, found.cluster)
    assert again == pytest.approx([item.seconds for item in wanted], rel=0.03)
    assert not any(item.at_edge for item in found.constants if "link" in item.path)
