"""torchtitan's TOML (pytorch/torchtitan, `torchtitan/config/job_config.py` and its forebears).

Names moved between sections over time; every place is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.imports.document import Document
from autopar.imports.imported import (
    Described,
    Imported,
    Precision,
    Recompute,
    expert_remarks,
)
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import PRESETS

_PLACES = ("parallelism", "training", "experimental")
MEANINGS: Mapping[str, str] = {
    "training.enable_cpu_offload": "keeps parameters, gradients and optimizer on the host; plans"
    " keep everything on devices",
    "parallelism.enable_async_tensor_parallel": "hides tensor collectives in the products beside"
    " them; a step may be faster than predicted",
    "experimental.enable_async_tensor_parallel": "hides tensor collectives in the products beside"
    " them; a step may be faster than predicted",
    "parallelism.enable_compiled_autograd": "compiles backward",
    "experimental.enable_compiled_autograd": "compiles backward",
    "parallelism.context_parallel_rotate_method": "how keys and values are exchanged; plans pass"
    " them round in a ring",
    "parallelism.expert_tensor_parallel_degree": "tensor ranks of experts, apart from those of"
    " other layers",
    "parallelism.module_fqns_per_model_part": "where stages are cut: name the cuts of this model"
    " (cuts=[...])",
    "parallelism.pipeline_parallel_split_points": "where stages are cut, in torchtitan's names:"
    " name the cuts of this model (cuts=[...])",
    "parallelism.disable_loss_parallel": "logits are gathered for the loss; plans split the"
    " vocabulary",
    "float8.enable_fsdp_float8_all_gather": "weights are gathered in 8 bits; plans gather 16",
    "optimizer.early_step_in_backward": "updates parameters while backward runs, so that their"
    " gradients are freed; plans update at the end",
    "quantize.*": "products in fewer bits",
    "fault_tolerance.enable": "replicas that come and go",
}
IRRELEVANT = (
    "job.*", "profiling.*", "metrics.*", "checkpoint.*", "lr_scheduler.*", "optimizer.*",
    "validation.*", "comm.*", "experimental.custom_*", "debug.*", "fault_tolerance.*",
    "memory_estimation.*", "model.tokenizer*", "model.hf_assets_path", "model.print_after*",
    "training.steps", "training.max_norm", "training.dataset*", "training.gc_*", "training.seed",
    "training.deterministic", "training.warmup_steps", "training.data_parallel_type",
    "training.enable_compile*", "float8.*", "model.norm_type", "compile.components",
    "compile.backend", "activation_checkpoint.*force_recompute*", "activation_checkpoint.*",
    "training.fp8_linear", "parallelism.fsdp_*", "comet.*", "actorc*",
)  # fmt: skip
FLAVORS: Mapping[tuple[str, str], str] = {
    ("llama3", "8b"): "llama3-8b", ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3-405b", ("llama2", "7b"): "llama2-7b",
    ("llama2", "13b"): "llama2-13b", ("llama2", "70b"): "llama2-70b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b", ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
}  # fmt: skip
"""Models of torchtitan that are presets, by name and flavor in lower case."""
DEBUG = DecoderConfig(
    layers=6, hidden=256, heads=16, vocab=2048, ffn=768, positions="rope", norm="rms", gated=True,
    bias=False, tied=False,
)  # fmt: skip
"""Its ``debugmodel`` of Llama 3."""
_SCHEDULES = {
    "1f1b": ("1f1b", 1), "gpipe": ("gpipe", 1), "interleaved1f1b": ("interleaved_1f1b", 2),
    "zbvzerobubble": ("zbv", 2), "interleavedzerobubble": ("interleaved_1f1b", 2),
    "loopedbfs": ("interleaved_1f1b", 2), "flexibleinterleaved1f1b": ("interleaved_1f1b", 2),
    "dualpipev": ("zbv", 2),
}  # fmt: skip
_SCHEDULE = ("parallelism", "pipeline_parallel_schedule")


def is_one(data: Mapping[str, Any]) -> bool:
    """Whether a document is torchtitan's."""
    model = data.get("model")
    named = isinstance(model, Mapping) and "flavor" in model
    degrees = (data.get(place) for place in _PLACES)
    return named or any(
        isinstance(place, Mapping) and "tensor_parallel_degree" in place for place in degrees
    )


