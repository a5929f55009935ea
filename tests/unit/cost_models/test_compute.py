"""Seconds of kernels: limits of the roofline, what sizes and causal masks change, columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.cost_models.compute import (
    ATTENTION,
    BATCHED,
    MATMUL,
    STREAM,
    Columns,
    device_seconds,
    seen_share,
)
from autopar.cost_models.hardware import load_device
from autopar.cost_models.work import Attention, Kernel, Matmul

DEVICE = load_device("A100-80-SXM")


def product(m: int, n: int, k: int, batch: int = 1, dtype: str = "bfloat16") -> Kernel:
    return Kernel(
        node="x", op="mm", kind="matmul", phase="forward", flops=2 * batch * m * n * k,
        read_bytes=2 * batch * (m + n) * k, write_bytes=2 * batch * m * n, dtype=dtype,
        matmul=Matmul(batch=batch, m=m, n=n, k=k),
    )  # fmt: skip


def attention(seq: int, *, causal: bool, head: int = 128) -> Kernel:
    sizes = Attention(
        batch=2, heads=16, kv_heads=16, seq_q=seq, seq_k=seq, head_dim=head, value_dim=head,
        causal=causal,
    )  # fmt: skip
    return Kernel(
        node="x", op="attention", kind="attention", phase="forward",
        flops=4 * 2 * 16 * seq * seq * head, read_bytes=3 * 2 * 16 * seq * head * 2,
        write_bytes=2 * 16 * seq * head * 2, dtype="bfloat16", attention=sizes,
    )  # fmt: skip


def stream(size: int) -> Kernel:
    return Kernel(
        node="x", op="add", kind="elementwise", phase="forward", flops=size, read_bytes=size,
        write_bytes=size, dtype="bfloat16",
    )  # fmt: skip


def test_no_kernel_beats_the_device() -> None:
    kernels = [product(8192, 8192, 8192), product(64, 64, 8192), attention(4096, causal=False)]
    kernels += [stream(10**9), product(4096, 64, 64, batch=512)]
    for kernel, seconds in zip(kernels, device_seconds(kernels, DEVICE), strict=True):
        moved = kernel.read_bytes + kernel.write_bytes
        assert seconds > 0
        if kernel.kind != "elementwise":
            assert seconds >= kernel.flops / DEVICE.peak("bfloat16")
        if kernel.kind != "attention":
            assert seconds >= moved / DEVICE.memory_bytes_per_s


def test_larger_products_reach_more_of_the_peak() -> None:
    sides = [256, 512, 1024, 2048, 4096, 8192]
    kernels = [product(side, side, side) for side in sides]
    rates = [k.flops for k in kernels] / device_seconds(kernels, DEVICE)
    assert (np.diff(rates) > 0).all()
    odd, even = device_seconds([product(8191, 8191, 8191), product(8192, 8192, 8192)], DEVICE)
    assert odd >= even * (8191 / 8192) ** 3


def test_rows_of_odd_length_need_older_kernels() -> None:
    even, odd, four = (product(8192, n, 1024) for n in (50304, 50257, 50260))
    seconds = device_seconds([even, odd, four], DEVICE)
    assert seconds[1] / seconds[0] > 2.3 and seconds[2] == pytest.approx(seconds[1], rel=1e-3)
    wide = device_seconds([replace(four, dtype="float32"), replace(even, dtype="float32")], DEVICE)
    assert wide[0] < 1.3 * wide[1]  # four numbers of 32 bits are read at a time
    tokens = [product(8191, 1024, 1024), product(8192, 1024, 1024)]
    assert device_seconds(tokens[:1], DEVICE)[0] < 1.3 * device_seconds(tokens[1:], DEVICE)[0]
    gradient = replace(product(1024, 1024, 8191), phase="weight_gradient")
    assert Columns.of([*tokens, gradient]).unaligned.tolist() == [False, False, False]


def test_a_causal_mask_halves_attention_and_short_rows_are_slow() -> None:
    causal, whole = device_seconds(
        [attention(8192, causal=True), attention(8192, causal=False)], DEVICE
    )
    assert causal == pytest.approx(whole / 2, rel=1e-6)
    short, long = (attention(seq, causal=False) for seq in (256, 8192))
    seconds = device_seconds([short, long], DEVICE)
    assert short.flops / seconds[0] < 0.7 * long.flops / seconds[1]
    assert seen_share(100, 100, causal=True) == 0.5
    assert seen_share(100, 100, causal=True, window=20) == pytest.approx(0.2 - 0.02)
    assert seen_share(100, 100, causal=False, window=20) == 0.2
    assert seen_share(0, 100, causal=False) == 0.0


def test_counts_multiply_and_columns_keep_their_order() -> None:
    kernels = [product(512, 512, 512), stream(10**6), attention(512, causal=True)]
    often = [replace(kernel, count=7) for kernel in kernels]
    assert device_seconds(often, DEVICE) == pytest.approx(7 * device_seconds(kernels, DEVICE))
    columns = Columns.of([*kernels, product(64, 64, 64, batch=8)])
    assert columns.kind.tolist() == [MATMUL, STREAM, ATTENTION, BATCHED]
    alone = [device_seconds([kernel], DEVICE)[0] for kernel in kernels]
    assert device_seconds(kernels, DEVICE).tolist() == pytest.approx(alone)
    assert len(device_seconds([], DEVICE)) == 0


def test_formats_change_products_only() -> None:
    kernels = [product(8192, 8192, 8192, dtype="float32"), replace(stream(10**8), dtype="float32")]
    plain = device_seconds(kernels, DEVICE)
    narrow = device_seconds(kernels, DEVICE, formats={"float32": "tf32"})
    assert narrow[0] < plain[0] / 4
    assert narrow[1] == plain[1]
    slow, fast = (
        device_seconds([attention(4096, causal=True)], DEVICE, generation=generation)[0]
        for generation in ("flash1", "flash3")
    )
    assert fast < slow / 1.5


def test_a_cpu_launches_what_it_computes() -> None:
    cpu = load_device("cpu")
    one, ten = (replace(stream(64), launches=launches) for launches in (1, 10))
    seconds = device_seconds([one, ten], cpu)
    assert seconds[1] - seconds[0] == pytest.approx(9 * cpu.efficiency.launch_s)


@pytest.mark.parametrize("backward", [False, True])
def test_a_cpu_lays_out_anew_what_it_convolves(backward: bool) -> None:
    phase = "input_gradient" if backward else "forward"
    flat = replace(product(512, 512, 512, dtype="float32"), kind="conv", phase=phase)
    for name, times in (("cpu", 3.0 if backward else 2.0), ("A100-80-SXM", 0.0)):
        device = load_device(name)
        large = replace(flat, read_bytes=flat.read_bytes + 4096)  # computing still takes longer
        seconds = device_seconds([flat, large], device)
        bandwidth = device.memory_bytes_per_s * device.efficiency.memory_share
        assert seconds[1] - seconds[0] == pytest.approx(times * 4096 / bandwidth, rel=1e-3)


def test_a_cpu_goes_one_by_one_through_windows_and_variances() -> None:
    plain = replace(stream(2**20), kind="reduction")
    windows = replace(plain, op="max_pool", flops=9 * 2**20)
    moments = replace(plain, op="var_mean", flops=4 * 2**20)
    for name, slower in (("cpu", True), ("A100-80-SXM", False)):
        device = load_device(name)
        fast, *slow = device_seconds([plain, windows, moments], device)
        assert [seconds > fast for seconds in slow] == [slower] * 2
    cores = device_seconds([windows], load_device("cpu"))[0]
    assert 2e-9 < cores / (9 * 2**20) < 6e-9
