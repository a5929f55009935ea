"""What one device must do to be compared with microbatches: all at once, or part by part."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.runtime import reference, verify
from autopar.runtime.optimizers import optimizer_factory
from autopar.runtime.reference import EagerDevice, GraphDevice, Rounds, batch_dims, rows, train
from autopar.sharding.placement import Shard
from tests.models.cases import language, vision
from tests.models.check import Case, agree, alone, compare

MICROBATCHES = 4


class Normed(nn.Module):
    """Batch statistics, a running mean, and a loss that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its gradient would be rounding noise and nothing else.
        self.up, self.norm = nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        return self.head(F.silu(self.norm(self.up(x))))


def normed(loss=lambda y, x: F.mse_loss(y, x[:, :4].flip(1))) -> Case:
    torch.manual_seed(0)
    scale = torch.logspace(-1, 1, 8)[:, None]  # samples, and so microbatches, differ
    return Case(model=Normed().double(), args=((torch.randn(8, 5) * scale).double(),), loss=loss)


def few_labels(y, x):
    """Cross-entropy of samples of which the first microbatch has fewer with a label."""
    labels = x[:, :4].argmax(1)
    return F.cross_entropy(y, labels.masked_fill(torch.arange(8) == 0, -100))


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ("dp=1", "ddp"), ("dp=2", "ddp"), ("pp=2", "ddp,schedule=zb_h1"),
        ("pp=2,dp=2", "zero3,schedule=1f1b"), ("pp=2", "ddp,schedule=zbv"),
    ],
)  # fmt: skip
def test_batch_statistics_are_those_of_eager_accumulation(mesh: str, constraints: str):
    report = agree(normed(), mesh, f"{constraints},microbatches={MICROBATCHES}", steps=5)
    assert report.reference == "eager, 4 microbatches"
    assert report.worst.error <= 1e-12
    assert "reference: eager, 4 microbatches on one device" in report.summary()
    assert any("computed per microbatch" in note for note in report.plan.notes)
    assert {row.name for row in report.rows if row.kind == "buffer"} == {
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip


def test_statistics_of_the_whole_batch_would_be_told_apart(monkeypatch):
    monkeypatch.setattr(verify.Rounds, "of_plan", lambda *_: Rounds())
    report = compare(normed(), "pp=2", "ddp,microbatches=4", steps=1)
    bad = report.first_difference
    assert bad is not None and bad.error > 1e-3 and report.reference == "eager"


def test_without_statistics_the_whole_batch_is_the_reference():
    for case in (vision.long_skips(), language.labelled_tokens()):
        count = case.args[0].shape[0]
        report = agree(case, "pp=2", f"ddp,microbatches={count}")
        assert report.reference == "eager"


def test_one_microbatch_has_the_statistics_of_the_batch():
    assert agree(normed(), "pp=2,dp=2", "ddp", steps=2).reference == "eager"


@pytest.mark.parametrize(
    "loss",
    [lambda y, x: y.pow(2).sum(), lambda y, x: y.pow(2).mean().sqrt()],
    ids=["sum", "root of a mean"],
)
def test_sums_stay_sums_and_roots_of_means_are_averaged(loss):
    report = agree(normed(loss), "pp=2", "ddp,microbatches=4")
    assert report.reference == "eager, 4 microbatches"


@pytest.mark.parametrize(
    "loss",
    [few_labels, lambda y, x: y.pow(2).mean() + y.abs().sum()],
    ids=["few labels", "a mean and a sum"],
)
def test_what_no_mean_of_losses_tells_is_left_to_the_graph(loss):
    report = compare(normed(loss), "pp=2", "ddp,microbatches=4")
    assert report.reference == "graph, 4 microbatches"
    assert report.equal, report.summary()


@pytest.mark.parametrize(
    "case", [normed(), normed(lambda y, x: y.exp().sum())], ids=["mean", "sum"]
)
@pytest.mark.parametrize("optimizer", verify.OPTIMIZERS)
def test_the_graph_in_microbatches_is_eager_on_their_samples(case: Case, optimizer: str):
    options = {"optimizer": optimizer, "optimizer_options": verify.OPTIMIZERS[optimizer]}
    compiled = alone(case, constraints={"microbatches": MICROBATCHES}, **options)
    arguments = (case.args, {})
    graph = GraphDevice(compiled, arguments)
    dims = batch_dims(compiled.build(case.args, {}).sharded)
    assert dims == {"args[0]": Shard(0, 1, 8)}
    eager = EagerDevice(case.model, arguments, case.loss, case.traced, dims, MICROBATCHES)
    assert eager.weigh() and graph.counts_alike()
    rounds = Rounds(microbatches=MICROBATCHES)
    factory = optimizer_factory(optimizer, verify.OPTIMIZERS[optimizer])
    want, have = (train(device, rounds, 5, factory) for device in (eager, graph))
    for kind in ("loss", "gradient", "parameter", "buffer"):
        assert want[kind].keys() == have[kind].keys()
        for name, tensor in want[kind].items():
            assert torch.allclose(have[kind][name], tensor, rtol=1e-12, atol=1e-13), name


def test_eager_accumulation_is_what_a_user_would_write():
    case = normed()
    dims = {"args[0]": Shard(0, 1, 8)}
    device = EagerDevice(case.model, (case.args, {}), case.loss, case.traced, dims, MICROBATCHES)
    assert device.weigh() and device.weight == 1 / MICROBATCHES
    factory = optimizer_factory("adamw", {"lr": 0.01})
    have = train(device, Rounds(microbatches=MICROBATCHES), 2, factory)
    hand = normed().model
    optimizer = torch.optim.AdamW(hand.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        for part in case.args[0].chunk(MICROBATCHES):
            (case.loss(hand(part), part) / MICROBATCHES).backward()
        optimizer.step()
    for name, parameter in hand.named_parameters():
        assert torch.allclose(have["parameter"][name], parameter, rtol=1e-14), name


def test_samples_are_found_along_any_dim():
    flat = torch.arange(24).view(24, 1)
    for number in range(2):  # 2 blocks of 4 samples of 3 tokens
        part = rows(flat, Shard(0, 3, 4), 2, number)
        want = flat.view(2, 4, 3, 1)[:, 2 * number : 2 * number + 2].reshape(12, 1)
        assert torch.equal(part, want)
    state = torch.randn(3, 4, 2)
    assert torch.equal(rows(state, Shard(1, 1, 4), 4, 3), state[:, 3:])
    assert torch.equal(rows(state, Shard(1, 1, 4), 4, 3, copies=2), state[:, [3, 3]])
    assert rows(state, Shard(1, 1, 4), 1, 0).data_ptr() != state.data_ptr()


def test_the_reference_says_what_it_did():
    assert Rounds().describe("eager") == "eager"
    assert Rounds(microbatches=3).describe("graph") == "graph, 3 microbatches"
    old = Rounds(microbatches=4, updates=4, delays={"a": 1, "b": 3})
    assert old.describe("eager") == "eager, 4 microbatches, 4 updates, weights up to 3 updates old"
    assert reference.Rounds is verify.Rounds
