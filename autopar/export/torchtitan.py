"""torchtitan: a job configuration in TOML.

Names are those of ``torchtitan/config/job_config.py`` of 0.2, the last release that reads TOML;
where 0.3 has the same options as ``--section.option`` and under other names, a comment says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.export.common import (
    Work,
    again,
    begin,
    bubble_s,
    held_bytes,
    lose_inside,
    lower_schedule,
    whole_bytes,
)
from autopar.export.facts import Facts
from autopar.export.result import TARGETS, Exported, Target, comments
from autopar.plan.plan import Plan
from autopar.units import counted

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
}
Value = str | int | bool | list[list[str]]


def export_torchtitan(plan: Plan) -> Exported:
    """The plan as TOML: the sections that a plan decides."""
    work = begin(plan)
    facts = work.facts
    sections: dict[str, dict[str, Value]] = {
        "training": _training(work),
        "parallelism": _parallelism(work),
        "activation_checkpoint": _recompute(work),
    }
    odd = [split for split in work.splits if not split.plain]
    if odd:
        work.lose(
            "splits of " + ", ".join(split.module for split in odd[:4]),
            "as torchtitan's own model is split",
            extra_bytes=whole_bytes(odd) if all(not s.cut.even for s in odd) else None,
        )
    work.notes.insert(
        0, f"start {counted(facts.ranks, 'rank')}: CONFIG_FILE=THIS NGPU=N ./run_train.sh"
    )
    work.notes.append("add [model] name and flavor: the plan is of your model, not of torchtitan's")
    _later(work)
    body = "\n".join(_section(name, values) for name, values in sections.items() if values)
    head = comments(tuple(work.losses), tuple(work.notes))
    return Exported(text=f"{head}\n{body}", losses=tuple(work.losses), notes=tuple(work.notes))


def _later(work: Work) -> None:
    """The same in the options of release 0.3, which reads no TOML."""
    facts = work.facts
    micro, length = facts.micro_batch_size, facts.seq_len
    if micro is None or length is None or facts.batch_size is None:
        return
    if facts.pipeline > 1:
        more = f"--parallelism.num_pp_microbatches={facts.microbatches}"
    else:
        more = f"--training.num_tokens_per_train_step={facts.batch_size * length}"
    work.notes.append(
        "torchtitan 0.3 takes the options of [parallelism] as --parallelism.NAME, and for the "
        f"batch --training.num_tokens_per_microbatch_per_dp_rank={micro * length} "
        f"--training.max_context_length={length} {more}"
    )


def _section(name: str, values: Mapping[str, Value]) -> str:
    return f"[{name}]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in values.items())


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    rows = ["  [" + ", ".join(_toml(item) for item in row) + "],\n" for row in value]
    return "[\n" + "".join(rows) + "]"


def _training(work: Work) -> dict[str, Value]:
    """Batch sizes: a rank's batch is all microbatches of its pipeline, or one of them alone."""
    facts = work.facts
    values: dict[str, Value] = {}
    micro = facts.micro_batch_size
    if facts.batch_size is None:
        work.notes.append("the plan does not say its batch size: add local_batch_size")
    elif micro is None:
        work.lose(
            f"{counted(facts.batch_size, 'sample')} over "
            f"{counted(facts.data_degree, 'rank')} in {facts.microbatches} "
            "microbatches, of unequal sizes",
            "add the batch sizes yourself",
        )
    else:
        values["local_batch_size"] = micro * (facts.microbatches if facts.pipeline > 1 else 1)
        values["global_batch_size"] = facts.batch_size
    if facts.seq_len is not None:
        values["seq_len"] = facts.seq_len
    if facts.dtype == "bfloat16":
        values["dtype"] = "bfloat16"
    elif facts.dtype == "float32":
        values["mixed_precision_param"] = "float32"
    else:
        work.lose(f"parameters of dtype {facts.dtype}", "torchtitan's: float32, bfloat16 products")
    return values


