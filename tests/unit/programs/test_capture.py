"""What capture turns a local forward into, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from autopar.errors import TraceError
from autopar.runtime.comm import SoloCommunicator
from autopar.runtime.lower import _Autocast, _Opaque
from autopar.runtime.programs import kinds, ops
from autopar.runtime.programs.capture import capture
from autopar.runtime.programs.program import Joint, Program, Slot
from autopar.runtime.programs.prologue import hoist_prologue
from tests.unit.programs.captured import captured, captured_function, planned

LOSS, OUT = Slot("loss", "loss"), Slot("boundary", "out")


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def calling(*modules: nn.Module) -> fx.GraphModule:
    """``w, x -> last(... first(w * x)).sum()``, each module a node of its own."""
    graph, root = fx.Graph(), nn.Module()
    w, x = graph.placeholder("w"), graph.placeholder("x")
    value = graph.call_function(torch.mul, (w, x))
    for number, module in enumerate(modules):
        root.add_module(f"custom_{number}", module)
        value = graph.call_module(f"custom_{number}", (value,))
    graph.output((graph.call_method("sum", (value,)),))
    return fx.GraphModule(root, graph)


def slots() -> dict[Slot, Tensor]:
    return {Slot("parameter", "w"): leaf(4), Slot("input", "x"): torch.arange(4.0) + 1}


def targets(program: Program) -> list[str]:
    return [str(node.target) for node in program.calls()]


@pytest.mark.parametrize("model", ["gpt2", "resnet", "moe", "unet"])
def test_the_joint_graph_computes_what_autograd_does(model: str):
    case = captured(model)
    case.agree([case.joint])
    gradients = [slot for slot in case.want if slot.kind == "gradient"]
    assert len(gradients) >= 3
    assert case.joint.forward_outputs == case.joint.outputs[: case.joint.num_forward]


def test_every_call_knows_its_origin_and_phase():
    joint, graph = captured("gpt2").joint, planned("gpt2").traced.graph
    known = {node.name: node.op for node in graph.nodes}
    for node in joint.calls():
        assert node.meta["phase"] in ("forward", "backward")
        assert node.meta.get("origin") in known or not joint.is_forward(node)
    # The backward of an op is known to serve it.
    serves = {
        "aten.native_layer_norm_backward.default": "aten.layer_norm.default",
        "aten.embedding_dense_backward.default": "aten.embedding.default",
        "aten.tanh_backward.default": "aten.tanh.default",
    }
    met = {str(node.target): known[node.meta["origin"]] for node in joint.calls()
           if str(node.target) in serves}  # fmt: skip
    assert met == serves
    # Nothing of forward depends on a tangent.
    tangent = joint.input_nodes()[joint.inputs[-1]]
    assert tangent.users and not any(joint.is_forward(user) for user in tangent.users)


def test_a_middle_stage_takes_and_gives_gradients_of_boundaries():
    def function(w, x, mask):
        y = torch.where(mask, x @ w, 0.0)
        return y, mask, y.detach().argmax(), x

    values = {
        Slot("parameter", "w"): leaf(4, 4),
        Slot("boundary", "x"): leaf(4, 4, seed=1),
        Slot("boundary", "mask"): torch.eye(4, dtype=torch.bool),
    }
    outputs = [OUT, Slot("boundary", "mask"), Slot("output", "best"), Slot("boundary", "x")]
    case = captured_function(function, outputs, values)
    case.agree([case.joint])
    tangents = [slot.name for slot in case.joint.inputs if slot.kind == "tangent"]
    assert tangents == ["out", "x"]
    assert case.joint.outputs[4:] == (Slot("input_gradient", "x"), Slot("gradient", "w"))


def test_gradients_that_do_not_exist_are_named():
    values = {Slot("parameter", name): leaf(3) for name in ("used", "unused", "cut")}
    case = captured_function(
        lambda a, b, c: ((a * c.detach()).sum(),), [LOSS], values
    )  # fmt: skip
    assert case.joint.absent == (Slot("gradient", "unused"), Slot("gradient", "cut"))
    assert case.joint.outputs == (LOSS, Slot("gradient", "used"))
    case.agree([case.joint])


def test_without_gradients_there_is_only_forward():
    module = fx.symbolic_trace(lambda w, x: ((w * x).sum(),))
    joint = capture(module, list(slots().items()), [LOSS], {}, gradients=False)
    assert joint.outputs == (LOSS,) and all(map(joint.is_forward, joint.calls()))
    assert len(joint.inputs) == 2


def test_meta_tensors_stand_for_tensors_of_the_device():
    module = calling(_Opaque(lambda x: x + torch.ones(4)))
    meta = [(slot, value.to("meta")) for slot, value in slots().items()]
    joint = capture(module, meta, [LOSS], {})
    assert {node.meta["val"].device.type for node in joint.graph.nodes if "val" in node.meta} == {
        "cpu"
    }
    assert joint.print_readable() == capture(
        module, list(slots().items()), [LOSS], {}
    ).print_readable()  # fmt: skip


class Twice(torch.autograd.Function):
    """Works in place on its own tensor; the gradient is not that of the formula."""

    @staticmethod
    def forward(ctx, x):
        out = x.clone()
        out[1:].mul_(2)
        return out.add_(1)

    @staticmethod
    def backward(ctx, grad):
        done = torch.zeros_like(grad)
        done[:2] = grad[:2]
        return done.mul_(10)


def test_custom_functions_become_plain_nodes_without_writes():
    module = calling(_Opaque(Twice.apply), nn.Tanh())
    case = captured_function(module, [LOSS], slots())
    case.agree([case.joint])
    assert not any(kinds.written(node) for node in case.joint.calls())
    assert case.want[Slot("gradient", "w")][2] == 0  # really its own backward
    assert all("phase" in node.meta for node in case.joint.calls())


def test_autocast_holds_for_its_op_and_for_nothing_else():
    graph, root = fx.Graph(), nn.Module()
    low = _Autocast(torch.ops.aten.mm.default, ("autocast", "cpu", "bfloat16"))
    root.add_module("autocast", low)
    w, x = graph.placeholder("w"), graph.placeholder("x")
    product = graph.call_module("autocast", (x, w))
    other = graph.call_function(torch.mm, (x, w))
    summed = graph.call_function(torch.add, (product, other))
    graph.output((graph.call_method("sum", (summed,)),))
    values = {Slot("parameter", "w"): leaf(4, 4), Slot("boundary", "x"): leaf(4, 4, seed=1)}
    case = captured_function(fx.GraphModule(root, graph), [LOSS], values)
    with torch.autocast("cpu", dtype=torch.float16):  # a caller's autocast changes nothing
        case.agree([case.joint])
    products = [node for node in case.joint.calls() if str(node.target) == "aten.mm.default"]
    assert {node.meta["val"].dtype for node in products} == {torch.bfloat16, torch.float32}


def test_numbers_become_literals():
    def numbers(x):
        vector = torch.tensor([1.0, -2.0, 3.0, float("inf")])
        return x * vector.clamp(max=5) * torch.tensor(2.5)

    case = captured_function(calling(_Opaque(numbers)), [LOSS], slots())
    case.agree([case.joint])
    assert not any(node.op == "get_attr" for node in case.joint.graph.nodes)
    assert torch.tensor in {node.target for node in case.joint.calls()}


class Reads(torch.autograd.Function):
    """Decides by a value."""

    @staticmethod
    def forward(ctx, x):
        return x * 2 if x.sum().item() > 0 else x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Leaves(torch.autograd.Function):
    """Computes its gradient with numpy."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return torch.from_numpy(np.asarray(grad.numpy() * 2))


