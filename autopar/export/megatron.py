"""Megatron-LM: the arguments of its training scripts, one per line.

Names are those of ``megatron/training/arguments.py`` and of the configuration classes that it
makes arguments from (``megatron/core/model_parallel_config.py``, ``megatron/training/config``).
"""

from __future__ import annotations

from itertools import groupby

from autopar.export.common import (
    Work,
    again,
    begin,
    bubble_s,
    lose_inside,
    lower_schedule,
    whole_bytes,
)
from autopar.export.layers import recomputed
from autopar.export.result import TARGETS, Exported, Target, comments
from autopar.export.splits import ATTENTION
from autopar.plan.plan import Plan
from autopar.units import counted

_ORDERS = (("pp", "dp", "cp", "tp"), ("dp", "pp", "cp", "tp"))
"""Roles of mesh axes, outermost first: the usual order, and that of --use-tp-pp-dp-mapping."""


def export_megatron(plan: Plan) -> Exported:
    """The plan as arguments; lines that begin with ``#`` are for people.

    ``grep -v '^#' plan.args | xargs torchrun ... pretrain_gpt.py`` passes them on.
    """
    work = begin(plan)
    words = [*_model(work), *_degrees(work), *_pipeline(work), *_batch(work)]
    words += [*_zero(work), *_recompute(work), *_precision(work)]
    _check_splits(work)
    work.notes.insert(
        0,
        f"start {counted(work.facts.ranks, 'rank')}: grep -v '^#' THIS | xargs torchrun "
        "--nnodes N --nproc-per-node M pretrain_gpt.py",
    )
    body = "".join(f"{word}\n" for word in words)
    head = comments(tuple(work.losses), tuple(work.notes))
    return Exported(text=head + body, losses=tuple(work.losses), notes=tuple(work.notes))


def _model(work: Work) -> list[str]:
    """Sizes of the model that the plan file tells."""
    facts, layers = work.facts, work.layers
    words = []
    if layers.count:
        words.append(f"--num-layers {layers.count}")
    tables = [p for p in work.plan.parameters if p.fqn in layers.lead and len(p.shape) == 2]
    if tables:
        words.append(f"--hidden-size {tables[0].shape[1]}")
    heads = _heads(work.plan)
    if heads is not None:
        words.append(f"--num-attention-heads {heads[0]}")
        if heads[1] != heads[0]:
            words += ["--group-query-attention", f"--num-query-groups {heads[1]}"]
    if facts.seq_len is not None:
        words.append(f"--seq-length {facts.seq_len}")
    work.notes.append(
        "the plan file does not hold the rest of the model (heads, feed-forward size, positions, "
        "tokenizer, norms): add those arguments"
    )
    return words


def _heads(plan: Plan) -> tuple[int, int] | None:
    """Heads of queries, and of keys and values, if a placement names them."""
    sizes: dict[str, int] = {}
    for item in plan.parameters:
        for word in item.placement:
            factor, _, place = word.partition("@")
            if factor in ATTENTION:
                sizes[factor] = int(place.rpartition("x")[2])
    if "heads" in sizes:
        return sizes["heads"], sizes["heads"]
    if "kv_heads" in sizes and "group" in sizes:
        return sizes["kv_heads"] * sizes["group"], sizes["kv_heads"]
    return None


def _degrees(work: Work) -> list[str]:
    facts = work.facts
    words = []
    tensor, context = facts.degree(facts.tensor), facts.degree(facts.context)
    if tensor > 1:
        words.append(f"--tensor-model-parallel-size {tensor}")
        if facts.sequence:
            words.append("--sequence-parallel")
    if context > 1:
        words.append(f"--context-parallel-size {context}")
    if facts.experts:
        words.append(f"--expert-model-parallel-size {facts.degree(facts.experts)}")
        extra = [axis for axis in facts.experts if axis not in facts.data]
        if extra:
            work.lose(
                f"axes {', '.join(extra)} split experts and nothing else",
                "expert-parallel ranks are taken from the data-parallel ones",
            )
    return words + _order(work)


def _order(work: Work) -> list[str]:
    """Which ranks are neighbours, as far as there is a choice."""
    facts = work.facts
    roles = {work.plan.pipeline.axis: "pp"}
    for role, axes in (("dp", facts.data), ("cp", facts.context), ("tp", facts.tensor)):
        roles |= dict.fromkeys(axes, role)
    found = [roles[name] for name, size in work.plan.mesh if size > 1 and name in roles]
    found = [role for role, _ in groupby(found)]
    if not found or found == [role for role in _ORDERS[0] if role in found]:
        return []
    if found == [role for role in _ORDERS[1] if role in found]:
        return ["--use-tp-pp-dp-mapping"]
    work.lose(
        f"ranks lie in the order {', '.join(found)}, outermost first",
        "the order pp, dp, cp, tp: other ranks are neighbours",
    )
    return []