def _parallelism(work: Work) -> dict[str, Value]:
    facts = work.facts
    replicate, shard = _data(work)
    values: dict[str, Value] = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
    }
    if shard > 1:
        values["fsdp_reshard_after_forward"] = "always" if facts.zero == 3 else "never"
    tensor = facts.degree(facts.tensor)
    values["tensor_parallel_degree"] = tensor
    if tensor > 1 and not facts.sequence:
        work.lose(
            "activations between tensor-parallel blocks are whole",
            "split along the sequence (sequence parallelism), which torchtitan 0.2 always does",
        )
    values["context_parallel_degree"] = facts.degree(facts.context)
    values["pipeline_parallel_degree"] = facts.pipeline
    if facts.pipeline > 1:
        values |= _pipeline(work)
    if facts.experts:
        values["expert_parallel_degree"] = facts.degree(facts.experts)
        values["expert_tensor_parallel_degree"] = 1
    _check_order(work)
    return values


def _data(work: Work) -> tuple[int, int]:
    """Degrees of replication and of sharding."""
    facts = work.facts
    if facts.zero == 0:
        return facts.data_degree, 1
    shard = facts.degree(facts.zero_axes)
    if facts.zero < 3:
        what = "gradients and parameters are" if facts.zero == 1 else "parameters are"
        work.lose(
            f"ZeRO stage {facts.zero}: {what} whole on every rank between steps",
            "divided as well (FSDP), and gathered from the first forward to the end of backward; "
            "torchtitan reduces gradients of every microbatch",
        )
    return facts.data_degree // shard, shard


def _check_order(work: Work) -> None:
    """The mesh of torchtitan is pp, dp_replicate, dp_shard, cp, tp, outermost first."""
    facts = work.facts
    rank = {work.plan.pipeline.axis: 0}
    rank |= {axis: 1 + (axis in facts.zero_axes) for axis in facts.data}
    rank |= dict.fromkeys(facts.context, 3) | dict.fromkeys(facts.tensor, 4)
    found = [rank[name] for name, size in work.plan.mesh if size > 1 and name in rank]
    if found != sorted(found):
        names = ", ".join(name for name, size in work.plan.mesh if size > 1)
        work.lose(
            f"ranks lie in the order {names}, outermost first",
            "the order pp, dp_replicate, dp_shard, cp, tp: other ranks are neighbours",
        )


def _pipeline(work: Work) -> dict[str, Value]:
    facts, pipeline = work.facts, work.plan.pipeline
    name = lower_schedule(work, tuple(_SCHEDULES))
    values: dict[str, Value] = {"pipeline_parallel_schedule": _SCHEDULES[name]}
    if facts.micro_batch_size is not None:
        values["pipeline_parallel_microbatch_size"] = facts.micro_batch_size
    lose_inside(work)
    chunks = pipeline.chunks if name == pipeline.schedule else 1
    if chunks != pipeline.chunks:
        return values
    stages = facts.pipeline * chunks
    if facts.microbatches < stages:
        work.notes.append(
            f"torchtitan warns: {counted(facts.microbatches, 'microbatch')}, "
            f"{counted(stages, 'stage')}"
        )
    parts = _parts(work, facts)
    if parts:
        values["module_fqns_per_model_part"] = parts
        work.notes.append(
            "module_fqns_per_model_part has the names of the plan's model; torchtitan's own are "
            "tok_embeddings, layers.N, norm and output"
        )
    else:
        work.lose(
            f"cuts at {', '.join(pipeline.cuts[:4])}", "as torchtitan divides layers",
            extra_s=bubble_s(facts, chunks),
        )  # fmt: skip
    return values


def _parts(work: Work, facts: Facts) -> list[list[str]]:
    """Modules of every stage; empty where the model is no list of layers."""
    layers, counts = work.layers, work.stages.counts
    if not layers.count or not held_bytes(facts):
        return []
    start, parts = 0, []
    for count in counts:
        parts.append([layers.path(place) for place in range(start, start + count)])
        start += count
    parts[0] = [*_modules(layers.lead), *parts[0]]
    parts[-1] += _modules(layers.tail)
    return parts


def _modules(names: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _recompute(work: Work) -> dict[str, Value]:
    kind = again(work)
    if kind in ("none", "full"):
        return {"mode": kind}
    work.lose(
        "backward computes again "
        + ("norms, activations and attention scores" if kind == "selective" else "by layer: mixed"),
        "torchtitan's own choice of ops, in all layers (it keeps every second matrix product, and "
        "attention)",
    )
    return {"mode": "selective", "selective_ac_option": "op"}


TARGETS.add(
    "torchtitan", Target(summary="TOML of a job (releases up to 0.2)", export=export_torchtitan)
)