def read(document: Document) -> Imported:
    """What a torchtitan configuration says.

    Raises:
        InputError: Names key and line.
    """
    pp, tp = _degree(document, "pipeline_parallel"), _degree(document, "tensor_parallel")
    cp, ep = _degree(document, "context_parallel"), _degree(document, "expert_parallel")
    replicas = _degree(document, "data_parallel_replicate")
    shard = _any(document, "data_parallel_shard_degree", least=-1)
    shard = _any(document, "data_parallel_degree", least=-1) if shard is None else shard
    whole = shard == 1 and cp == 1
    local = document.number("training", "local_batch_size")
    local = local or document.number("training", "batch_size")
    batch = document.number("training", "global_batch_size", least=-1)
    micro, accumulation = _micro(document, local, pp)
    schedule, chunks = _schedule(document, pp)
    recompute, every = _recompute(document)
    found = Imported(
        source="torchtitan",
        where=document.where,
        stack="torchtitan",
        pp=pp, tp=tp, cp=cp, ep=ep,
        replicas=replicas,
        shards=shard if shard is not None and shard > 0 else None,
        parallel=True,
        zero=0 if whole else _zero(document, pp),
        sequence_parallel=tp > 1,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=batch if batch is not None and batch > 0 else None,
        schedule=schedule,
        chunks=chunks,
        ends_count=pp > 1,
        recompute=recompute,
        recompute_every=every,
        seq_len=document.number("training", "seq_len"),
        precision=_precision(document),
        master_weights=document.text("training", "dtype") != "bfloat16",
        gradient_bytes=2 if document.text("training", "dtype") == "bfloat16" else None,
        compiled=_compiled(document),
        model=_model(document),
    )  # fmt: skip
    remarks, ignored = document.remarks(MEANINGS, IRRELEVANT)
    path = ("parallelism", "expert_parallel_degree")
    remarks = (*expert_remarks(".".join(path), ep, document.line_of(path)), *remarks)
    return replace(found, remarks=remarks, ignored=ignored)


def _any(document: Document, name: str, least: int = 1) -> int | None:
    found = [document.number(place, name, least=least) for place in _PLACES]
    return next((value for value in found if value is not None), None)


def _degree(document: Document, name: str) -> int:
    return _any(document, f"{name}_degree") or 1


def _micro(document: Document, local: int | None, pp: int) -> tuple[int | None, int | None]:
    """Samples of a microbatch and microbatches: a pipeline divides the local batch further."""
    named = "pipeline_parallel_microbatch_size"
    size, count = _any(document, named), _any(document, "pipeline_parallel_microbatches")
    if pp == 1 or local is None:
        return local, None
    if count is not None:
        return max(1, local // count), count
    size = size or 1
    if local % size:
        raise document.wrong(("parallelism", named), size, f"a divisor of the local batch {local}")
    return size, local // size


def _schedule(document: Document, pp: int) -> tuple[str, int]:
    path = _SCHEDULE
    if document.raw(*path) is None:
        path = ("experimental", path[1])
    name = document.text(*path)
    layers = _any(document, "pipeline_parallel_layers_per_stage")
    if pp == 1:
        return "1f1b", 1
    found = _SCHEDULES.get((name or "1F1B").replace("_", "").lower())
    if found is None:
        raise document.wrong(path, name, ", ".join(_SCHEDULES))
    schedule, chunks = found
    model = _model(document)
    if layers is not None and model is not None and chunks > 1:
        chunks = max(chunks, round((model.layers + 2) / layers / pp))
    return schedule, chunks


def _zero(document: Document, pp: int) -> int:
    """FSDP2 frees weights after forward; by default not with a pipeline."""
    known = ("default", "always", "never")
    when = document.text("parallelism", "fsdp_reshard_after_forward", known=known) or "default"
    if when == "never" or (when == "default" and pp > 1):
        return 2
    return 3


def _recompute(document: Document) -> tuple[Recompute, int]:
    known = ("none", "selective", "full", "memory_budget")
    mode = document.text("activation_checkpoint", "mode", known=known)
    option = document.raw("activation_checkpoint", "selective_ac_option")
    if mode is None:
        return "none", 1
    if mode == "full":
        return "full", 1
    if mode == "memory_budget":
        return "selective", 1
    if mode == "none":
        return "none", 1
    if option is None or option == "op":
        return "ops", 1
    if str(option).isdigit() and int(option) > 0:
        return "full", int(option)
    raise document.wrong(
        ("activation_checkpoint", "selective_ac_option"), option, '"op" or a whole number'
    )


def _precision(document: Document) -> Precision:
    converters = document.raw("model", "converters") or document.raw("model", "handlers") or ()
    asked = converters if isinstance(converters, str) else " ".join(map(str, converters))
    older = document.flag("float8", "enable_float8_linear")
    if "float8" in asked or "mx" in asked.split() or older:
        return "fp8"
    kinds = ("bfloat16", "float32")
    param = document.text("training", "mixed_precision_param", known=kinds)
    document.text("training", "mixed_precision_reduce", known=kinds)
    return "fp32" if param == "float32" else "bf16"


def _compiled(document: Document) -> bool:
    places = (("compile", "enable"), ("training", "compile"))
    return any(document.flag(*place) for place in places)


def _model(document: Document) -> Described | None:
    name, flavor = document.text("model", "name"), document.text("model", "flavor")
    if name is None or flavor is None:
        return None
    if (name.lower(), flavor.lower()) == ("llama3", "debugmodel"):
        return Described(sizes=DEBUG, name="llama3 debugmodel")
    preset = FLAVORS.get((name.lower(), flavor.lower()))
    if preset is None:
        return None
    sizes = PRESETS[preset].sizes
    assert isinstance(sizes, DecoderConfig), preset
    return Described(sizes=sizes, name=preset, preset=preset)
