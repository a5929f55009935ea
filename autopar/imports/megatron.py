"""Megatron-LM's arguments: a script, a text of arguments, its YAML, or NeMo's YAML.

Defaults and what follows from what are those of `megatron/training/arguments.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from typing import Any

from autopar.errors import InputError
from autopar.imports.document import UNKNOWN, Document, at_line
from autopar.imports.imported import (
    Described,
    Imported,
    Precision,
    Recompute,
    Remark,
    expert_remarks,
)
from autopar.imports.megatron_model import model_of
from autopar.imports.megatron_names import IRRELEVANT, MEANINGS, NEMO
from autopar.imports.script import Flag, Flags, commands, read_flags
from autopar.units import counted

_SIGNS = (
    "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--micro-batch-size",
    "--num-attention-heads",
)  # fmt: skip
_OLD = ("--checkpoint-activations", "--DDP-impl", "--no-query-key-layer-scaling", "--deepspeed")
"""Arguments of Megatron-LM of 2020 to 2022, without flash attention."""


_EXPERTS = ("--expert-model-parallel-size", "--moe-expert-parallel-size")


def is_script(text: str) -> bool:
    """Whether a text holds Megatron's arguments as words (and not as keys of YAML)."""
    return any(re.search(rf"(?m){sign}[\s=]+[^\s:=]", text) for sign in _SIGNS)


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a document is Megatron-LM's or NeMo's."""
    model = data.get("model", data)
    named = isinstance(model, Mapping) and "tensor_model_parallel_size" in model
    return named or any("--num-layers" in part for part in (data, data.get("MODEL_ARGS") or {}))


def read_script(text: str, where: str) -> Imported:
    """What a script, or a text of arguments, says.

    Raises:
        InputError: Names argument and line.
    """
    flags, variables = read_flags(text)
    devices = _devices(flags, variables)
    program = re.search(r"pretrain_(bert|t5|gpt|llama|mamba|vlm|vision)\w*\.py", text)
    found = Flags(flags, where, set(), commands(text))
    return _read(found, program[1] if program else "gpt", devices, "")


def read_yaml(document: Document) -> Imported:
    """What Megatron-LM's or NeMo's YAML says.

    Raises:
        InputError: Names key and line.
    """
    data = document.data
    if isinstance(data.get("model"), Mapping):
        return _nemo(document)
    section = "MODEL_ARGS" if isinstance(data.get("MODEL_ARGS"), Mapping) else None
    found = {}
    for key, value in (data[section] if section else data).items():
        path = (section, key) if section else (key,)
        name = "--" + str(key).removeprefix("--").replace("_", "-")
        if value is not False and value is not None:
            words = () if value is True else tuple(str(value).split())
            found[name] = Flag(name, words, document.line_of(path) or 0)
    return _read(Flags(found, document.where, set()), "gpt", None, "")


def _nemo(document: Document) -> Imported:
    """NeMo's configuration: its ``model`` and ``trainer``."""
    model, trainer = document.data["model"], document.data.get("trainer") or {}
    found = {}
    ignored = 0
    for key, value in model.items():
        name = NEMO.get(key)
        if name is None:
            ignored += 1
            continue
        text = str(value)
        if value in (None, False) or text.startswith("${"):
            continue
        line = document.line_of(("model", key)) or 0
        found[name] = Flag(name, () if value is True else tuple(text.split()), line)
    precision = str(trainer.get("precision", "bf16"))
    line = document.line_of(("trainer", "precision")) or 0
    for kind in ("bf16", "fp16", "16"):
        if kind in precision:
            name = "--bf16" if kind == "bf16" else "--fp16"
            found[name] = Flag(name, (), line)
            break
    optimizer = model.get("optim") or {}
    if "distributed" in str(optimizer.get("name", "")):
        place = document.line_of(("model", "optim", "name")) or 0
        found["--use-distributed-optimizer"] = Flag("--use-distributed-optimizer", (), place)
    devices = None
    if type(trainer.get("devices")) is int and type(trainer.get("num_nodes")) is int:
        devices = trainer["devices"] * trainer["num_nodes"]
    made = _read(Flags(found, document.where, set()), "gpt", devices, "nemo")
    return replace(made, ignored=(*made.ignored, *["model.*"] * ignored))


