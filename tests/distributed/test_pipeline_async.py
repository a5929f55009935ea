"""PipeDream and PipeDream-2BW train by their papers' formulas, written out here once more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from autopar.errors import PlanError
from autopar.runtime import reference, verify
from tests.distributed.pipeline_matrix import model
from tests.models.cases import language
from tests.models.check import Case, agree, compare, on_ranks

STEPS = 3
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-4}),
}
# Constraint beside the schedule's name; updates of a step of 4 microbatches on n stages; age in
# updates of the weights of stage i (from 0) at update t.
FORMULAS = {
    "pipedream": ("", lambda n: 4, lambda n, i: n - 1 - i),
    "vertical sync": (",vertical_sync=true", lambda n: 4, lambda n, i: n - 1),
    "pipedream_2bw": ("", lambda n: 4 // n, lambda n, i: 1),
    "2bw, one update": (",update_every=4", lambda n: 1, lambda n, i: 1),
}


def chain(layers: int = 4) -> Case:
    """A stage's worth of weights per layer."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(layers)]
    return Case(
        model=nn.Sequential(*parts).double(),
        args=(torch.randn(8, 5).double(),),
        loss=lambda y, x: (y - x.flip(1)).pow(2).mean(),
    )


def constraints(formula: str, stages: int) -> str:
    name = {"vertical sync": "pipedream", "2bw, one update": "pipedream_2bw"}.get(formula, formula)
    cuts = "+".join(str(4 // stages * i) for i in range(1, stages))
    return f"ddp,microbatches=4,schedule={name}{FORMULAS[formula][0]},cuts={cuts}"


def by_formula(case: Case, formula: str, stages: int, optimizer: str) -> dict[str, Tensor]:
    """w(t+1) from grad f(w_0(t - age of stage 0), w_1(t - age of stage 1), ...)."""
    _, updates_of, age_of = FORMULAS[formula]
    updates, samples = updates_of(stages), case.args[0]
    now = {name: nn.Parameter(p.detach().clone()) for name, p in case.model.named_parameters()}
    make, options = OPTIMIZERS[optimizer]
    taker = make(now.values(), **options)
    history: list[dict[str, Tensor]] = []
    for t in range(STEPS * updates):
        history.append({name: p.detach().clone() for name, p in now.items()})
        mine = samples.chunk(updates)[t % updates]
        stale = {}
        for name in now:
            stage = int(name.split(".")[0]) // (4 // stages)
            version = history[max(0, t - age_of(stages, stage))][name]
            stale[name] = version.clone().requires_grad_()
        loss = case.loss(functional_call(case.model, stale, (mine,)), mine)
        for name, gradient in zip(now, torch.autograd.grad(loss, stale.values()), strict=True):
            now[name].grad = gradient
        taker.step()
    return {name: p.detach() for name, p in now.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("formula", FORMULAS)
def test_weights_follow_the_formula_over_steps(formula: str, stages: int, optimizer: str):
    case = chain()
    want = by_formula(case, formula, stages, optimizer)
    fresh = by_formula(case, formula, 1, optimizer) if formula == "pipedream" else None
    make, options = OPTIMIZERS[optimizer]

    def body(compiled):
        for _ in range(STEPS):
            compiled.step(*case.args)
        engine = compiled.build(case.args, {})
        stashed = {stage: len(unit.versions) for stage, unit in engine.units.items()}
        return compiled.state_dict(), stashed

    found = on_ranks(
        case, f"pp={stages}", constraints(formula, stages), body,
        optimizer=make, optimizer_options=options,
    )  # fmt: skip
    age_of = FORMULAS[formula][2]
    for rank, (state, stashed) in enumerate(found):
        for name, tensor in want.items():
            assert torch.allclose(state[name], tensor, rtol=1e-12, atol=1e-14), name
        # n - i versions, n with vertical sync, 2 with two buffers: the current and older ones.
        assert stashed == {rank: age_of(stages, rank) + 1}
    if fresh is not None:
        gap = max(float((want[name] - fresh[name]).abs().max()) for name in want)
        assert gap > 1e-4, "old weights must make a difference that the comparison would see"


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("formula", FORMULAS)
def test_verify_knows_the_formulas(formula: str, optimizer: str):
    exact = agree(chain(), "pp=4", constraints(formula, 4), optimizer=optimizer, steps=3)
    assert exact.worst.error <= 1e-12
    assert exact.reference.startswith("eager, 4 microbatches")
    oldest = FORMULAS[formula][2](4, 0)
    assert exact.reference.endswith(f"weights up to {oldest} update{'s' * (oldest > 1)} old")


@pytest.mark.parametrize("formula", FORMULAS)
def test_verify_sees_weights_of_another_age(formula: str, monkeypatch):
    right = reference.Rounds.of_plan

    def wrong(*args):
        rounds = right(*args)
        changed = dict(rounds.delays)
        changed["0.0.weight"] -= 1
        return reference.Rounds(
            microbatches=rounds.microbatches, updates=rounds.updates, delays=changed
        )

    monkeypatch.setattr(verify.Rounds, "of_plan", wrong)
    report = compare(chain(), "pp=2", constraints(formula, 2), steps=3)
    assert not report.equal


@pytest.mark.distributed
def test_on_processes(ranks2):
    case = model("unet")
    for schedule in ("pipedream", "pipedream_2bw"):
        report = verify.verify(
            case.model, case.args, traced=case.traced, mesh="pp=2", dtype="float64",
            constraints=f"ddp,microbatches=4,schedule={schedule}", ranks=ranks2,
        )  # fmt: skip
        assert report.equal and report.worst.error <= 1e-12, report.summary()


def test_a_shared_parameter_is_refused_by_name_with_the_way_out():
    case = language.tied()
    for schedule in ("pipedream", "pipedream_2bw"):
        with pytest.raises(PlanError) as caught:
            compare(case, "pp=2", f"ddp,microbatches=2,schedule={schedule}")
        text = str(caught.value)
        assert "stages 0, 1 share parameter embed.weight" in text
        assert "1f1b" in text and "untie" in text and "cuts" in text
    agree(case, "pp=2", "ddp,microbatches=2,schedule=1f1b", dtype="float64", steps=1)
    # One rank is one stage: nothing is shared.
    agree(case, "pp=1", "ddp,microbatches=2,schedule=pipedream", dtype="float64", steps=1)
