"""Searching from the command line and from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.cli.main import main
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.graph.ir import Graph, Input, TensorSpec, Value
from autopar.plan.plan import Plan
from autopar.search.find import format_notes

MODEL = """
import torch
from autopar.runtime.tiny_gpt import GPT, GPTConfig

def build():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=512, context=64, layers=4, heads=4, width=64))
        tokens = torch.empty(16, 64, dtype=torch.int64)
    return model, (tokens, tokens), {}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("search") / "searched_model.py"
    file.write_text(MODEL)
    return f"{file}:build"


def test_a_cluster_alone_is_searched(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "plan.json"
    assert main(["plan", model, "--cluster", "1x4xA100", "-o", str(file)]) == 0
    text = capsys.readouterr().out
    assert "no plan takes less than" in text and "predicted" in text
    plan = Plan.load(file)
    assert plan.searched and plan.strategy == "search" and plan.device_mesh.size == 4


def test_what_is_given_is_kept(model: str, capsys: pytest.CaptureFixture[str]):
    words = ["plan", model, "--cluster", "1x4xA100", "--json"]
    kept = ["--mesh", "pp=2,tp=2", "--microbatches", "8", "--recompute", "full"]
    assert main([*words, *kept]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert dict(plan.mesh) == {"pp": 2, "tp": 2} and plan.pipeline.microbatches == 8
    assert plan.recompute


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--search", "exact", "--strategy", "ddp"], "--search is given"),
        (["--search", "magic"], "unknown search strategy 'magic'"),
        (["--mesh", "dp=2,x=2"], "cannot fill mesh axis 'x'"),
        (["--mesh", "dp=2"], "needs 2 devices"),
        (["--recompute", "blocks.9.*"], "matches no op"),
        (["--global-batch-size", "8"], "which is no preset"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    model: str, words: list[str], what: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", model, "--cluster", "1x4xA100", *words]) in (1, 2)
    assert what in capsys.readouterr().err


def test_the_batch_of_a_configuration_is_that_of_the_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}')
    assert main(["plan", model, "--cluster", "4xcpu", "--constraints", str(file), "--json"]) == 0
    plan, said = capsys.readouterr()
    assert Plan.from_json(plan).pipeline.microbatches == 16 // 4 // 2
    assert "says 32 samples a step, and the model is given 16, for which the plan is" in said


def test_an_impossible_number_names_those_that_are_possible(
    model: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", model, "--cluster", "1x4xA100", "--microbatches", "7"]) == 2
    text = capsys.readouterr().err
    assert "microbatches 7" in text and "1, 2, 4, 8, 16" in text


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "gpt3-6.7b", "--cluster", "1x1xT4", "--global-batch-size", "4"]
    assert main(words) == 1
    text = capsys.readouterr().err
    assert "no plan fits" in text and "over the memory of a device" in text
    assert "optimizer" in text and "devices, the fewest tried that are enough" in text


def test_python_gets_plan_prediction_and_proof():
    import torch

    from autopar.runtime.tiny_gpt import GPT, GPTConfig

    model = GPT(GPTConfig(vocabulary=128, context=16, layers=2, heads=2, width=16))
    tokens = torch.zeros(8, 16, dtype=torch.int64)
    found = autopar.search(model, "1x2xA100", (tokens, tokens))
    assert found.plan.searched and 0 <= found.result.gap <= 0.05
    assert found.prediction.step_s == pytest.approx(found.result.best.step_s)
    assert found.result.certificate.bound_s <= found.prediction.step_s
    again = autopar.plan(model, "1x2xA100", (tokens, tokens))
    drop = {"notes"}
    first, second = (json.loads(plan.to_json()) for plan in (found.plan, again))
    for data in (first, second):
        assert data["forecast"]["certificate"].pop("seconds_s") > 0
    assert {k: v for k, v in first.items() if k not in drop} == {
        k: v for k, v in second.items() if k not in drop
    }
    with pytest.raises(PlanError, match="leave nothing to search"):
        autopar.search(model, "1x2xA100", (tokens, tokens), constraints="ddp")


def test_what_else_could_be_is_searched_too(model: str, capsys: pytest.CaptureFixture[str]):
    words = ["plan", model, "--cluster", "2x2xA100", "--what-if"]
    words += ["--microbatches", "1", "--recompute", "none", "--zero", "1", "--schedule", "1f1b"]
    assert main(words) == 0
    text = capsys.readouterr().out
    lines = text[text.index("what if (predicted)") :].splitlines()[1:]
    assert [line.split("  ")[1] for line in lines[:5]] == [
        "one more node", "half of the nodes", "twice the bandwidth between nodes",
        "twice the bandwidth inside of nodes", "16 GiB more per device",
    ]  # fmt: skip
    assert sum("% of the memory" in line for line in lines) >= 1


def test_a_format_that_devices_lack_is_named():
    parameter = Input(
        value=Value(name="w", spec=TensorSpec(shape=(2,), dtype="bfloat16")),
        kind="parameter",
        target="w",
    )
    graph = Graph(inputs=(parameter,), nodes=(), outputs=())
    (note,) = format_notes(graph, ClusterSpec.parse("2x8xV100+1x8xA100"))
    assert "V100-SXM2-32 has no bfloat16" in note and "cast the model to fp16" in note
    assert not format_notes(graph, ClusterSpec.parse("8xA100"))
