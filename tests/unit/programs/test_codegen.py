"""The generated functions: what they free, bind and leave alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.runtime.comm import SoloCommunicator
from autopar.runtime.programs import ops
from autopar.runtime.programs.compat import fake_mode
from autopar.runtime.programs.direct import direct
from autopar.runtime.programs.program import Program, Slot
from autopar.runtime.programs.split import split
from tests.unit.programs.captured import captured, captured_function

aten = torch.ops.aten


class _Alive(TorchDispatchMode):
    """Counts, at every call, the bytes of results that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        if isinstance(result, Tensor):
            self.results.append(weakref.ref(result))
        alive = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in (ref() for ref in self.results)
            if tensor is not None
        }
        self.peak = max(self.peak, sum(alive.values()))
        return result


def chain(x: Tensor) -> tuple[Tensor]:
    for _ in range(6):
        x = x.exp().tanh()
    return (x,)


def test_values_are_dropped_after_their_last_use():
    case = captured_function(chain, [Slot("output", "x")], {Slot("input", "x"): torch.ones(256)})
    run = case.joint.compile(SoloCommunicator())
    gc.disable()  # references alone must do
    try:
        with _Alive() as alive:
            run([torch.ones(256)])
    finally:
        gc.enable()
    assert alive.peak == 2 * 256 * 4


def test_inputs_are_taken_out_of_the_list_and_dropped_too():
    case = captured_function(
        lambda x, y: (x.exp().exp(),), [Slot("output", "x")],
        {Slot("input", "x"): torch.ones(4), Slot("input", "y"): torch.ones(4)},
    )  # fmt: skip
    seen: list[bool] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(ref() is None)
            return func(*args, **kwargs or {})

    values = [torch.ones(4), torch.ones(4)]
    ref = weakref.ref(values[0])
    run = case.joint.compile(SoloCommunicator())
    with Watch():
        run(values)
    assert values == [] and seen == [False, True]


def test_nothing_is_recorded_for_autograd():
    case = captured("moe")
    run = case.joint.compile(SoloCommunicator())
    results = run([case.values[slot] for slot in case.joint.inputs])
    assert not any(result.requires_grad for result in results)


def test_the_source_can_be_read():
    case = captured_function(
        lambda lambda_, x: ((x * lambda_).sum(),), [Slot("loss", "loss")],
        {Slot("parameter", "lambda"): torch.ones(3, requires_grad=True),
         Slot("input", "x"): torch.ones(3)},
    )  # fmt: skip
    source = case.joint.compile(SoloCommunicator()).source
    assert source == (
        "def program(values):\n"
        "    parameter_lambda, input_x, tangent_loss, = values\n"
        "    values.clear()\n"
        "    mul = _aten_mul_Tensor(input_x, parameter_lambda)\n"
        "    del parameter_lambda\n"
        "    sum_1 = _aten_sum(mul)\n"
        "    del mul\n"
        "    expand = _aten_expand(tangent_loss, [3])\n"
        "    del tangent_loss\n"
        "    mul_1 = _aten_mul_Tensor(expand, input_x)\n"
        "    del expand, input_x\n"
        "    return [sum_1, mul_1]\n"
    )


def program_of(build, **inputs: Tensor) -> Program:
    """A program written by hand: ``build(graph, *placeholders)`` returns the result."""
    graph = fx.Graph()
    mode = fake_mode()
    holders = []
    for name, tensor in inputs.items():
        node = graph.placeholder(name)
        node.meta["val"] = mode.from_tensor(tensor)
        holders.append(node)
    result = build(graph, *holders)
    graph.output((result,))
    for node in graph.nodes:
        node.meta.setdefault("val", mode.from_tensor(torch.ones(2)))
    slots = tuple(Slot("input", name) for name in inputs)
    return Program(name="by hand", graph=graph, inputs=slots, outputs=(Slot("output", "y"),))


class _Noting(SoloCommunicator):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[tuple[int, ...], str]] = []

    def _alone(self, ranks):
        self.seen.append(ranks)
        return super()._alone(ranks)


def test_collectives_run_on_the_communicator_of_the_program():
    def build(graph, x):
        handle = graph.call_function(ops.start_all_reduce, (x, [0], "sum"))
        done = graph.call_function(ops.wait, (handle,))
        return graph.call_function(ops.ALL_REDUCE, (done, [0], "max"))

    program = program_of(build, x=torch.ones(2))
    first, second = _Noting(), _Noting()
    for comm in (first, second):
        (result,) = program.compile(comm)([torch.full((2,), 3.0)])
        assert torch.equal(result, torch.full((2,), 3.0))
    assert first.seen == second.seen == [(0,), (0,)]


@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan"), 1e-300, True, -0.0])
def test_numbers_are_written_exactly(number):
    program = program_of(
        lambda graph, x: graph.call_function(
            aten.full.default, ([2], number), {"dtype": torch.float64}
        ),
        x=torch.ones(2),
    )
    (result,) = program.compile(SoloCommunicator())([torch.ones(2)])
    want = torch.full([2], number, dtype=torch.float64)
    assert torch.equal(result.view(torch.int64), want.view(torch.int64))


def call(target, *args, **kwargs) -> fx.Node:
    graph, mode = fx.Graph(), fake_mode()

    def holder(value):
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = mode.from_tensor(value)
        return node

    return graph.call_function(target, tuple(map(holder, args)), kwargs)


X = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("node", "wanted"),
    [
        (call(aten.mm.default, X, X), torch.mm),
        (call(aten.mul.Tensor, X, 2.0), torch.mul),
        (call(aten.view.default, X, [4]), torch.Tensor.view),
        (call(aten.sum.dim_IntList, X, [0], True), torch.sum),
        (call(aten.addmm_.default, X, X, X), torch.Tensor.addmm_),
        (call(aten.tanh_backward.default, X, X), aten.tanh_backward.default._op),
        # torch.mul with a number is mul.Tensor: another op than the graph asks for.
        (call(aten.mul.Scalar, X, 2.0), aten.mul.Scalar._op),
    ],
    ids=lambda value: str(value.target) if isinstance(value, fx.Node) else "",
)
def test_shortcuts_are_taken_where_they_are_the_same_call(node, wanted):
    assert direct(node) == wanted


def test_most_calls_of_a_model_take_a_shortcut():
    calls = [n for p in split(captured("gpt2").joint).all() for n in p.calls()]
    overloads = [node for node in calls if isinstance(node.target, torch._ops.OpOverload)]
    short = [node for node in overloads if direct(node) != node.target._op]
    assert len(short) > 0.8 * len(overloads)


def test_programs_are_not_cast_by_the_callers_autocast():
    linear = nn.Linear(4, 4)
    values = {
        Slot("parameter", "w"): linear.weight.detach().clone().requires_grad_(),
        Slot("input", "x"): torch.randn(2, 4),
    }
    case = captured_function(lambda w, x: ((x @ w.t()).sum(),), [Slot("loss", "loss")], values)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        case.agree([case.joint])
