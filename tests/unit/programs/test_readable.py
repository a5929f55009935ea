"""Golden text of a small stage before and after every pass."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from autopar.runtime.lower import _Opaque
from autopar.runtime.programs import ops
from autopar.runtime.programs.capture import capture
from autopar.runtime.programs.program import Joint, Slot
from autopar.runtime.programs.prologue import hoist_prologue
from autopar.runtime.programs.simplify import simplify
from autopar.runtime.programs.split import split
from tests.unit.programs.captured import Captured, captured_function


def stage(w1: Tensor, w2: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor]:
    hidden = nn.functional.linear(x, w1).relu()
    count = ops.MICROBATCH_SUM(mask.sum(), 4)
    return ((nn.functional.linear(hidden, w2) * mask).sum() / count,)


def make() -> Joint:
    values = {
        Slot("parameter", "w1"): torch.empty(6, 4).requires_grad_(),
        Slot("parameter", "w2"): torch.empty(2, 6).requires_grad_(),
        Slot("boundary", "x"): torch.empty(3, 4).requires_grad_(),
        Slot("input", "mask"): torch.empty(3, 2),
    }
    module = fx.symbolic_trace(stage)
    origins = {node.name: node.name for node in module.graph.nodes}
    return capture(
        module, list(values.items()), [Slot("loss", "loss")], origins, name="stage 1"
    )  # fmt: skip


JOINT = """\
stage 1
inputs
  %0 f32[6, 4] = parameter:w1
  %1 f32[2, 6] = parameter:w2
  %2 f32[3, 4] = boundary:x
  %3 f32[3, 2] = input:mask
  %4 f32[] = tangent:loss
body
  %5 f32[4, 6] = aten.t(%0)  # linear
  %6 f32[3, 6] = aten.mm(%2, %5)  # linear
  %7 f32[3, 6] = aten.relu(%6)  # relu
  %8 f32[] = aten.sum(%3)  # sum_1
  %9 f32[] = autopar.microbatch_sum(%8, 4)  # microbatch_sum_default
  %10 f32[6, 2] = aten.t(%1)  # linear_1
  %11 f32[3, 2] = aten.mm(%7, %10)  # linear_1
  %12 f32[3, 2] = aten.mul.Tensor(%11, %3)  # mul
  %13 f32[] = aten.sum(%12)  # sum_2
  %14 f32[] = aten.div.Tensor(%13, %9)  # truediv
  %15 f32[] = aten.div.Tensor(%4, %9)  # truediv
  %16 f32[3, 2] = aten.expand(%15, [3, 2])  # sum_2
  %17 f32[3, 2] = aten.mul.Tensor(%16, %3)  # mul
  %18 f32[2, 3] = aten.t(%17)  # linear_1
  %19 f32[2, 6] = aten.mm(%18, %7)  # linear_1
  %20 f32[3, 6] = aten.mm(%17, %1)  # linear_1
  %21 f32[3, 6] = aten.threshold_backward(%20, %7, 0)  # relu
  %22 f32[6, 3] = aten.t(%21)  # linear
  %23 f32[6, 4] = aten.mm(%22, %2)  # linear
  %24 f32[3, 4] = aten.mm(%21, %0)  # linear
outputs
  loss:loss = %14
  input_gradient:x = %24
  gradient:w1 = %23
  gradient:w2 = %19
"""
PROLOGUE = """\
stage 1 prologue
inputs
  %0 f32[3, 2] = input:mask
body
  %1 f32[] = aten.sum(%0)  # sum_1
outputs
  prologue:microbatch_sum = %1
"""
HOISTED = """\
stage 1
inputs
  %0 f32[6, 4] = parameter:w1
  %1 f32[2, 6] = parameter:w2
  %2 f32[3, 4] = boundary:x
  %3 f32[3, 2] = input:mask
  %4 f32[] = tangent:loss
  %5 f32[] = prologue:microbatch_sum
body
  %6 f32[4, 6] = aten.t(%0)  # linear
  %7 f32[3, 6] = aten.mm(%2, %6)  # linear
  %8 f32[3, 6] = aten.relu(%7)  # relu
  %9 f32[6, 2] = aten.t(%1)  # linear_1
  %10 f32[3, 2] = aten.mm(%8, %9)  # linear_1
  %11 f32[3, 2] = aten.mul.Tensor(%10, %3)  # mul
  %12 f32[] = aten.sum(%11)  # sum_2
  %13 f32[] = aten.div.Tensor(%12, %5)  # truediv
  %14 f32[] = aten.div.Tensor(%4, %5)  # truediv
  %15 f32[3, 2] = aten.expand(%14, [3, 2])  # sum_2
  %16 f32[3, 2] = aten.mul.Tensor(%15, %3)  # mul
  %17 f32[2, 3] = aten.t(%16)  # linear_1
  %18 f32[2, 6] = aten.mm(%17, %8)  # linear_1
  %19 f32[3, 6] = aten.mm(%16, %1)  # linear_1
  %20 f32[3, 6] = aten.threshold_backward(%19, %8, 0)  # relu
  %21 f32[6, 3] = aten.t(%20)  # linear
  %22 f32[6, 4] = aten.mm(%21, %2)  # linear
  %23 f32[3, 4] = aten.mm(%20, %0)  # linear
