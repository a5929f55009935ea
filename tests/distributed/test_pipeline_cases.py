"""Hard cases of pipelines: tied weights, skips, ZeRO beside stages, accumulation, recurrence."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime.programs.buckets import ALIGN_BYTES
from autopar.runtime.verify import verify
from tests.marks import later
from tests.models.cases import language, structure, vision
from tests.models.check import Case, agree, compiled_on, on_ranks


def classified(width: int, layers: int, samples: int) -> Case:
    """A plain stack of layers that tells which of the first features is largest."""
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return Case(
        model=nn.Sequential(*parts, nn.Linear(width, 3)),
        args=(torch.randn(samples, width),),
        loss=lambda y, x: F.cross_entropy(y, x[:, :3].argmax(1)),
    )


# Tied weights at both ends of a pipeline.


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ("pp=2", "ddp"), ("pp=2,dp=2", "zero1"), ("pp=2,dp=2", "zero2"), ("pp=2,dp=2", "zero3"),
        ("pp=2,tp=2", "megatron"), ("pp=2", "ddp,schedule=zbv"), ("pp=4", "ddp,schedule=zb_h1"),
    ],
)  # fmt: skip
def test_a_tied_weight_trains_as_one(mesh: str, constraints: str):
    for how in ("module", "thrice"):
        case = language.tied(how)
        report = agree(case, mesh, f"{constraints},microbatches=2")
        assert report.reference == "eager" and report.worst.error <= 1e-5
        names = [row.name for row in report.rows if row.kind == "gradient"]
        assert names.count("embed.weight") == 1


def test_both_ends_hold_the_same_tied_weight_after_every_step():
    case = language.tied()

    def body(compiled):
        engine = compiled.build(case.args, {})
        name = next(n for n, item in engine.items.items() if item.target == "embed.weight")
        seen = []
        for _ in range(3):
            compiled.step(*case.args)
            held = [u.parameters.whole_value(name) for u in engine.units.values()
                    if name in u.parameters.items]  # fmt: skip
            seen.append([tensor.clone() for tensor in held])
        # The sum of both uses, once, whichever rank is asked.
        _, gradients = compiled.gradients(*case.args)
        return seen, gradients["embed.weight"], compiled.state_dict()

    ranks = on_ranks(case, "pp=2,dp=2", "zero1,microbatches=2", body)
    for step in range(3):
        copies = [tensor for seen, _, _ in ranks for tensor in seen[step]]
        assert len(copies) == 4
        assert all(torch.equal(copies[0], other) for other in copies[1:])
    trained = language.tied().model
    trained.load_state_dict(ranks[0][2])
    case.loss(trained(*case.args), *case.args).backward()
    for _, gradient, state in ranks:
        assert torch.allclose(gradient, trained.embed.weight.grad, rtol=1e-4, atol=1e-7)
        assert state.keys() == case.model.state_dict().keys()
        assert torch.equal(state["unembed.weight"], state["embed.weight"])


# ZeRO inside a pipeline.


SHARDED = [
    pytest.param(zero, schedule, marks=() if (zero + place) % 3 == 0 else pytest.mark.long)
    for zero in (1, 2, 3)
    for place, schedule in enumerate(("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"))
]
"""All of these are in the matrix, too, with other models."""


@pytest.mark.parametrize(("zero", "schedule"), SHARDED)
def test_shards_get_the_sum_over_microbatches_and_ranks(zero: int, schedule: str):
    case = classified(10, 6, 16)
    report = agree(case, "pp=2,dp=2", f"zero{zero},microbatches=4,schedule={schedule}")
    assert report.reference == "eager" and report.worst.error <= 1e-5
    exact = agree(case, "pp=2,dp=2", f"zero{zero},microbatches=4,schedule={schedule}",
                  dtype="float64", steps=5)  # fmt: skip
    assert exact.worst.error <= 1e-12


@pytest.mark.distributed
@pytest.mark.parametrize("zero", [*later(1, 2), 3])
def test_zero_in_a_pipeline_on_processes(zero: int, ranks4):
    case = classified(10, 6, 16)
    torch.manual_seed(1)
    model = nn.Sequential(case.model, nn.MSELoss())  # picklable: no loss function of a test
    target = torch.randn(16, 3)

    report = verify(
        Scored(model[0]), (case.args[0], target), mesh="pp=2,dp=2",
        constraints=f"zero{zero},microbatches=4", dtype="float64", ranks=ranks4,
    )  # fmt: skip
    assert report.equal and report.worst.error <= 1e-12, report.summary()


class Scored(nn.Module):
    """A model that returns its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, target):
        return F.mse_loss(self.inner(x), target)


# Gradients of three microbatches.


