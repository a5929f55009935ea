"""fsdp2: one Python file that trains as the plan says with PyTorch alone.

DDP or `fully_shard` for data-parallel ranks, `parallelize_module` for tensor-parallel ones,
`torch.distributed.pipelining` for stages, `torch.utils.checkpoint` for what is computed again. A
stage is the model's own forward, entered at the stage's first module and left at the next's.
"""

from __future__ import annotations

from autopar.export.common import (
    Work,
    begin,
    bubble_s,
    held_bytes,
    lose_inside,
    lower_schedule,
    overlap_s,
)
from autopar.export.fsdp2_tensor import sequence_of, styles_of, summed
from autopar.export.fsdp2_write import Script, write
from autopar.export.layers import recomputed
from autopar.export.result import TARGETS, Exported, Target
from autopar.plan.plan import Plan
from autopar.units import counted

_SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}


def export_fsdp2(plan: Plan) -> Exported:
    """The plan as a script."""
    work = begin(plan)
    facts = work.facts
    stages = _stages(work)
    schedule, chunks = _schedule(work) if stages else ("", 1)
    if stages and chunks != plan.pipeline.chunks:
        stages = _stages(work, chunks)
    mesh, degrees = _mesh(work, bool(stages))
    mode = _mode(work, degrees, bool(stages))
    styles, vocabulary = styles_of(work)
    sequence = sequence_of(work, styles)
    if sequence is not None:
        styles = sequence.styles
    full, cheap = _recompute(work)
    _notes(work)
    script = Script(
        plan=plan,
        losses=tuple(work.losses),
        notes=tuple(work.notes),
        mesh=mesh,
        degrees=degrees,
        microbatches=facts.microbatches,
        mode=mode,
        reshard=facts.zero == 3,
        late=facts.zero == 1,
        layers=work.layers.pattern if work.layers.count else "",
        stages=stages,
        schedule=schedule,
        chunks=chunks,
        fold=schedule == _SCHEDULES["zbv"],
        styles=tuple(styles.items()),
        vocabulary=vocabulary,
        sums=summed(work, styles),
        sequence=None if sequence is None else sequence.places,
        full=full,
        cheap=cheap,
    )
    return Exported(text=write(script), losses=tuple(work.losses), notes=tuple(work.notes))


def _stages(work: Work, chunks: int | None = None) -> tuple[tuple[str, ...], ...]:
    """Modules of every stage; empty if there is no pipeline, or none that a script can have.

    Args:
        work: The export.
        chunks: Stages per rank where they differ from the plan's: layers are then divided evenly.
    """
    facts, layers = work.facts, work.layers
    if facts.pipeline == 1:
        return ()
    counts = work.stages.counts
    if chunks is not None:
        number = facts.pipeline * chunks
        counts = tuple(
            layers.count * (at + 1) // number - layers.count * at // number for at in range(number)
        )
    start, stages = 0, []
    for count in counts:
        stages.append([layers.path(place) for place in range(start, start + count)])
        start += count
    stages[0] = [*_modules(layers.lead), *stages[0]]
    stages[-1] += _modules(layers.tail)
    if layers.count and not layers.others and all(stages):
        if chunks is None:
            lose_inside(work)
        return tuple(map(tuple, stages))
    why = "its layers are no single list" if all(stages) else "a stage has no modules"
    work.lose(
        f"a pipeline of {len(counts)} stages ({why})",
        f"one stage: axis {work.plan.pipeline.axis} splits the batch",
        extra_bytes=held_bytes(facts) * (facts.pipeline - 1),
    )
    return ()


