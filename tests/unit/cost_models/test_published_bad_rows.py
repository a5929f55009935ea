"""Rows with values that no run has: refused with line, row and field, or skipped with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.cost_models.published.rows import SHIPPED

DENSE = "vtrain-multi-40L6144h-g256-b1024-mb2-t16d16p1"
SPARSE = "flagperf-mixtral-h100"


def shipped(name: str) -> dict[str, Any]:
    for line in SHIPPED.read_text("utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if row["id"] == name:
            return row
    raise AssertionError(name)


def changed(name: str, changes: dict[str, Any]) -> str:
    row = shipped(name)
    for key, value in changes.items():
        section, _, field = key.rpartition(".")
        (row[section] if section else row)[field] = value
    return json.dumps(row)


def run(tmp_path, capsys, line: str, *options: str) -> tuple[int, str]:
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n" + json.dumps(shipped(SPARSE) | {"id": "good"}), encoding="utf-8")
    code = main(["validate", "--rows", str(file), *options])
    said = capsys.readouterr()
    return code, said.out if options else said.out + said.err


REFUSED = [
    {"hardware.gpus_per_node": 0}, {"hardware.gpus_per_node": -1},
    {"hardware.gpu_mem_gb": float("nan")}, {"hardware.gpu_mem_gb": float("inf")},
    {"hardware.gpu_mem_gb": 1e300}, {"measured.mfu": 0},
    {"measured.iter_time_s": 1e300}, {"plan.global_batch": 10**400}, {"model.seq_len": 10**19},
    {"model.head_dim": -1}, {"model.vocab": 0}, {"plan.vp": 0}, {"id": "\ud800"},
]  # fmt: skip


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_numbers_that_nothing_has_are_refused(changes, tmp_path, capsys):
    code, out = run(tmp_path, capsys, changed(DENSE, changes))
    assert code == 2 and "line 1" in out and "Traceback" not in out
    assert next(iter(changes)) in out


SKIPPED = [
    (DENSE, {"plan.ep": 4}, "plan.ep 4 does not divide model.experts 0"),
    (DENSE, {"plan.tp": 15, "plan.dp": 16, "hardware.gpus": 240}, "does not divide model.heads"),
    (DENSE, {"plan.dp": 10**6, "hardware.gpus": None}, "plan.dp x tp x pp x cp is over"),
    (DENSE, {"plan.dp": 10**9, "hardware.gpus": None}, "plan.dp x tp x pp x cp is over"),
    (DENSE, {"plan.pp": 10**9, "hardware.gpus": None}, "plan.dp x tp x pp x cp is over"),
    (DENSE, {"plan.vp": 10**9}, "plan.pp x vp is more than"),
    (DENSE, {"plan.cp": 2, "plan.dp": 8}, "context parallelism without fused attention"),
    (SPARSE, {"plan.cp": 3, "hardware.gpus": None}, "plan.cp 3 does not divide model.seq_len"),
    (DENSE, {"model.seq_len": 10**14}, "model.seq_len is not between"),
    (DENSE, {"model.heads": 7}, "does not divide model.hidden"),
    (DENSE, {"plan.micro_batch": 10**7, "plan.global_batch": 10**7 * 16}, "is over 1,000,000"),
    (DENSE, {"plan.recompute": "garbage"}, "plan.recompute is 'garbage'"),
    (SPARSE, {"model.topk": 10**6}, "model.topk is not between"),
    (SPARSE, {"plan.ep": 3, "hardware.gpus": None}, "plan.ep 3 does not divide model.experts 8"),
    (SPARSE, {"model.moe_ffn_hidden": -1}, "model.moe_ffn_hidden is not between"),
]  # fmt: skip


def test_plans_that_cannot_be_are_skipped_and_the_others_priced(tmp_path, capsys):
    rows = [
        changed(name, {**changes, "id": f"bad {place}"})
        for place, (name, changes, _) in enumerate(SKIPPED)
    ]
    code, out = run(tmp_path, capsys, "\n".join(rows), "--json")
    found = json.loads(out)
    assert code == 0 and {row["id"] for row in found["rows"]} == {"good"}
    skipped = {row["id"]: row["reason"] for row in found["skipped"]}
    assert len(skipped) == len(SKIPPED)
    for place, (_, _, reason) in enumerate(SKIPPED):
        assert reason in skipped[f"bad {place}"], skipped


def test_a_model_that_cannot_be_built_is_skipped_for_time_and_for_memory(tmp_path, capsys):
    sizes = {"plan.precision": "tf32", "id": "timed"}  # no grouped products of float32
    memory = {"measured": {"peak_mem_gib": 70.0, "peak_mem_kind": "max allocated"}, "derived": {}}
    rows = [json.loads(changed(SPARSE, sizes)) for _ in range(2)]
    rows[1].update({"id": "kept", **memory})
    code, out = run(tmp_path, capsys, "\n".join(map(json.dumps, rows)), "--json")
    found = json.loads(out)
    assert code == 0 and {row["id"] for row in found["rows"]} == {"good"}
    assert {row["id"] for row in found["skipped"]} == {"timed", "kept"}
    assert all("the model cannot be built" in row["reason"] for row in found["skipped"])


def test_a_file_nested_without_end_is_no_json(tmp_path, capsys):
    code, out = run(tmp_path, capsys, "[" * 100_000)
    assert code == 2 and "line 1 is no JSON" in out


def test_a_format_that_a_device_lacks_is_said_to_run_in_another(tmp_path, capsys):
    code, out = run(tmp_path, capsys, changed(DENSE, {"plan.precision": "fp8"}), "--json")
    (row,) = [row for row in json.loads(out)["rows"] if row["id"] == DENSE]
    assert code == 0 and "A100-80-SXM has no products in fp8: bf16" in row["assumed"]
