"""Training under plans in detail: statistics, frozen weights, faults, buffers, depth."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from autopar.errors import NonFiniteError, TraceError
from autopar.graph.blocks import find_blocks
from autopar.trace import trace
from tests.models.cases import hostile, language, structure, vision
from tests.models.check import ALL_PLANS, Case, alone, losses, on_ranks

PLANS = (("dp=3", "ddp"), ("tp=2", "megatron"), ("dp=2,tp=2", "megatron_sp"))


def test_batch_statistics_are_global():
    case = vision.batch_statistics(7)
    eager = copy.deepcopy(case.model)
    eager(*case.args)
    want = dict(eager.named_buffers())

    def body(compiled):
        compiled.step(*case.args)
        return compiled.state_dict(), compiled.plan.notes

    for mesh, constraints in ALL_PLANS:
        ranks = on_ranks(case, mesh, constraints, body)
        for state, notes in ranks:
            for name, buffer in want.items():
                assert torch.allclose(state[name], buffer, rtol=1e-5, atol=1e-6), name
                assert torch.equal(state[name], ranks[0][0][name]), name
            assert int(state["plain.num_batches_tracked"]) == 1
            if mesh.startswith("dp"):
                assert any("spatial" in note and "global batch" in note for note in notes)


def test_cumulative_statistics_are_refused_by_name():
    case = vision.batch_statistics(momentum=None)
    with pytest.raises(TraceError, match="momentum=None") as caught:
        _ = case.traced
    assert "'spatial'" in str(caught.value)


def test_frozen_weights_stay_out_of_everything():
    case = structure.adapters()
    frozen = {name for name, p in case.model.named_parameters() if not p.requires_grad}
    assert len(frozen) == 7

    def body(compiled):
        _, gradients = compiled.gradients(*case.args)
        compiled.step(*case.args)
        engine = compiled.build(case.args, {})
        held = {id(p) for group in compiled.optimizer.param_groups for p in group["params"]}
        parameters = engine.units[0].parameters
        for name, item in parameters.items.items():
            assert item.trainable == (item.fqn not in frozen)
            assert (id(parameters.values[name]) in held) == item.trainable
            assert (name in parameters.gradients) == item.trainable
        assert {name for name, grad in gradients.items() if grad is None} == frozen
        return compiled.state_dict()

    for mesh, constraints in ALL_PLANS:
        for state in on_ranks(case, mesh, constraints, body):
            for name in frozen:
                assert torch.equal(state[name], case.model.state_dict()[name])
            assert not torch.equal(state["wide.up"], case.model.state_dict()["wide.up"])


def test_a_model_with_nothing_to_train_still_runs():
    case = structure.adapters()
    case.model.requires_grad_(False)
    for rank in losses(case, "dp=2,tp=2", "megatron"):
        assert rank[0] == rank[2]


def test_a_rank_without_labels_adds_nothing():
    case = language.labelled_tokens()
    want = case.model(*case.args)
    # Five samples on five ranks: two of them have no label at all.
    for rank in losses(case, "dp=5", "ddp", steps=1):
        assert rank[0].item() == pytest.approx(want.item(), rel=1e-6)


def test_no_label_anywhere_is_told():
    case = language.labelled_tokens()
    case.args[1].fill_(-100)
    with pytest.raises(NonFiniteError, match="nan"):
        losses(case, "dp=2", "ddp", steps=1)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_all_ranks_report_a_poisoned_sample_in_the_same_step(poison: float):
    good, bad = hostile.padded_rows(), hostile.padded_rows(poison)

    def body(compiled):
        compiled.step(*good.args)
        before = compiled.state_dict()
        try:
            compiled.step(*bad.args)
        except NonFiniteError as error:
            after = compiled.state_dict()
            assert all(torch.equal(after[name], before[name]) for name in after)
            return str(error), compiled.step(*good.args)
        return "no error", None

    for mesh, constraints in (("dp=4", "ddp"), ("dp=2,tp=2", "megatron")):
        ranks = on_ranks(good, mesh, constraints, body)
        for text, loss in ranks:
            assert text == ranks[0][0]
            assert "the loss of step 2 is nan" in text and "nothing was updated" in text
            assert "module qkv, aten.linear.default" in text
            assert ("rank 1" if mesh == "dp=4" else "rank 0") in text
            assert "input args[0] holds a number that is not finite" in text
            assert torch.isfinite(loss)


def test_a_nan_born_inside_is_traced_to_its_module():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.second(torch.sqrt(self.first(x))).sum()

    torch.manual_seed(0)
    case = Case(model=nn.Sequential(nn.Linear(4, 4), Root()), args=(torch.randn(4, 4),))

    def body(compiled):
        with pytest.raises(NonFiniteError) as caught:
            compiled.step(*case.args)
        return str(caught.value)

    for text in on_ranks(case, "dp=2,tp=2", "megatron", body):
        assert "module 1, aten.sqrt.default" in text and "test_cases_training.py:" in text


def test_an_infinity_is_traced_past_those_that_are_meant():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score, self.grow = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            far = self.score(x).masked_fill(x > 0, float("inf")).amin(1)
            return torch.exp(100 * self.grow(x).abs() + 80).sum() + far.clamp(max=9).sum()

    torch.manual_seed(0)
    case = Case(model=Root(), args=(torch.randn(4, 4),))

    def body(compiled):
        with pytest.raises(NonFiniteError) as caught:
            compiled.step(*case.args)
        return str(caught.value)

    for text in on_ranks(case, "dp=2", "ddp", body):
        assert "is inf" in text and "aten.exp.default" in text


def test_finite_checks_can_be_off():
    bad = hostile.padded_rows(math.nan)
    for rank in losses(bad, "dp=2", "ddp", steps=1, check_finite=False):
        assert torch.isnan(rank[0])


def test_a_teacher_keeps_no_activations():
    case = hostile.teacher()
    engine = alone(case).build(case.args, {})
    programs = engine.units[0].programs
    forward = programs.parts["F"]
    saved = [
        node.meta["val"].shape
        for slot, node in forward.output_nodes().items()
        if slot.kind == "saved"
    ]
    assert saved
    assert not any(9 in shape for shape in saved), "the teacher's hidden layer has 9 features"
    modules = {node.name: node.module for node in engine.sharded.graph.nodes}
    backward = {modules.get(node.meta.get("origin")) for node in programs.parts["B"].calls()}
    assert any(module and module.startswith("student") for module in backward)
    assert not any(module and module.startswith("teacher") for module in backward)


def test_moving_buffers_are_those_of_one_device_on_every_rank():
    case = hostile.teacher()
    eager = copy.deepcopy(case.model)
    eager(*case.args)

    def body(compiled):
        compiled.step(*case.args)
        return compiled.state_dict()

    for mesh, constraints in ALL_PLANS:
        ranks = on_ranks(case, mesh, constraints, body)
        for state in ranks:
            assert int(state["steps"]) == 1
            assert torch.allclose(state["middle"], eager.middle, rtol=1e-5, atol=1e-7)
            assert torch.equal(state["middle"], ranks[0]["middle"])


def test_a_hand_written_backward_gives_the_gradients_of_eager():
    case = hostile.hand_written_backward()
    eager = copy.deepcopy(case.model)
    case.loss(eager(*case.args), *case.args).backward()
    for mesh, constraints in PLANS:
        for _, gradients in on_ranks(
            case, mesh, constraints, lambda compiled: compiled.gradients(*case.args)
        ):
            for name, parameter in eager.named_parameters():
                assert torch.allclose(gradients[name], parameter.grad, 1e-5, 1e-7), name


def test_depth_costs_little():
    # Seconds are not asserted: tests/bench/bench_trace.py prints them.
    for layers in (50, 400):
        case = structure.deep(layers)
        traced = trace(case.model, case.args, {}, case.loss)
        assert len(traced.parameters) == 6 * layers + 2
        assert max(block.count for block in find_blocks(traced.graph)) >= layers - 1


def test_equal_layers_get_equal_strategies():
    case = structure.deep(12)
    plan = compiled_on_plan(case)
    placed = {item.fqn: item.placement for item in plan.parameters}
    for layer in range(1, 12):
        for name in ("norm.weight", "up.weight", "up.bias", "down.weight", "down.bias"):
            assert placed[f"{layer}.{name}"] == placed[f"0.{name}"]


def compiled_on_plan(case: Case):
    return on_ranks(case, "dp=2,tp=4", "megatron", lambda compiled: compiled.plan)[0]
