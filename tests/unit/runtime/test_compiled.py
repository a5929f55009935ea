"""The public face: compile, step, call, state, plans; on one rank and on processes."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import InputError, PlanError, RankError
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModel
from tests.models.cases import hostile, language, structure, vision
from tests.models.check import Case, alone, on_ranks


class Small(nn.Module):
    """Tied weights, persistent and other buffers, an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 6))
        self.register_buffer("scratch", torch.ones(6), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        h = self.norm(self.embed(ids)) * self.scale * self.scratch
        logits = self.head(h)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "count": 3}


def small() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 11, (8,))
    return Case(model=Small(), args=(ids,), kwargs={"labels": (ids * 3) % 11})


def eager_losses(case: Case, optimizer, steps: int = 3) -> list[float]:
    model = copy.deepcopy(case.model)
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad])
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = model(*case.args, **case.kwargs)
        loss = out["loss"] if case.loss is None else case.loss(out, *case.args)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def test_lazy_and_eager_compilation_train_alike():
    case = small()
    lazy = autopar.compile(case.model, lr=0.1)
    ready = autopar.compile(
        case.model, example_inputs=case.args, example_kwargs=case.kwargs, lr=0.1
    )
    assert ready.plan.strategy == "ddp"
    for use in (lambda: lazy.plan, lazy.state_dict, lazy.print_readable):
        with pytest.raises(PlanError, match="step"):
            use()
    assert lazy.optimizer is None
    for _ in range(3):
        assert torch.equal(
            lazy.step(*case.args, **case.kwargs), ready.step(*case.args, **case.kwargs)
        )
    assert lazy.plan == ready.plan


