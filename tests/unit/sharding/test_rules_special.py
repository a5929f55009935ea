"""Special lowerings beyond equality in float64: precision, autocast, random numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.runtime.special.random import key_of, uniform
from autopar.sharding.choices import Choices, place_call
from autopar.sharding.factors import Unit
from autopar.sharding.rule import OpRule, rule_for
from tests.unit.sharding.oracle import collect, local_call, split, whole_units
from tests.unit.sharding.samples import Draw, Sample, run_node, sample, spec_of

D = Draw("special")
PINNED = [10239060, 10125110, 8366814, 479157]
SIZES = (2,)


def rule_of(case: Sample) -> OpRule:
    rule = rule_for(case.node, case.spec)
    assert rule is not None
    return rule


def result(case: Sample, rule: OpRule, choices: Choices) -> torch.Tensor:
    """The first output, put together from two ranks."""
    ranks = local_call(case, rule, choices, SIZES)
    pair = place_call(case.node, rule, choices).outputs[0]
    parts = [outputs[0] for _, outputs in ranks]
    return collect(parts, case.outputs[0].shape, pair.forward, SIZES, "output")


def letter(rule: OpRule, name: str) -> Choices:
    return (split(Unit(name, 1, rule.letter(name).size, name)),)


def test_a_mean_loss_in_half_precision_does_not_overflow():
    left = torch.full((4, 30000), 2.0, dtype=torch.float16)
    case = sample("mse_loss", left, torch.zeros_like(left))
    rule = rule_of(case)
    got = result(case, rule, letter(rule, "d0"))
    assert got.dtype == torch.float16
    assert got.item() == 4.0


def test_a_mean_cross_entropy_in_half_precision_does_not_overflow():
    logits = torch.zeros(4000, 2, dtype=torch.float16)
    logits[:, 1] = 60.0
    case = sample("cross_entropy_loss", logits, torch.zeros(4000, dtype=torch.int64))
    rule = rule_of(case)
    for name in ("n", "v"):
        got = result(case, rule, letter(rule, name))
        assert got.dtype == torch.float16
        assert got.item() == 60.0


CASES = {
    "softmax": lambda x: sample("softmax.int", x, -1),
    "log_softmax": lambda x: sample("log_softmax.int", x, 0),
    "mean": lambda x: sample("mean.dim", x, [1]),
    "layer_norm": lambda x: sample("layer_norm", x, [6], x[0], x[1]),
    "rms_norm": lambda x: sample("rms_norm", x, [6], x[0]),
    "group_norm": lambda x: sample("group_norm", x, 3),
    "batch_norm": lambda x: sample("batch_norm", x, *[None] * 4, True, 0.1, 1e-5, False),
    "embedding": lambda x: sample("embedding", x, torch.tensor([0, 3, 1])),
    "cross_entropy": lambda x: sample("cross_entropy_loss", x, torch.tensor([0, 5, 1, 2])),
}


@pytest.mark.parametrize("name", CASES)
def test_half_precision_in_and_out(name: str):
    case = CASES[name](D.normal(4, 6).bfloat16())
    rule = rule_of(case)
    exact = CASES[name](case.operands[0].double()).outputs[0]
    for unit in whole_units(rule):
        got = result(case, rule, (split(unit),))
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("name", "letters"), [("cross_entropy_loss", "nv"), ("mse_loss", ["d0"]), ("conv1d", "g")]
)
def test_special_lowerings_run_under_the_autocast_of_their_call(name: str, letters: str):
    x = D.normal(4, 6).float()
    operands = {
        "cross_entropy_loss": (x.bfloat16(), torch.tensor([0, 5, 1, 2])),
        "mse_loss": (x.bfloat16(), x),
        "conv1d": (D.normal(2, 4, 5).float(), D.normal(6, 2, 3).float(), None, [1], [0], [1], 2),
    }[name]
    plain = sample(name, *operands)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = run_node(plain.node, list(plain.operands))
    value = replace(plain.node.outputs[0], spec=spec_of(want))
    node = replace(plain.node, outputs=(value,), context=("autocast", "cpu", "bfloat16"))
    case = replace(plain, node=node, outputs=(want,))
    rule = rule_of(case)
    for each in letters:
        got = result(case, rule, letter(rule, each))
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_uniform_numbers_are_uniform():
    count = 1 << 18
    drawn = uniform(torch.arange(count, dtype=torch.int32), key_of("layer.dropout"), 3).double()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 4 * (1 / 12 / count) ** 0.5
    bins = torch.histc(drawn, 64, 0, 1)
    chi_squared = ((bins - count / 64) ** 2 / (count / 64)).sum()
    assert chi_squared < 63 + 5 * (2 * 63) ** 0.5
    for lag in (1, 2, 64, 4096):
        correlation = torch.corrcoef(torch.stack([drawn[:-lag], drawn[lag:]]))[0, 1]
        assert abs(correlation) < 5 / count**0.5


def test_streams_are_independent():
    count = 1 << 16
    index = torch.arange(count, dtype=torch.int32)
    streams = [
        uniform(index, key_of(name, stream), seed)
        for name, stream, seed in (
            ("a", 0, 0),
            ("b", 0, 0),
            ("a", 1, 0),
            ("a", 0, 1),
            ("a", 0, 2**40),
        )
    ]
    matrix = torch.corrcoef(torch.stack(streams).double())
    assert (matrix - torch.eye(5).double()).abs().max() < 5 / count**0.5


def test_the_seed_may_be_a_tensor_and_indices_may_be_long():
    index = torch.arange(1000, dtype=torch.int32)
    seed = -(2**50) - 7
    assert torch.equal(uniform(index, 5, seed), uniform(index, 5, torch.tensor(seed)))
    long = torch.arange(1000) + 2**33
    far = uniform(long, 5, seed)
    assert not torch.equal(far, uniform(long + 2**33, 5, seed))
    assert abs(far.mean() - 0.5) < 0.05


def test_numbers_are_pinned():
    # A change of these numbers changes every run that resumes with dropout.
    drawn = uniform(torch.arange(4, dtype=torch.int32), key_of("layer.dropout"), 1)
    assert (drawn * 2**24).to(torch.int64).tolist() == PINNED


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_the_right_share(p: float):
    case = sample("dropout", torch.ones(100, 100, dtype=torch.float64), p, True)
    rule = rule_of(case)
    got = result(case, rule, letter(rule, "d0"))
    kept = (got != 0).double().mean().item()
    assert abs(kept - (1 - p)) < 4 * (p * (1 - p) / 1e4) ** 0.5
    assert torch.allclose(got[got != 0], torch.tensor(1 / (1 - p)).double())
