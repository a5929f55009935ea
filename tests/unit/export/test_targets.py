"""Exports: what each target's file says, and that what it cannot say is listed."""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cli.main import main
from autopar.export.result import TARGETS
from autopar.export.targets import export
from autopar.plan.plan import Plan
from tests.unit.export.plans import plan_of

BIG = {"pp": 2, "dp": 2, "tp": 2}
FULL = ("layers.**/*",)


def words(plan: Plan) -> dict[str, str]:
    """Megatron's arguments by name."""
    lines = [line for line in export(plan, "megatron").text.splitlines() if line[0] != "#"]
    assert all(line.startswith("--") for line in lines)
    return {line.split(" ", 1)[0][2:]: line.partition(" ")[2] for line in lines}


def lost(plan: Plan, target: str) -> str:
    return "\n".join(map(str, export(plan, target).losses))


def test_megatron_says_a_plan_with_all_degrees():
    plan = plan_of(
        BIG, sequence=True, zero=1, dtype="bfloat16", pipeline={"microbatches": 4}, recompute=FULL
    )
    assert words(plan) == {
        "num-layers": "4", "hidden-size": "32", "seq-length": "16",
        "tensor-model-parallel-size": "2", "sequence-parallel": "",
        "pipeline-model-parallel-size": "2", "micro-batch-size": "4", "global-batch-size": "32",
        "use-distributed-optimizer": "", "recompute-granularity": "full",
        "recompute-method": "uniform", "recompute-num-layers": "1", "bf16": "",
    }  # fmt: skip
    assert lost(plan, "megatron") == ""


@pytest.mark.parametrize(
    ("stages", "layout"),
    [((1, 3), "E,t|t*3,L"), ((0, 4), "E|t*4,L"), ((4, 0), "E,t*4|L")],
)
def test_uneven_stages_become_a_layout(stages, layout):
    plan = plan_of({"pp": 2}, stages=stages, pipeline={"microbatches": 2})
    found = words(plan)
    assert found["pipeline-model-parallel-layout"] == layout
    assert "num-layers-per-virtual-pipeline-stage" not in found


def test_interleaved_stages_are_layers_per_virtual_stage():
    pipeline = {"schedule": "interleaved_1f1b", "chunks": 2, "microbatches": 4}
    found = words(plan_of({"pp": 2}, layers=8, pipeline=pipeline))
    assert found["num-layers-per-virtual-pipeline-stage"] == "2"


@pytest.mark.parametrize(
    ("mesh", "flag", "loss"),
    [
        ({"pp": 2, "dp": 2, "tp": 2}, False, False),
        ({"dp": 2, "pp": 2, "tp": 2}, True, False),
        ({"tp": 2, "dp": 2, "pp": 2}, False, True),
    ],
)
def test_megatron_keeps_neighbours_or_says_so(mesh, flag, loss):
    plan = plan_of(mesh, pipeline={"microbatches": 2})
    assert ("use-tp-pp-dp-mapping" in words(plan)) == flag
    assert ("ranks lie in the order" in lost(plan, "megatron")) == loss


def test_recomputed_first_layers_of_stages_are_a_block():
    plan = plan_of(
        {"pp": 2}, pipeline={"microbatches": 2}, recompute=("layers.0.*/*", "layers.2.*/*")
    )
    found = words(plan)
    assert (found["recompute-method"], found["recompute-num-layers"]) == ("block", "1")
    assert lost(plan, "megatron") == ""
    odd = plan_of({"pp": 2}, pipeline={"microbatches": 2}, recompute=("layers.1.*/*",))
    assert "layers differ" in lost(odd, "megatron")


def test_deepspeed_divides_gradients_only_without_a_pipeline():
    alone = json.loads(export(plan_of({"dp": 4}, zero=2), "deepspeed").text)
    assert alone["zero_optimization"]["stage"] == 2
    plan = plan_of({"pp": 2, "dp": 2}, zero=2, pipeline={"microbatches": 2})
    piped = export(plan, "deepspeed")
    assert json.loads(piped.text)["zero_optimization"]["stage"] == 1
    (loss,) = [item for item in piped.losses if "ZeRO" in item.what]
    held = sum(4 * p.shape[0] * (p.shape[1] if len(p.shape) > 1 else 1) for p in plan.parameters)
    assert loss.extra_bytes == held // 2 // 2  # of a stage, the half that the other rank held


def test_deepspeed_splits_fused_matrices_piece_by_piece():
    config = json.loads(export(plan_of({"dp": 2, "tp": 2}, gpt=True), "deepspeed").text)
    specs = {
        spec["patterns"][0]: spec
        for spec in config["tensor_parallel"]["partition_config"]["layer_specs"]
    }
    fused = specs[r".*blocks\.\d+\.qkv\.weight$"]
    assert (fused["partition_type"], fused["shape"], fused["partition_dim"]) == (
        "column", [3, -1], 0,
    )  # fmt: skip
    assert specs[r".*blocks\.\d+\.out\.weight$"]["partition_type"] == "row"
    assert config["train_batch_size"] == 2 * config["train_micro_batch_size_per_gpu"] == 32


def test_torchtitan_lists_modules_of_stages():
    plan = plan_of(BIG, sequence=True, zero=3, stages=(1, 3), pipeline={"microbatches": 4})
    config = tomllib.loads(export(plan, "torchtitan").text)
    parallelism = config["parallelism"]
    assert parallelism["module_fqns_per_model_part"] == [
        ["tokens", "layers.0"],
        ["layers.1", "layers.2", "layers.3", "norm", "head"],
    ]
    assert parallelism["fsdp_reshard_after_forward"] == "always"
    assert config["training"]["local_batch_size"] == 16
    assert parallelism["pipeline_parallel_microbatch_size"] == 4
    assert lost(plan, "torchtitan") == ""


