"""Differences of plans, in the words of plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.plan.diff import Difference, differences, lines
from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.plan import ParameterPlan, Plan

PLANS = Path(__file__).parents[2] / "data" / "plans"


def plan(**changes: object) -> Plan:
    made = Plan(
        mesh=(("dp", 2), ("tp", 2)),
        strategy="megatron",
        order=(("dp", ("batch",)), ("tp", ("heads", "ffn"))),
        parameters=tuple(
            ParameterPlan(
                fqn=f"layers.{layer}.mlp.weight", shape=(64, 16), dtype="float32",
                placement=("whole", "ffn@0:1x64"),
            )
            for layer in range(12)
        ),
        inputs=(("args[0]", "int64[16, 8]"),),
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def told(first: Plan, second: Plan) -> list[tuple[str, str, str, str]]:
    return [(d.part, d.name, d.before, d.after) for d in differences(first, second)]


def test_a_plan_is_equal_to_itself_whatever_its_notes():
    searched = Plan.load(PLANS / "searched.json")
    for item in (plan(), searched):
        assert not differences(item, item)
        assert not differences(item, replace(item, notes=("another",)))


def test_choices_differ_by_name():
    first, bare = plan(), plan(parameters=())
    assert told(bare, replace(bare, mesh=(("dp", 4), ("tp", 2)))) == [
        ("mesh", "axes", "dp=2,tp=2", "dp=4,tp=2"), ("mesh", "ranks", "4", "8"),
    ]  # fmt: skip
    assert told(first, plan(order=(("dp", ("batch",)), ("tp", ())))) == [
        ("splits", "tp", "heads, ffn", "nothing")
    ]
    assert told(first, plan(zero=ZeroPlan(stage=1, axes=("dp",)))) == [
        ("zero", "stage", "0", "1"), ("zero", "over", "-", "dp"),
    ]  # fmt: skip
    pipeline = PipelinePlan(microbatches=4, schedule="gpipe")
    assert told(first, plan(pipeline=pipeline)) == [
        ("pipeline", "schedule", "1f1b", "gpipe"), ("pipeline", "microbatches", "1", "4"),
    ]  # fmt: skip
    assert told(first, plan(recompute=("layers.1/*", "layers.2/*"))) == [
        ("recompute", "layers.{1,2}/*", "-", "again")
    ]
    assert told(first, plan(inputs=(("args[0]", "int64[32, 8]"),))) == [
        ("model", "input args[0]", "int64[16, 8]", "int64[32, 8]")
    ]
    assert told(first, plan(overrides={"layers.3/aten.mul#0": ("replicate",)})) == [
        ("ops", "layers.3/aten.mul#0", "as its axes imply", "replicate")
    ]


def test_placements_are_folded_over_layers():
    whole = tuple(
        replace(item, placement=("whole", "whole")) if index not in (3, 4, 7) else item
        for index, item in enumerate(plan().parameters)
    )
    assert told(plan(), plan(parameters=whole)) == [
        ("parameters", "layers.{0..2,5,6,8..11}.mlp.weight", "ffn (dim 0) over tp", "whole")
    ]
    fewer = plan(parameters=plan().parameters[:-1])
    (only,) = differences(plan(), fewer)
    assert (only.name, only.after) == ("layers.11.mlp.weight", "-")


def test_predictions_before_and_after():
    first = Plan.load(PLANS / "searched.json")
    assert first.forecast is not None
    forecast = replace(first.forecast, step_s=2 * first.forecast.step_s)
    found = differences(first, replace(first, forecast=forecast))
    assert [(d.part, d.name) for d in found] == [("predicted", "step")]
    assert "(+100.0%)" in found[0].after
    (only,) = differences(first, replace(first, forecast=None))
    assert (only.name, only.before, only.after) == ("predicted at all", "yes", "no")


def test_text_has_a_heading_for_each_part():
    found = [
        Difference(part="mesh", name="axes", before="dp=2", after="dp=4"),
        Difference(part="mesh", name="ranks", before="2", after="4"),
        Difference(part="zero", name="stage", before="0", after="1"),
    ]
    assert lines(found) == [
        "mesh", "  axes: dp=2 -> dp=4", "  ranks: 2 -> 4", "zero", "  stage: 0 -> 1",
    ]  # fmt: skip


@pytest.mark.parametrize("same", [True, False])
def test_the_command_exits_with_what_it_found(same, tmp_path, capsys):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    plan().save(first)
    (plan() if same else plan(explicit=True)).save(second)
    assert main(["diff", str(first), str(second)]) == (0 if same else 1)
    assert ("equal" in capsys.readouterr().out) == same
    assert main(["diff", str(first), str(second), "--json"]) == (0 if same else 1)
    assert json.loads(capsys.readouterr().out)["equal"] == same
    assert main(["diff", str(first), str(tmp_path / "none.json")]) == 2
