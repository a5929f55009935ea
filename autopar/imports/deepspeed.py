"""DeepSpeed's JSON (docs: www.deepspeed.ai/docs/config-json).

It holds batch sizes, precision and ZeRO; stages of a pipeline and, before AutoTP, tensor ranks are
in the training code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import InputError
from autopar.imports.document import Document, at_line
from autopar.imports.imported import Imported, Precision, Remark

_SIGNS = (
    "zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps", "zero_allow_untested_optimizer",
)  # fmt: skip
_OFFLOAD = (
    "moves state to the memory of the host or to disks; plans keep everything on devices, so the"
    " step is priced, and must fit, without it"
)
MEANINGS: Mapping[str, str] = {
    "zero_optimization.offload_optimizer*": _OFFLOAD,
    "zero_optimization.offload_param*": _OFFLOAD,
    "zero_optimization.cpu_offload*": _OFFLOAD,
    "zero_optimization.zenflow*": _OFFLOAD,
    "zero_optimization.super_offload*": _OFFLOAD,
    "zero_optimization.zero_hpz_partition_size": "a second copy of weights inside of a node"
    " (ZeRO++); plans gather weights over all data ranks",
    "zero_optimization.zero_quantized_*": "quantised collectives (ZeRO++); plans send whole"
    " numbers",
    "zero_optimization.mics_*": "ZeRO within groups (MiCS); name a mesh with axes replica and dp",
    "zero_optimization.stage3_param_persistence_threshold": "small parameters stay whole on every"
    " rank; plans divide all parameters",
    "activation_checkpointing.partition_activations": "tensor ranks keep a part each of what is"
    " saved; sequence parallelism (megatron_sp) does that",
    "activation_checkpointing.cpu_checkpointing": _OFFLOAD,
    "activation_checkpointing.*": "says how blocks that the model's code marks are computed again;"
    " autopar decides that (--recompute)",
    "sparse_attention*": "attention over blocks; the model as it is traced decides that",
    "compression_training*": "quantises or prunes while training; plans do not",
    "curriculum_learning*": "changes sequence lengths while training; a plan is for one length",
    "data_efficiency*": "changes samples while training; a plan is for one length",
    "progressive_layer_drop*": "leaves layers out while training; plans run all of them",
    "sequence_parallel_size": "Ulysses: attention split by heads, the rest by tokens; a mesh axis"
    " cp splits the sequence everywhere",
    "pipeline.*": "how DeepSpeed's pipeline module cuts and runs stages; the number of stages is in"
    " the training code: say --mesh pp=N",
    "tensor_parallel.*": "how tensor ranks are set up",
    "moe*": "expert parallelism of DeepSpeed's layers; experts of a traced model are a factor",
    "data_types.*": "formats of gradients between microbatches",
    "communication_data_type": "number format of collectives; plans send values as they are",
    "fp8*": "products in fp8",
    "amp*": "NVIDIA's automatic mixed precision; a plan runs the model in the types it has",
    "torch_autocast*": "autocast of torch; a plan runs the model in the types it has",
    "zero_optimization.sub_group_size": "parts in which ZeRO-3 updates",
    "zero_optimization.ignore_unused_parameters": "parameters without a gradient",
}
IRRELEVANT = (
    "optimizer.params.*", "optimizer.type", "scheduler.*", "gradient_clipping", "steps_per_print",
    "wall_clock_breakdown", "dump_state", "fp16.*", "bf16.*", "bfloat16.*", "tensorboard*",
    "wandb*", "csv_monitor*", "comet*", "flops_profiler*", "comms_logger*", "checkpoint*",
    "aio*", "autotuning*", "elasticity*", "prescale_gradients", "gradient_predivide_factor",
    "sparse_gradients", "seed", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "memory_breakdown", "timers*", "compile*", "nebula*", "hybrid_engine*",
    "zero_optimization.offload_*.pin_memory", "zero_optimization.offload_*.buffer_*",
    "zero_optimization.offload_*.pipeline*", "zero_optimization.offload_*.fast_init",
    "zero_optimization.*bucket_size", "zero_optimization.overlap_comm",
    "zero_optimization.contiguous_gradients", "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions", "zero_optimization.round_robin_gradients",
    "zero_optimization.stage3_max_*", "zero_optimization.*16bit_weights*",
    "zero_optimization.*fp16_weights*", "zero_optimization.elastic_checkpoint",
    "zero_optimization.load_from_fp32_weights", "zero_optimization.use_all_reduce*",
    "zero_optimization.log_trace*", "zero_optimization.module_granularity_threshold",
    "zero_optimization.sub_group_size", "zero_optimization.ignore_unused_parameters",
)  # fmt: skip


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a document is DeepSpeed's."""
    return any(name in data for name in _SIGNS)


