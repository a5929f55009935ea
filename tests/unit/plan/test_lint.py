"""Lint: every fault with its path, what it is and what would be right; the schema; migrations."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from autopar.cli.main import main
from autopar.errors import PlanError
from autopar.plan.codec import read_plan
from autopar.plan.plan import SCHEMA_VERSION, Plan
from autopar.plan.schema import FILE, json_schema, schema_text
from autopar.plan.shapes import Fault

PLANS = Path(__file__).parents[2] / "data" / "plans"
TEXT = (PLANS / "searched.json").read_text(encoding="utf-8")


def faults(data: Any) -> list[Fault]:
    return read_plan(json.dumps(data))[1]


def spoilt(*changes: tuple[str, Any]) -> Any:
    """A plan file with values put at paths such as ``pipeline.cuts.0``."""
    data = json.loads(TEXT)
    for path, value in changes:
        holder: Any = data
        *keys, last = path.split(".")
        for key in keys:
            holder = holder[int(key)] if isinstance(holder, list) else holder[key]
        if isinstance(holder, list):
            holder[int(last)] = value
        else:
            holder[last] = value
    return data


CASES: list[tuple[str, Any, str, str]] = [
    ("mesh", 3, "$.mesh", "a list"),
    ("mesh.0.1", 2.0, "$.mesh[0][1]", "a whole number from 0"),
    ("mesh.0.1", 0, "$.mesh[0]", "a whole number from 1"),
    ("mesh.0.0", "a b", "$.mesh[0]", "dp=2,tp=2"),
    ("mesh.0.1", 2**40, "$.mesh", "at most 16,777,216"),
    ("mesh.0.1", 10**30, "$.mesh[0][1]", "a whole number"),
    ("strategy", None, "$.strategy", "a string"),
    ("explicit", 1, "$.explicit", "true or false"),
    ("order.0.0", "db", "$.order[0][0]", "one of dp"),
    ("order.0.1", ["bach"], "$.order[0][1][0]", "batch"),
    ("storage", ["zp"], "$.storage[0]", "one of dp"),
    ("unheard_of", 1, "$.unheard_of", "one of the fields"),
    ("pipeline.scheduled", 1, "$.pipeline.scheduled", "one of the fields"),
    ("pipeline.schedule", "1f1bb", "$.pipeline.schedule", "1f1b"),
    ("pipeline.chunks", 3, "$.pipeline.chunks", "1"),
    ("pipeline.microbatches", 3, "$.pipeline.microbatches", "a divisor of 16"),
    ("inputs.0.1", f"float32[{10**18 - 11}, 3]", "$.pipeline.microbatches", "a divisor of"),
    ("pipeline.microbatches", 0, "$.pipeline.microbatches", "from 1"),
    ("pipeline.microbatches", 2**21, "$.pipeline.microbatches", "product of at most"),
    ("pipeline.cuts", ["a/b#0", "c/d#0"], "$.pipeline.cuts", "1 cut"),
    ("pipeline.cuts.0", "layers", "$.pipeline.cuts[0]", "the key of an op"),
    ("pipeline.axis", "qq", "$.pipeline.axis", "one of pp"),
    ("pipeline.vertical_sync", True, "$.pipeline.vertical_sync", "pipedream"),
    ("pipeline.update_every", 3, "$.pipeline.update_every", "or 0"),
    ("zero.stage", 4, "$.zero.stage", "0, 1, 2 or 3"),
    ("zero.axes", ["pp"], "$.zero.axes", "data axes"),
    ("parameters.0.shape", [2**40, 2**40], "$.parameters[0].shape", "a product up to"),
    ("parameters.0.placement", [], "$.parameters[0].placement", "1 word, one"),
    ("parameters.0.placement.0", "hole", "$.parameters[0].placement[0]", '"whole"'),
    ("parameters.0.placement.0", "ffn@7:1x2", "$.parameters[0].placement[0]", "a dim below 2"),
    ("parameters.0.placement.0", "ffn@0:3x5", "$.parameters[0].placement[0]", "to divide"),
    ("parameters.0.dtype", "bfloat", "$.parameters[0].dtype", "bfloat16"),
    ("parameters.0.shape.0", -1, "$.parameters[0].shape[0]", "from 0"),
    ("parameters.1.fqn", "first.weight", "$.parameters[1].fqn", "every parameter once"),
    ("overrides", {"a/b#0": ["x"]}, "$.overrides['a/b#0']", "2, one per sub-axis"),
    ("overrides", {"a/b#0": ["x", "replicate"]}, "$.overrides['a/b#0'][0]", "replicate"),
    ("recompute", [""], "$.recompute[0]", "a pattern"),
    ("graph", "abc", "$.graph", "a hash"),
    ("inputs.0.1", "float32", "$.inputs[0][1]", "a dtype and sizes"),
    ("notes", ["\x1b[2J"], "$.notes[0]", "'\\x1b'"),
    ("forecast.step_s", float("nan"), "$.forecast.step_s", "a finite number"),
    ("forecast.step_s", -1.0, "$.forecast.step_s", "from 0"),
    ("forecast.step_s", float("inf"), "$.forecast.step_s", "up to"),
    ("forecast.ranks", [], "$.forecast.ranks", "2 pipeline ranks"),
    ("forecast.ranks.0.kernels.matmul", -1.0, "$.forecast.ranks[0].kernels.matmul", "from 0"),
    ("forecast.ranks.0.kernels.matmul", float("nan"),
     "$.forecast.ranks[0].kernels.matmul", "a finite number"),
    ("forecast.ranks.0.peak.saved", -1, "$.forecast.ranks[0].peak.saved", "from 0"),
    ("forecast.ranks.0.reserved_bytes", 1, "$.forecast.ranks[0]", "at least the one before"),
    ("parameters.0.fqn", "", "$.parameters[0].fqn", "the name of a parameter"),
    ("parameters.2.shape", [0], "$.parameters[2].shape", "sizes from 1"),
    ("forecast.memory.ranks.0.update", 999, "$.forecast.memory.ranks[0].update", "below"),
    ("forecast.memory.ranks.0.events", {"run 0F": "9999"},
     "$.forecast.memory.ranks[0].events['run 0F']", "numbers of effects"),
    ("forecast.memory.ranks.0.events", {"jump": "0"},
     "$.forecast.memory.ranks[0].events.jump", "run 3F"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value", "where", "words"), CASES)
def test_a_fault_is_told_with_its_place(path, value, where, words):
    found = [fault for fault in faults(spoilt((path, value))) if fault.path == where]
    assert found, faults(spoilt((path, value)))
    assert any(words in f"{fault.expected} {fault.fix}" for fault in found), found
    if not found[0].warning:
        with pytest.raises(PlanError) as caught:
            Plan.from_json(json.dumps(spoilt((path, value))), "p.json")
        assert str(caught.value.where).startswith("p.json: $")


def test_all_faults_are_told_at_once(tmp_path, capsys):
    data = spoilt(
        ("mesh.0.1", "2"), ("zero.stage", 9), ("parameters.2.dtype", "float"),
        ("pipeline.schedule", "gpip"), ("notes", [1, None]), ("strategi", "ddp"),
    )  # fmt: skip
    del data["strategy"]
    paths = {fault.path for fault in faults(data)}
    assert {
        "$.mesh[0][1]", "$.notes[0]", "$.notes[1]", "$.strategi", "$.strategy",
    } <= paths  # fmt: skip
    data["mesh"][0][1] = 2
    assert {"$.zero.stage", "$.parameters[2].dtype", "$.pipeline.schedule"} <= {
        fault.path for fault in faults(data)
    }
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    assert main(["lint", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "did you mean 'strategy'?" in shown and "did you mean 'gpipe'?" in shown
    assert main(["lint", str(file), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"] and len(told["faults"]) == len(faults(data))


def test_warnings_leave_a_plan_usable(tmp_path, capsys):
    data = spoilt(("strategy", "megatorn"), ("pipeline.microbatches", 8))
    found = faults(data)
    assert found and all(fault.warning for fault in found)
    assert {fault.path for fault in found} >= {"$.strategy", "$.forecast.choices"}
    assert Plan.from_json(json.dumps(data)).pipeline.microbatches == 8
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    assert main(["lint", str(file)]) == 0
    assert "warning" in capsys.readouterr().out


def test_faults_of_one_kind_are_told_a_few_times(tmp_path, capsys):
    data = spoilt(("zero.stage", 9))
    item = data["parameters"][0]
    data["parameters"] = [{**item, "fqn": f"a.{n}", "dtype": f"kind{n}"} for n in range(50)]
    file = tmp_path / "p.json"
    file.write_text(json.dumps(data))
    assert main(["lint", str(file)]) == 1
    text = capsys.readouterr().out
    assert text.count(".dtype: is 'kind") == 3
    assert "and 47 more like these, the last at $.parameters[49].dtype" in text
    assert "ZeRO stage 9" in text and "51 faults" in text
    assert main(["lint", str(file), "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["faults"]) == 51


def test_predictions_that_lack_actions_are_told(tmp_path, capsys):
    file = tmp_path / "p.json"
    for path, key in (("tasks", "UPDATE"), ("messages", "SEND_B")):
        data = json.loads(TEXT)
        timing = data["forecast"]["timing"]
        timing[path] = [item for item in timing[path] if item["kind"] != key]
        file.write_text(json.dumps(data))
        assert main(["lint", str(file)]) == 0
        text = capsys.readouterr().out
        assert f"$.forecast.timing.{path}: lacks the" in text and key in text
        assert "autopar reprice" in text
        assert main(["report", str(file), "-o", str(tmp_path / "r.html")]) == 2
        assert "autopar reprice" in capsys.readouterr().err
    data = json.loads(TEXT)
    data["forecast"]["timing"]["edges"] = [[0, 999]]
    file.write_text(json.dumps(data))
    assert main(["lint", str(file), "--json"]) == 0
    assert "does not go with the schedule" in capsys.readouterr().out
    data = json.loads(TEXT)
    walk = data["forecast"]["memory"]["ranks"][1]["events"]
    name = next(key for key in walk if key.startswith("run"))
    walk[name] = walk[name].split(" ")[0].split("*")[0]
    file.write_text(json.dumps(data))
    assert main(["lint", str(file)]) == 0
    assert f"lacks the event '{name}'" in capsys.readouterr().out


def test_a_key_that_stands_twice_is_told():
    text = TEXT.replace('"searched": ', '"searched": true,\n "searched": ', 1)
    found = read_plan(text)[1]
    assert [(f.path, f.warning) for f in found] == [("$.searched", False)]


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (b"", "1:1"), (b'{"a":\n 1,}', "2:4"), (b"[" * 100_000, "1:100000"),
        (b'{"a":\n"\xff"}', "2:2"), (b"\xef\xbb\xbf{}", "1:1"), (b"3", "$"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_told_by_line_and_column(data, place, tmp_path, capsys):
    file = tmp_path / "p.json"
    file.write_bytes(data)
    assert main(["lint", str(file), "--json"]) == 1
    (fault,) = json.loads(capsys.readouterr().out)["faults"]
    assert fault["path"] == place and fault["expected"] and fault["fix"]
    with pytest.raises(PlanError, match=r"p\.json"):
        Plan.load(file)


def test_no_file_is_bad_input(tmp_path, capsys):
    (tmp_path / "plan.json").write_text("{}")
    for name, fix in (("plam.json", "did you mean 'plan.json'?"), ("x/y", "check the path"),
                      ("", "name a file in this folder")):  # fmt: skip
        assert main(["lint", str(tmp_path / name)]) == 2
        text = capsys.readouterr().err
        assert "cannot read the plan file" in text and "expected:" in text and fix in text


def test_the_schema_that_ships_is_that_of_the_classes():
    assert FILE.read_text(encoding="utf-8") == schema_text()


def test_the_schema_accepts_plans_and_refuses_wrong_types():
    Draft202012Validator.check_schema(json_schema())
    validator = Draft202012Validator(json_schema())
    assert not list(validator.iter_errors(json.loads(TEXT)))
    for path, value in (
        ("mesh.0.1", "2"), ("explicit", 1), ("unheard_of", 1), ("zero.stage", -1),
        ("schema_version", 1), ("forecast.ranks.0.peak", {"saved": "1"}),
    ):  # fmt: skip
        assert list(validator.iter_errors(spoilt((path, value)))), path


def test_every_field_of_the_schema_is_described():
    definitions = [json_schema(), *json_schema()["$defs"].values()]
    bare = [
        f"{found.get('title', found['description'])}: {name}"
        for found in definitions
        for name, item in found["properties"].items()
        if "description" not in item
    ]
    assert not bare


def test_files_of_the_first_version_load():
    old = json.loads((PLANS / "first_version.json").read_text(encoding="utf-8"))
    assert old["schema_version"] == 1 and "forecast" not in old
    plan = Plan.load(PLANS / "first_version.json")
    assert plan.schema_version == SCHEMA_VERSION and plan.forecast is None
    assert Plan.from_json(plan.to_json()) == plan
    for name in ("mesh", "order", "parameters", "graph"):
        kept = json.loads(plan.to_json())[name]
        assert kept == old[name]


@pytest.mark.parametrize("version", [0, 3, "1", None, True, 1.0])
def test_other_versions_are_refused(version):
    found = faults(spoilt(("schema_version", version)))
    assert [fault.path for fault in found] == ["$.schema_version"]
    with pytest.raises(PlanError, match="schema_version"):
        Plan.from_json(json.dumps(spoilt(("schema_version", version))))


def large() -> str:
    """A plan file as long as that of GPT-3: 1,152 parameters."""
    data = json.loads(TEXT)
    block = copy.deepcopy(data["parameters"][:12] or data["parameters"])
    data["parameters"] = [
        {**item, "fqn": f"layers.{layer}.{place}.{item['fqn']}"}
        for layer in range(96)
        for place, item in enumerate((block * 12)[:12])
    ]
    return json.dumps(data)


def test_reading_takes_no_torch_and_no_time(tmp_path):
    file = tmp_path / "large.json"
    file.write_text(large())
    code = (
        "import sys, time; from autopar.plan.plan import Plan; import autopar.plan.codec;"
        "took = []\n"
        "for _ in range(5):\n"
        "    start = time.process_time(); Plan.load(sys.argv[1])\n"
        "    took.append(time.process_time() - start)\n"
        "heavy = {'torch', 'numpy', 'networkx', 'ortools', 'rich', 'yaml'} & set(sys.modules)\n"
        "print(min(took), sorted(heavy))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True
    )
    seconds, _, heavy = made.stdout.strip().partition(" ")
    assert float(seconds) <= 0.05 and heavy == "[]"
