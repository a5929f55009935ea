"""DeepSpeed: the JSON configuration that ``deepspeed.initialize(config=...)`` reads.

Field names are those of ``deepspeed/runtime/config.py``, ``runtime/zero/config.py`` and
``runtime/tensor_parallel/config.py`` of release 0.19.
"""

from __future__ import annotations

import json
import re
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
from autopar.export.result import TARGETS, Exported, Target
from autopar.export.splits import Split, group_of
from autopar.plan.plan import Plan
from autopar.units import counted


def export_deepspeed(plan: Plan) -> Exported:
    """The plan as a DeepSpeed configuration.

    The JSON has no comments: losses and what the launcher and the model must do stand beside it.
    """
    work = begin(plan)
    config: dict[str, Any] = _batch(work)
    config |= _precision(work)
    config["zero_optimization"] = _zero(work)
    if work.facts.pipeline > 1:
        config["pipeline"] = _pipeline(work)
    config["activation_checkpointing"] = _recompute(work, config)
    if work.facts.tensor:
        config["tensor_parallel"] = _tensor(work)
    if work.facts.context:
        size = work.facts.degree(work.facts.context)
        config["sequence_parallel_size"] = size
        work.notes.append(
            f"sequence parallelism of {size} (Ulysses) needs attention from "
            "deepspeed.sequence.layer.DistributedAttention in the model"
        )
    _experts(work)
    work.notes.insert(
        0,
        f"start {counted(work.facts.ranks, 'rank')}: deepspeed --num_gpus N --num_nodes M train.py",
    )
    text = json.dumps(config, indent=2) + "\n"
    return Exported(text=text, losses=tuple(work.losses), notes=tuple(work.notes))


def _batch(work: Work) -> dict[str, Any]:
    facts = work.facts
    if facts.batch_size is None:
        work.notes.append("the plan does not say its batch size: train_batch_size is to be set")
        return {"gradient_accumulation_steps": facts.microbatches}
    if facts.micro_batch_size is None:
        work.lose(
            f"{counted(facts.batch_size, 'sample')} over "
            f"{counted(facts.data_degree, 'rank')} in {facts.microbatches} "
            "microbatches, of unequal sizes",
            "the batch size is to be set",
        )
        return {"gradient_accumulation_steps": facts.microbatches}
    return {
        "train_batch_size": facts.batch_size,
        "train_micro_batch_size_per_gpu": facts.micro_batch_size,
        "gradient_accumulation_steps": facts.microbatches,
    }


def _precision(work: Work) -> dict[str, Any]:
    match work.facts.dtype:
        case "bfloat16":
            return {"bf16": {"enabled": True}}
        case "float16":
            return {"fp16": {"enabled": True}}
    return {}


def _zero(work: Work) -> dict[str, Any]:
    facts, stage = work.facts, work.facts.zero
    if facts.pipeline > 1 and stage > 1:
        # The pipeline engine refuses to divide gradients (runtime/pipe/engine.py).
        part = 1 - 1 / facts.degree(facts.zero_axes)
        work.lose(
            f"ZeRO stage {stage} beside a pipeline",
            "stage 1",
            extra_bytes=held_bytes(facts) * part * (stage - 1),
        )
        stage = 1
    config: dict[str, Any] = {"stage": stage}
    rest = facts.data_degree // max(1, facts.degree(facts.zero_axes))
    if stage and rest > 1:
        if stage == 3:
            config["mics_shard_size"] = facts.degree(facts.zero_axes)
            config["mics_hierarchical_params_gather"] = False
        else:
            work.lose(
                f"ZeRO divides over {', '.join(facts.zero_axes)} only",
                f"over all {facts.data_degree} data-parallel ranks",
            )
    return config


def _pipeline(work: Work) -> dict[str, Any]:
    """The section of the pipeline engine; stages themselves are made in Python."""
    facts, plan = work.facts, work.plan
    lower_schedule(work, ("1f1b",))
    lose_inside(work)
    stages = work.stages
    method = "uniform"
    if plan.pipeline.chunks > 1 or not stages.even:
        counts = ", ".join(map(str, stages.counts))
        work.lose(
            f"stages of {counts} layers",
            f"{counted(facts.pipeline, 'stage')} as PipelineModule divides its list of layers",
        )
        method = "parameters"
    work.notes.append(
        f"the model must be a deepspeed.pipe.PipelineModule(layers, num_stages={facts.pipeline}, "
        f'partition_method="{method}")'
    )
    return {"stages": facts.pipeline, "partition": method}


def _recompute(work: Work, config: dict[str, Any]) -> dict[str, Any]:
    kind = again(work)
    if kind == "none":
        return {}
    if kind == "full" and "pipeline" in config:
        config["pipeline"]["activation_checkpoint_interval"] = 1
        work.notes.append(
            "full recomputation: PipelineModule(..., activation_checkpoint_interval=1)"
        )
    elif kind == "full":
        work.notes.append(
            f"full recomputation: call {work.layers.pattern} through "
            "deepspeed.checkpointing.checkpoint (or gradient_checkpointing_enable() of "
            "Hugging Face models)"
        )
    else:
        work.lose(
            "backward computes again "
            f"{counted(len(work.plan.recompute), 'pattern of ops')} ({kind})",
            "DeepSpeed checkpoints whole calls: the model decides which",
        )
    return {"partition_activations": False, "contiguous_memory_optimization": False}


def _tensor(work: Work) -> dict[str, Any]:
    """The section of automatic tensor parallelism, with a line per kind of matrix."""
    facts = work.facts
    specs, whole = [], []
    for split in work.splits:
        if split.kind in ("column", "row", "head") and split.cut.even:
            specs.append(_layer(split))
        else:
            whole.append(split)
    broken = {group_of(split) for split in whole}
    if whole:
        work.lose(
            "tensor-parallel " + ", ".join(split.module for split in whole[:4]),
            f"whole on all {facts.degree(facts.tensor)} ranks",
            extra_bytes=whole_bytes(whole),
        )
    if broken & {"attention", "ffn"}:
        work.notes.append("matrices of one block are split in part: check its shapes")
    if facts.sequence:
        work.lose(
            "activations between tensor-parallel blocks are split along the sequence",
            "whole on every rank",
        )
    return {
        "autotp_size": facts.degree(facts.tensor),
        "partition_config": {"use_default_specs": False, "layer_specs": specs},
    }


def _layer(split: Split) -> dict[str, Any]:
    module = re.escape(split.module).replace(r"\*", r"\d+")
    spec: dict[str, Any] = {
        "patterns": [rf".*{module}\.weight$"],
        "partition_type": "row" if split.kind == "row" else "column",
    }
    if split.kind == "head":
        spec["gather_output"] = True
    if split.cut.copies > 1:
        spec["shape"] = [split.cut.copies, -1]
        spec["partition_dim"] = split.cut.dim
    return spec


def _experts(work: Work) -> None:
    if not work.facts.experts:
        return
    size = work.facts.degree(work.facts.experts)
    work.lose(
        f"experts are split over {', '.join(work.facts.experts)} ({counted(size, 'rank')})",
        f"in Python only: deepspeed.moe.layer.MoE(..., ep_size={size})",
    )


TARGETS.add(
    "deepspeed", Target(summary="ds_config.json for deepspeed.initialize", export=export_deepspeed)
)
