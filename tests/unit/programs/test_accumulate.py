"""Gradients are written into owned buffers, whatever graph makes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from autopar.runtime.programs.accumulate import accumulate, finish_order
from autopar.runtime.programs.program import Program, Slot
from autopar.runtime.programs.split import split
from tests.unit.programs.pass_models import Maker, gpt_stage, mlp_stage, run, text_of, whole

aten = torch.ops.aten
F64 = torch.float64

BEFORE = """\
stage backward
inputs
  %0 f64[] = tangent:loss
  %1 f64[5, 6] = saved:relu
  %2 f64[3, 6] = parameter:w2
  %3 f64[5, 4] = input:x
body
  %4 f64[5, 3] = aten.expand(%0, [5, 3])  # sum_1
  %5 f64[3, 5] = aten.t(%4)  # linear_1
  %6 f64[3, 6] = aten.mm(%5, %1)  # linear_1
  %7 f64[5, 6] = aten.mm(%4, %2)  # linear_1
  %8 f64[5, 6] = aten.threshold_backward(%7, %1, 0)  # relu
  %9 f64[6, 5] = aten.t(%8)  # linear
  %10 f64[6, 4] = aten.mm(%9, %3)  # linear
  %11 f64[1, 6] = aten.sum.dim_IntList(%8, [0], True)  # linear
  %12 f64[6] = aten.view(%11, [6])  # linear
outputs
  gradient:w1 = %10
  gradient:b1 = %12
  gradient:w2 = %6
"""

AFTER = """\
stage backward
inputs
  %0 f64[] = tangent:loss
  %1 f64[5, 6] = saved:relu
  %2 f64[3, 6] = parameter:w2
  %3 f64[5, 4] = input:x
  %4 f64[6, 4] = gradient:w1
  %5 f64[6] = gradient:b1
  %6 f64[3, 6] = gradient:w2
body
  %7 f64[5, 3] = aten.expand(%0, [5, 3])  # sum_1
  %8 f64[3, 5] = aten.t(%7)  # linear_1
  %9 f64[3, 6] = {write}  # linear_1
  %10 f64[5, 6] = aten.mm(%7, %2)  # linear_1
  %11 f64[5, 6] = aten.threshold_backward(%10, %1, 0)  # relu
  %12 f64[6, 5] = aten.t(%11)  # linear
  %13 f64[6, 4] = {write_w1}  # linear
  %14 f64[1, 6] = aten.sum.dim_IntList(%11, [0], True)  # linear
  %15 f64[1, 6] = aten.view(%5, [1, 6])  # linear
  %16 f64[1, 6] = {write_b1}(%15, %14)  # linear