def _devices(flags: Mapping[str, Flag], variables: Mapping[str, str]) -> int | None:
    """Devices that a script starts, if it says so plainly."""
    per_node, nodes = flags.get("--nproc-per-node"), flags.get("--nnodes")
    words = (per_node.value if per_node else "", nodes.value if nodes else "1")
    if all(word.isdigit() for word in words):
        return int(words[0]) * int(words[1])
    world = variables.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() else None


@dataclass(frozen=True, slots=True)
class _Pipeline:
    pp: int
    schedule: str
    chunks: int
    first: int | None
    last: int | None
    ends: bool


def _read(flags: Flags, program: str, devices: int | None, stack: str) -> Imported:
    tp = flags.number("--tensor-model-parallel-size", least=1) or 1
    cp = flags.number("--context-parallel-size", least=1) or 1
    model = model_of(flags, program)
    pipeline = _pipeline(flags, model)
    precision, gradient_bytes = _precision(flags)
    stack = stack or _stack(flags, pipeline.pp)
    recompute, layers, every = _recompute(flags)
    found = Imported(
        source="megatron",
        where=flags.where,
        stack=stack,
        pp=pipeline.pp,
        tp=tp,
        cp=cp,
        ep=flags.number(*_EXPERTS, least=1) or 1,
        parallel=True,
        devices=devices,
        zero=_zero(flags, precision, pipeline.pp),
        sequence_parallel=flags.has("--sequence-parallel") and tp > 1,
        micro_batch=flags.number("--micro-batch-size", "--batch-size", least=1),
        global_batch=flags.number("--global-batch-size", least=1),
        schedule=pipeline.schedule,
        chunks=pipeline.chunks,
        first_layers=pipeline.first,
        last_layers=pipeline.last,
        ends_count=pipeline.ends,
        recompute=recompute,
        recompute_layers=layers,
        recompute_every=every,
        seq_len=flags.number("--seq-length", "--encoder-seq-length", least=1),
        precision=precision,
        master_weights=precision != "fp32",
        gradient_bytes=gradient_bytes,
        optimizer=_optimizer(flags),
        model=model,
    )
    remarks, ignored = _rest(flags)
    experts = next((flags.found[name] for name in _EXPERTS if name in flags.found), None)
    if experts is not None:
        remarks = (*expert_remarks(experts.name, found.ep, experts.line), *remarks)
    return replace(found, remarks=remarks, ignored=ignored)


def _rest(flags: Flags) -> tuple[tuple[Remark, ...], tuple[str, ...]]:
    """What nobody asked for: what it means, and what does not matter."""
    remarks, ignored = [], []
    for name, flag in flags.found.items():
        if name in flags.seen:
            continue
        meaning = next((m for pattern, m in MEANINGS.items() if fnmatch(name, pattern)), None)
        if meaning is None and any(fnmatch(name, pattern) for pattern in IRRELEVANT):
            ignored.append(name)
            continue
        value = flag.value if len(flag.value) <= 60 else flag.value[:57] + "..."
        remarks.append(Remark(name=name, value=value, meaning=meaning or UNKNOWN, line=flag.line))
    return tuple(remarks), tuple(ignored)


