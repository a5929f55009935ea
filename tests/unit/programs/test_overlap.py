"""Collectives start early and are waited for late, in their order and within the limits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.runtime.comm_threads import run_threads
from autopar.runtime.programs import ops
from autopar.runtime.programs.overlap import advance_inputs, overlap
from autopar.runtime.programs.program import Program, Slot, target_name
from tests.unit.programs.pass_models import Maker, run, whole

aten = torch.ops.aten
F64 = torch.float64
RANKS = [0, 1]
BYTES = 4 * 8

BEFORE = """\
hand-made
inputs
  %0 f64[4] = boundary:x
  %1 f64[4] = boundary:y
  %2 f64[4] = gradient:w
body
  %3 f64[4] = aten.relu(%0)
  %4 f64[4] = aten.relu(%1)
  %5 f64[4] = aten.add_.Tensor(%2, %4)
  %6 f64[4] = autopar.all_reduce(%3, [0, 1], 'sum')
  %7 f64[4] = autopar.all_reduce(%2, [0, 1], 'sum')
  %8 f64[4] = aten.relu(%1)
  %9 f64[4] = aten.add_.Tensor(%2, %8)
  %10 f64[4] = aten.add.Tensor(%6, %7)
outputs
  output:out = %10
"""

AFTER = """\
hand-made
inputs
  %0 f64[4] = boundary:x
  %1 f64[4] = boundary:y
  %2 f64[4] = gradient:w
body
  %3 f64[4] = aten.relu(%0)
  %4 f64[4] = start_all_reduce(%3, [0, 1], 'sum')
  %5 f64[4] = aten.relu(%1)
  %6 f64[4] = aten.add_.Tensor(%2, %5)
  %7 f64[4] = start_all_reduce(%2, [0, 1], 'sum')
  %8 f64[4] = aten.relu(%1)
  %9 f64[4] = wait(%7)
  %10 f64[4] = aten.add_.Tensor(%2, %8)
  %11 f64[4] = wait(%4)
  %12 f64[4] = aten.add.Tensor(%11, %9)
outputs
  output:out = %12
