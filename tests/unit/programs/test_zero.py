"""ZeRO-2 and ZeRO-3 as graph passes: right shards, nothing whole kept, the traffic of the paper."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.runtime.comm_threads import run_threads
from autopar.runtime.programs import ops
from autopar.runtime.programs.accumulate import accumulate
from autopar.runtime.programs.buckets import Bucket, make_buckets, reduce_buckets
from autopar.runtime.programs.liveness import summarise
from autopar.runtime.programs.overlap import overlap
from autopar.runtime.programs.program import Program, Slot
from autopar.runtime.programs.split import Programs, split
from autopar.runtime.programs.zero import gather_parameters, gradient_buckets, scatter_gradients
from tests.unit.programs.pass_models import Stage, chain_stage, mlp_stage, run, text_of
from tests.unit.programs.test_buckets import buckets_of, examples, expected, shared

F64 = torch.float64

SCATTERED = """\
stage backward
inputs
  %0 f64[] = tangent:loss
  %1 f64[5, 6] = saved:relu
  %2 f64[3, 6] = parameter:w2
  %3 f64[5, 4] = input:x
  %4 f64[5] = shard:gradients.0
  %5 f64[8] = shard:gradients.1
body
  %6 f64[5, 3] = aten.expand(%0, [5, 3])  # sum_1
  %7 f64[3, 5] = aten.t(%6)  # linear_1
  %8 f64[20] = aten.empty.memory_format([20], dtype=float64, device=cpu, pin_memory=False)
  %9 f64[18] = aten.slice.Tensor(%8, 0, 0, 18)
  %10 f64[3, 6] = aten.view(%9, [3, 6])
  %11 f64[2] = aten.slice.Tensor(%8, 0, 18, 20)
  %12 f64[2] = aten.zero_(%11)
  %13 f64[3, 6] = aten.mm.out(%7, %1, out=%10)  # linear_1
  %14 f64[4, 5] = aten.view(%8, [4, 5])
  %15 f64[5] = start_reduce_scatter(%14, [0, 1, 2, 3], 'sum')
  %16 f64[5, 6] = aten.mm(%6, %2)  # linear_1
  %17 f64[5, 6] = aten.threshold_backward(%16, %1, 0)  # relu
  %18 f64[6, 5] = aten.t(%17)  # linear
  %19 f64[32] = aten.empty.memory_format([32], dtype=float64, device=cpu, pin_memory=False)
  %20 f64[24] = aten.slice.Tensor(%19, 0, 0, 24)
  %21 f64[6, 4] = aten.view(%20, [6, 4])
  %22 f64[6] = aten.slice.Tensor(%19, 0, 24, 30)
  %23 f64[6] = aten.view(%22, [6])
  %24 f64[2] = aten.slice.Tensor(%19, 0, 30, 32)
  %25 f64[2] = aten.zero_(%24)
  %26 f64[6, 4] = aten.mm.out(%18, %3, out=%21)  # linear
  %27 f64[1, 6] = aten.sum.dim_IntList(%17, [0], True)  # linear
  %28 f64[1, 6] = aten.view(%23, [1, 6])  # linear
  %29 f64[1, 6] = aten.copy_(%28, %27)  # linear
  %30 f64[4, 8] = aten.view(%19, [4, 8])
  %31 f64[5] = wait(%15)
  %32 f64[5] = aten.add_.Tensor(%4, %31)
  %33 f64[8] = start_reduce_scatter(%30, [0, 1, 2, 3], 'sum')
  %34 f64[8] = wait(%33)
  %35 f64[8] = aten.add_.Tensor(%5, %34)
outputs
"""

GATHERED_FORWARD = """\
stage forward
inputs
  %0 f64[5, 4] = input:x
  %1 f64[12] = shard:parameters.0
  %2 f64[13] = shard:parameters.1
body
  %3 f64[2, 12] = autopar.all_gather(%1, [0, 1])  # parameters.0
  %4 f64[24] = aten.view(%3, [24])  # parameters.0
  %5 f64[24] = aten.slice.Tensor(%4, 0, 0, 24)  # parameters.0
  %6 f64[6, 4] = aten.view(%5, [6, 4])  # parameters.0
  %7 f64[4, 6] = aten.t(%6)  # linear
  %8 f64[2, 13] = autopar.all_gather(%2, [0, 1])  # parameters.1
  %9 f64[26] = aten.view(%8, [26])  # parameters.1
  %10 f64[6] = aten.slice.Tensor(%9, 0, 0, 6)  # parameters.1
  %11 f64[6] = aten.view(%10, [6])  # parameters.1
  %12 f64[18] = aten.slice.Tensor(%9, 0, 8, 26)  # parameters.1
  %13 f64[3, 6] = aten.view(%12, [3, 6])  # parameters.1
  %14 f64[5, 6] = aten.addmm(%11, %0, %7)  # linear
  %15 f64[5, 6] = aten.relu(%14)  # relu
  %16 f64[6, 3] = aten.t(%13)  # linear_1
  %17 f64[5, 3] = aten.mm(%15, %16)  # linear_1
  %18 f64[] = aten.sum(%17)  # sum_1
