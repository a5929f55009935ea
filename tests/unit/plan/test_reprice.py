"""Plans on other sizes and clusters are predicted anew; other models are refused."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.cli.main import main
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import InputError, PlanError
from autopar.graph.ir import Graph
from autopar.plan.build import apply_plan, make_plan
from autopar.plan.diff import differences
from autopar.plan.fingerprint import fingerprint, is_of, structure
from autopar.plan.keys import op_keys
from autopar.plan.plan import Plan
from autopar.planning import changes, fitted
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.trace import trace

MODEL = """
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.rise = nn.Linear(8, 32)
        self.fall = nn.Linear(32, 8)

    def forward(self, x):
        return self.fall(self.rise(x).relu()).square().mean()


def build():
    return Mlp(), (torch.zeros(32, 8),), {}
"""


class Mlp(nn.Module):
    """Two layers whose names and order of declaration may differ."""

    def __init__(self, names: tuple[str, str] = ("rise", "fall"), *, swap: bool = False) -> None:
        super().__init__()
        layers = [(names[0], nn.Linear(8, 32)), (names[1], nn.Linear(32, 8))]
        for name, layer in reversed(layers) if swap else layers:
            setattr(self, name, layer)
        self.names = names

    def forward(self, x: Tensor) -> Tensor:
        up, down = (getattr(self, name) for name in self.names)
        return down(up(x).relu()).square().mean()


class Other(Mlp):
    """The same parameters, another computation."""

    def forward(self, x: Tensor) -> Tensor:
        up, down = (getattr(self, name) for name in self.names)
        return down(up(x).sigmoid()).square().mean()


@functools.cache
def graph(kind: str = "same", batch: int = 16) -> Graph:
    models = {
        "same": Mlp,
        "other": Other,
        "renamed": lambda: Mlp(("up", "down")),
        "swapped": lambda: Mlp(("up", "down"), swap=True),
    }
    return trace(models[kind](), (torch.zeros(batch, 8),), {}, None).graph


@functools.cache
def plan() -> Plan:
    made, _ = api.plan_and_predict(
        Mlp(), "2x2xA100", (torch.zeros(16, 8),), mesh="dp=2,tp=2",
        constraints="megatron,microbatches=2",
    )  # fmt: skip
    return made


def test_fingerprints_do_not_depend_on_names():
    assert fingerprint(graph()) == fingerprint(graph("renamed")) == fingerprint(graph("swapped"))
    assert structure(graph()) == structure(graph("renamed"))
    assert fingerprint(graph()) != fingerprint(graph("other"))
    assert structure(graph()) != structure(graph("other"))


def test_the_structure_is_that_of_every_batch():
    assert structure(graph()) == structure(graph(batch=32))
    assert fingerprint(graph()) != fingerprint(graph(batch=32))


def test_a_renamed_model_is_refused_with_the_first_name():
    with pytest.raises(PlanError, match=r"a parameter rise\.weight, this model has none") as caught:
        apply_plan(plan(), graph("renamed"))
    assert "compute the same, so it may be called up.weight here" in str(caught.value)


def test_another_model_is_refused():
    with pytest.raises(PlanError, match="the computation differs"):
        apply_plan(plan(), graph("other"))
    with pytest.raises(PlanError, match="the computation differs"):
        api.reprice(plan(), Other(), None, (torch.zeros(16, 8),))
    with pytest.raises(PlanError, match=r"rise\.weight"):
        api.reprice(plan(), nn.Linear(8, 1), None, (torch.zeros(16, 8),), loss_fn=first)


def first(outputs: Tensor, x: Tensor) -> Tensor:
    return outputs.sum()


def test_another_batch_is_refused_with_the_way_out():
    with pytest.raises(PlanError, match=r"autopar reprice.*another batch"):
        apply_plan(plan(), graph(batch=32))


def test_a_plan_on_another_batch_or_cluster_is_priced_anew():
    same = trace(Mlp(), (torch.zeros(16, 8),), {}, None)
    other = trace(Mlp(), (torch.zeros(64, 8),), {}, None)
    assert fitted(plan(), same) is plan() and changes(plan(), plan()) == ""
    assert fitted(plan(), same, cluster=ClusterSpec.parse("2x2xA100")) is plan()
    made = fitted(plan(), other)
    assert made.forecast is not None and made.forecast.global_batch_size == 64
    text = changes(plan(), made)
    assert "float32[16, 8] -> float32[64, 8]" in text and "step: " in text and "%)" in text
    apply_plan(made, other.graph)
    moved = fitted(plan(), same, cluster=ClusterSpec.parse("4xV100"))
    assert "cluster: 2x2xA100 -> 4xV100" in changes(plan(), moved)
    bare = fitted(replace(plan(), forecast=None), other)
    assert bare.forecast is None and "float32[64, 8]" in changes(plan(), bare)


def test_only_what_cannot_hold_is_refused():
    large = trace(Mlp().to("meta"), (torch.zeros(2**32, 8, device="meta"),), {}, None)
    with pytest.raises(PlanError, match="does not fit"):
        fitted(plan(), large, must_fit=True)
    made = fitted(plan(), large)
    assert made.forecast is not None and not made.forecast.fits
    assert "DOES NOT FIT" in changes(plan(), made)
    odd = trace(Mlp(), (torch.zeros(15, 8),), {}, None)
    with pytest.raises(PlanError, match="15 does not divide into 2 microbatches"):
        apply_plan(fitted(plan(), odd), odd.graph)
    renamed = trace(Mlp(("up", "down")), (torch.zeros(64, 8),), {}, None)
    with pytest.raises(PlanError, match=r"rise\.weight"):
        fitted(plan(), renamed)
    with pytest.raises(PlanError, match="the computation differs"):
        fitted(plan(), trace(Other(), (torch.zeros(64, 8),), {}, None))


def test_a_plan_file_trains_on_another_batch(tmp_path, caplog):
    made, _ = api.plan_and_predict(
        Mlp(), "1xA100", (torch.zeros(16, 8),), mesh="dp=1", constraints="ddp"
    )
    made.save(tmp_path / "plan.json")
    compiled = api.compile(Mlp(), plan=tmp_path / "plan.json")
    loss = compiled.step(torch.ones(4, 8))
    assert loss.isfinite() and compiled.plan.inputs == (("args[0]", "float32[4, 8]"),)
    assert "float32[16, 8] -> float32[4, 8]" in caplog.text
    assert "its step takes" in caplog.text and "(predicted; fits" in caplog.text


def test_fingerprints_of_the_first_version_hold():
    file = Path(__file__).parents[2] / "data" / "plans" / "first_version.json"
    old = Plan.load(file)
    assert not old.graph.startswith("2:") and not is_of(old.graph, graph())
    held = replace(plan(), graph=fingerprint(graph()).partition(":")[2])
    assert not is_of(held.graph, graph()), "the first version counted names"


def test_the_same_again_changes_nothing():
    made, found = api.reprice(plan(), Mlp(), None, (torch.zeros(16, 8),))
    assert made == plan() and not differences(plan(), made)
    assert made.forecast is not None and found.step_s == made.forecast.step_s


def test_another_batch_and_cluster_are_predicted():
    made, found = api.reprice(plan(), Mlp(), "4xV100", (torch.zeros(64, 8),))
    names = {item.name: (item.before, item.after) for item in differences(plan(), made)}
    assert names["global batch size"] == ("16", "64")
    assert names["input args[0]"] == ("float32[16, 8]", "float32[64, 8]")
    assert names["cluster"] == ("2x2xA100", "4xV100") and "step" in names
    assert made.forecast is not None and made.forecast.step_s == found.step_s
    apply_plan(made, graph(batch=64))
    with pytest.raises(PlanError, match="needs 4 devices"):
        api.reprice(plan(), Mlp(), "2xV100", (torch.zeros(16, 8),))


def test_choices_of_ops_keep_their_factors_at_other_sizes():
    """A choice names a factor with its size; at another batch it is the same factor."""
    key = "rise/aten.linear.default#0"
    index = op_keys(graph()).index(key)
    units = infer_factors(graph()).units[index]
    (unit,) = (unit for unit in units if unit.name == "batch")
    word = f"batch@{unit.letter}:{unit.stride}x16"
    held = replace(plan(), overrides={key: (word, word, word)})
    made, _ = api.reprice(held, Mlp(), None, (torch.zeros(64, 8),))
    assert made.overrides == {key: (word.replace("x16", "x64"),) * 3}


def test_a_plan_without_forecast_needs_a_cluster():
    bare, _ = make_plan(graph(), Mesh.parse("dp=2"), "ddp")
    with pytest.raises(InputError, match="no cluster is given"):
        api.reprice(bare, Mlp(), None, (torch.zeros(16, 8),))
    made, _ = api.reprice(bare, Mlp(), "2xA100", (torch.zeros(16, 8),))
    assert made.forecast is not None and replace(made, forecast=None) == bare


def test_the_command_says_what_changed(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    plan().save("plan.json")
    words = ["reprice", "plan.json", "model.py:build"]
    assert main([*words, "-o", "new.json"]) == 0
    assert "global batch size: 16 -> 32" in capsys.readouterr().out
    assert Plan.load("new.json").inputs == (("args[0]", "float32[32, 8]"),)
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] and told["differences"]
