"""Bad input is one error that says what, where, and the way out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import (
    AutoparError,
    ClusterError,
    InputError,
    NonFiniteError,
    PlanError,
    TraceError,
)
from autopar.report.show import show

BATCH = torch.arange(16.0).view(4, 4) / 16


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def mean_square(y: Tensor, *_: Any) -> Tensor:
    return y.pow(2).mean()


def compiled(**options: Any) -> autopar.CompiledModel:
    defaults = {"example_inputs": (BATCH,), "loss_fn": mean_square}
    return autopar.compile(options.pop("model", None) or model(), **defaults | options)


def message(kind: type[AutoparError], function: Any, *args: Any, **options: Any) -> str:
    """The text of the one error, of exactly this kind."""
    with pytest.raises(AutoparError) as caught:
        function(*args, **options)
    assert type(caught.value) is kind, caught.value
    return str(caught.value)


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor | None = None


@dataclasses.dataclass
class Registered:
    x: Tensor
    y: Tensor


torch.export.register_dataclass(Registered)


class Takes(nn.Module):
    """Takes its tensor out of an object, gives its result in one."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make, self.inner = make, nn.Linear(4, 4)

    def forward(self, batch: Any) -> Any:
        return self.make(self.inner(batch.x))


def test_an_unregistered_dataclass():
    text = message(TraceError, compiled, model=Takes(lambda x: x), example_inputs=(Batch(BATCH),))
    for words in ("args[0]", "dataclass Batch is not registered", "register_dataclass(Batch)"):
        assert words in text
    text = message(
        TraceError, compiled, model=Takes(Batch), example_inputs=(Registered(BATCH, BATCH),)
    )
    assert "result" in text and "dataclass Batch" in text


def test_a_registered_dataclass_is_fine():
    ready = compiled(
        model=Takes(lambda x: Registered(x, x * 2)),
        example_inputs=(Registered(BATCH, BATCH),),
        loss_fn=lambda out, batch: (out.y - batch.y).pow(2).mean(),
    )
    out = ready(Registered(BATCH, BATCH))
    assert type(out) is Registered and torch.equal(out.y, out.x * 2)
    assert math.isfinite(ready.step(Registered(BATCH, BATCH)))
    text = message(InputError, ready.step, Registered(BATCH[:2], BATCH))
    assert "args[0].x" in text


def test_a_cache_in_the_output():
    from tests.models.families import family

    case = family("llama")
    text = message(
        TraceError, autopar.compile, case.model, example_kwargs={**case.kwargs, "use_cache": True}
    )
    assert "result" in text and "DynamicCache" in text and "use_cache=False" in text


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.ones(5, 4),), {}, ("args[0]", "shape (5, 4)", "shape (4, 4)")),
        ((torch.ones(4),), {}, ("args[0]", "shape (4,)")),
        ((None,), {}, ("args[0]", "None", "float32 tensor of shape (4, 4)")),
        ((BATCH.double(),), {}, ("args[0]", "float64", "float32")),
        ((BATCH.tolist(),), {}, ("args[0]",)),
        ((3,), {}, ("args[0]", "the int 3")),
        ((), {}, ("args[0]", "missing")),
        ((BATCH, BATCH), {}, ("args[1]", "was not there")),
        ((BATCH,), {"mask": None}, ("kwargs['mask']", "was not there")),
    ],
)
def test_another_input_than_was_traced(args, kwargs, words: tuple[str, ...]):
    ready = compiled()
    for use in (ready.step, ready, ready.gradients):
        text = message(InputError, use, *args, **kwargs)
        assert "fix:" in text
        for word in words:
            assert word in text
    assert ready.step(BATCH)


def test_a_tensor_where_none_was_traced():
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.inner(x)
            return y if mask is None else y * mask

    ready = compiled(model=Optional(), example_inputs=(BATCH, None))
    text = message(InputError, ready.step, BATCH, torch.ones(4, 4))
    assert "args[1]" in text and "traced with None" in text
    # Left out is not None: the call has another form.
    assert "args[1]" in message(InputError, ready.step, BATCH)


@pytest.mark.parametrize("value", [BATCH, {"x": BATCH}, 3])
def test_example_inputs_that_are_no_tuple(value):
    text = message(InputError, compiled, example_inputs=value)
    assert "example_inputs" in text and "a tuple" in text and "(x,)" in text
    text = message(InputError, autopar.plan, model(), 2, value)
    assert "args is of type" in text
    assert "a dict" in message(InputError, compiled, example_kwargs=[BATCH])


