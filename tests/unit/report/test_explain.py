"""What `autopar explain` says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.cli.main import main
from autopar.cost_models.explain import Part
from autopar.errors import InputError
from autopar.plan.forecast import Forecast
from autopar.plan.plan import Plan
from autopar.report.alternatives import why_not
from autopar.report.explain import binding, certificate_words, explain
from autopar.report.html import report
from autopar.report.show import show
from autopar.report.trees import memory_of_rank, time_of_rank, time_of_stage
from tests.unit.report.golden import FOLDER, NAMES, plan_text, stored


def predicted(name: str) -> tuple[Plan, Forecast]:
    plan = stored(name)
    assert plan.forecast is not None
    return plan, plan.forecast


def assert_adds_up(part: Part) -> None:
    if part.parts:
        total = sum(inner.value for inner in part.parts)
        assert total == pytest.approx(part.value, rel=1e-6), part.name
    for inner in part.parts:
        assert_adds_up(inner)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ddp"])
def test_trees_add_up(name: str):
    plan, forecast = predicted(name)
    for rank in forecast.ranks:
        time, memory = time_of_rank(rank), memory_of_rank(rank)
        assert time.value == pytest.approx(forecast.step_s, rel=1e-6)
        assert memory.value == rank.device_bytes
        assert_adds_up(time)
        assert_adds_up(memory)
    for stage in {0, plan.num_stages - 1}:
        tree = time_of_stage(plan, forecast, stage)
        assert_adds_up(tree)
        assert 0 < tree.value <= forecast.step_s * 1.001


def test_a_stage_is_what_its_rank_computes():
    plan, forecast = predicted("gpt3_pipeline")
    rank = forecast.ranks[3]
    tree = time_of_stage(plan, forecast, 3)
    assert "pipeline rank 3" in tree.name
    slowed = rank.kernels.get("slowed by collectives beside it", 0.0)
    update = rank.kernels.get("optimizer", 0.0)
    computed = sum(part.value for action in tree.parts for part in action.parts[:1])
    assert computed == pytest.approx(rank.compute_s - slowed - update, rel=1e-3)


def test_alternatives_add_up():
    for name in ("gpt3", "llama3_8b"):
        plan, forecast = predicted(name)
        found = why_not(plan, forecast)
        assert len(found) == len(forecast.alternatives) > 1
        for item in found:
            assert forecast.step_s + sum(item.time.values()) == pytest.approx(item.step_s, rel=1e-6)
            assert sum(item.memory.values()) == item.more_bytes


def test_why_not_names_what_differs():
    plan, forecast = predicted("gpt3")
    found = {item.text: item for item in why_not(plan, forecast)}
    item = found["pp=8 dp=32 tp=4 megatron_sp m=24 zero=1 interleaved_1f1b v=6"]
    assert item.changes == (
        "pp 1 -> 8", "dp 512 -> 32", "tp 2 -> 4", "ZeRO 3 -> 1", "microbatches 1 -> 24",
        "schedule interleaved_1f1b", "stages per rank 6", "recomputes 19 of 96 layers selective",
    )  # fmt: skip
    over = [item for item in found.values() if not item.fits]
    assert over and all(item.slower < 0 and (item.over_bytes or 0) > 0 for item in over)
    assert "over by 957 MB" in explain(plan, 1000)


def test_what_binds():
    plan, forecast = predicted("gpt3")
    time, memory = binding(plan, forecast)
    assert time.startswith("time: computation is 98.1 %") and "It binds: 1 plan" in memory
    slow = replace(forecast.ranks[0], compute_s=1.0, inline_s=9.0, collectives={"dp": 9.0})
    time, _ = binding(plan, replace(forecast, ranks=(slow,)))
    assert "communication, most of it over dp, across nodes, is 90.0 %" in time
    slow = replace(forecast.ranks[0], compute_s=1.0, idle_s=90.0)
    assert "more microbatches" in binding(plan, replace(forecast, ranks=(slow,)))[0]
    slow = replace(forecast.ranks[0], compute_s=1.0, host_s=90.0)
    assert "work of the host" in binding(plan, replace(forecast, ranks=(slow,)))[0]
    alone = replace(forecast, alternatives=())
    assert binding(plan, alone)[1].endswith("It is nearly full")


def test_certificates_in_words():
    _, forecast = predicted("gpt3")
    proof = forecast.certificate
    assert proof is not None
    words = certificate_words(proof)
    assert "less than 16.9 s" in words and "0.99 %" in words and "stopped early" not in words
    assert "stopped early" in certificate_words(replace(proof, complete=False))
    assert "no bound" in certificate_words(replace(proof, bound_s=None))
    assert certificate_words(None).startswith("nothing")


def test_what_is_proven_is_said_once():
    plan = stored("gpt3")
    for text in (explain(plan, 1000), show(plan, 1000, everything=True), report(plan)):
        assert text.count("faster by more than") == 1


def test_ranks_and_stages_are_checked():
    plan = stored("interleaved")
    assert "pipeline rank 2" in explain(plan, 100, rank=2)
    assert "actions of stage 5 on pipeline rank 1" in explain(plan, 100, stage=5)
    for options in ({"rank": 4}, {"stage": 8}, {"rank": -1}):
        with pytest.raises(InputError, match="a number from 0 to"):
            explain(plan, 100, **options)


def test_the_command(capsys, tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text(plan_text("llama3_8b"))
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert text == (FOLDER / "llama3_8b.explain.100.txt").read_text()
    assert "twice the bandwidth between nodes" in text
    assert main(["explain", str(path), "--json", "--stage", "0"]) == 0
    found = json.loads(capsys.readouterr().out)["predicted"]
    assert len(found["changes"]) == 10 and found["stage"]["value"] > 0
    assert main(["explain", str(path), "--rank", "9"]) == 2
    assert "--rank 9" in capsys.readouterr().err