class _Custom:
    """As the tracer keeps a custom function."""

    def __init__(self, function) -> None:
        self.function = function

    def __call__(self, x):
        return self.function.apply(x)


def test_a_custom_function_that_reads_values_is_named():
    module = calling(_Opaque(_Custom(Reads)))
    with pytest.raises(TraceError, match=r"autograd function Reads cannot be captured") as caught:
        capture(module, list(slots().items()), [LOSS], {"custom_0": "call_3"})
    assert caught.value.where == "graph node call_3"


def test_a_backward_that_leaves_torch_is_placed():
    module = calling(_Opaque(_Custom(Leaves)))
    with pytest.raises(TraceError, match="cannot be captured") as caught:
        capture(module, list(slots().items()), [LOSS], {"custom_0": "call_3"})
    assert caught.value.where == "graph node call_3"


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = fx.symbolic_trace(lambda w, x: ((w * x).sum(),))
    with pytest.raises(TraceError, match="cuda:0 is asked of a machine without a GPU"):
        capture(module, list(slots().items()), [LOSS], {}, device=torch.device("cuda", 0))


def test_writing_an_input_is_refused():
    module = fx.symbolic_trace(lambda w, x: ((w * x.add_(1)).sum(),))
    with pytest.raises(TraceError, match="in place"):
        capture(module, list(slots().items()), [LOSS], {})