outputs
  loss:loss = %18
  saved:relu = %15
"""

GATHERED_BACKWARD = """\
stage backward
inputs
  %0 f64[] = tangent:loss
  %1 f64[5, 6] = saved:relu
  %2 f64[13] = shard:parameters.1
  %3 f64[5, 4] = input:x
body
  %4 f64[5, 3] = aten.expand(%0, [5, 3])  # sum_1
  %5 f64[3, 5] = aten.t(%4)  # linear_1
  %6 f64[3, 6] = aten.mm(%5, %1)  # linear_1
  %7 f64[2, 13] = autopar.all_gather(%2, [0, 1])  # parameters.1
  %8 f64[26] = aten.view(%7, [26])  # parameters.1
  %9 f64[18] = aten.slice.Tensor(%8, 0, 8, 26)  # parameters.1
  %10 f64[3, 6] = aten.view(%9, [3, 6])  # parameters.1
  %11 f64[5, 6] = aten.mm(%4, %10)  # linear_1
  %12 f64[5, 6] = aten.threshold_backward(%11, %1, 0)  # relu
  %13 f64[6, 5] = aten.t(%12)  # linear
  %14 f64[6, 4] = aten.mm(%13, %3)  # linear
  %15 f64[1, 6] = aten.sum.dim_IntList(%12, [0], True)  # linear
  %16 f64[6] = aten.view(%15, [6])  # linear
outputs
  gradient:w1 = %14
  gradient:b1 = %16
  gradient:w2 = %6
"""


def parameter_buckets(
    stage: Stage, ranks: tuple[int, ...], first_bytes: int, limit_bytes: int
) -> tuple[Bucket, ...]:
    """Buckets for all parameters, in the order in which they are given."""
    shapes = {name: tuple(value.shape) for name, value in stage.parameters.items()}
    return make_buckets(
        list(shapes),
        shapes,
        dict.fromkeys(shapes, F64),
        dict.fromkeys(shapes, ranks),
        prefix="parameters",
        first_bytes=first_bytes,
        limit_bytes=limit_bytes,
    )


def test_text_of_scattered_gradients():
    backward = accumulate(split(mlp_stage().joint).backward, first=True)
    before = backward.print_readable()
    buckets = buckets_of(backward, (0, 1, 2, 3), 1, 8 * 30)
    assert text_of(scatter_gradients(backward, buckets, first=False)) == SCATTERED
    assert backward.print_readable() == before


def test_text_of_gathered_parameters():
    stage = mlp_stage()
    before = stage.joint.print_readable()
    buckets = parameter_buckets(stage, (0, 1), 1, 8 * 20)
    joint = gather_parameters(stage.joint, buckets)
    programs = split(joint, recompute=[bucket.name for bucket in buckets])
    assert text_of(programs.forward) == GATHERED_FORWARD
    assert text_of(programs.backward) == GATHERED_BACKWARD
    assert stage.joint.print_readable() == before


def flat_of(bucket: Bucket, tensors: dict[str, Tensor]) -> Tensor:
    """A bucket filled with tensors, zero behind them."""
    flat = torch.zeros(bucket.numel, dtype=bucket.dtype)
    for member in bucket.members:
        flat[member.offset : member.offset + member.numel] = tensors[member.name].reshape(-1)
    return flat


def shards_of(comm, forward: Program, steps: list[Program], buckets, parameters) -> tuple:
    """One rank's shards of the gradients after one microbatch per step, and its losses."""
    stage, _ = shared()
    mine = {
        Slot("shard", bucket.name): flat_of(bucket, stage.parameters).chunk(comm.world_size)[
            comm.rank
        ]
        for bucket in parameters
    }
    held = {
        Slot("shard", bucket.name): torch.full((bucket.shard_numel,), torch.nan, dtype=F64)
        for bucket in buckets
    }
    losses = []
    for step, example in zip(steps, examples(comm.rank, len(steps)), strict=True):
        values = stage.values | example | mine
        values |= run(forward, values, comm)
        losses.append(values[Slot("loss", "loss")])
        assert run(step, values | held, comm) == {}
    return {slot.name: value for slot, value in held.items()}, losses


@cache
def losses_of(rank: int, count: int) -> list[Tensor]:
    """The losses of the whole model."""
    stage, programs = shared()
    return [
        run(programs.forward, stage.values | example)[Slot("loss", "loss")]
        for example in examples(rank, count)
    ]


SIZES = {
    "world_size": st.integers(2, 3),
    "count": st.integers(1, 2),
    "first_bytes": st.integers(1, 6000),
    "limit_bytes": st.integers(1, 12000),
    "in_flight": st.integers(1, 3),
    "overlapped": st.booleans(),
}