@pytest.mark.parametrize(
    ("optimizer", "options", "reference"),
    [
        ("sgd", {"lr": 0.2, "momentum": 0.9},
         lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)),
        ("AdamW", {"lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01)),
        (torch.optim.RMSprop, {"lr": 0.01}, lambda p: torch.optim.RMSprop(p, lr=0.01)),
        (lambda p: torch.optim.Adam(p, lr=0.03), {}, lambda p: torch.optim.Adam(p, lr=0.03)),
    ],
)  # fmt: skip
def test_optimizers_by_name_class_and_factory(optimizer, options, reference):
    case = small()
    compiled = autopar.compile(case.model, optimizer=optimizer, **options)
    losses = [compiled.step(*case.args, **case.kwargs).item() for _ in range(4)]
    assert losses == pytest.approx(eager_losses(case, reference, 4), rel=1e-5)
    assert isinstance(compiled.optimizer, torch.optim.Optimizer)


def test_a_schedule_of_the_learning_rate():
    case = small()
    compiled = autopar.compile(
        case.model, example_inputs=case.args, example_kwargs=case.kwargs, optimizer="sgd", lr=0.5
    )
    schedule = torch.optim.lr_scheduler.StepLR(compiled.optimizer, step_size=1, gamma=0.1)
    losses = []
    for _ in range(3):
        losses.append(compiled.step(*case.args, **case.kwargs).item())
        schedule.step()

    def with_schedule(parameters):
        return _Stepped(parameters)

    assert losses == pytest.approx(eager_losses(case, with_schedule), rel=1e-5)


class _Stepped(torch.optim.SGD):
    """SGD whose rate falls tenfold at each step."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.5)

    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.1


def test_without_an_optimizer_only_gradients():
    case = small()
    compiled = autopar.compile(case.model, optimizer=None)
    before = copy.deepcopy(case.model.state_dict())
    first = compiled.step(*case.args, **case.kwargs)
    loss, gradients = compiled.gradients(*case.args, **case.kwargs)
    assert torch.equal(first, loss) and compiled.optimizer is None
    assert torch.equal(compiled.state_dict()["embed.weight"], before["embed.weight"])
    model = copy.deepcopy(case.model)
    model(*case.args, **case.kwargs)["loss"].backward()
    assert gradients["unused"] is None
    assert torch.allclose(gradients["embed.weight"], model.embed.weight.grad, atol=1e-6)


def test_the_state_dict_is_the_users():
    case = small()

    def body(compiled: CompiledModel):
        compiled.step(*case.args, **case.kwargs)
        return compiled.state_dict()

    want = case.model.state_dict()
    for mesh, how in (("dp=1", "ddp"), ("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=4", "megatron")):
        for state in on_ranks(case, mesh, how, body):
            assert list(state) == list(want)
            assert {k: (v.shape, v.dtype) for k, v in state.items()} == {
                k: (v.shape, v.dtype) for k, v in want.items()
            }
            assert torch.equal(state["head.weight"], state["embed.weight"])
            assert torch.equal(state["unused"], want["unused"])
            assert int(state["norm.num_batches_tracked"]) == 1
            assert "scratch" not in state and "scale" in state
            copy.deepcopy(case.model).load_state_dict(state)


def test_a_state_dict_is_a_copy():
    case = small()
    compiled = alone(case)
    state = compiled.state_dict()
    for tensor in state.values():
        tensor.zero_()
    assert compiled.state_dict()["embed.weight"].any()
    assert case.model.embed.weight.any() and case.model.scale.any()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_state_dict_is_taken(when: str):
    case = small()
    donor = small()
    with torch.no_grad():
        for parameter in donor.model.parameters():
            parameter.normal_()
    donor.model(*case.args)
    state = donor.model.state_dict()

    def body(compiled: CompiledModel):
        if when == "after":
            compiled.step(*case.args, **case.kwargs)
        compiled.load_state_dict(state)
        return compiled.state_dict(), compiled.gradients(*case.args, **case.kwargs)[0]

    want = donor.model(*case.args, **case.kwargs)["loss"]
    for mesh, how in (("dp=2", "ddp"), ("dp=2", "fsdp"), ("tp=2", "megatron")):
        for held, loss in on_ranks(case, mesh, how, body):
            assert all(torch.equal(held[name], state[name]) for name in state)
            assert loss.item() == pytest.approx(want.item(), rel=1e-5)


def test_a_state_dict_before_the_first_step():
    case = small()
    state = {k: torch.zeros_like(v) for k, v in case.model.state_dict().items()}
    compiled = autopar.compile(case.model, optimizer=None)
    compiled.load_state_dict(state)
    loss = compiled.step(*case.args, **case.kwargs)
    assert loss.item() == pytest.approx(torch.log(torch.tensor(11.0)).item())
    assert not compiled.state_dict()["embed.weight"].any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head.weight": None}, "lacks head.weight"),
        ({"extra": torch.ones(1)}, "no tensor extra"),
        ({"scale": torch.ones(5)}, "scale has shape (5,)"),
        ({"scale": [1.0] * 6}, "scale is of type list"),
    ],
)
def test_a_wrong_state_dict_names_the_key(change, words: str):
    case = small()
    state = case.model.state_dict() | change
    state = {name: value for name, value in state.items() if value is not None}
    for compiled in (autopar.compile(case.model), alone(case)):
        with pytest.raises(InputError) as caught:
            compiled.load_state_dict(state)
        assert words in str(caught.value)
    with pytest.raises(InputError, match="type list"):
        compiled.load_state_dict([1])


def test_a_call_gives_the_models_own_structure():
    case = small()
    want = copy.deepcopy(case.model)(*case.args, **case.kwargs)

    def body(compiled: CompiledModel):
        out = compiled(*case.args, **case.kwargs)
        again = compiled(*case.args, **case.kwargs)
        assert torch.equal(out["logits"], again["logits"])
        assert int(compiled.state_dict()["norm.num_batches_tracked"]) == 0
        return out

    for mesh, how in (("dp=1", "ddp"), ("dp=3", "ddp"), ("tp=4", "megatron")):
        for out in on_ranks(case, mesh, how, body):
            assert list(out) == ["loss", "logits", "count"] and out["count"] == 3
            assert torch.allclose(out["logits"], want["logits"], atol=1e-6)
            assert not out["logits"].requires_grad


def test_calling_without_a_loss():
    case = Case(model=Small(), args=(torch.arange(8),))
    compiled = autopar.compile(case.model, example_inputs=case.args)
    out = compiled(*case.args)
    assert out["loss"] is None and out["logits"].shape == (8, 11)
    with pytest.raises(PlanError) as caught:
        compiled.step(*case.args)
    assert "returns no loss" in str(caught.value) and "loss_fn" in str(caught.value)


def test_plans_are_saved_and_carried_out(tmp_path):
    case = language.decoder()
    plan = autopar.plan(case.model, "2x2xcpu", case.args, loss_fn=case.loss,
                        constraints="megatron", mesh="dp=2,tp=2")  # fmt: skip
    file = tmp_path / "plan.json"
    plan.save(file)
    assert autopar.load_plan(file) == plan

    def body(compiled: CompiledModel):
        return compiled.plan, compiled.step(*case.args)

    from autopar.runtime.comm_threads import run_threads
    from tests.models.check import compiled_on

    by_file = run_threads(4, lambda comm: body(compiled_on(comm, case, plan=plan)))
    by_name = on_ranks(case, "dp=2,tp=2", "megatron", body)
    # Only the file says what the plan takes: by name, no cluster is known.
    assert [(replace(found, forecast=None), loss) for found, loss in by_file] == by_name
    assert by_file[0][0] == plan and plan.forecast is not None


def test_a_plan_for_a_cluster_one_lacks():
    case = structure.samples(64)
    plan = autopar.plan(case.model, "4x8xH100-SXM", case.args, loss_fn=case.loss)
    assert plan.device_mesh.size == 32 and str(plan.device_mesh) == "dp=32"
    plan = autopar.plan(case.model, 8, case.args, loss_fn=case.loss, constraints="megatron")
    assert str(plan.device_mesh) == "tp=8"
    with torch.device("meta"):
        model = structure.Classes()
    assert autopar.plan(model, 2, (torch.randn(6, 6),)).device_mesh.size == 2


def test_the_program_can_be_read():
    case = language.decoder()
    text = on_ranks(case, "dp=2,tp=2", "megatron", lambda c: c.print_readable())[0]
    for words in ("stage 0 forward", "stage 0 backward", "parameter:", "saved:", "actions 0F0 0B0"):
        assert words in text
    assert "aten.mm(" in text and "  # blocks.0" in text  # what runs, and whose it is
    assert "autopar.all_reduce(" in text  # of tensor parallelism, where it stands
    assert "start_all_reduce_(" in text  # of gradients, bucket by bucket


def test_two_models_do_not_disturb_each_other():
    first, second = language.dropped(), language.dropped()

    def together(comm: Communicator):
        from tests.models.check import compiled_on

        one, two = (compiled_on(comm, case, "dp=2", "ddp") for case in (first, second))
        return [
            (one.step(*first.args), two.step(*second.args), two.step(*second.args))
            for _ in range(2)
        ]

    from autopar.runtime.comm_threads import run_threads

    _ = first.traced, second.traced
    mixed = run_threads(2, together)
    apart = [loss for (loss,) in _steps(first, 2)], [loss for (loss,) in _steps(second, 4)]
    for rank in mixed:
        assert [a for a, _, _ in rank] == apart[0]
        assert list(itertools.chain(*((b, c) for _, b, c in rank))) == apart[1]


def _steps(case: Case, steps: int) -> list[tuple[Tensor]]:
    return on_ranks(case, "dp=2", "ddp", lambda c: [(c.step(*case.args),) for _ in range(steps)])[0]


def test_the_users_model_is_left_alone():
    case = vision.batch_statistics()
    model = case.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    keys = [sorted(vars(module)) for module in model.modules()]
    compiled = autopar.compile(model, loss_fn=case.loss, lr=0.1)
    for _ in range(2):
        compiled.step(*case.args)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameters[name] is p for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert keys == [sorted(vars(module)) for module in model.modules()]
    assert model.training and not torch.equal(
        compiled.state_dict()["head.weight"], before["head.weight"]
    )


def test_eval_mode_is_the_traced_one():
    case = language.dropped(0.5)
    case.model.eval()
    compiled = alone(case)
    assert torch.allclose(compiled(*case.args), case.model(*case.args), atol=1e-6)
    assert not case.model.training


def test_numbers_and_nothing_among_inputs_and_outputs():
    case = structure.switches()
    compiled = autopar.compile(case.model, loss_fn=case.loss)
    out = compiled(*case.args, **case.kwargs)
    assert out["said"] == {"loud": True, "n": 2}
    assert out["more"][1] is None and isinstance(out["more"], tuple)
    assert isinstance(out["more"][2], list)
    compiled.step(*case.args, **case.kwargs)


def test_custom_functions_need_no_help():
    case = hostile.hand_written_backward()
    compiled = autopar.compile(case.model, loss_fn=case.loss, optimizer="sgd", lr=0.1)
    losses = [compiled.step(*case.args).item() for _ in range(3)]
    assert losses == pytest.approx(
        eager_losses(case, lambda p: torch.optim.SGD(p, lr=0.1)), rel=1e-5
    )


def _train(comm: Communicator, mesh: str, how: str) -> tuple[list[float], dict[str, Tensor], int]:
    case = language.decoder()
    compiled = autopar.compile(
        case.model, comm.world_size, loss_fn=case.loss, mesh=mesh, constraints=how,
        optimizer="sgd", lr=0.1, comm=comm,
    )  # fmt: skip
    losses = [compiled.step(*case.args).item() for _ in range(3)]
    return losses, compiled.state_dict(), sum(compiled.traffic.values())


@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "how"), [("dp=2", "ddp"), ("tp=2", "megatron_sp")])
def test_processes_train_what_one_would(ranks2, mesh: str, how: str):
    want = eager_losses(language.decoder(), lambda p: torch.optim.SGD(p, lr=0.1))
    for losses, state, sent in ranks2.run(_train, mesh, how):
        assert losses == pytest.approx(want, rel=1e-5)
        assert state["embed.weight"].shape == (32, 16) and sent > 0


def _disagree(comm: Communicator, what: str) -> str:
    torch.manual_seed(comm.rank if what == "batch" else 0)
    batch = torch.randn(4, 6)
    torch.manual_seed(comm.rank)
    model = structure.Classes()
    if what == "model" and comm.rank == 1:
        model = nn.Sequential(model, nn.ReLU())
    how = "fsdp" if what == "plan" and comm.rank == 1 else "ddp"
    compiled = autopar.compile(
        model, loss_fn=lambda y, x: y.pow(2).mean(), constraints=how, mesh="dp=2", comm=comm
    )
    try:
        compiled.step(batch)
    except RankError as error:
        return str(error)
    return str(compiled.state_dict()["out.bias"].sum().item())


@pytest.mark.distributed
def test_ranks_that_disagree_are_told(ranks2):
    for what, words in (("model", "different model and inputs"), ("plan", "different plan"),
                        ("batch", "different args[0]")):  # fmt: skip
        for text in ranks2.run(_disagree, what):
            assert words in text and "fix:" in text
    # Weights of rank 0 are taken: seeding the model is not needed.
    first, second = ranks2.run(_disagree, "nothing")
    assert first == second
