"""Sizes of the call, as a plan tells them."""

from __future__ import annotations

import pytest

from autopar.plan.plan import Plan
from autopar.plan.sizes import sizes_of


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [
        ((("args[0]", "int64[16, 2048]"), ("args[1]", "int64[16, 2048]")), (16, 2048)),
        ((("mask", "bool[8, 64]"), ("ids", "int32[8, 64]")), (8, 64)),
        ((("images", "float32[8, 3, 224, 224]"), ("labels", "int64[8]")), (8, None)),
        ((("scalar", "float32[]"),), (None, None)),
        ((), (None, None)),
    ],
)
def test_sizes_come_from_the_inputs(
    inputs: tuple[tuple[str, str], ...], sizes: tuple[int | None, int | None]
) -> None:
    plan = Plan(mesh=(("dp", 2),), strategy="ddp", order=(("dp", ("batch",)),), inputs=inputs)
    assert sizes_of(plan) == sizes