def read(document: Document) -> Imported:
    """What a DeepSpeed configuration says.

    Raises:
        InputError: Names key and line.
    """
    get = document
    asked = get.number("zero_optimization", "stage", least=0)
    stage = asked or 0
    if stage > 3:
        raise get.wrong(("zero_optimization", "stage"), stage, "0, 1, 2 or 3")
    batch = get.number("train_batch_size")
    micro = get.number("train_micro_batch_size_per_gpu")
    steps = get.number("gradient_accumulation_steps")
    tensor = get.number("tensor_parallel", "autotp_size", least=0) or 1
    tensor = max(tensor, get.number("tensor_parallel", "tp_size") or 1)
    context = get.number("sequence_parallel_size") or 1
    precision, gradient_bytes = _precision(get)
    optimizer, more = _optimizer(get)
    _check_batch(get, batch, micro, steps)
    if stage == 3 and get.number("zero_optimization", "mics_shard_size", least=-1) in (-1, None):
        get.seen.add(("zero_optimization", "mics_shard_size"))
    remarks, ignored = document.remarks(MEANINGS, IRRELEVANT)
    return Imported(
        source="deepspeed",
        where=document.where,
        stack="deepspeed-hf",
        tp=tensor,
        cp=context,
        parallel=tensor > 1,
        devices=batch // (micro * steps) * tensor if batch and micro and steps else None,
        zero=stage,
        stated=frozenset(
            name for name, value in (("zero", asked), ("accumulation", steps)) if value is not None
        ),
        micro_batch=micro,
        accumulation=steps if steps is not None or micro is None else _steps(batch),
        global_batch=batch,
        precision=precision,
        master_weights=precision != "fp32",
        gradient_bytes=gradient_bytes,
        optimizer=optimizer,
        remarks=(*more, *remarks),
        ignored=ignored,
    )


def _steps(batch: int | None) -> int | None:
    """Accumulation steps that are not stated: by the batch, else one."""
    return 1 if batch is None else None


def _check_batch(get: Document, batch: int | None, micro: int | None, steps: int | None) -> None:
    """Refuse sizes that contradict each other on any number of devices."""
    each = (micro or 1) * (steps or 1)
    if batch is not None and batch % each:
        raise InputError(
            f"train_batch_size {batch} is no multiple of micro batch {micro or 1} x"
            f" {steps or 1} accumulation steps",
            expected="train_batch_size = micro batch x accumulation steps x data ranks",
            where=at_line(get.where, get.line_of(("train_batch_size",))),
        )


def _precision(get: Document) -> tuple[Precision, int | None]:
    bf16 = get.flag("bf16", "enabled") or get.flag("bfloat16", "enabled")
    fp16 = get.flag("fp16", "enabled")
    if bf16 and fp16:
        raise get.wrong(("fp16", "enabled"), True, "bf16 or fp16, not both")
    stated = (get.raw("bf16"), get.raw("bfloat16"), get.raw("fp16"))
    left_open = any(isinstance(part, Mapping) and part.get("enabled") == "auto" for part in stated)
    kind = get.text("data_types", "grad_accum_dtype", known=("fp32", "fp16", "bf16"))
    width = {None: None, "fp32": 4, "fp16": 2, "bf16": 2}[kind]
    if fp16 and not bf16:
        return "fp16", width
    return ("bf16" if bf16 or left_open else "fp32"), width


_OPTIMIZERS = {
    "adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "cpuadam": "adamw",
    "deepspeedcpuadam": "adamw", "onebitadam": "adamw", "zerooneadam": "adamw",
    "sgd": "sgd", "adagrad": "adagrad", "lion": "lion", "fusedlion": "lion", "lamb": "adamw",
    "fusedlamb": "adamw", "onebitlamb": "adamw", "rmsprop": "rmsprop",
}  # fmt: skip
_LIKE_ADAM = ("onebitadam", "zerooneadam", "lamb", "fusedlamb", "onebitlamb")


def _optimizer(get: Document) -> tuple[str, tuple[Remark, ...]]:
    name = get.text("optimizer", "type")
    if name is None:
        return "adamw", ()
    found = _OPTIMIZERS.get(name.lower())
    line = get.line_of(("optimizer", "type"))
    if found is None or name.lower() in _LIKE_ADAM:
        return found or "adamw", (
            Remark(
                name="optimizer.type", value=name, line=line,
                meaning="not an optimizer of this package; its memory is taken to be Adam's",
            ),
        )  # fmt: skip
    return found, ()