outputs
  loss:loss = %13
  input_gradient:x = %23
  gradient:w1 = %22
  gradient:w2 = %18
"""
FORWARD = """\
stage 1 forward
inputs
  %0 f32[6, 4] = parameter:w1
  %1 f32[2, 6] = parameter:w2
  %2 f32[3, 4] = boundary:x
  %3 f32[3, 2] = input:mask
  %4 f32[] = prologue:microbatch_sum
body
  %5 f32[4, 6] = aten.t(%0)  # linear
  %6 f32[3, 6] = aten.mm(%2, %5)  # linear
  %7 f32[3, 6] = aten.relu(%6)  # relu
  %8 f32[6, 2] = aten.t(%1)  # linear_1
  %9 f32[3, 2] = aten.mm(%7, %8)  # linear_1
  %10 f32[3, 2] = aten.mul.Tensor(%9, %3)  # mul
  %11 f32[] = aten.sum(%10)  # sum_2
  %12 f32[] = aten.div.Tensor(%11, %4)  # truediv
outputs
  loss:loss = %12
  saved:boundary_x = %2
  saved:relu = %7
"""
BACKWARD = """\
stage 1 backward
inputs
  %0 f32[] = prologue:microbatch_sum
  %1 f32[] = tangent:loss
  %2 f32[3, 2] = input:mask
  %3 f32[3, 6] = saved:relu
  %4 f32[2, 6] = parameter:w2
  %5 f32[3, 4] = saved:boundary_x
  %6 f32[6, 4] = parameter:w1
body
  %7 f32[] = aten.div.Tensor(%1, %0)  # truediv
  %8 f32[3, 2] = aten.expand(%7, [3, 2])  # sum_2
  %9 f32[3, 2] = aten.mul.Tensor(%8, %2)  # mul
  %10 f32[2, 3] = aten.t(%9)  # linear_1
  %11 f32[2, 6] = aten.mm(%10, %3)  # linear_1
  %12 f32[3, 6] = aten.mm(%9, %4)  # linear_1
  %13 f32[3, 6] = aten.threshold_backward(%12, %3, 0)  # relu
  %14 f32[6, 3] = aten.t(%13)  # linear
  %15 f32[6, 4] = aten.mm(%14, %5)  # linear
  %16 f32[3, 4] = aten.mm(%13, %6)  # linear
outputs
  input_gradient:x = %16
  gradient:w1 = %15
  gradient:w2 = %11
"""
RECOMPUTING = """\
stage 1 backward
inputs
  %0 f32[] = prologue:microbatch_sum
  %1 f32[] = tangent:loss
  %2 f32[3, 2] = input:mask
  %3 f32[6, 4] = parameter:w1
  %4 f32[3, 4] = saved:boundary_x
  %5 f32[2, 6] = parameter:w2
body
  %6 f32[] = aten.div.Tensor(%1, %0)  # truediv
  %7 f32[3, 2] = aten.expand(%6, [3, 2])  # sum_2
  %8 f32[3, 2] = aten.mul.Tensor(%7, %2)  # mul
  %9 f32[2, 3] = aten.t(%8)  # linear_1
  %10 f32[4, 6] = aten.t(%3)  # linear
  %11 f32[3, 6] = aten.mm(%4, %10)  # linear
  %12 f32[3, 6] = aten.relu(%11)  # relu
  %13 f32[2, 6] = aten.mm(%9, %12)  # linear_1
  %14 f32[3, 6] = aten.mm(%8, %5)  # linear_1
  %15 f32[3, 6] = aten.threshold_backward(%14, %12, 0)  # relu
  %16 f32[6, 3] = aten.t(%15)  # linear
  %17 f32[6, 4] = aten.mm(%16, %4)  # linear
  %18 f32[3, 4] = aten.mm(%15, %3)  # linear
outputs
  input_gradient:x = %18
  gradient:w1 = %17
  gradient:w2 = %13
"""
INPUT_ONLY = """\
stage 1 backward
inputs
  %0 f32[] = prologue:microbatch_sum
  %1 f32[] = tangent:loss
  %2 f32[3, 2] = input:mask
  %3 f32[2, 6] = parameter:w2
  %4 f32[3, 6] = saved:relu
  %5 f32[6, 4] = parameter:w1