@pytest.mark.parametrize("zero", [0, *later(1, 2), 3])
def test_the_gradient_is_the_sum_over_microbatches_not_the_last(zero: int):
    torch.manual_seed(0)
    case = Case(
        model=nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33, 5)),
        args=(torch.randn(12, 7),),
        loss=lambda y, x: F.cross_entropy(y, x[:, :5].argmax(1)),
    )
    parts = []
    for part in case.args[0].chunk(3):
        case.model.zero_grad()
        (case.loss(case.model(part), part) / 3).backward()
        parts.append({name: p.grad.clone() for name, p in case.model.named_parameters()})
    case.model.zero_grad(set_to_none=True)

    def body(compiled):
        first = compiled.gradients(*case.args)[1]
        return first, compiled.gradients(*case.args)[1]  # and nothing is left of the first

    for first, second in on_ranks(case, "dp=2", f"zero={zero},microbatches=3", body):
        for name, last in parts[2].items():
            want = sum(part[name] for part in parts)
            assert torch.allclose(first[name], want, rtol=1e-5, atol=1e-7), name
            assert torch.equal(first[name], second[name])
            assert not torch.allclose(first[name], last, rtol=1e-2)
    report = agree(case, "dp=2", f"zero={zero},microbatches=3")
    assert report.worst.error <= 1e-5 and report.reference == "eager"


def test_shards_divide_the_optimizer_state():
    case = classified(10, 6, 16)
    whole = sum(p.numel() for p in case.model.parameters())

    def body(compiled):
        compiled.step(*case.args)
        states = compiled.optimizer.state.values()
        return sum(state["exp_avg"].numel() for state in states)

    for zero in (1, 2, 3):
        held = on_ranks(case, "pp=2,dp=2", f"zero{zero},microbatches=4", body)
        assert whole <= sum(held) <= whole + 4 * 4  # but padding
        alone = on_ranks(case, "pp=2,dp=2", "ddp,microbatches=4", body)
        assert sum(alone) == 2 * whole
        # Members of a bucket are aligned, so halves of few elements are not quite equal.
        assert max(held) <= math.ceil(max(alone) / 2) + ALIGN_BYTES // 4


# Skips that jump over stages.


@pytest.mark.parametrize("schedule", [*later("gpipe", "1f1b"), "zb_h1"])
def test_early_activations_go_straight_to_the_far_end(schedule: str):
    case = vision.long_skips()
    constraints = f"ddp,microbatches=2,schedule={schedule},cuts=down.1+up.0+up.1"
    report = agree(case, "pp=4", constraints)
    assert report.reference == "eager" and report.worst.error <= 1e-5
    assert agree(case, "pp=4", constraints, dtype="float64", steps=5).worst.error <= 1e-12

    def body(compiled):
        execution = compiled.build(case.args, {}).execution
        rows = execution.schedule.actions
        sends = {(a.kind, a.stage, a.peer) for row in rows for a in row if a.kind[:4] == "SEND"}
        return {(e.source, e.target) for e in execution.stages.edges()}, sends

    for edges, sends in on_ranks(case, "pp=4", constraints, body):
        # The first activation is needed by the last stage, that of the first stage's end by two.
        assert {(0, 1), (1, 2), (2, 3), (0, 3)} <= edges
        for source, target in edges:
            assert ("SEND_F", source, target) in sends
            assert ("SEND_B", target, source) in sends


# States whose batch is not their first dim.


@pytest.mark.parametrize("schedule", ["1f1b", *later("zb_h1", "pipedream")])
def test_recurrent_layers_in_a_pipeline(schedule: str):
    case = structure.recurrent()
    report = agree(case, "pp=2,dp=2", f"ddp,microbatches=2,schedule={schedule}")
    assert report.reference.split(",")[0] == "eager" and report.worst.error <= 1e-5
    if schedule == "1f1b":
        exact = agree(case, "pp=2", "ddp,microbatches=2", dtype="float64", steps=2)
        assert exact.worst.error <= 1e-12


def test_states_of_recurrent_layers_come_back_whole():
    case = structure.recurrent()
    with torch.no_grad():
        want = case.model(*case.args)
    have = on_ranks(case, "pp=2,dp=2", "ddp,microbatches=2", lambda compiled: compiled(*case.args))
    for outputs in have:
        for tensor, expected in zip(outputs, want, strict=True):
            assert torch.allclose(tensor, expected, rtol=1e-5, atol=1e-6)


def test_a_plan_is_the_same_on_one_rank_and_on_many():
    from autopar.runtime.comm import SoloCommunicator

    case = classified(10, 6, 16)
    alone = compiled_on(SoloCommunicator(), case, "pp=1", "ddp,microbatches=4")
    loss, gradients = alone.gradients(*case.args)
    for other, found in on_ranks(
        case, "pp=2", "ddp,microbatches=4", lambda compiled: compiled.gradients(*case.args)
    ):
        assert torch.equal(loss, other)
        assert all(torch.equal(found[name], gradients[name]) for name in gradients)
