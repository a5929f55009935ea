"""Dropout, initial weights and repeatability: the same numbers under every plan."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from autopar.errors import InputError
from tests.models.cases import language, structure
from tests.models.check import ALL_PLANS, Case, alone, compare, losses, on_ranks

PLANS = (("dp=3", "ddp"), ("tp=2", "megatron"), ("dp=2,tp=2", "megatron_sp"))


class Mask(nn.Module):
    """Two dropouts of the same input, one whose features can be split."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)
        nn.init.ones_(self.up.weight)
        nn.init.ones_(self.up.bias)

    def forward(self, x):
        hidden = nn.functional.dropout(self.up(x).relu(), self.p, self.training)
        again = nn.functional.dropout(self.up(x).relu(), self.p, self.training)
        return self.down(hidden).mean(), hidden, again


def masks(p: float = 0.25) -> Case:
    torch.manual_seed(0)
    return Case(model=Mask(p), args=(torch.ones(96, 8),), loss=lambda out, x: out[0])


def test_every_plan_draws_the_masks_of_one_device():
    case = masks()
    _, hidden, again = alone(case)(*case.args)
    for mesh, constraints in ALL_PLANS:
        for _, other, other_again in on_ranks(
            case, mesh, constraints, lambda compiled: compiled(*case.args)
        ):
            assert torch.equal(other, hidden) and torch.equal(other_again, again)


def test_masks_differ_between_shards_draws_steps_and_seeds():
    case = masks()
    compiled = alone(case)
    _, hidden, again = compiled(*case.args)
    kept = hidden != 0
    assert not torch.equal(kept[:48], kept[48:])  # shards of the batch
    assert not torch.equal(kept[:, :32], kept[:, 32:])  # shards of the features
    assert not torch.equal(kept, again != 0)  # two dropouts
    compiled.step(*case.args)
    assert not torch.equal(kept, compiled(*case.args)[1] != 0)
    assert not torch.equal(kept, alone(case, seed=1)(*case.args)[1] != 0)
    assert torch.equal(kept, alone(case)(*case.args)[1] != 0)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_keep_rate(p: float):
    case = masks(p)
    _, hidden, again = alone(case)(*case.args)
    for made in (hidden, again):
        kept = (made != 0).double().mean().item()
        assert abs(kept - (1 - p)) <= 3 * math.sqrt(p * (1 - p) / made.numel())
        if p < 1:
            assert torch.allclose(made[made != 0], torch.tensor(9 / (1 - p)))


def test_no_dropout_in_eval():
    case = masks(0.9)
    case.model.eval()
    assert (alone(case)(*case.args)[1] == 9).all()


def test_gradients_belong_to_the_masks_that_were_drawn():
    case = language.dropped()
    compiled = alone(case, float64=True)
    engine = compiled.build(case.args, {})

    def loss_at(state) -> float:
        compiled.load_state_dict(state)
        engine.num_steps = 7  # one seed for all
        return float(compiled.gradients(*case.args)[0])

    start = compiled.state_dict()
    engine.num_steps = 7
    _, gradients = compiled.gradients(*case.args)
    generator = torch.Generator().manual_seed(0)
    for name in ("1.query.weight", "1.up.weight", "2.down.bias", "2.after.weight"):
        gradient = gradients[name]
        assert gradient is not None
        way = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)
        step = 1e-5
        up, down = (loss_at({**start, name: start[name] + sign * step * way}) for sign in (1, -1))
        assert (up - down) / (2 * step) == pytest.approx(float((gradient * way).sum()), rel=1e-6)


def test_dropout_repeats_bitwise_and_leaves_the_users_generator_alone():
    case = language.dropped()
    before = torch.random.get_rng_state()
    first = losses(case, "dp=2,tp=2", "megatron")
    second = losses(case, "dp=2,tp=2", "megatron")
    assert torch.equal(before, torch.random.get_rng_state())
    for rank in (*first, *second):
        assert rank == first[0]
    assert losses(case, "dp=2,tp=2", "megatron", seed=5)[0] != first[0]


def test_the_start_does_not_depend_on_the_plan():
    on_cpu, on_meta = structure.order_sensitive(), structure.order_sensitive("meta")
    for case in (on_cpu, on_meta):
        want = alone(case).state_dict()
        if case is on_cpu:
            assert all(torch.equal(want[n], t) for n, t in case.model.state_dict().items())
        for mesh, constraints in ALL_PLANS:
            for state in on_ranks(case, mesh, constraints, lambda c: c.state_dict()):
                assert all(torch.equal(state[name], want[name]) for name in want)
    other = alone(on_meta, seed=3).state_dict()
    assert not torch.equal(other["head.weight"], want["head.weight"])
    bound = 1 / math.sqrt(8)  # of nn.Linear.reset_parameters
    assert 0.5 * bound < want["layers.0.weight"].abs().max() <= bound
    assert not torch.equal(want["layers.0.weight"], want["layers.1.weight"])
    assert all(p.is_meta for p in on_meta.model.parameters())


def test_two_runs_are_bitwise_equal_and_replicas_too():
    case = structure.order_sensitive()

    def body(compiled):
        found = [compiled.step(*case.args) for _ in range(5)]
        return found, compiled.build(case.args, {}).replicas_differ(), compiled.state_dict()

    for mesh, constraints in PLANS:
        first = on_ranks(case, mesh, constraints, body)
        second = on_ranks(case, mesh, constraints, body)
        for steps, differ, state in (*first, *second):
            assert steps == first[0][0] and differ is None
            assert all(torch.equal(state[n], t) for n, t in first[0][2].items())


def test_meta_tied_weights_stay_tied():
    with torch.device("meta"):
        model = language.TiedDecoder()
    case = Case(model=model, args=(torch.randint(0, 30, (4, 7)),), loss=language.next_token)
    state = alone(case).state_dict()
    assert torch.equal(state["embed.weight"], state["unembed.weight"])
    for _ in range(4):  # ranks that are threads share the generator that initialises
        assert compare(case, "dp=2,tp=2", "megatron", dtype="float64", steps=1).equal


def test_meta_without_reset_is_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), language.Block())
    case = Case(model=model, args=(torch.randn(2, 6, 16),), loss=language.shifted_distance)
    with pytest.raises(InputError) as caught:
        alone(case)
    text = str(caught.value)
    assert "module 1 (Block)" in text and "reset_parameters" in text and "sharpness" in text