@settings(max_examples=12, deadline=None)
@given(zero=st.sampled_from([2, 3]), **SIZES)
def test_any_bucket_size(zero, world_size, count, first_bytes, limit_bytes, in_flight, overlapped):
    stage, programs = shared()
    ranks = tuple(range(world_size))
    parameters: tuple[Bucket, ...] = ()
    if zero == 3:
        parameters = parameter_buckets(stage, ranks, first_bytes, limit_bytes)
        joint = gather_parameters(stage.joint, parameters)
        programs = split(joint, recompute=[bucket.name for bucket in parameters])
        buckets = gradient_buckets(parameters)
    written = accumulate(programs.backward, first=True)
    if zero == 2:
        buckets = buckets_of(written, ranks, first_bytes, limit_bytes)
    steps = [
        scatter_gradients(written, buckets, first=number == 0, in_flight=in_flight)
        for number in range(count)
    ]
    forward = programs.forward
    if overlapped:
        forward = overlap(forward, limit_count=in_flight)
        steps = [overlap(step, limit_count=in_flight) for step in steps]
    by_rank = run_threads(world_size, shards_of, forward, steps, buckets, parameters)
    total = expected(world_size, count)
    assert sorted(total) == sorted(m.name for bucket in buckets for m in bucket.members)
    for bucket in buckets:
        found = torch.cat([shards[bucket.name] for shards, _ in by_rank])
        torch.testing.assert_close(found, flat_of(bucket, total))
    for rank, (_, losses) in enumerate(by_rank):
        torch.testing.assert_close(losses, losses_of(rank, count), rtol=0, atol=0)


def traffic(zero: int) -> int:
    """Bytes that rank 0 of 2 sends in one step, less the gather of updated parameters."""
    stage, programs = shared()
    ranks = (0, 1)
    parameters = parameter_buckets(stage, ranks, 10**9, 10**9)
    buckets = gradient_buckets(parameters)
    if zero == 3:
        joint = gather_parameters(stage.joint, parameters)
        programs = split(joint, recompute=[bucket.name for bucket in parameters])
    step = accumulate(programs.backward, first=True)
    if zero < 2:
        step = reduce_buckets(step, buckets, "reduce_scatter" if zero else "all_reduce")
    else:
        step = scatter_gradients(step, buckets, first=True)

    def work(comm) -> int:
        values = dict(stage.values)
        for bucket in parameters:
            flat = flat_of(bucket, stage.parameters)
            values[Slot("shard", bucket.name)] = flat.chunk(2)[comm.rank]
        for bucket in buckets:
            values[Slot("bucket", bucket.name)] = torch.zeros(bucket.numel, dtype=F64)
            if zero > 1:
                values[Slot("shard", bucket.name)] = torch.zeros(bucket.shard_numel, dtype=F64)
        values |= run(programs.forward, values, comm)
        for handle in run(step, values, comm).values():
            handle.wait()
        return sum(comm.take_traffic().values())

    return run_threads(2, work)[0]


def test_traffic():
    """2, 1, 1 and 3 times (N-1)/N of the parameters; stages 1 and 2 gather once in the update."""
    stage, _ = shared()
    half = sum(value.numel() for value in stage.parameters.values()) * 8 // 2
    assert [traffic(zero) for zero in range(4)] == [2 * half, half, half, 3 * half]


def test_nothing_gathered_is_saved():
    stage, _ = shared()
    buckets = parameter_buckets(stage, (0, 1), 1, 1)
    joint = gather_parameters(stage.joint, buckets)
    kept: Programs = split(joint)
    programs = split(joint, recompute=[bucket.name for bucket in buckets])

    def gathers(program: Program) -> int:
        return sum(node.target is ops.ALL_GATHER for node in program.calls())

    assert gathers(kept.forward) == gathers(programs.forward) == len(buckets)
    assert gathers(kept.backward) == 0
    # Positions are only added, so backward does without.
    assert gathers(programs.backward) == len(buckets) - 1
    parameter_bytes = sum(value.numel() for value in stage.parameters.values()) * 8
    difference = summarise(kept.forward).net_bytes - summarise(programs.forward).net_bytes
    assert 0 < difference <= parameter_bytes
    assert not any(
        slot.kind == "saved" and "gather" in slot.name for slot in programs.forward.outputs
    )


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_full_gradients_live_as_long_as_their_bucket(in_flight):
    """Of a chain of equal layers at most `in_flight` buckets and the one being written live."""
    layers, width = 8, 64
    stage = chain_stage(layers, width, batch=1)
    written = accumulate(split(stage.joint).backward, first=True)
    buckets = buckets_of(written, (0, 1), 1, 1)
    assert len(buckets) == layers
    bucket_bytes = buckets[0].size_bytes
    summary = summarise(scatter_gradients(written, buckets, first=True, in_flight=in_flight))
    most = (in_flight + 1) * (bucket_bytes + bucket_bytes // 2)
    small = 8 * width * 8
    assert summary.peak_above_start_bytes <= most + small
    assert summary.peak_above_start_bytes >= (in_flight + 1) * bucket_bytes