def _pipeline(flags: Flags, model: Described | None) -> _Pipeline:
    pp = flags.number("--pipeline-model-parallel-size", least=1) or 1
    first = flags.number("--decoder-first-pipeline-num-layers", least=1)
    last = flags.number("--decoder-last-pipeline-num-layers", least=1)
    ends = flags.has("--account-for-embedding-in-pipeline-split") and flags.has(
        "--account-for-loss-in-pipeline-split"
    )
    method = flags.word("--pp-partition-method")
    ends = ends or (method is not None and "embedding" in method)
    chunks = flags.number("--num-virtual-stages-per-pipeline-rank", least=1)
    each = flags.number("--num-layers-per-virtual-pipeline-stage", least=1)
    if chunks is None and each is not None and pp > 1:
        if model is None:
            raise flags.wrong(
                flags.found["--num-layers-per-virtual-pipeline-stage"], "--num-layers beside it"
            )
        chunks, left = divmod(model.layers, each * pp)
        if left or not chunks:
            raise flags.wrong(
                flags.found["--num-layers-per-virtual-pipeline-stage"],
                f"a number that divides {counted(model.layers, 'layer')} "
                f"over {counted(pp, 'pipeline rank')} evenly",
            )
    chunks = chunks if chunks is not None and pp > 1 else 1
    schedule = "interleaved_1f1b" if chunks > 1 else "1f1b"
    return _Pipeline(pp, schedule, chunks, first, last, ends)


def _precision(flags: Flags) -> tuple[Precision, int | None]:
    bf16, fp16 = flags.has("--bf16"), flags.has("--fp16")
    eight = flags.word("--fp8-format") is not None or flags.has("--fp8-hybrid", "--fp8-e4m3")
    eight = eight or flags.has("--fp8")
    narrow = flags.has("--grad-reduce-in-bf16")
    flags.has("--params-dtype")
    if bf16 and fp16:
        raise InputError(
            "--bf16 and --fp16 are both given",
            expected="one of them",
            where=at_line(flags.where, flags.found["--fp16"].line),
        )
    if eight:
        return "fp8", 2 if narrow else 4
    if bf16:
        return "bf16", 2 if narrow else 4  # main gradients are float32
    return ("fp16", None) if fp16 else ("fp32", 4)


def _stack(flags: Flags, pp: int) -> str:
    deepspeed = flags.has("--deepspeed") and "--deepspeed" in flags.found
    if deepspeed and pp > 1 and not flags.has("--no-pipeline-parallel"):
        return "deepspeed-pipeline"
    if any(name in flags.found for name in _OLD) and not flags.has(
        "--use-mcore-models", "--use-flash-attn"
    ):
        return "megatron-deepspeed"
    return "mcore"


_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _zero(flags: Flags, precision: Precision, pp: int) -> int:
    stage = flags.number("--zero-stage")
    if stage is not None and stage > 3:
        raise flags.wrong(flags.found["--zero-stage"], "0, 1, 2 or 3")
    if stage is not None and flags.has("--deepspeed"):
        # DeepSpeed's optimizer for bf16 divides its state under a pipeline whatever the stage is.
        return max(stage, 1) if precision == "bf16" and pp > 1 else stage
    if flags.has("--use-megatron-fsdp", "--use-custom-fsdp"):
        known = tuple(_SHARDED)
        return _SHARDED[flags.word("--data-parallel-sharding-strategy", known=known) or "no_shard"]
    if flags.has("--use-torch-fsdp2"):
        return 3
    return 1 if flags.has("--use-distributed-optimizer") else 0


def _recompute(flags: Flags) -> tuple[Recompute, int | None, int]:
    kind = flags.word("--recompute-granularity", known=("full", "selective"))
    method = flags.word(
        "--recompute-method", "--checkpoint-method", "--activations-checkpoint-method",
        known=("uniform", "block"),
    )  # fmt: skip
    layers = flags.number("--recompute-num-layers", "--checkpoint-num-layers")
    old = flags.has("--checkpoint-activations", "--deepspeed-activation-checkpointing")
    if kind == "selective" or flags.has("--recompute-activations"):
        return "attention", None, 1
    if kind == "full" or old or (kind is None and method is not None):
        if method == "block" and layers is not None:
            return "full", layers, 1
        return "full", None, 1
    return "none", None, 1


_OPTIMIZERS = ("adam", "sgd", "adamw", "muon", "dist_muon")


def _optimizer(flags: Flags) -> str:
    found = flags.word("--optimizer", known=_OPTIMIZERS) or "adam"
    return "sgd" if found == "sgd" else "adamw"