outputs
"""


def test_text_before_and_after():
    backward = split(mlp_stage().joint).backward
    first = accumulate(backward, first=True)
    later = accumulate(backward, first=False)
    assert text_of(first) == AFTER.format(
        write="aten.mm.out(%8, %1, out=%6)",
        write_w1="aten.mm.out(%12, %3, out=%4)",
        write_b1="aten.copy_",
    )
    assert text_of(later) == AFTER.format(
        write="aten.addmm_(%6, %8, %1)",
        write_w1="aten.addmm_(%4, %12, %3)",
        write_b1="aten.add_.Tensor",
    )
    assert text_of(backward) == BEFORE
    assert finish_order(backward) == ("w2", "w1", "b1")
    assert finish_order(first) == ("w2", "w1", "b1")


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.calls()]


def test_no_product_of_a_parameter_is_left_in_a_transformer():
    stage = gpt_stage()
    backward = split(stage.joint).backward
    later = accumulate(backward, first=False)
    # Four weights per layer and the head; the embedding's other gradient is added.
    assert targets(later).count("aten.addmm_.default") == 2 * 4 + 1
    products = targets(backward).count("aten.mm.default")
    assert targets(later).count("aten.mm.default") == products - 9


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_three_microbatches_of_a_tied_transformer(dtype):
    stage = gpt_stage()
    programs = split(stage.joint)
    values = dict(stage.values)
    values |= run(programs.forward, values)
    expected = stage.gradients()
    for name, gradient in expected.items():
        values[Slot("gradient", name)] = torch.full_like(gradient, torch.nan, dtype=dtype)
    for first in (True, False, False):
        run(accumulate(programs.backward, first=first, dtype=dtype), values)
    assert set(expected) == set(stage.parameters)
    for name, gradient in expected.items():
        found = values[Slot("gradient", name)]
        torch.testing.assert_close(found, (3 * gradient).to(found.dtype))


def test_small_gradients_survive_in_a_wider_buffer():
    maker = Maker()
    x = maker.input(Slot("tangent", "x"), (4, 4), torch.bfloat16)
    product = maker.call(aten.mm.default, x, x)
    program = maker.program({Slot("gradient", "w"): product})
    buffer = torch.zeros(4, 4)
    values = {Slot("tangent", "x"): torch.eye(4).bfloat16(), Slot("gradient", "w"): buffer}
    run(accumulate(program, first=True, dtype=torch.float32), values)
    for _ in range(300):
        run(accumulate(program, first=False, dtype=torch.float32), values)
    # In bfloat16 the sum stops at 256.
    assert torch.equal(buffer, 301 * torch.eye(4))


def _twice(maker, x, y):
    """A product that is added to its own transpose."""
    product = maker.call(aten.mm.default, x, y)
    return maker.call(aten.add.Tensor, product, maker.call(aten.t.default, product))


def _transposes(maker, x, y):
    product = maker.call(aten.mm.default, x, y)
    left = maker.call(aten.t.default, product)
    right = maker.call(aten.t.default, product)
    return maker.call(aten.add.Tensor, left, right)


def _sum_of_sums(maker, x, y):
    inner = maker.call(aten.add.Tensor, maker.call(aten.mm.default, y, x), x)
    return maker.call(aten.add.Tensor, maker.call(aten.t.default, inner), y)


def check_accumulated(program: Program, first: bool) -> None:
    """Compare with the program that returns its gradients."""
    values = {
        slot: whole(node.meta["val"].shape, 7 + number)
        for number, (slot, node) in enumerate(program.input_nodes().items())
    }
    copies = {slot: value.clone() for slot, value in values.items()}
    expected = run(program, values)
    expected = {slot: value.clone() for slot, value in expected.items()}
    held = {}
    for slot in expected:
        if slot.kind == "gradient":
            held[slot] = torch.full((4, 4), torch.nan, dtype=F64) if first else whole((4, 4), 99)
    buffers = {slot: value.clone() for slot, value in held.items()}
    results = run(accumulate(program, first=first), values | buffers)
    for slot, value in results.items():
        assert torch.equal(value, expected[slot])
    for slot, buffer in buffers.items():
        assert torch.equal(buffer, expected[slot] if first else held[slot] + expected[slot]), slot
    for slot, value in values.items():
        assert torch.equal(value, copies[slot]), slot


# Gradients that once were, or easily would be, taken apart wrongly.
TRAPS = {
    "twice": _twice,
    "transposes": _transposes,
    "sum of sums": _sum_of_sums,
    "inputs": lambda maker, x, y: maker.call(aten.add.Tensor, x, y),
    "one input twice": lambda maker, x, y: maker.call(aten.add.Tensor, x, x),
    "difference": lambda maker, x, y: maker.call(
        aten.add.Tensor, maker.call(aten.mm.default, x, y), y, alpha=-1
    ),
    "scaled product": lambda maker, x, y: maker.call(aten.addmm.default, x, y, x, alpha=3),
    "input": lambda maker, x, y: x,
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("trap", TRAPS)
def test_traps(trap, first):
    maker = Maker()
    x, y = (maker.input(Slot("tangent", name), (4, 4), F64) for name in "xy")
    check_accumulated(maker.program({Slot("gradient", "w"): TRAPS[trap](maker, x, y)}), first)


@pytest.mark.parametrize("order", [1, -1])
def test_gradient_of_one_is_inside_that_of_another(order):
    maker = Maker()
    x, y = (maker.input(Slot("tangent", name), (4, 4), F64) for name in "xy")
    product = maker.call(aten.mm.default, x, y)
    gradients = [product, maker.call(aten.t.default, product)][::order]
    program = maker.program({Slot("gradient", f"w{i}"): node for i, node in enumerate(gradients)})
    check_accumulated(program, first=True)


@st.composite
def programs(draw) -> Program:
    """Random graphs over 4x4 matrices; products have a small operand, so that sums are exact."""
    maker = Maker()
    small = [maker.input(Slot("tangent", f"x{i}"), (4, 4), F64) for i in range(2)]
    row = maker.input(Slot("tangent", "row"), (1, 4), F64)
    nodes: list[fx.Node] = [*small]
    for kind in draw(st.lists(st.sampled_from(sorted(_MAKERS)), min_size=1, max_size=9)):
        a, b = draw(st.sampled_from(nodes)), draw(st.sampled_from(nodes))
        nodes.append(_MAKERS[kind](maker, a, b, draw(st.sampled_from(small)), row))
    # Mostly late nodes, which much leads to.
    ends = st.one_of(st.sampled_from(nodes[-3:]), st.sampled_from(nodes))
    gradients = draw(st.lists(ends, min_size=1, max_size=4))
    outputs = {Slot("gradient", f"w{i}"): node for i, node in enumerate(gradients)}
    if draw(st.booleans()):
        outputs[Slot("input_gradient", "x")] = draw(st.sampled_from(nodes))
    return maker.program(outputs)


def _batched(maker, a, b, small, row):
    left, right = (maker.call(aten.unsqueeze.default, x, 0) for x in (a, small))
    product = maker.call(aten.bmm.default, left, right)
    return maker.call(aten.squeeze.dim, product, 0)


def _flat(maker, a, b, small, row):
    if not a.meta["val"].is_contiguous():
        return maker.call(aten.clone.default, a, memory_format=torch.contiguous_format)
    return maker.call(aten.view.default, maker.call(aten.view.default, a, [16]), [4, 4])


_MAKERS = {
    "mm": lambda maker, a, b, small, row: maker.call(aten.mm.default, a, small),
    "bmm": _batched,
    "addmm": lambda maker, a, b, small, row: maker.call(aten.addmm.default, b, small, a),
    "add": lambda maker, a, b, small, row: maker.call(aten.add.Tensor, a, b),
    "difference": lambda maker, a, b, small, row: maker.call(aten.add.Tensor, a, b, alpha=-1),
    "t": lambda maker, a, b, small, row: maker.call(aten.t.default, a),
    "transpose": lambda maker, a, b, small, row: maker.call(aten.transpose.int, a, -1, 0),
    "permute": lambda maker, a, b, small, row: maker.call(aten.permute.default, a, [1, 0]),
    "flat": _flat,
    "expand": lambda maker, a, b, small, row: maker.call(aten.expand.default, row, [4, 4]),
    "relu": lambda maker, a, b, small, row: maker.call(aten.relu.default, a),
}


@settings(max_examples=100, deadline=None)
@given(programs(), st.booleans())
def test_any_graph(program, first):
    text = program.print_readable()
    check_accumulated(program, first)
    assert program.print_readable() == text