def _pipeline(work: Work) -> list[str]:
    facts, plan, stages = work.facts, work.plan, work.stages
    if facts.pipeline == 1:
        return []
    words = [f"--pipeline-model-parallel-size {facts.pipeline}"]
    name = lower_schedule(work, ("1f1b", "interleaved_1f1b"))
    chunks = plan.pipeline.chunks if name == "interleaved_1f1b" else 1
    if chunks > 1 and facts.microbatches % facts.pipeline:
        work.lose(
            f"interleaved 1F1B of {counted(facts.microbatches, 'microbatch')} "
            f"over {counted(facts.pipeline, 'rank')}",
            "1F1B: Megatron interleaves multiples of the number of ranks",
            extra_s=bubble_s(facts),
        )
        chunks = 1
    lose_inside(work)
    if plan.pipeline.chunks != chunks:
        if work.layers.count % facts.pipeline:
            work.lose("stages of unequal numbers of layers", "none: give a layout yourself")
        return words
    if stages.even and stages.counts[0]:
        if chunks > 1:
            words.append(f"--num-layers-per-virtual-pipeline-stage {stages.counts[0]}")
        return words
    return [*words, f"--pipeline-model-parallel-layout {_layout(stages.counts)}"]


def _layout(counts: tuple[int, ...]) -> str:
    """Layers of stages in Megatron's words: E embedding, t layer, L loss, | between stages."""
    stages = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    stages[0] = "E" + ("," if stages[0] else "") + stages[0]
    stages[-1] += ("," if stages[-1] else "") + "L"
    return "|".join(stages)


def _batch(work: Work) -> list[str]:
    facts = work.facts
    if facts.batch_size is None:
        work.notes.append(
            "the plan does not say its batch size: add --micro-batch-size and --global-batch-size "
            f"({counted(facts.microbatches, 'microbatch')} on each "
            f"of {counted(facts.data_degree, 'rank')})"
        )
        return []
    if facts.micro_batch_size is None:
        work.lose(
            f"{counted(facts.batch_size, 'sample')} over "
            f"{counted(facts.data_degree, 'rank')} in {facts.microbatches} "
            "microbatches, of unequal sizes",
            "add --micro-batch-size and --global-batch-size yourself",
        )
        return []
    return [
        f"--micro-batch-size {facts.micro_batch_size}",
        f"--global-batch-size {facts.batch_size}",
    ]


def _zero(work: Work) -> list[str]:
    facts = work.facts
    if not facts.zero:
        return []
    words = ["--use-distributed-optimizer"]
    if facts.zero > 1:
        sharded = "optim_grads" if facts.zero == 2 else "optim_grads_params"
        words += [
            "--use-megatron-fsdp",
            f"--data-parallel-sharding-strategy {sharded}",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format fsdp_dtensor",
        ]
    rest = facts.data_degree // facts.degree(facts.zero_axes)
    if rest > 1:
        words.append(f"--num-distributed-optimizer-instances {rest}")
    return words


def _recompute(work: Work) -> list[str]:
    kind = again(work)
    if kind == "none":
        return []
    if kind == "selective":
        work.lose(
            "backward computes again norms, activations and attention scores",
            "attention scores and norms only (core_attn, layernorm)",
        )
        return ["--recompute-granularity selective", "--recompute-modules core_attn layernorm"]
    if kind == "full":
        return [
            "--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"
        ]  # fmt: skip
    return _block(work)


def _block(work: Work) -> list[str]:
    """Full recomputation of the first layers of every stage, as near as that comes."""
    kinds = recomputed(work.plan, work.layers)
    start, firsts, exact = 0, [], True
    for count in work.stages.counts:
        own = kinds[start : start + count]
        full = own.count("full")
        exact &= set(own[:full]) <= {"full"} and set(own[full:]) <= {"none"}
        firsts.append(full)
        start += count
    most = max(firsts, default=0)
    if not most:
        work.lose(
            "backward computes again "
            f"{counted(len(work.plan.recompute), 'pattern of ops')}, by layer",
            "attention scores only, in all layers",
        )
        return ["--recompute-granularity selective"]
    if not exact or len(set(firsts)) > 1:
        work.lose(
            "layers differ in what backward computes again "
            f"({', '.join(map(str, firsts))} whole layers by stage)",
            f"the first {most} layers of every stage are computed again, and nothing else",
        )
    return [
        "--recompute-granularity full", "--recompute-method block", f"--recompute-num-layers {most}"
    ]  # fmt: skip


def _precision(work: Work) -> list[str]:
    return {"bfloat16": ["--bf16"], "float16": ["--fp16"]}.get(work.facts.dtype, [])


def _check_splits(work: Work) -> None:
    """Matrices that Megatron's own layers split otherwise."""
    odd = [split for split in work.splits if split.kind == "other" or not split.cut.even]
    if odd and not work.facts.experts:
        work.lose(
            "splits of " + ", ".join(split.module for split in odd[:4]),
            "as Megatron's own layers are split",
            extra_bytes=whole_bytes(odd) if not any(s.cut.even for s in odd) else None,
        )


TARGETS.add(
    "megatron", Target(summary="arguments of pretrain_gpt.py, one a line", export=export_megatron)
)
