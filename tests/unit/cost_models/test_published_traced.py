"""A queue of kernels, against one launched step by step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.published import tables
from autopar.cost_models.published.tables import Piece
from autopar.cost_models.published.traced import Trace, parts, traces
from autopar.cost_models.work import Kernel, Phase

ORDER = (
    (tables.FIRST, "forward"), (tables.BLOCK, "forward"), (tables.LAST, "forward"),
    (tables.LAST, "input_gradient"), (tables.BLOCK, "weight_gradient"),
    (tables.FIRST, "input_gradient"),
)  # fmt: skip
PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")


def piece(part: int, phase: Phase, launches: int, count: int, op: str = "mm") -> Piece:
    kernel = Kernel(
        node="x", op=op, kind="elementwise", phase=phase, flops=0, read_bytes=1, write_bytes=1,
        dtype="bfloat16", launches=launches, count=count,
    )  # fmt: skip
    return Piece(kernel=kernel, part=part, core=False)


def walked(pieces: list[Piece], spent: list[float], launch_s: float, share: float) -> list[float]:
    """Seconds by part, as a host that launches and a device that works one kernel at a time."""
    host = device = begun = 0.0
    found: list[float] = []
    for number, (part, phase) in enumerate(ORDER):
        first = True
        for item, seconds in zip(pieces, spent, strict=True):
            kernel = item.kernel
            if item.part != part or (kernel.phase == "forward") != (phase == "forward"):
                continue
            runs = kernel.launches * kernel.count
            for _ in range(runs):
                host += launch_s * (share if phase != "forward" else 1.0)
                start = max(host, device)
                if first and number:
                    found.append(start - begun)
                if first:
                    begun, first = start, False
                device = start + seconds / runs
    return [*found, device - begun]


def every_part() -> list[Piece]:
    return [piece(part, phase, 1, 1) for part, phase in ORDER]  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(
    more=st.lists(
        st.tuples(
            st.sampled_from((tables.FIRST, tables.BLOCK, tables.LAST)), st.sampled_from(PHASES),
            st.integers(1, 3), st.integers(1, 3),
        ), max_size=12,
    ),
    seconds=st.lists(st.floats(0, 5), min_size=18, max_size=18),
    launch_s=st.floats(0, 3), share=st.floats(0.1, 2),
)  # fmt: skip
def test_a_trace_is_what_a_host_and_a_device_do_step_by_step(more, seconds, launch_s, share):
    pieces = every_part() + [piece(*item) for item in more]
    spent = seconds[: len(pieces)]
    found = Trace.of(pieces, 0).seconds(np.array(spent), launch_s, share)
    assert found.tolist() == pytest.approx(walked(pieces, spent, launch_s, share))


def test_a_host_that_is_behind_decides_and_one_that_is_ahead_does_not():
    spent = np.array([1.0, 1.0, 50.0, 50.0, 1.0, 1.0])
    found = Trace.of(every_part(), 0).seconds(spent, 10.0, 1.0)
    # Launched at 10, 20, ... 60; from the third on the device is behind, at 80, 130 and 131.
    assert found.tolist() == [10.0, 10.0, 50.0, 50.0, 1.0, 1.0]


def test_what_a_kernel_does_as_well_takes_time_but_no_launch():
    pieces = [*every_part(), piece(tables.BLOCK, "forward", 4, 3, op="dropout_mask")]
    spent = np.array([1.0] * 6 + [2.5])
    found = Trace.of(pieces, 0).seconds(spent, 0.0, 1.0)
    assert found.tolist() == [1.0, 3.5, 1.0, 1.0, 1.0, 1.0]
    slow = Trace.of(pieces, 0).seconds(0 * spent, 10.0, 1.0)
    assert slow.tolist() == [10.0, 10.0, 10.0, 10.0, 10.0, 0.0]


def test_only_steps_that_are_composed_have_traces():
    assert traces([], []) == {}
    assert parts({}, np.zeros(0), np.ones(3), np.ones(3)).tolist() == [[0.0] * 3] * 4
