"""What configurations of other frameworks amount to, and what is wrong with them, by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import AutoparError, InputError, PlanError
from autopar.imports import Imported, read_config
from autopar.imports.read import Own, is_file, read_constraints, resolve
from autopar.presets.config import DecoderConfig
from autopar.sharding.mesh import Mesh

CONFIGS = Path(__file__).parents[2] / "data" / "configs"


def config(name: str) -> Imported:
    return read_config(CONFIGS / name)


def written(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def remark(found: Imported, name: str) -> str:
    return next(item.text() for item in found.remarks if item.name == name)


@pytest.mark.parametrize(
    ("name", "devices", "mesh", "constraints"),
    [
        ("megatron_gpt3_175b_2021.sh", 1024, "pp=16,dp=8,tp=8",
         {"strategy": "megatron", "microbatches": 192, "schedule": "1f1b", "recompute": "full"}),
        ("megatron_gpt3_175b.sh", 128, "pp=16,tp=8",
         {"strategy": "megatron", "microbatches": 1536, "schedule": "1f1b"}),
        ("bloom_176b.slurm", 384, "pp=12,dp=8,tp=4",
         {"strategy": "megatron", "microbatches": 128, "schedule": "1f1b", "recompute": "full",
          "zero": {"stage": 1, "axes": ["dp"]}}),
        ("megatron_llama3_8b_fp8.sh", 8, "dp=4,cp=2",
         {"strategy": "ddp", "microbatches": 32, "zero": {"stage": 1, "axes": ["dp", "cp"]}}),
        ("megatron_t5_220m.sh", 8, "dp=8", {"strategy": "ddp"}),
        ("nemo_gpt3_20b.yaml", 512, "dp=128,tp=4",
         {"strategy": "megatron_sp", "microbatches": 4, "zero": {"stage": 1, "axes": ["dp"]}}),
        ("mt_nlg_530b.txt", 2240, "pp=35,dp=8,tp=8",
         {"strategy": "megatron", "microbatches": 240, "schedule": "1f1b", "recompute": "full"}),
        ("torchtitan_llama3_8b.toml", 64, "dp=64",
         {"strategy": "ddp", "zero": {"stage": 3, "axes": ["dp"]}, "recompute": "selective"}),
        ("torchtitan_llama3_405b.toml", 128, "dp=16,tp=8",
         {"strategy": "megatron_sp", "zero": {"stage": 3, "axes": ["dp"]}, "recompute": "full"}),
        ("deepspeed_zero3.json", 8, "dp=8",
         {"strategy": "ddp", "zero": {"stage": 3, "axes": ["dp"]}}),
        ("deepspeed_autotp.json", 8, "dp=2,tp=4",
         {"strategy": "megatron", "zero": {"stage": 2, "axes": ["dp"]}}),
        ("deepspeed_zero2_8b.json", 8, "dp=8",
         {"strategy": "ddp", "zero": {"stage": 2, "axes": ["dp"]}}),
        ("accelerate_tp_hsdp.yaml", 8, "replica=2,dp=2,tp=2",
         {"strategy": "megatron", "zero": {"stage": 3, "axes": ["dp"]}}),
        ("accelerate_context.yaml", 8, "dp=2,cp=4",
         {"strategy": "ddp", "zero": {"stage": 3, "axes": ["dp", "cp"]}}),
    ],
)  # fmt: skip
def test_public_configurations(name, devices, mesh, constraints):
    found = config(name).on(devices)
    assert str(found.mesh()) == mesh
    assert found.constraints() == constraints


def test_models_that_files_describe():
    gpt = config("megatron_gpt3_175b_2021.sh").model
    assert gpt is not None and isinstance(gpt.sizes, DecoderConfig)
    assert gpt.sizes.params() == pytest.approx(174.6e9, rel=0.005)
    bloom = config("bloom_176b.slurm").model
    assert bloom is not None and isinstance(bloom.sizes, DecoderConfig)
    assert bloom.sizes.params() == pytest.approx(176.2e9, rel=0.005)
    assert (bloom.sizes.positions, bloom.sizes.vocab) == ("alibi", 250880)
    llama = config("megatron_llama3_8b_fp8.sh")
    assert llama.model is not None and isinstance(llama.model.sizes, DecoderConfig)
    assert llama.model.sizes.params() == pytest.approx(8.03e9, rel=0.005)
    assert llama.model.sizes.dropout == 0 and llama.precision == "fp8"
    titan = config("torchtitan_llama3_405b.toml")
    assert titan.model is not None and titan.model.preset == "llama3-405b"
    t5 = config("megatron_t5_220m.sh").model
    assert t5 is not None and t5.kind == "t5" and t5.layers == 12
    assert config("deepspeed_zero3.json").model is None
    nemo = config("nemo_gpt3_20b.yaml").model
    assert nemo is not None and isinstance(nemo.sizes, DecoderConfig)
    assert nemo.sizes.params() == pytest.approx(20e9, rel=0.05)


def test_devices_that_files_mention():
    assert config("megatron_gpt3_175b.sh").devices == 8
    assert config("nemo_gpt3_20b.yaml").devices == 512
    assert config("deepspeed_zero2_8b.json").devices == 8
    assert config("accelerate_context.yaml").devices == 8
    assert config("bloom_176b.slurm").devices is None


def test_stages_are_cut_as_the_framework_cuts_them():
    assert config("bloom_176b.slurm").stage_layers(70) == (5, *[6] * 10, 5)
    assert config("megatron_gpt3_175b.sh").stage_layers(96) == (6,) * 16
    assert config("megatron_t5_220m.sh").stage_layers(24) == (24,)


def test_what_a_plan_cannot_hold_is_said_with_its_line():
    offload = remark(config("deepspeed_zero3.json"), "zero_optimization.offload_param.device")
    assert offload.startswith("line 6: ") and "host" in offload
    ramp = remark(config("bloom_176b.slurm"), "--rampup-batch-size")
    assert "192 16 9_765_625" in ramp and "final size" in ramp
    overlap = config("torchtitan_llama3_405b.toml")
    assert "line 20" in remark(overlap, "parallelism.enable_async_tensor_parallel")
    assert not config("torchtitan_debug.toml").remarks  # what is off has no meaning
    notes = config("deepspeed_zero3.json").notes()
    assert any("not concern the plan" in note for note in notes)


def test_nothing_is_dropped(tmp_path):
    """A setting is read, listed with its meaning, or counted among those that do not matter."""
    text = '{"train_batch_size": 8, "wall_clock_breakdown": true, "brand_new": {"deep": 3}}'
    found = read_config(written(tmp_path, "ds.json", text))
    assert found.ignored == ("wall_clock_breakdown",)
    assert "not known here" in remark(found, "brand_new.deep")
    script = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr 1 --brand-new 7\n"
    flags = read_config(written(tmp_path, "flags.txt", script + "--micro-batch-size 1"))
    assert flags.ignored == ("--lr",) and "not known here" in remark(flags, "--brand-new")


@pytest.mark.parametrize(
    ("name", "text", "message", "line"),
    [
        ("a.json", '{\n "zero_optimization": {\n  "stage": 7\n }\n}', "stage is 7", 3),
        ("a.json", '{\n "train_batch_size": "many"\n}', 'train_batch_size is "many"', 2),
        ("a.json", '{\n "train_batch_size": 8,\n}', "no JSON", 3),
        ("a.json", '{\n\n "train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}', "9 is no",
         3),
        ("a.toml", '[model]\nflavor = "8B"\n[training]\nseq_len = "long"', "training.seq_len", 4),
        ("a.toml", '[model]\nflavor = = "8B"', "no TOML", 2),
        ("a.yaml", "distributed_type: FSDP\nmixed_precision: half", "mixed_precision is", 2),
        ("a.yaml", "distributed_type: FSPD", "did you mean 'fsdp'", 1),
        ("a.yaml", "distributed_type: [", "no YAML", 1),
        ("a.sh", "--micro-batch-size 1 \\\n --num-layers few \\\n", "--num-layers is 'few'", 2),
        ("a.sh", "--micro-batch-size $MBS", "nothing sets \\$MBS", 1),
        ("a.sh", "--micro-batch-size 1\n--bf16\n--fp16", "both given", 3),
        ("a.sh", "--num-layers 10 --hidden-size 8 --num-attention-heads 2\n"
         "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2",
         "per-virtual", 2),
    ],
)  # fmt: skip
def test_errors_name_the_line(tmp_path, name, text, message, line):
    with pytest.raises(InputError, match=message) as caught:
        read_config(written(tmp_path, name, text))
    assert caught.value.where is not None and caught.value.where.endswith(f"{name}:{line}")


@pytest.mark.parametrize(
    ("text", "words", "fix"),
    [
        ("TP=$(nproc --all)\nA=$TP\n--tensor-model-parallel-size $A", "line 1 sets TP by the"
         " command $(nproc --all)", "TP=N"),
        ("export TP=`nproc` # all\n--tensor-model-parallel-size ${TP}", "the command `nproc`",
         "TP=N"),
        ("--tensor-model-parallel-size $(nproc)", "what a command prints", "in its place"),
        ("--tensor-model-parallel-size $1", "nothing sets $1", "in its place"),
        ("--tensor-model-parallel-size $TP", "nothing sets $TP", "or TP=N above it"),
        ("TP=$(nproc)\nTP=4\n--tensor-model-parallel-size $TP --num-layers $X", "nothing sets $X",
         "X=N"),
    ],
)  # fmt: skip
def test_values_that_only_a_shell_knows(tmp_path, text, words, fix):
    with pytest.raises(InputError) as caught:
        read_config(written(tmp_path, "a.sh", text + " --micro-batch-size 1"))
    assert words in caught.value.what and fix in str(caught.value.fix)
    assert "nothing sets $TP" in words or "nothing sets $TP" not in caught.value.what


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("a.json", "", "is empty"), ("a.json", '{"train_batch_size": 8', "ends too early"),
        ("a.json", '{"train_batch_size": 8,\n}', "the comma from the end of line 1"),
        ("a.json", '{"train_batch_size" 8,\n "b": 1}', "mend line 1, '{\"train_batch_size\" 8,'"),
        ("a.toml", "[model]\nflavor = = 1\n", "mend line 2"), ("b.yaml", "a: [", "ends too early"),
        ("c.json", "[" * 100_000, "check that"), ("d.yaml", "- 1", "check that"),
        ("e.txt", "hello", "check that"), ("own.json", '{"heads": "tp"}', "--constraints"),
    ],
)  # fmt: skip
def test_broken_files_are_refused_with_a_way_out(tmp_path, name, text, fix):
    with pytest.raises(InputError) as caught:
        read_config(written(tmp_path, name, text))
    assert caught.value.expected and fix in str(caught.value.fix), caught.value.fix
    with pytest.raises(InputError) as caught:
        read_config(tmp_path / ("x" + name))
    assert caught.value.expected and f"did you mean '{name}'?" == caught.value.fix


def test_files_that_are_something_else(tmp_path):
    with pytest.raises(InputError, match="cannot read constraints"):
        read_config(tmp_path / "missing.json")
    with pytest.raises(InputError, match="cannot tell"):
        read_config(written(tmp_path, "notes.txt", "hello"))
    with pytest.raises(InputError, match="no configuration"):
        read_config(written(tmp_path, "own.json", '{"heads": "tp"}'))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="no text"):
        read_config(tmp_path / "bytes.json")
    with pytest.raises(InputError, match="a list"):
        read_config(written(tmp_path, "list.json", "[1]"))
    assert read_constraints(written(tmp_path, "own.yaml", "heads: tp")) == Own({"heads": "tp"})


def test_devices_must_fit():
    with pytest.raises(PlanError, match="multiple of 128 devices, not 8"):
        config("megatron_gpt3_175b.sh").on(8)
    with pytest.raises(PlanError, match="not 16"):
        config("accelerate_tp_hsdp.yaml").on(16)
    with pytest.raises(PlanError, match="no multiple of micro batch 2"):
        config("bloom_176b.slurm").on(384).microbatches(2040)


def test_variables_sums_and_comments_of_scripts(tmp_path):
    text = """
    TP=${TP:-4}   # ranks
    NODES=2; export PER_NODE=8
    : "${PP:=2}"
    ARGS=(
        --tensor-model-parallel-size ${TP} # --pipeline-model-parallel-size 9
        #--context-parallel-size 7
        "--pipeline-model-parallel-size $PP"
        --micro-batch-size $(( TP / 2 ))
        --global-batch-size=$((${NODES:-1} * 16 * TP))
    )
    ARGS+=(--sequence-parallel)
    """
    found = read_config(written(tmp_path, "run.sh", text))
    assert (found.tp, found.pp, found.cp) == (4, 2, 1)
    assert (found.micro_batch, found.global_batch) == (2, 128) and found.sequence_parallel


def test_scripts_are_read_and_never_run(tmp_path):
    text = f"--micro-batch-size $(touch {tmp_path}/ran) --num-layers $((__import__('os')))"
    with pytest.raises(AutoparError):
        read_config(written(tmp_path, "run.sh", text))
    assert not (tmp_path / "ran").exists()


def test_pipelines_of_torchtitan(tmp_path):
    text = """
    [model]
    name = "llama3"
    flavor = "405B"
    [training]
    local_batch_size = 32
    [parallelism]
    pipeline_parallel_degree = 8
    pipeline_parallel_schedule = "Interleaved1F1B"
    tensor_parallel_degree = 8
    """
    found = read_config(written(tmp_path, "pp.toml", text)).on(512)
    assert str(found.mesh()) == "pp=8,dp=8,tp=8"
    kept = found.constraints()
    assert (kept["schedule"], kept["chunks"], kept["microbatches"]) == ("interleaved_1f1b", 2, 32)
    assert kept["zero"]["stage"] == 2  # FSDP2 keeps weights between microbatches of a pipeline
    assert found.stage_layers(126) == (7, *[8] * 14, 7)


def test_expert_parallelism_is_said_to_have_no_axis(tmp_path):
    text = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --num-experts 4\n"
    more = "--expert-model-parallel-size 4 --micro-batch-size 1"
    found = read_config(written(tmp_path, "moe.sh", text + more)).on(8)
    assert str(found.mesh()) == "dp=8"
    assert "tensor ranks" in remark(found, "--expert-model-parallel-size")
    assert found.model is not None and isinstance(found.model.sizes, DecoderConfig)
    assert (found.model.sizes.experts, found.model.sizes.top_k) == (4, 2)


def test_accelerate_reads_the_deepspeed_file_beside_it(tmp_path):
    written(tmp_path, "zero.json", '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: {}\n"
    found = read_config(written(tmp_path, "acc.yaml", text.format("zero.json")))
    assert (found.source, found.zero, found.precision) == ("accelerate", 2, "bf16")
    with pytest.raises(InputError, match="not there") as caught:
        read_config(written(tmp_path, "acc.yaml", text.format("gone.json")))
    assert caught.value.where is not None and caught.value.where.endswith(":3")


def test_constraints_of_files():
    assert is_file("deepspeed.json") and is_file("run.sh")
    assert not is_file("megatron,zero=1") and not is_file({"heads": "tp"}) and not is_file(None)
    fixed = resolve(str(CONFIGS / "deepspeed_zero3.json"), None, 8)
    assert str(fixed.mesh) == "dp=8" and fixed.notes
    given = resolve(str(CONFIGS / "deepspeed_zero3.json"), Mesh.parse("dp=2,tp=2"), None)
    assert str(given.mesh) == "dp=2,tp=2"
    kept = resolve(str(CONFIGS / "megatron_gpt3_175b_2021.sh"), None, 1024, search=True)
    assert str(kept.mesh) == "pp=16,dp=8,tp=8"
    assert kept.constraints == {
        "micro_batch": 1, "schedule": "1f1b", "recompute": "full", "tensor": "megatron"
    }  # fmt: skip
    free = resolve(str(CONFIGS / "deepspeed_zero3.json"), None, 8, search=True)
    assert free.mesh is None and free.constraints == {"zero": 3}
    with pytest.raises(InputError, match="cannot keep mesh axis 'cp'"):
        resolve(str(CONFIGS / "accelerate_context.yaml"), None, 8, search=True)
    with pytest.raises(InputError, match="how many devices"):
        resolve(str(CONFIGS / "deepspeed_zero3.json"), None, None)


def test_what_a_search_keeps_of_a_file(tmp_path: Path):
    def kept(text: str, devices: int, name: str = "ds.json", mesh: str = "") -> object:
        file = written(tmp_path, name, text)
        given = Mesh.parse(mesh) if mesh else None
        found = resolve(str(file), given, devices, search=True)
        return str(found.mesh), found.constraints

    micro = '{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64'
    steps = ', "gradient_accumulation_steps": 1'
    assert kept(micro + "}", 8) == ("None", {"micro_batch": 2})
    assert kept(micro + "}", 8, mesh="pp=2,dp=4") == ("pp=2,dp=4", {"micro_batch": 2})
    assert kept(micro + steps + ', "zero_optimization": {"stage": 0}}', 8) == (
        "None", {"micro_batch": 2, "microbatches": 1, "zero": 0}
    )  # fmt: skip
    script = (
        "torchrun pretrain_gpt.py --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"
        " --decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 3"
        " --num-layers 24 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
        " --micro-batch-size 1 --global-batch-size 64 --sequence-parallel"
        " --use-distributed-optimizer --bf16"
    )
    layers = {"first": 5, "last": 3, "stages": 4}
    common = {
        "tensor": "megatron_sp", "micro_batch": 1, "schedule": "1f1b", "stage_layers": layers
    }  # fmt: skip
    assert kept(script, 8, "run.sh") == ("pp=4,tp=2", common)
    assert kept(script, 16, "run.sh") == ("pp=4,dp=2,tp=2", {**common, "zero": 1})


def test_a_mesh_beside_a_file_says_how_many_data_ranks_there_are(tmp_path: Path):
    text = '{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64}'
    file = str(written(tmp_path, "ds.json", text))
    found = resolve(file, Mesh.parse("pp=2,dp=4"), None).constraints
    assert isinstance(found, dict) and found["microbatches"] == 8
    other = resolve(file, Mesh.parse("pp=2,dp=4"), None, batch=32)
    assert isinstance(other.constraints, dict) and other.constraints["microbatches"] == 4
    assert "says 64 samples a step, and the model is given 32" in other.notes[0]


class Sized:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


@pytest.mark.parametrize(
    ("args", "kwargs", "batch"),
    [
        ((Sized(32, 7),), None, 32),
        ((3, Sized(), None), {"x": Sized(32, 7)}, 32),
        ((Sized(7, 64),), {}, 64),  # tokens first
        ((), {}, 64),
    ],
)
def test_a_call_says_how_many_samples_there_are(tmp_path: Path, args, kwargs, batch: int):
    text = '{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64}'
    file = str(written(tmp_path, "ds.json", text))
    found = resolve(file, None, 4, call=(args, kwargs))
    assert isinstance(found.constraints, dict) and found.constraints["microbatches"] == batch // 8
    assert any("is given" in note for note in found.notes) == (batch != 64)


def test_a_file_as_constraints_of_a_plan():
    import torch

    import autopar

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    batch = (torch.ones(16, 8),)
    file = str(CONFIGS / "deepspeed_zero3.json")
    plan = autopar.plan(
        model, "4xcpu", batch, constraints=file, loss_fn=lambda out, x: out.square().mean()
    )
    assert plan.mesh == (("dp", 4),) and plan.zero.stage == 3
    assert any("offload_param" in note for note in plan.notes)
    assert plan.pipeline.microbatches == 1