body
  %6 f32[] = aten.div.Tensor(%1, %0)  # truediv
  %7 f32[3, 2] = aten.expand(%6, [3, 2])  # sum_2
  %8 f32[3, 2] = aten.mul.Tensor(%7, %2)  # mul
  %9 f32[2, 3] = aten.t(%8)  # linear_1
  %10 f32[3, 6] = aten.mm(%8, %3)  # linear_1
  %11 f32[3, 6] = aten.threshold_backward(%10, %4, 0)  # relu
  %12 f32[6, 3] = aten.t(%11)  # linear
  %13 f32[3, 4] = aten.mm(%11, %5)  # linear
outputs
  input_gradient:x = %13
  saved:mul_1 = %8
  saved:threshold_backward = %11
"""
WEIGHT = """\
stage 1 weight gradients
inputs
  %0 f32[3, 6] = saved:relu
  %1 f32[3, 2] = saved:mul_1
  %2 f32[3, 4] = saved:boundary_x
  %3 f32[3, 6] = saved:threshold_backward
body
  %4 f32[2, 3] = aten.t(%1)  # linear_1
  %5 f32[2, 6] = aten.mm(%4, %0)  # linear_1
  %6 f32[6, 3] = aten.t(%3)  # linear
  %7 f32[6, 4] = aten.mm(%6, %2)  # linear
outputs
  gradient:w1 = %7
  gradient:w2 = %5
"""


def test_joint():
    assert make().print_readable() == JOINT


def test_prologue():
    prologue, joint = hoist_prologue(make())
    assert prologue is not None
    assert prologue.print_readable() == PROLOGUE
    assert joint.print_readable() == HOISTED


def test_split():
    programs = split(hoist_prologue(make())[1])
    assert programs.weight is None
    assert programs.forward.print_readable() == FORWARD
    assert programs.backward.print_readable() == BACKWARD


def test_split_with_recomputation():
    programs = split(hoist_prologue(make())[1], recompute={"linear", "relu"})
    assert programs.backward.print_readable() == RECOMPUTING


def test_split_of_weight_gradients():
    programs = split(hoist_prologue(make())[1], weight=True)
    assert programs.weight is not None
    assert programs.forward.print_readable() == FORWARD
    assert programs.backward.print_readable() == INPUT_ONLY
    assert programs.weight.print_readable() == WEIGHT


def test_modules_may_be_printed_instead_of_origins():
    text = make().print_readable({"linear": "layers.0.mlp", "relu": "layers.0.act"})
    assert "aten.mm(%2, %5)  # layers.0.mlp\n" in text and "# layers.0.act\n" in text


def keyed(x: Tensor, seed: Tensor) -> Tensor:
    def key(number: int) -> Tensor:
        return ((torch.full((), number, dtype=torch.int64) >> 2) ^ 5) + (seed >> 3)

    return x + key(40) * x + key(40) + key(44)


def keyed_case() -> Captured:
    graph, root = fx.Graph(), nn.Module()
    root.add_module("keyed", _Opaque(keyed))
    inputs = graph.placeholder("x"), graph.placeholder("seed")
    graph.output((graph.call_module("keyed", inputs),))
    values = {Slot("input", "x"): torch.arange(3), Slot("seed", "seed"): torch.tensor(77)}
    return captured_function(fx.GraphModule(root, graph), [Slot("output", "y")], values)


def test_simplify():
    case = keyed_case()
    case.agree([case.joint])
    assert case.joint.print_readable() == SIMPLIFIED
    simplify(case.joint.graph)
    assert case.joint.print_readable() == SIMPLIFIED  # nothing is left to do


SIMPLIFIED = """\
stage
inputs
  %0 i64[3] = input:x
  %1 i64[] = seed:seed
body
  %2 i64[] = aten.full([], 15, dtype=int64, device=cpu)  # keyed
  %3 i64[] = aten.__rshift__.Scalar(%1, 3)  # keyed
  %4 i64[] = aten.add.Tensor(%2, %3)  # keyed
  %5 i64[3] = aten.mul.Tensor(%4, %0)  # keyed
  %6 i64[3] = aten.add.Tensor(%0, %5)  # keyed
  %7 i64[3] = aten.add.Tensor(%6, %4)  # keyed
  %8 i64[] = aten.full([], 14, dtype=int64, device=cpu)  # keyed
  %9 i64[] = aten.add.Tensor(%8, %3)  # keyed
  %10 i64[3] = aten.add.Tensor(%7, %9)  # keyed
outputs
  output:y = %10
"""
