"""Rows are read field by field, and become jobs or a reason why not."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.cli.validate_text import lines
from autopar.cost_models.published.folds import counts, distinct, family, fold
from autopar.cost_models.published.jobs import read_job
from autopar.cost_models.published.known import Unpriceable
from autopar.cost_models.published.memory import rank_params
from autopar.cost_models.published.predict import Validation, job_name, memory_quantity
from autopar.cost_models.published.rows import SCHEMA, parse_rows, read_rows
from autopar.errors import InputError

GOOD = {
    "id": "one", "group": "llm-foundry", "tier": "A",
    "model": {
        "family": "mpt", "layers": 24, "hidden": 2048, "heads": 16, "vocab": 50368,
        "seq_len": 2048, "gated_mlp": False, "tied_embeddings": True,
    },
    "hardware": {"gpu": "A100-80GB", "gpus": 8, "gpus_per_node": 8},
    "plan": {
        "dp": 8, "tp": 1, "pp": 1, "zero_stage": 3, "fsdp": "FULL_SHARD", "recompute": "none",
        "micro_batch": 4, "global_batch": 64, "precision": "amp_bf16", "flash_attention": True,
        "framework": "composer FSDP1", "sp": False,
    },
    "measured": {"iter_time_s": 2.0},
}  # fmt: skip


def changed(section: str | None = None, **values) -> dict:
    row = json.loads(json.dumps(GOOD))
    (row if section is None else row[section]).update(values)
    return row


def read(*rows: dict):
    return parse_rows([json.dumps(row) for row in rows], "rows.jsonl")


def test_the_rows_that_ship_are_well_formed():
    rows = read_rows()
    assert len(rows) > 1400
    assert all(row.get("source", "repo") and row.get("source", "locator") for row in rows)
    groups = {row.group for row in rows}
    assert {"llm-foundry", "vtrain-multi", "megatron-golden-tiny", "internevo"} <= groups


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (changed(extra=1), "line 1, row 'one': unknown field 'extra'"),
        (changed("plan", tp="two"), "field 'plan.tp' is 'two'"),
        (changed("plan", tp=0), "field 'plan.tp' is 0"),
        (changed("plan", sp=1), "field 'plan.sp' is 1"),
        (changed("model", layers=True), "field 'model.layers' is True"),
        (changed("model", depth=3), "unknown field 'model.depth'"),
        (changed("measured", iter_time_s=-1.0), "field 'measured.iter_time_s' is -1.0"),
        ({key: value for key, value in GOOD.items() if key != "plan"}, "no field 'plan'"),
    ],
)
def test_malformed_rows_are_refused_with_line_and_field(row, message):
    with pytest.raises(InputError) as caught:
        read(row)
    assert message in str(caught.value)
    assert caught.value.where == "rows.jsonl:1"


def test_broken_lines_and_twins_are_refused():
    with pytest.raises(InputError, match="line 2 is no JSON"):
        parse_rows([json.dumps(GOOD), "{"], "x")
    with pytest.raises(InputError, match="a second row has id 'one'"):
        read(GOOD, GOOD)
    with pytest.raises(InputError, match="cannot read rows"):
        read_rows("no such file")


def test_a_row_becomes_a_job():
    (row,) = read(GOOD)
    job = read_job(row)
    assert (job.stack.name, job.zero, job.regather, job.microbatches) == ("llm-foundry", 3, True, 2)
    assert job.hardware.device == "A100-80-SXM" and job.gpus == 8
    assert job.config.params() == 24 * (12 * 2048**2 + 13 * 2048) + 2 * 2048 + (50368 + 2048) * 2048
    assert job.assumed == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (changed("plan", recompute=None), "plan.recompute is not stated"),
        (changed("plan", micro_batch=None), "plan.micro_batch is not stated"),
        (changed("plan", dp=4), "is 4, hardware.gpus is 8"),
        (changed("plan", global_batch=63), "no multiple"),
        (changed("plan", framework="mine"), "no known software stack"),
        (changed("plan", offload="optimizer (CPU)"), "not priced"),
        (changed("hardware", gpu="Titan"), "no known device"),
        (changed("model", family="nemotron-hybrid"), "state-space"),
        (changed(notes="layers per stage [26]"), "24 layers in stages of [24]"),
    ],
)
def test_what_cannot_be_priced_is_named(row, reason):
    (found,) = read(row)
    if "stages" in reason:  # embedding and head count as two layers: that is right
        assert read_job(found).stage_layers == (24,)
        return
    with pytest.raises(Unpriceable, match=None) as caught:
        read_job(found)
    assert reason in str(caught.value)


def test_assumptions_are_listed_not_silent():
    (row,) = read(changed("plan", recompute=None, flash_attention=None))
    job = read_job(row, assume_recompute="full")
    assert job.recompute == "full" and "recompute full" in job.assumed
    assert any("attention kernel" in text for text in job.assumed)


def test_a_mislabelled_row_betrays_itself():
    rows = {row.id: row for row in read_rows()}
    with pytest.raises(Unpriceable, match="32 layers in stages of"):
        read_job(rows["sailor-GPT-NEO-N4_N4_D4"])


def test_whole_families_are_held_out_and_twins_count_once():
    rows = [row for row in read_rows() if row.group == "internevo" and counts(row)]
    jobs = [read_job(row) for row in rows]
    kept = distinct(rows, jobs)
    assert len(rows) - len(kept) == 4  # the same runs in two tables
    families = {family(job) for job in jobs}
    assert len(families) == 1  # one model on one kind of device, however many of them
    assert all(fold(name, "a") == fold(name, "a") for name in families)
    assert {fold(f"family {number}", "a") for number in range(30)} == {0, 1, 2}


def test_ranking_sets_are_found_by_what_plans_share():
    rows = [row for row in read_rows() if row.group == "vtrain-multi"]
    assert len({job_name(row) for row in rows}) == 3


def test_kinds_of_memory_are_never_mixed():
    assert memory_quantity("torch max allocated on the last rank") == "peak_allocated_bytes"
    assert memory_quantity("torch max_memory_reserved, worst rank") == "peak_reserved_bytes"
    assert memory_quantity("nvidia-smi, worst node") == "peak_device_bytes"
    assert memory_quantity("GPU Memory (GB), kind not stated") is None


@pytest.mark.parametrize("identity", ["vtrain-multi-96L12288h-g512-b1536-mb2-t4d8p16"])
def test_stages_and_tensor_ranks_share_all_parameters(identity):
    (row,) = [row for row in read_rows() if row.id == identity]
    job = read_job(row)
    total = sum(sum(rank_params(job, stage)) for stage in range(job.pp)) * job.tp
    whole = job.config.params() + job.config.vocab * job.config.hidden  # the tied head's copy
    assert total == pytest.approx(whole, rel=1e-3)


def test_every_section_of_the_schema_is_read():
    (row,) = read(GOOD)
    assert all(
        row.get(section, name) is None or True for section in SCHEMA for name in SCHEMA[section]
    )
    assert row.step_time_s == 2.0


@pytest.mark.parametrize(
    ("section", "field", "value", "reason"),
    [
        ("model", "heads", 63, "does not divide"),
        ("plan", "zero_stage", 7, "zero_stage is 7"),
        ("model", "vocab", 10**15, "vocab is not between"),
        ("model", "layers", 10**7, "layers is not between"),
    ],
)
def test_what_no_model_has_is_skipped_with_the_reason(
    section: str, field: str, value: int, reason: str
):
    row = next(row for row in read_rows() if row.id.startswith("foundry"))
    sections = {**row.sections, section: {**row.sections[section], field: value}}
    with pytest.raises(Unpriceable, match=reason):
        read_job(replace(row, sections=sections))


def test_an_unknown_family_is_an_assumption():
    row = next(row for row in read_rows() if row.id.startswith("foundry"))
    sections = {**row.sections, "model": {**row.sections["model"], "family": "frobnicator"}}
    assert any("frobnicator" in text for text in read_job(replace(row, sections=sections)).assumed)


def test_errors_of_shipped_rows_come_with_those_of_rows_held_out():
    nothing = Validation(comparisons=(), skipped=())
    text = "\n".join(lines(nothing, by_group=False, shipped=True))
    assert "in-sample" in text and text.count("%") == 3 and "held out" in text.lower()
    assert "held out" not in "\n".join(lines(nothing, by_group=False, shipped=False)).lower()