"""


def example() -> Program:
    """One collective could start at once; the other reads a buffer written before and after."""
    maker = Maker()
    x, y = (maker.input(Slot("boundary", name), (4,), F64) for name in "xy")
    buffer = maker.input(Slot("gradient", "w"), (4,), F64)
    early = maker.call(aten.relu.default, x)
    maker.call(aten.add_.Tensor, buffer, maker.call(aten.relu.default, y))
    first = maker.call(ops.ALL_REDUCE, early, RANKS, "sum")
    second = maker.call(ops.ALL_REDUCE, buffer, RANKS, "sum")
    maker.call(aten.add_.Tensor, buffer, maker.call(aten.relu.default, y))
    return maker.program({Slot("output", "out"): maker.call(aten.add.Tensor, first, second)})


def test_text_before_and_after():
    program = example()
    assert overlap(program).print_readable() == AFTER
    assert program.print_readable() == BEFORE


def starts(program: Program) -> list[str]:
    return [
        target_name(node.target).removeprefix("start_").removeprefix("autopar.")
        for node in program.calls()
        if ops.is_collective(node.target)
    ]


def test_ready_and_needed_at_once_stays_blocking():
    maker = Maker()
    x = maker.input(Slot("boundary", "x"), (4,), F64)
    y = maker.call(ops.ALL_REDUCE, maker.call(aten.relu.default, x), RANKS, "sum")
    program = maker.program({Slot("output", "out"): maker.call(aten.relu.default, y)})
    assert overlap(program).print_readable() == program.print_readable()


def _reduce(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    return maker.call(ops.ALL_REDUCE, a, RANKS, "max")


def _gather(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    rows = maker.call(ops.ALL_GATHER, a, RANKS)
    flat = maker.call(aten.view.default, rows, [8])
    return maker.call(aten.slice.Tensor, flat, 0, 2, 6)


def _scatter(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    row = maker.call(ops.REDUCE_SCATTER, maker.call(aten.view.default, a, [2, 2]), RANKS, "sum")
    return maker.call(aten.cat.default, [row, row])


def _buffer_sum(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    return maker.call(ops.ALL_REDUCE, maker.call(aten.view.default, buffer, [4]), RANKS, "sum")


def _write(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    maker.call(aten.copy_.default, maker.call(aten.view.default, buffer, [4]), a)
    return a


def _exchange(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    return maker.call(ops.ALL_TO_ALL, a, [2, 2], [2, 2], RANKS)


def _halved(maker: Maker, a: fx.Node, b: fx.Node, buffer: fx.Node) -> fx.Node:
    return maker.call(aten.mul.Tensor, maker.call(aten.add.Tensor, a, b), 0.5)


KINDS = (_reduce, _gather, _scatter, _exchange, _buffer_sum, _write, _halved, _halved)


@st.composite
def programs(draw) -> Program:
    maker = Maker()
    nodes = [maker.input(Slot("boundary", name), (4,), F64) for name in "xy"]
    buffer = maker.input(Slot("gradient", "w"), (4,), F64)
    for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=12)):
        a, b = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        nodes.append(kind(maker, a, b, buffer))
    return maker.program({Slot("output", f"o{i}"): node for i, node in enumerate(nodes[2:])})


def call(comm, program: Program) -> list[torch.Tensor]:
    values = {
        slot: whole((4,), 10 * comm.rank + number) for number, slot in enumerate(program.inputs)
    }
    return [*run(program, values, comm).values(), values[Slot("gradient", "w")]]


def hoisted(before: Program, after: Program) -> list[tuple[int, int, int]]:
    """For each start that moved up: nodes passed, results then under way, and their bytes."""
    old = {node.name: i for i, node in enumerate(before.graph.nodes)}
    blocking = [node for node in before.calls() if ops.is_collective(node.target)]
    found = []
    above, number = 0, 0
    flying: dict[fx.Node, int] = {}
    for node in after.graph.nodes:
        if node.target is ops.wait:
            del flying[node.args[0]]
        elif ops.is_collective(node.target):
            was = old[blocking[number].name]
            number += 1
            if node.name not in old:
                value = node.meta["val"]
                flying[node] = value.numel() * value.element_size()
                # Only other collectives may stand between its old place and where it is now.
                passed = sum(
                    1
                    for other in before.graph.nodes
                    if above < old[other.name] < was and not ops.is_collective(other.target)
                )
                if passed:
                    found.append((passed, len(flying), sum(flying.values())))
        elif node.name in old:
            above = old[node.name]
    return found


@settings(max_examples=100, deadline=None)
@given(
    programs(),
    st.sampled_from([BYTES, 2 * BYTES, 4 * BYTES, 10**9]),
    st.sampled_from([None, 1, 2]),
    st.sampled_from([None, 0, 1, 4]),
)
def test_any_program(program, limit_bytes, limit_count, lookahead):
    text = program.print_readable()
    found = overlap(program, limit_bytes=limit_bytes, limit_count=limit_count, lookahead=lookahead)
    assert program.print_readable() == text
    assert starts(found) == starts(program)
    for passed, count, size_bytes in hoisted(program, found):
        assert size_bytes <= limit_bytes
        assert limit_count is None or count <= limit_count
        assert lookahead is None or passed <= lookahead
    expected = run_threads(2, call, program)
    for mine, theirs in zip(run_threads(2, call, found), expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_prefetch(count):
    """Gathers of parameters, each used in turn: `count` are under way ahead of their use."""
    maker = Maker()
    shards = [maker.input(Slot("shard", f"p.{i}"), (4,), F64) for i in range(6)]
    x = maker.input(Slot("boundary", "x"), (8,), F64)
    for shard in shards:
        rows = maker.call(ops.ALL_GATHER, shard, RANKS)
        x = maker.call(aten.mul.Tensor, x, maker.call(aten.view.default, rows, [8]))
    program = overlap(maker.program({Slot("boundary", "y"): x}), limit_count=count)
    flying, ahead = 0, []
    for node in program.calls():
        flying += (node.target is ops.start_all_gather) - (node.target is ops.wait)
        if node.target is aten.mul.Tensor:
            ahead.append(flying)
    assert ahead == [min(count, 5 - i) for i in range(6)]


def test_collective_of_a_collective():
    """The second cannot start before the first is waited for."""
    maker = Maker()
    x, y = (maker.input(Slot("boundary", name), (4,), F64) for name in "xy")
    first = maker.call(ops.ALL_REDUCE, x, RANKS, "sum")
    other = maker.call(aten.relu.default, y)
    second = maker.call(ops.ALL_REDUCE, first, RANKS, "max")
    total = maker.call(aten.add.Tensor, other, maker.call(aten.relu.default, y))
    result = maker.call(aten.add.Tensor, total, second)
    program = overlap(maker.program({Slot("output", "out"): result}))
    body = [target_name(node.target) for node in program.calls()]
    assert body == [
        "start_all_reduce", "aten.relu", "wait", "start_all_reduce", "aten.relu",
        "aten.add.Tensor", "wait", "aten.add.Tensor",
    ]  # fmt: skip


COUNTED = """\
hand-made
inputs
  %0 i64[4] = input:tokens
  %1 f64[4] = boundary:x
body
  %2 bool[4] = aten.ne.Scalar(%0, 3)
  %3 f64[] = aten.sum(%2, dtype=float64)
  %4 f64[] = start_all_reduce(%3, [0, 1], 'sum')
  %5 f64[4] = aten.relu(%1)
  %6 f64[4] = autopar.all_reduce(%5, [0, 1], 'sum')
  %7 f64[] = wait(%4)
  %8 f64[4] = aten.div.Tensor(%6, %7)
outputs
  output:out = %8
"""


def test_a_count_of_tokens_has_all_of_forward():
    maker = Maker()
    tokens = maker.input(Slot("input", "tokens"), (4,), torch.int64)
    x = maker.input(Slot("boundary", "x"), (4,), F64)
    total = maker.call(ops.ALL_REDUCE, maker.call(aten.relu.default, x), RANKS, "sum")
    counted = maker.call(aten.sum.default, maker.call(aten.ne.Scalar, tokens, 3), dtype=F64)
    count = maker.call(ops.ALL_REDUCE, counted, RANKS, "sum")
    program = maker.program({Slot("output", "out"): maker.call(aten.div.Tensor, total, count)})
    early = advance_inputs(program)
    # A count under way takes no room from those that matter.
    assert overlap(early, limit_count=1, small_bytes=8).print_readable() == COUNTED
    assert advance_inputs(program, limit_bytes=7).print_readable() == program.print_readable()


def test_what_is_written_stays_in_order():
    maker = Maker()
    tokens = maker.input(Slot("input", "tokens"), (4,), F64)
    copy = maker.call(aten.empty_like.default, tokens)
    maker.call(aten.copy_.default, copy, tokens)
    total = maker.call(ops.ALL_REDUCE, copy, RANKS, "sum")
    program = maker.program({Slot("output", "out"): total})
    assert advance_inputs(program) is program
