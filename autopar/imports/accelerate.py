"""Accelerate's YAML (docs: huggingface.co/docs/accelerate, `accelerate config`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.errors import InputError
from autopar.imports import deepspeed
from autopar.imports.document import Document, at_line, parse_json
from autopar.imports.imported import Imported, Precision, Remark

_OFFLOAD = deepspeed.MEANINGS["zero_optimization.offload_param*"]
_KINDS = (
    "no", "multi_gpu", "multi_cpu", "multi_xpu", "fsdp", "deepspeed", "megatron_lm", "tp",
    "multi_npu", "multi_mlu",
)  # fmt: skip
MEANINGS: Mapping[str, str] = {
    "fsdp_config.fsdp_offload_params": _OFFLOAD,
    "deepspeed_config.offload_*": _OFFLOAD,
    "deepspeed_config.deepspeed_multinode_launcher": "how processes are started",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "how weights are loaded",
    "downcast_bf16": "only for TPUs",
    "tpu_*": "TPUs are no devices here",
    "use_cpu": "trains on CPUs; the cluster says what there is",
    "ipex_config*": "Intel's extension of torch",
    "fp8_config*": "how products run in fp8",
    "megatron_lm_config.*": "an argument that Accelerate hands to Megatron-LM",
    "parallelism_config.parallelism_config_cp_comm_strategy": "how keys and values are exchanged",
}
IRRELEVANT = (
    "compute_environment", "debug", "machine_rank", "main_training_function", "main_process_*",
    "rdzv_*", "same_network", "enable_cpu_affinity", "deepspeed_hostfile", "num_machines",
    "deepspeed_config.zero3_*", "deepspeed_config.deepspeed_hostfile", "gpu_ids", "commands",
    "deepspeed_config.gradient_clipping", "fsdp_config.fsdp_auto_wrap_policy",
    "fsdp_config.fsdp_state_dict_type", "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    "fsdp_config.fsdp_sync_module_states", "fsdp_config.fsdp_use_orig_params",
    "fsdp_config.fsdp_backward_prefetch*", "fsdp_config.fsdp_forward_prefetch",
    "fsdp_config.fsdp_min_num_params", "fsdp_config.fsdp_cpu_ram_efficient_loading",
    "dynamo_config*", "dynamo_backend", "mpirun_*", "tpu_env", "command_file", "megatron_lm_config"
    ".megatron_lm_gradient_clipping", "megatron_lm_config.megatron_lm_tokenizer*",
)  # fmt: skip


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a document is Accelerate's."""
    return any(
        name in data
        for name in ("distributed_type", "fsdp_config", "parallelism_config", "compute_environment")
    )


def read(document: Document) -> Imported:
    """What an Accelerate configuration says.

    Raises:
        InputError: Names key and line.
    """
    kind = document.text("distributed_type", known=_KINDS) or _guess(document)
    found = Imported(
        source="accelerate",
        where=document.where,
        stack="torchtitan" if kind == "fsdp" else "deepspeed-hf",
        devices=document.number("num_processes"),
        accumulation=(steps := document.number("gradient_accumulation_steps")),
        stated=frozenset() if steps is None else frozenset({"accumulation"}),
        precision=_precision(document),
        master_weights=True,
    )
    if kind == "fsdp":
        found = _fsdp(document, found)
    elif kind == "deepspeed":
        found = _deepspeed(document, found)
    elif kind == "megatron_lm":
        found = _megatron(document, found)
    found = _degrees(document, found)
    remarks, ignored = document.remarks(MEANINGS, IRRELEVANT)
    return replace(found, remarks=(*found.remarks, *remarks), ignored=ignored)


def _guess(document: Document) -> str:
    named = {"fsdp_config": "fsdp", "deepspeed_config": "deepspeed",
             "megatron_lm_config": "megatron_lm"}  # fmt: skip
    return next((kind for key, kind in named.items() if key in document.data), "no")


def _precision(document: Document) -> Precision:
    found = document.text("mixed_precision", known=("no", "fp16", "bf16", "fp8"))
    return {None: "bf16", "no": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}[found]  # type: ignore[return-value]


_SHARDING = {
    "full_shard": (3, False), "shard_grad_op": (2, False), "no_shard": (0, False),
    "hybrid_shard": (3, True), "hybrid_shard_zero2": (2, True),
    "1": (3, False), "2": (2, False), "3": (0, False), "4": (3, True), "5": (2, True),
}  # fmt: skip