def test_inputs_that_are_no_tensors():
    text = message(TraceError, compiled, example_inputs=(BATCH.numpy(),))
    assert "args[0]" in text and "ndarray" in text
    text = message(TraceError, compiled, example_inputs=(object(),))
    assert "args[0]" in text and "type object" in text


def test_a_model_that_does_not_run():
    text = message(TraceError, compiled, example_inputs=(torch.ones(4, 5),))
    assert "module '0'" in text and "same reduction dim" in text
    text = message(TraceError, compiled, example_inputs=())
    assert "missing 1 required positional argument" in text


@pytest.mark.parametrize(
    ("loss", "kind", "words"),
    [
        (3, InputError, ("loss_fn is the int 3", "loss_fn(outputs, *args")),
        (lambda y: y.mean(), InputError, ("loss_fn(y)", "outputs, args[0]")),
        (lambda y, x, z: y.mean(), InputError, ("loss_fn(y, x, z)", "'z'")),
        (lambda y, x: y, TraceError, ("shape (4, 2)", "one element", ".mean()")),
        (lambda y, x: y.argmax(), TraceError, ("int64",)),
        (lambda y, x: 1.0, TraceError, ("the float 1.0",)),
    ],
)
def test_a_wrong_loss_function(loss, kind, words: tuple[str, ...]):
    text = message(kind, compiled, loss_fn=loss)
    assert "loss_fn" in text
    for word in words:
        assert word in text


def test_a_model_without_a_loss():
    ready = compiled(loss_fn=None)
    assert ready(BATCH).shape == (4, 2)
    text = message(PlanError, ready.step, BATCH)
    assert "returns no loss" in text and "loss_fn=" in text


@pytest.mark.parametrize("thing", [3, None, lambda x: x, nn.Linear])
def test_no_model_at_all(thing):
    assert "a torch.nn.Module" in message(InputError, autopar.compile, thing)


def test_a_plan_for_another_model():
    plan = autopar.plan(model(), 1, (BATCH,), loss_fn=mean_square)
    assert compiled(plan=plan).plan == plan
    other = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 2))
    text = message(PlanError, compiled, model=other, plan=plan)
    assert "another model" in text and "0.weight is float32[8, 4]" in text and "[9, 4]" in text
    assert "fix:" in text and "parameters['0.weight']" in text


def test_a_plan_beside_what_it_holds(tmp_path):
    plan = autopar.plan(model(), 1, (BATCH,), loss_fn=mean_square)
    assert "together with mesh" in message(InputError, compiled, plan=plan, mesh="dp=1")
    assert "constraints" in message(InputError, compiled, plan=plan, constraints="ddp")
    assert "of type int" in message(InputError, compiled, plan=3)
    assert "none.json" in message(PlanError, compiled, plan=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    assert "schema_version" in message(PlanError, compiled, plan=str(tmp_path / "bad.json"))


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"mesh": "dp=2"}, ClusterError, ("dp=2 has 2 ranks", "runs 1", "--nproc-per-node 2")),
        ({"mesh": {"dp": 2, "tp": 3}}, ClusterError, ("dp=2,tp=3 has 6 ranks",)),
        ({"mesh": "dp:1"}, PlanError, ("'dp:1'", "dp=2,tp=2")),
        ({"mesh": "dp=0"}, PlanError, ("size 0",)),
        ({"mesh": "1d=1"}, PlanError, ("'1d'",)),
        ({"mesh": {"dp": "1"}}, PlanError, ("size '1'",)),
        ({"mesh": 3}, InputError, ("mesh is of type int", "dp=2,tp=2")),
        ({"cluster": 2}, ClusterError, ("2 ranks", "runs 1")),
        ({"cluster": 0}, ClusterError, ("devices_per_node is 0",)),
        ({"cluster": "2x8xH100"}, ClusterError, ("16 ranks",)),
        ({"cluster": "lots"}, ClusterError, ("'lots'", "8x8xH100-SXM")),
        ({"cluster": "none.yaml"}, ClusterError, ("none.yaml",)),
        ({"cluster": [1]}, InputError, ("cluster is of type list",)),
        ({"constraints": "megatrom"}, PlanError, ("did you mean 'megatron'?",)),
        ({"constraints": {"bacth": "dp"}}, PlanError, ("'bacth'", "did you mean 'batch'?")),
        ({"constraints": {"batch": "dpp"}}, PlanError, ("axis 'dpp'", "did you mean 'dp'?")),
        ({"optimizer": "adamx"}, InputError, ("'adamx'", "did you mean 'adam", "sgd")),
        ({"optimizer": "muon"}, InputError, ("'muon'",)),
        ({"optimizer": 3}, InputError, ("optimizer is of type int", "a factory")),
        ({"optimizer": torch.optim.LBFGS}, InputError, ("LBFGS", "whole tensors")),
        ({"optimizer": "sgd", "learning_rate": 1}, InputError, ("SGD has no option", "'learn")),
        ({"optimizer": "sgd", "lr": -1}, InputError, ("learning rate: -1",)),
        ({"optimizer": None, "lr": 1}, InputError, ("['lr'] without an optimizer",)),
        ({"optimizer": lambda p: torch.optim.SGD(p), "lr": 1}, InputError, ("factory",)),
        ({"seed": "one"}, InputError, ("seed is 'one'",)),
    ],
)
def test_a_wrong_option(options: dict[str, Any], kind, words: tuple[str, ...]):
    options = {"mesh": "dp=1"} | options if "constraints" in options else options
    text = message(kind, lambda: compiled(**options).step(BATCH))
    for word in words:
        assert word in text