def test_a_large_literal_is_refused():
    numbers = [0.5] * 5000
    module = calling(_Opaque(lambda x: x + torch.tensor(numbers).sum()))
    with pytest.raises(TraceError, match="5000 numbers"):
        capture(module, list(slots().items()), [LOSS], {})


def hoistable(w: Tensor, x: Tensor, mask: Tensor) -> tuple[Tensor]:
    count = ops.MICROBATCH_SUM(ops.MICROBATCH_SUM((mask > 0).sum(), 4) * 1.0, 4)
    scale = ops.MICROBATCH_SUM((x.detach() * w.detach()).mean(), 4)
    return ((w * x).sum() / ops.MICROBATCH_SUM((mask > 0).sum() + 0.0, 4) * scale + count * 0,)


def hoisted() -> tuple[Program | None, Joint, dict[Slot, Tensor]]:
    values = {
        Slot("parameter", "w"): leaf(4),
        Slot("input", "x"): torch.arange(4.0) + 1,
        Slot("constant", "mask"): torch.tensor([0, 1, 1, 0]),
    }
    module = fx.symbolic_trace(hoistable)
    origins = {node.name: node.name for node in module.graph.nodes}
    joint = capture(module, list(values.items()), [LOSS], origins)
    values[Slot("tangent", "loss")] = torch.ones(())
    return *hoist_prologue(joint), values


def test_sums_of_inputs_are_hoisted_and_others_estimated():
    prologue, joint, values = hoisted()
    assert prologue is not None
    # A sum of a sum is no sum over one microbatch.
    assert len(prologue.outputs) == 2 and prologue.inputs == (Slot("constant", "mask"),)
    assert len(joint.estimated) == 2
    assert not any(node.target is ops.MICROBATCH_SUM for node in joint.calls())
    summands = prologue.compile(SoloCommunicator())([values[slot] for slot in prologue.inputs])
    totals = {slot: value * 4 for slot, value in zip(prologue.outputs, summands, strict=True)}
    assert sorted(float(total) for total in totals.values()) == [8.0, 8.0]
    everything = {slot: value.detach() for slot, value in (values | totals).items()}
    boxed = [everything[slot] for slot in joint.inputs]
    loss, gradient = joint.compile(SoloCommunicator())(boxed)
    w, x = everything[Slot("parameter", "w")], everything[Slot("input", "x")]
    scale = (x * w).mean() * 4
    torch.testing.assert_close(loss, (w * x).sum() / 8 * scale)
    torch.testing.assert_close(gradient, x / 8 * scale)


def test_what_only_the_prologue_needs_leaves_the_stage():
    _, joint, _ = hoisted()
    assert "aten.gt.Scalar" not in targets(joint)
