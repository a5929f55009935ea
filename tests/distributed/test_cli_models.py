"""The commands that need a model, end to end."""

from __future__ import annotations

import json

import pytest

from autopar.cli.main import main

MODEL = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return {
        "model": model,
        "args": (torch.randn(6, 8),),
        "loss_fn": lambda out, x: out.square().mean(),
    }

def other():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))
    return {**build(), "model": model}
"""

pytestmark = pytest.mark.distributed


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "perceptron_model.py"
    file.write_text(MODEL)
    return f"{file}:build"


def test_plan_show_verify(target, tmp_path, capsys):
    path = str(tmp_path / "plan.json")
    assert main(["plan", target, "--mesh", "dp=2", "--strategy", "ddp", "-o", path]) == 0
    printed = capsys.readouterr().out
    assert "dp=2: 2 ranks" in printed
    assert main(["show", path]) == 0
    assert capsys.readouterr().out == printed
    assert main(["show", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["strategy"] == "ddp"

    assert main(["verify", path, target, "--steps", "2"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("equal")
    assert main(["verify", path, target.replace("build", "other")]) == 2
    assert "another model" in capsys.readouterr().err


def test_verify_by_options_in_float64(target, capsys):
    words = ["verify", target, "--mesh", "dp=2", "--dtype", "float64", "--steps", "1", "--json"]
    assert main(words) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["equal"] is True
    assert {row["kind"] for row in report["rows"]} == {"loss", "gradient", "parameter"}
    assert max(row["error"] for row in report["rows"]) < 1e-11


@pytest.mark.slow
def test_quickstart(capsys):
    assert main(["quickstart", "--steps", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["equal"] is True
    assert document["plan"]["mesh"] == [["dp", 2], ["tp", 2]]
    assert len(document["losses"]["sharded"]) == len(document["losses"]["single"]) == 2