def test_an_optimizer_that_exists_already():
    net = model()
    text = message(
        InputError, compiled, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)
    )
    assert "of type SGD" in text and "a function of the parameters" in text
    text = message(InputError, lambda: compiled(optimizer=lambda p: list(p)))
    assert "made an object of type list" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(value: float):
    ready = compiled(optimizer="sgd", lr=0.1)
    before = ready.state_dict()
    text = message(NonFiniteError, ready.step, BATCH * value)
    assert "step 1" in text and "module 0, aten.linear.default" in text
    assert "args[0] holds a number that is not finite" in text and "check_finite=False" in text
    assert all(torch.equal(before[name], tensor) for name, tensor in ready.state_dict().items())
    assert math.isfinite(ready.step(BATCH))


class Rare(nn.Module):
    """Calls an op for which there is no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(self.inner(x))


def test_an_op_without_a_rule_is_reported_or_refused():
    ready = compiled(model=nn.Sequential(Rare(), nn.Linear(4, 2)))
    (op,) = ready.plan.unruled
    assert (op.op, op.module, op.size_bytes) == ("aten.linalg_svdvals.default", "0", 80)
    assert "no rule for aten.linalg_svdvals.default in 0: every rank" in show(ready.plan, 200)
    text = message(PlanError, compiled, model=nn.Sequential(Rare(), nn.Linear(4, 2)), strict=True)
    for words in ("aten.linalg_svdvals.default", "80 bytes", "module 0", "test_bad_input.py:"):
        assert words in text
    assert compiled(strict=True).plan.unruled == ()


def test_random_numbers_that_ranks_would_not_share():
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x[None])[0]

    from autopar.runtime.comm_threads import run_threads
    from autopar.runtime.compiled import CompiledModel, CompileOptions
    from autopar.sharding.mesh import Mesh

    net = Draws()
    traced = autopar.trace(net, (BATCH,), {}, mean_square)
    options = CompileOptions(mesh=Mesh.parse("dp=2"), loss_fn=mean_square)

    def rank(comm: Any) -> None:
        CompiledModel(net, comm, options, traced).step(BATCH)

    text = message(PlanError, run_threads, 2, rank)
    assert "aten.lstm" in text and "module lstm" in text and "nn.Dropout" in text
    assert compiled(model=net).step(BATCH) >= 0  # one rank has nobody to differ from


def test_nothing_was_compiled_yet():
    lazy = autopar.compile(model())
    for use in (lambda: lazy.plan, lazy.state_dict, lazy.print_readable):
        assert "step()" in message(PlanError, use)


def test_errors_keep_their_parts():
    error = InputError("what", expected="good", fix="mend", where="here")
    assert str(error).splitlines() == [
        "what", "  where:    here", "  expected: good", "  fix:      mend"
    ]  # fmt: skip
