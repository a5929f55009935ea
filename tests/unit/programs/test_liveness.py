"""Live bytes: predicted, counted node by node, and measured on real tensors, all equal."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.comm import SoloCommunicator
from autopar.runtime.programs import ops
from autopar.runtime.programs.accumulate import accumulate
from autopar.runtime.programs.buckets import make_buckets, reduce_buckets
from autopar.runtime.programs.liveness import RankWalk, summarise, summarise_stage
from autopar.runtime.programs.measure import measure_peak
from autopar.runtime.programs.overlap import overlap
from autopar.runtime.programs.program import Program, Slot
from autopar.runtime.programs.split import split
from autopar.runtime.programs.zero import gather_parameters, scatter_gradients
from tests.unit.programs.node_walk import HANDED_OVER, walk
from tests.unit.programs.pass_models import Maker, Stage, chain_stage, gpt_stage, mlp_stage

aten = torch.ops.aten
STAGES = {
    "mlp": mlp_stage,
    "chain": lambda: chain_stage(5, 16, batch=8),
    "gpt": gpt_stage,
}


@cache
def stage_named(name: str) -> Stage:
    return STAGES[name]()


def origins(stage: Stage) -> list[str]:
    return sorted(
        {
            node.meta["origin"]
            for node in stage.joint.calls()
            if stage.joint.is_forward(node) and "origin" in node.meta
        }
    )


@cache
def programs_of(name: str, share: float, weight: bool, seed: int) -> tuple[Program, ...]:
    """Forward, backward and maybe weight program, a share of the values recomputed."""
    stage = stage_named(name)
    names = origins(stage)
    chosen = random.Random(seed).sample(names, round(share * len(names)))
    programs = split(stage.joint, recompute=chosen, weight=weight)
    forward, *rest = programs.all()
    return forward, *(accumulate(program, first=False) for program in rest)


VARIANTS = [
    (name, share, weight)
    for name in STAGES
    for share in (0.0, 0.5, 1.0)
    for weight in (False, True)
]


@pytest.mark.parametrize(("name", "share", "weight"), VARIANTS)
def test_equal_to_what_is_measured(name, share, weight):
    """To the byte: peak, and what is left, of each program."""
    stage = stage_named(name)
    programs = programs_of(name, share, weight, 0)
    _, summaries = summarise_stage(programs)
    values = dict(stage.values)
    for program in programs:
        for slot, node in program.input_nodes().items():
            if slot.kind == "gradient":
                fake = node.meta["val"]
                values.setdefault(slot, torch.zeros(fake.shape, dtype=fake.dtype))
    owned: dict[Slot, torch.Tensor] = {}
    fixed = [value for slot, value in values.items() if slot.kind not in HANDED_OVER]
    for number, (program, summary) in enumerate(zip(programs, summaries, strict=True)):
        later = {slot for other in programs[number + 1 :] for slot in other.inputs}
        owned |= {
            slot: values[slot].clone()
            for slot in program.inputs
            if slot.kind == "tangent" and slot not in owned
        }
        held = [
            value for slot, value in owned.items() if slot in later or slot not in program.inputs
        ]
        boxed = [owned[slot] if slot in owned else values[slot] for slot in program.inputs]
        for slot in program.inputs:
            if slot not in later:
                owned.pop(slot, None)
        measured, results = measure_peak(
            program.compile(SoloCommunicator()), boxed, [*fixed, *held]
        )
        assert measured.start_bytes == sum(summary.start.values())
        assert measured.peak_bytes == sum(summary.peak.values()), summary.high_water
        assert measured.end_bytes == sum(summary.end.values())
        assert measured.peak_above_start_bytes == summary.peak_above_start_bytes
        assert measured.net_bytes == summary.net_bytes
        owned |= {
            slot: value
            for slot, value in zip(program.outputs, results, strict=True)
            if slot.kind == "saved"
        }
        del held, results


def test_accumulation_in_place_lowers_the_peak():
    stage = chain_stage(4, 64, batch=2)
    backward = split(stage.joint).backward
    one = 64 * 64 * 8
    assert summarise(backward).end == {"gradients": 4 * one}
    assert summarise(accumulate(backward, first=False)).peak_above_start_bytes < one // 4


def gathering(*, blocking: bool) -> Program:
    """A gather of 1 KiB from each of 2 ranks beside a chain of 4 KiB tensors."""
    maker = Maker()
    x = maker.input(Slot("boundary", "x"), (256,), torch.float32)
    y = maker.input(Slot("boundary", "y"), (1024,), torch.float32)
    if blocking:
        whole = maker.call(ops.ALL_GATHER, x, [0, 1])
        y = maker.call(aten.relu.default, maker.call(aten.relu.default, y))
    else:
        start = maker.call(ops.start_all_gather, x, [0, 1])
        y = maker.call(aten.relu.default, maker.call(aten.relu.default, y))
        whole = maker.call(ops.wait, start)
    row = maker.call(aten.slice.Tensor, whole, 0, 0, 1)
    total = maker.call(aten.sum.default, row)
    return maker.program({Slot("output", "y"): y, Slot("output", "total"): total})


def test_operand_of_a_start_is_held_until_the_wait():
    blocking, split_up = summarise(gathering(blocking=True)), summarise(gathering(blocking=False))
    assert blocking.start == split_up.start == {"boundary": 5 * 1024}
    assert blocking.peak == {"collective": 2048, "temporary": 4096, "boundary": 4096}
    assert split_up.peak == {"collective": 2048, "temporary": 4096, "boundary": 4096 + 1024}
    assert split_up.end == blocking.end == {"outputs": 4096 + 4}
    assert split_up.high_water == blocking.high_water == "relu_default"
    # The result of a start and that of its wait are one tensor.
    assert split_up.net_bytes == 4096 + 4 - 5 * 1024


@st.composite
def sequences(draw) -> tuple[tuple[Program, ...], list[tuple[int, int]]]:
    """Programs and a valid order of calls ``(program, microbatch)``."""
    programs = programs_of(
        draw(st.sampled_from(sorted(STAGES))),
        draw(st.sampled_from([0.0, 0.3, 0.7, 1.0])),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )
    count = draw(st.integers(1, 4))
    done = [0] * count
    order = []
    while any(step < len(programs) for step in done):
        ready = [m for m, step in enumerate(done) if step < len(programs)]
        microbatch = draw(st.sampled_from(ready))
        order.append((done[microbatch], microbatch))
        done[microbatch] += 1
    return programs, order


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_action_walk_equals_node_walk(sequence):
    programs, order = sequence
    kept, summaries = summarise_stage(programs)
    rank = RankWalk(live=Counter(kept.by_kind()))
    received: set[tuple[int, Slot]] = set()
    for index, microbatch in order:
        summary = summaries[index]
        for slot in programs[index].inputs:
            if slot.kind == "tangent" and (microbatch, slot) not in received:
                received.add((microbatch, slot))
                value = programs[index].input_nodes()[slot].meta["val"]
                rank.allocate("boundary", value.untyped_storage().nbytes())
        rank.run(summary)
        rank.release("outputs", summary.end.get("outputs", 0))
    expected = walk([(programs[index], microbatch) for index, microbatch in order], set(kept.kinds))
    base = sum(kept.by_kind().values())
    assert rank.peak_bytes == base + expected.peak_bytes
    assert rank.live.total() == base + expected.live_bytes == base
    assert min(rank.live.values()) >= 0


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_is_measured(zero, blocking):
    """In a group of one, where what moves is copied: equal while blocking, a bound otherwise."""
    stage = chain_stage(5, 16, batch=8)
    shapes = {name: tuple(value.shape) for name, value in stage.parameters.items()}
    parameters = make_buckets(
        list(shapes),
        shapes,
        dict.fromkeys(shapes, torch.float64),
        dict.fromkeys(shapes, (0,)),
        first_bytes=1,
        limit_bytes=2 * 16 * 16 * 8,
    )
    joint, recompute = stage.joint, []
    if zero == 3:
        joint = gather_parameters(joint, [replace(b, name=f"p.{b.name}") for b in parameters])
        recompute = [f"p.{bucket.name}" for bucket in parameters]
    forward, backward = split(joint, recompute=recompute).all()
    backward = accumulate(backward, first=True)
    if zero == 1:
        backward = reduce_buckets(backward, parameters, "none")
    else:
        backward = scatter_gradients(backward, parameters, first=True)
    programs = [forward, backward]
    if not blocking:
        programs = [overlap(program, limit_count=2) for program in programs]
    _, summaries = summarise_stage(programs)
    values = {slot: value.clone() for slot, value in stage.values.items()}
    for program in programs:
        for slot, node in program.input_nodes().items():
            if slot.kind in ("shard", "bucket"):
                values[slot] = torch.ones(node.meta["val"].shape, dtype=torch.float64)
    fixed = [value for slot, value in values.items() if slot.kind not in HANDED_OVER]
    for program, summary in zip(programs, summaries, strict=True):
        boxed = [values.pop(s) if s.kind in HANDED_OVER else values[s] for s in program.inputs]
        measured, results = measure_peak(program.compile(SoloCommunicator()), boxed, fixed)
        values |= zip(program.outputs, results, strict=True)
        results.clear()
        predicted = sum(summary.peak.values())
        # A scatter is never blocking: its bucket is freed at once here, and not before the wait
        # where ranks meet.
        slack = parameters[-1].size_bytes if zero > 1 and program is programs[1] else 0
        slack += 0 if blocking else 2 * parameters[-1].size_bytes
        assert predicted - slack <= measured.peak_bytes <= predicted, summary.high_water
        assert measured.end_bytes == sum(summary.end.values())
