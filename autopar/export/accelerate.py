"""Accelerate: the YAML that ``accelerate launch --config_file`` reads.

Names are those of ``accelerate/commands/config/config_args.py`` and of the options of
``accelerate launch`` (1.15). A pipeline goes to its Megatron-LM plugin; ZeRO 1 and 2 to its
DeepSpeed plugin; ZeRO 3 and tensor or context parallelism to FSDP 2 with a parallelism
configuration; plain data parallelism to DDP.
"""

from __future__ import annotations

from typing import Any

from autopar.export.common import (
    Work,
    again,
    begin,
    held_bytes,
    lose_inside,
    lower_schedule,
    whole_bytes,
)
from autopar.export.result import TARGETS, Exported, Target, comments
from autopar.plan.plan import Plan
from autopar.units import counted


def export_accelerate(plan: Plan) -> Exported:
    """The plan as an Accelerate configuration."""
    work = begin(plan)
    facts = work.facts
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": facts.ranks,
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16"}.get(facts.dtype, "no"),
        "use_cpu": False,
    }
    if facts.pipeline > 1:
        config |= _megatron(work)
    elif facts.tensor or facts.context or facts.zero == 3:
        config |= _fsdp(work)
    elif facts.zero:
        config |= _deepspeed(work)
    else:
        config["distributed_type"] = "MULTI_GPU"
        _accumulation(work)
        _recompute(work)
    if facts.experts:
        size = facts.degree(facts.experts)
        work.lose(f"experts are split over {counted(size, 'rank')}", "whole on every rank")
    _batch(work)
    work.notes.insert(
        0, "set num_machines, machine_rank and main_process_ip where there is more than one node"
    )
    head = comments(tuple(work.losses), tuple(work.notes))
    return Exported(text=head + _yaml(config), losses=tuple(work.losses), notes=tuple(work.notes))


def _yaml(config: dict[str, Any]) -> str:
    lines = []
    for key, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            lines += [f"  {name}: {_scalar(item)}" for name, item in value.items()]
        else:
            lines.append(f"{key}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: object) -> str:
    """A scalar in YAML; words that YAML would read as true or false are quoted."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"'{value}'" if value in ("no", "yes", "on", "off") else str(value)


def _batch(work: Work) -> None:
    facts = work.facts
    if facts.micro_batch_size is None:
        work.notes.append("the batch size is the data loader's")
        return
    work.notes.append(
        f"the data loader of a rank gives {counted(facts.micro_batch_size, 'sample')} at a time "
        f"(global batch {facts.batch_size})"
    )


def _accumulation(work: Work) -> None:
    if work.facts.microbatches > 1:
        work.notes.append(
            f"Accelerator(gradient_accumulation_steps={work.facts.microbatches}) in the script"
        )


def _recompute(work: Work) -> bool:
    """Whether FSDP's checkpointing of whole layers is what the plan asks for."""
    kind = again(work)
    if kind in ("none", "full"):
        if kind == "full":
            work.notes.append("full recomputation: model.gradient_checkpointing_enable()")
        return kind == "full"
    work.lose(
        f"backward computes again {counted(len(work.plan.recompute), 'pattern of ops')} ({kind})",
        "nothing is computed again; whole layers are with fsdp_activation_checkpointing or "
        "gradient_checkpointing_enable()",
    )
    return False


def _deepspeed(work: Work) -> dict[str, Any]:
    facts = work.facts
    rest = facts.data_degree // facts.degree(facts.zero_axes)
    if rest > 1:
        work.lose(
            f"ZeRO divides over {', '.join(facts.zero_axes)} only",
            f"over all {counted(facts.data_degree, 'rank')}",
        )
    _recompute(work)
    return {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "zero_stage": facts.zero,
            "gradient_accumulation_steps": facts.microbatches,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
        },
    }


def _fsdp(work: Work) -> dict[str, Any]:
    facts = work.facts
    shard = facts.degree(facts.zero_axes) if facts.zero else 1
    replicate = facts.data_degree // shard
    if replicate > 1 and shard == 1:
        # ParallelismConfig refuses replication beside tensor parallelism without sharding.
        work.lose(
            "data-parallel ranks hold whole parameters beside tensor or context parallelism",
            "FSDP shards them, and gathers them once a step",
        )
        replicate, shard = 1, replicate
    elif facts.zero in (1, 2):
        work.lose(
            f"ZeRO stage {facts.zero} beside tensor or context parallelism",
            "FSDP shards parameters too, and keeps them gathered from forward to backward",
        )
    checkpointing = _recompute(work)
    _accumulation(work)
    if facts.sequence:
        work.lose(
            "activations between tensor-parallel blocks are split along the sequence",
            "whole on every rank",
        )
    if facts.tensor:
        odd = [split for split in work.splits if not split.plain]
        work.notes.append(
            "tensor parallelism follows the model's own tp_plan (Hugging Face models, "
            'from_pretrained(..., tp_plan="auto"))'
        )
        if odd:
            work.lose(
                "splits of " + ", ".join(split.module for split in odd[:4]),
                "as the model's tp_plan says",
                extra_bytes=whole_bytes(odd),
            )
    return {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": facts.zero == 3,
            "fsdp_activation_checkpointing": checkpointing,
            "fsdp_cpu_ram_efficient_loading": False,
            "fsdp_offload_params": False,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        },
        "parallelism_config": {
            "parallelism_config_dp_replicate_size": replicate,
            "parallelism_config_dp_shard_size": shard,
            "parallelism_config_tp_size": facts.degree(facts.tensor),
            "parallelism_config_cp_size": facts.degree(facts.context),
        },
    }


def _megatron(work: Work) -> dict[str, Any]:
    facts, kind = work.facts, again(work)
    lower_schedule(work, ("1f1b",))
    lose_inside(work)
    if facts.zero > 1:
        part = 1 - 1 / facts.degree(facts.zero_axes)
        work.lose(
            f"ZeRO stage {facts.zero} beside a pipeline",
            "optimizer state only is divided",
            extra_bytes=held_bytes(facts) * part * (facts.zero - 1),
        )
    if work.plan.pipeline.chunks == 1 and not work.stages.even:
        counts = ", ".join(map(str, work.stages.counts))
        work.lose(f"stages of {counts} layers", "stages of equally many layers")
    config: dict[str, Any] = {
        "megatron_lm_tp_degree": facts.degree(facts.tensor),
        "megatron_lm_pp_degree": facts.pipeline,
        "megatron_lm_num_micro_batches": facts.microbatches,
        "megatron_lm_sequence_parallelism": facts.sequence,
        "megatron_lm_use_distributed_optimizer": facts.zero > 0,
    }
    if facts.context:
        config["megatron_lm_context_parallel_size"] = facts.degree(facts.context)
    if kind == "full":
        config |= {
            "megatron_lm_recompute_activations": True,
            "megatron_lm_recompute_granularity": "full",
            "megatron_lm_recompute_method": "uniform",
            "megatron_lm_recompute_num_layers": 1,
        }
    elif kind != "none":
        config |= {
            "megatron_lm_recompute_activations": True,
            "megatron_lm_recompute_granularity": "selective",
        }
        work.lose(
            "backward computes again "
            f"{counted(len(work.plan.recompute), 'pattern of ops')} ({kind})",
            "attention scores only",
        )
    return {"distributed_type": "MEGATRON_LM", "megatron_lm_config": config}


TARGETS.add("accelerate", Target(summary="YAML for accelerate launch", export=export_accelerate))
