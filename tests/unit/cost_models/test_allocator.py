"""The caching allocator: rounding, segments, joining, what stays reserved; estimates of a peak."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.allocator import (
    ROUND_BYTES,
    Block,
    CachingAllocator,
    replay,
    reserve,
    rounded,
    segment_bytes,
)
from autopar.cost_models.implementation import CUDA
from autopar.cost_models.memory import RankMemory
from autopar.units import MIB
from tests.unit.cost_models.models import planned, priced

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 64 * MIB))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 7)), max_size=60))
def test_blocks_never_overlap_and_nothing_is_lost(steps: list[tuple[int, int]]) -> None:
    allocator = CachingAllocator()
    live: list[Block] = []
    for size, choice in steps:
        live.append(allocator.allocate(size))
        least = rounded(size, ROUND_BYTES)
        # What cannot be split off small or large segments goes to the tensor too.
        assert least <= live[-1].size_bytes <= least + (0 if least <= MIB else MIB)
        if choice < len(live) and choice % 2:
            allocator.free(live.pop(choice))
        assert allocator.allocated_bytes == sum(block.size_bytes for block in live)
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
        assert allocator.peak_allocated_bytes <= allocator.reserved_bytes
    held = allocator.reserved_bytes
    while live:
        allocator.free(live.pop())
    assert allocator.allocated_bytes == 0
    # Segments are whole again: what was asked for first fits without a new one.
    for size, _ in steps[:1]:
        allocator.allocate(size)
    assert allocator.reserved_bytes == held


def test_segments_are_those_of_torch() -> None:
    assert segment_bytes(1) == segment_bytes(MIB) == 2 * MIB
    assert segment_bytes(MIB + 1) == segment_bytes(10 * MIB - 512) == 20 * MIB
    assert segment_bytes(10 * MIB) == 10 * MIB
    assert segment_bytes(11 * MIB + 512) == 12 * MIB
    allocator = CachingAllocator()
    first, second = allocator.allocate(100), allocator.allocate(1000)
    assert (first.size_bytes, second.size_bytes) == (512, 1024)
    assert allocator.reserved_bytes == 2 * MIB
    allocator.allocate(6 * MIB)
    assert allocator.reserved_bytes == 22 * MIB
    big = allocator.allocate(30 * MIB)
    assert allocator.reserved_bytes == 52 * MIB
    allocator.free(big)
    allocator.allocate(31 * MIB)  # does not fit into what is free: fragmentation
    assert allocator.reserved_bytes == 84 * MIB


def test_a_peak_is_rounded_and_grows_by_a_factor() -> None:
    memory = RankMemory(
        rank=0, stages=(0,), resident=Counter(), peak=Counter(saved=10**8 + 1), where=""
    )
    found = reserve(memory, factor=1.1, context_bytes=5, workspace_bytes=7)
    assert found.allocated_bytes == rounded(10**8 + 8, 512)
    assert found.reserved_bytes == rounded(int(found.allocated_bytes * 1.1), 2 * MIB)
    assert found.device_bytes == found.reserved_bytes + 5
    plain = reserve(memory, caching=False)
    assert plain.allocated_bytes == plain.reserved_bytes == 10**8 + 1


@pytest.mark.parametrize("in_flight", [1, 3])
def test_replayed_steps_need_what_is_live(in_flight: int) -> None:
    plan = planned("deep_gpt", "dp=1", "ddp", "bfloat16")
    [stage] = priced("deep_gpt", plan, CUDA, dtype="bfloat16")
    static = [item.size_bytes for item in stage.parameters]
    found = replay(stage.programs, static, in_flight)
    forward, backward = stage.summaries["F"], stage.summaries["B"]
    kept = forward.end["saved"]
    live = sum(static) + (in_flight - 1) * kept
    live += max(forward.peak.total(), backward.peak.total())
    assert live <= found.allocated_bytes <= 1.05 * live + 512 * 400 * in_flight
    assert found.allocated_bytes <= found.reserved_bytes <= found.allocated_bytes + 64 * MIB
