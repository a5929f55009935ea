"""`autopar.verify`: equal plans are equal, wrong execution is found and named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, InputError
from autopar.runtime import unit
from autopar.runtime.engine import Engine
from tests.models.cases import language, structure, vision
from tests.models.check import Case, agree, compare


def test_the_report_is_a_table():
    report = agree(language.tied(), "dp=2,tp=2", "megatron")
    text = report.summary()
    for words in ("loss ", "gradient ", "parameter ", "reference: eager", "equal"):
        assert words in text
    assert "buffer" not in text and "NOT" not in text
    assert report.worst in report.rows and report.first_difference is None
    assert report.traffic["all_reduce"] > 0
    assert [row.name for row in report.rows if row.kind == "loss"] == ["0", "1", "2"]


def test_gradients_that_are_not_reduced_are_found(monkeypatch):
    right = unit.reduce_buckets
    monkeypatch.setattr(
        unit, "reduce_buckets", lambda program, buckets, how: right(program, buckets, "none")
    )
    report = compare(structure.samples(6), "dp=2", "ddp", steps=1)
    bad = report.first_difference
    assert bad is not None and bad.kind == "gradient" and bad.name == "hidden.weight"
    assert not report.equal and report.exact is None
    assert "NOT equal: gradient hidden.weight differs by" in report.summary()


def test_a_wrong_tensor_is_named(monkeypatch):
    full = Engine.full_gradients

    def wrong(self):
        found = full(self)
        found["out.bias"] = found["out.bias"] * 1.001
        return found

    monkeypatch.setattr(Engine, "full_gradients", wrong)
    bad = compare(structure.samples(6), "dp=2", "ddp").first_difference
    assert bad is not None and bad.name == "out.bias"
    assert 1e-5 < bad.error < 2e-3


def test_missing_and_misshaped_tensors_are_infinitely_wrong(monkeypatch):
    full = Engine.full_gradients
    for change in (lambda g: None, lambda g: g[:1]):

        def wrong(self, change=change):
            found = full(self)
            found["out.bias"] = change(found["out.bias"])
            return found

        monkeypatch.setattr(Engine, "full_gradients", wrong)
        bad = compare(structure.samples(6), "dp=2", "ddp", steps=1).first_difference
        assert bad is not None and bad.name == "out.bias" and math.isinf(bad.error)


def test_replicas_that_drift_apart_are_named(monkeypatch):
    step = Engine.step

    def wrong(self, inputs):
        loss = step(self, inputs)
        with torch.no_grad():
            parameters = self.units[0].parameters
            name = next(n for n, item in parameters.items.items() if item.fqn == "out.bias")
            parameters.values[name][0] += 1e-9 * self.context.comm.rank
        return loss

    monkeypatch.setattr(Engine, "step", wrong)
    report = compare(structure.samples(6), "dp=2", "ddp", dtype="float64", tolerance=1e-6)
    bad = report.first_difference
    assert bad is not None and (bad.kind, bad.name) == ("replicas", "out.bias")


def test_stale_buffers_are_found(monkeypatch):
    keep = unit.StageUnit.keep

    def wrong(self, slot, value):
        if slot.kind != "buffer":
            keep(self, slot, value)

    monkeypatch.setattr(unit.StageUnit, "keep", wrong)
    bad = compare(vision.batch_statistics(), "dp=2", "ddp").first_difference
    assert bad is not None and bad.kind == "buffer"


def test_rounding_that_adamw_magnifies_is_told_from_mistakes():
    class Faint(nn.Module):
        """A gradient of pure rounding noise: the bias before a norm."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return self.norm(self.inner(x)).pow(3).mean() * 30

    torch.manual_seed(0)
    report = compare(Case(model=Faint(), args=(torch.randn(7, 6),)), "dp=3", "ddp")
    assert report.equal
    if report.first_difference is not None:  # as the machine adds
        assert report.rounding_only and "in float64" in report.summary()


def test_a_plan_is_verified_in_float64_as_it_is():
    case = language.heads(6)
    plan = compare(case, "tp=4", "megatron", steps=1).plan
    report = compare(case, "dp=2", None, plan=plan, dtype="float64", steps=1)
    assert report.equal and report.plan == plan and report.reference == "graph"


def test_by_name_of_a_file(tmp_path, local_ranks):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\n"
        "def build():\n"
        "    torch.manual_seed(0)\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    return {'model': model, 'args': (torch.ones(4, 4),),\n"
        "            'loss_fn': lambda y, x: y.pow(2).mean()}\n"
    )
    report = autopar.verify(f"{file}:build", mesh="dp=2", ranks=local_ranks(2))
    assert report.equal, report.summary()


def test_other_dtypes_are_refused():
    with pytest.raises(InputError, match="float64"):
        compare(structure.samples(4), "dp=2", "ddp", dtype="float16")
    with pytest.raises(AutoparError):
        autopar.verify("nothing.py:build")