def _fsdp(document: Document, found: Imported) -> Imported:
    section = "fsdp_config"
    document.number(section, "fsdp_version")
    key = (section, "fsdp_reshard_after_forward")
    again = document.raw(*key)
    named = document.raw(section, "fsdp_sharding_strategy")
    if isinstance(again, str) and again.lower() not in ("true", "false"):
        key, named, again = key, again, None  # as older versions wrote it
    zero, hybrid = (2 if again is False or str(again).lower() == "false" else 3), False
    if named is not None:
        if str(named).lower() not in _SHARDING:
            raise document.wrong(
                (section, "fsdp_sharding_strategy"), named, ", ".join(list(_SHARDING)[:5])
            )
        zero, hybrid = _SHARDING[str(named).lower()]
    machines = document.number("num_machines") or 1
    return replace(
        found,
        zero=zero,
        stated=found.stated | {"zero"},
        replicas=machines if hybrid else 1,
        recompute="full" if document.flag(section, "fsdp_activation_checkpointing") else "none",
    )


def _deepspeed(document: Document, found: Imported) -> Imported:
    section = "deepspeed_config"
    name = document.text(section, "deepspeed_config_file")
    if name is not None:
        path = Path(document.where).parent / name
        place = at_line(document.where, document.line_of((section, "deepspeed_config_file")))
        if not path.is_file():
            raise InputError(
                f"the DeepSpeed configuration {name!r} is not there", where=place,
                expected="a file, by its path from the folder of this one",
            )  # fmt: skip
        inner = deepspeed.read(parse_json(path.read_text(encoding="utf-8"), str(path)))
        asked = json.loads(path.read_text(encoding="utf-8"))
        stated = any(isinstance(asked.get(k), dict) for k in ("bf16", "fp16", "bfloat16"))
        return replace(
            inner,
            source="accelerate",
            where=document.where,
            devices=found.devices or inner.devices,
            accumulation=inner.accumulation or found.accumulation,
            stated=inner.stated | found.stated,
            precision=inner.precision if stated else found.precision,
        )
    zero = document.number(section, "zero_stage", least=0)
    if zero is not None and zero > 3:
        raise document.wrong((section, "zero_stage"), zero, "0, 1, 2 or 3")
    steps = document.number(section, "gradient_accumulation_steps")
    offload = (
        document.text(section, "offload_optimizer_device"),
        document.text(section, "offload_param_device"),
    )
    names = ("offload_optimizer_device", "offload_param_device")
    remarks = tuple(
        Remark(
            name=f"{section}.{name}", value=value, meaning=_OFFLOAD,
            line=document.line_of((section, name)),
        )
        for name, value in zip(names, offload, strict=True)
        if value not in (None, "none")
    )  # fmt: skip
    says = {name for name, value in (("zero", zero), ("accumulation", steps)) if value is not None}
    return replace(
        found, zero=zero or 0, accumulation=steps or found.accumulation,
        stated=found.stated | says, remarks=remarks,
    )  # fmt: skip


def _megatron(document: Document, found: Imported) -> Imported:
    section, prefix = "megatron_lm_config", "megatron_lm_"
    tensor = document.number(section, f"{prefix}tp_degree") or 1
    pipeline = document.number(section, f"{prefix}pp_degree") or 1
    again = document.flag(section, f"{prefix}recompute_activations")
    microbatches = document.number(section, f"{prefix}num_micro_batches")
    return replace(
        found,
        stack="mcore",
        tp=tensor,
        pp=pipeline,
        parallel=True,
        zero=1 if document.flag(section, f"{prefix}use_distributed_optimizer") else 0,
        sequence_parallel=bool(document.flag(section, f"{prefix}sequence_parallelism")),
        recompute="attention" if again else "none",
        accumulation=microbatches or found.accumulation,
    )


def _degrees(document: Document, found: Imported) -> Imported:
    section, prefix = "parallelism_config", "parallelism_config_"
    if section not in document.data:
        return found

    def size(name: str) -> int:
        return document.number(section, f"{prefix}{name}_size") or 1

    outer, shard, tensor, context = (
        size(name) for name in ("dp_replicate", "dp_shard", "tp", "cp")
    )
    context = max(context, size("sp"))
    sharded = shard > 1 or context > 1
    return replace(
        found,
        replicas=outer,
        shards=shard,
        tp=tensor,
        cp=context,
        parallel=True,
        zero=found.zero if sharded else 0,
    )