@pytest.mark.parametrize(
    ("mesh", "zero", "kind", "section"),
    [
        ({"dp": 4}, 0, "MULTI_GPU", None),
        ({"dp": 4}, 1, "DEEPSPEED", "deepspeed_config"),
        ({"dp": 4}, 3, "FSDP", "fsdp_config"),
        ({"dp": 2, "tp": 2}, 3, "FSDP", "parallelism_config"),
        ({"pp": 2, "dp": 2}, 1, "MEGATRON_LM", "megatron_lm_config"),
    ],
)
def test_accelerate_picks_the_plugin_that_can(mesh, zero, kind, section):
    plan = plan_of(mesh, zero=zero, pipeline={"microbatches": 2})
    config = yaml.safe_load(export(plan, "accelerate").text)
    assert config["distributed_type"] == kind
    assert config["mixed_precision"] == "no"
    assert section is None or section in config


@pytest.mark.parametrize("name", ["zb_h1", "pipedream", "pipedream_2bw", "zbv"])
def test_schedules_that_a_target_lacks_are_lost(name):
    pipeline = {"microbatches": 4, "schedule": name, "chunks": 2 if name == "zbv" else 1}
    plan = plan_of({"pp": 2}, pipeline=pipeline)
    for target in ("deepspeed", "megatron", "accelerate"):
        assert f"schedule {name}" in lost(plan, target)
    assert (f"schedule {name}" in lost(plan, "torchtitan")) == (name != "zbv")


def test_what_every_target_loses():
    plan = plan_of({"dp": 2, "q": 2}, order={"q": ("hidden",)}, overrides={"a/b#0": ("R", "R")})
    for target in TARGETS:
        text = lost(plan, target)
        assert "axis q of 2 ranks splits hidden" in text
        assert "1 op split otherwise" in text


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    axes = draw(st.permutations(["pp", "dp", "cp", "tp"]))
    mesh = {axis: draw(st.sampled_from([1, 2, 3, 4])) for axis in axes}
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv"]))
    chunks = {"interleaved_1f1b": 2, "zbv": 2}.get(schedule, 1)
    count = mesh["pp"] * chunks
    cuts = sorted(draw(st.lists(st.integers(0, 6), min_size=count - 1, max_size=count - 1)))
    edges = [0, *cuts, 6]
    return plan_of(
        mesh,
        layers=6,
        gpt=draw(st.booleans()),
        sequence=draw(st.booleans()),
        stages=tuple(b - a for a, b in itertools.pairwise(edges)),
        zero=draw(st.integers(0, 3)),
        batch=draw(st.sampled_from([48, 7])),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"])),
        pipeline={"schedule": schedule, "chunks": chunks, "microbatches": draw(st.integers(1, 5))},
        recompute=draw(st.sampled_from([(), FULL, ("layers.*.mlp_norm/*",), ("layers.1.*/*",)])),
    )


READ = {
    "deepspeed": json.loads,
    "megatron": lambda text: [line.split() for line in text.splitlines()],
    "torchtitan": tomllib.loads,
    "accelerate": yaml.safe_load,
    "fsdp2": ast.parse,
}


@settings(max_examples=40)
@given(plan=plans())
def test_any_plan_becomes_a_file_that_says_what_it_lacks(plan):
    assert set(READ) == set(TARGETS)
    for target, read in READ.items():
        exported = export(plan, target)
        assert read(exported.text)
        if target == "deepspeed":
            continue  # JSON has no comments
        flat = " ".join(exported.text.replace("'", '"').split())
        for loss in exported.losses:
            start = " ".join(loss.what.replace("'", '"').split())[:40]
            assert start in flat


def test_the_command_writes_one_file_and_tells_losses(tmp_path: Path, capsys):
    plan = tmp_path / "plan.json"
    plan_of({"dp": 2, "tp": 2}, gpt=True).save(plan)
    out = tmp_path / "train.py"
    assert main(["export", str(plan), "--to", "fsdp2", "-o", str(out)]) == 0
    assert "not expressed: splits of blocks.*.qkv" in capsys.readouterr().err
    ast.parse(out.read_text())
    assert main(["export", str(plan), "--to", "fsdp2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["text"] == out.read_text() and said["losses"][0]["what"]
    out.unlink()
    assert main(["export", str(plan), "--to", "fsdp2", "-o", str(out), "--strict"]) == 1
    assert {file.name for file in tmp_path.iterdir()} == {"plan.json"}
    assert main(["export", str(plan), "--to", "fsdp"]) == 2
    assert "did you mean 'fsdp2'?" in capsys.readouterr().err
    assert main(["export", str(plan), "--to", "megatron", "-o", str(plan)]) == 2


def test_export_needs_no_torch(tmp_path: Path):
    plan = tmp_path / "plan.json"
    plan_of(BIG, pipeline={"microbatches": 2}).save(plan)
    code = (
        "import sys\nfrom autopar.cli.main import main\n"
        f"for target in {sorted(TARGETS)!r}:\n"
        f"    assert main(['export', {str(plan)!r}, '--to', target, '--json']) == 0\n"
        "assert not {'torch', 'numpy', 'networkx'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