def _modules(names: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _schedule(work: Work) -> tuple[str, int]:
    """Class of the schedule, and stages per rank."""
    pipeline, facts = work.plan.pipeline, work.facts
    name = lower_schedule(work, tuple(_SCHEDULES))
    chunks = pipeline.chunks if name == pipeline.schedule else 1
    rounds = max(1, facts.microbatches // facts.pipeline)
    if name == "interleaved_1f1b" and facts.microbatches % rounds:
        work.lose(
            f"interleaved 1F1B of {counted(facts.microbatches, 'microbatch')}",
            "GPipe of whole stages: PyTorch interleaves multiples of the number of rounds",
            extra_s=bubble_s(facts),
        )
        name, chunks = "gpipe", 1
    if name == "1f1b" and facts.microbatches < facts.pipeline:
        work.lose(
            f"1F1B of {counted(facts.microbatches, 'microbatch')}, "
            f"fewer than {counted(facts.pipeline, 'stage')}",
            "GPipe, which is the same here: all of them are under way at once",
        )
        name = "gpipe"
    return _SCHEDULES[name], chunks


def _mesh(work: Work, piped: bool) -> tuple[str, tuple[int, int, int, int]]:
    """Expression of the tensor of ranks, and sizes of pipeline, replicate, shard and tensor."""
    facts, plan = work.facts, work.plan
    data = list(facts.data)
    if facts.pipeline > 1 and not piped:
        data.append(plan.pipeline.axis)
    for axis in (*facts.context, *(a for a in facts.experts if a not in facts.data)):
        data.append(axis)
        what = "the sequence" if axis in facts.context else "experts"
        work.lose(f"axis {axis} splits {what}", "it splits the batch")
    if facts.experts:
        work.lose("experts are split", "every rank holds all of them")
    roles = [
        (plan.pipeline.axis,) if piped else (),
        tuple(axis for axis in data if not facts.zero or axis not in facts.zero_axes),
        tuple(axis for axis in data if facts.zero and axis in facts.zero_axes),
        facts.tensor,
    ]
    kept = [(name, size) for name, size in plan.mesh if any(name in axes for axes in roles)]
    names = [name for name, _ in kept]
    degrees = (
        facts.degree(roles[0]), facts.degree(roles[1]), facts.degree(roles[2]),
        facts.degree(roles[3]),
    )  # fmt: skip
    order = [names.index(name) for axes in roles for name in names if name in axes]
    total = degrees[0] * degrees[1] * degrees[2] * degrees[3]
    expression = f"torch.arange({total})"
    if order != sorted(order):
        sizes = ", ".join(str(size) for _, size in kept)
        expression += f".reshape({sizes}).permute({', '.join(map(str, order))})"
    expression += f".reshape({', '.join(map(str, degrees))})"
    return expression, degrees


def _mode(work: Work, degrees: tuple[int, int, int, int], piped: bool) -> str:
    """How gradients of data-parallel ranks become one; see `Script.mode`."""
    facts = work.facts
    if degrees[2] > 1:
        if facts.zero < 3:
            work.lose(
                f"ZeRO stage {facts.zero}: whole parameters stay on every rank between steps",
                "fully_shard divides them, and gathers them once a microbatch or a step",
            )
        if facts.zero > 1 and piped:
            work.lose(
                f"ZeRO stage {facts.zero}: gradients are divided after every microbatch",
                "after the last one: PyTorch's pipeline keeps them whole until then",
                extra_bytes=held_bytes(facts) * (1 - 1 / degrees[2]),
            )
        return "fsdp"
    if degrees[1] == 1:
        return "none"
    if not facts.tensor and not piped:
        return "ddp"
    work.lose(
        "gradients are summed over data ranks beside backward",
        "after backward, parameter by parameter: neither DDP nor fully_shard does it beside "
        "stages and tensor-parallel modules without dividing parameters",
        extra_s=overlap_s(facts),
    )
    return "sum"


def _recompute(work: Work) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Layers that are computed again, and those of which products are kept."""
    kinds = recomputed(work.plan, work.layers)
    if work.plan.recompute and not any(kind != "none" for kind in kinds):
        work.lose(
            f"backward computes again {counted(len(work.plan.recompute), 'pattern of ops')} "
            "outside of layers",
            "they are kept",
        )
    if "mixed" in kinds:
        work.lose(
            f"{kinds.count('mixed')} layers keep some of their matrix products",
            "all of these layers is computed again",
        )
    if "selective" in kinds:
        work.lose(
            "backward computes again norms, activations and attention scores, op by op",
            "everything in these layers but products with weights, which are kept",
        )
    paths: tuple[list[str], list[str]] = ([], [])
    for place, kind in enumerate(kinds):
        if kind != "none":
            paths[kind == "selective"].append(work.layers.path(place))
    whole = work.layers.pattern
    full, cheap = (
        (whole,) if len(found) == work.layers.count and found else tuple(found) for found in paths
    )
    return full, cheap


def _notes(work: Work) -> None:
    facts = work.facts
    work.notes.append(
        "The loss is the mean of the ranks' and microbatches' losses: as the plan's, unless ranks "
        "count unequally many tokens."
    )
    work.notes.append("Dropout draws other masks; batch norm has each rank's own statistics.")
    if facts.tensor and work.splits:
        work.notes.append(
            "Attention must take the number of heads from its input, as in "
            "view(batch, seq, -1, head_dim): a rank has a part of them."
        )
    if facts.batch_size is not None and facts.micro_batch_size is None:
        work.lose(
            f"{counted(facts.batch_size, 'sample')} over "
            f"{counted(facts.data_degree, 'rank')} in {facts.microbatches} "
            "microbatches, of unequal sizes",
            "the script wants equal ones",
        )


TARGETS.add("fsdp2", Target(summary="a Python file that needs PyTorch alone", export=export_fsdp2))
