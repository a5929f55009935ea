"""From a prediction to what a plan file says of it, and from there to timelines and memory again.

A plan file holds no events: it holds what the simulator was told (`autopar.cost_models.timing`) and
what each kind of event does to live bytes, so that the very same timeline and memory over time are
made of its schedule in milliseconds, without the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from autopar.cost_models.cluster import ClusterSpec, NodeGroup, Tier
from autopar.cost_models.evaluate import Evaluator, Prediction, devices_of
from autopar.cost_models.events import schedule_of
from autopar.cost_models.explain import time_tree
from autopar.cost_models.layout import Layout
from autopar.cost_models.memory_forecast import note_memory
from autopar.cost_models.model_hash import COST_MODEL_VERSION, cluster_hash, cost_model_hash
from autopar.cost_models.simulate import Task
from autopar.cost_models.stages import stage_models
from autopar.cost_models.timing import Timing
from autopar.plan.fingerprint import choices_digest
from autopar.plan.forecast import (
    ClusterForecast,
    Forecast,
    MessageForecast,
    ModelForecast,
    NodesForecast,
    RankForecast,
    TaskForecast,
    TierForecast,
    TimingForecast,
)
from autopar.plan.microbatch import batch_sizes
from autopar.plan.plan import Plan


def forecast_of(
    evaluator: Evaluator,
    plan: Plan,
    *,
    optimizer: str = "adamw",
    software: str = "autopar",
    priced: Plan | None = None,
    again: frozenset[str] | None = None,
    memory_known: bool = True,
) -> tuple[Forecast, Prediction]:
    """Predict a plan, in the form in which it stands in the plan's file.

    Args:
        evaluator: Of the model and the cluster.
        plan: The plan.
        optimizer: Name of the optimizer that `evaluator` prices.
        software: Name of the software stack that it prices.
        priced: The plan as it is priced, if that is known to take the same.
        again: Names of the nodes that backward computes again, if known already.
        memory_known: Whether the memory of devices is more than a guess.

    Returns:
        The forecast, and the prediction that it was made from.

    Raises:
        PlanError: If the plan does not fit the model or the cluster.
    """
    priced = priced or plan
    models = stage_models(
        evaluator.place(priced), priced, evaluator.loss, evaluator.software.implementation,
        again=again,
    )  # fmt: skip
    found = evaluator.price(priced, models)
    cluster, layout = evaluator.cluster, evaluator.layout
    batch, tokens = sizes_of(layout)
    forecast = Forecast(
        choices=choices_digest(plan),
        cluster=describe_cluster(cluster),
        cost_model=ModelForecast(
            version=COST_MODEL_VERSION,
            fingerprint=cost_model_hash(cluster, evaluator.software),
            software=software,
            optimizer=optimizer,
            precision=_precision(plan, evaluator.software.speed.formats),
        ),
        global_batch_size=batch,
        sequence_length=tokens,
        step_s=found.step_s,
        ranks=_ranks(evaluator, priced, found, memory_known),
        timing=_timing(found.timing),
        memory=note_memory(evaluator, priced, models),
    )
    return forecast, found


def _precision(plan: Plan, formats: Mapping[str, str]) -> str:
    elements: Counter[str] = Counter()
    for item in plan.parameters:
        size = 1
        for length in item.shape:
            size *= length
        elements[item.dtype] += size
    dtype = max(elements, key=lambda name: elements[name], default="float32")
    return dtype + "".join(f", {one} products in {other}" for one, other in formats.items())


def sizes_of(layout: Layout) -> tuple[int | None, int | None]:
    """Samples of a step and tokens of a sample, as far as the model's factors tell them."""
    batches = batch_sizes(layout.folded, layout.factors)
    tokens = Counter(
        unit.size
        for node, units in zip(layout.folded.nodes, layout.factors.units, strict=True)
        if any(value.spec.requires_grad for value in node.outputs)
        for unit in units
        if unit.name.partition(".")[0] == "seq"
    )
    return _usual(batches), _usual(tokens)


def _usual(sizes: Counter[int]) -> int | None:
    return max(sizes, key=lambda size: (sizes[size], size), default=None)


# The cluster


def describe_cluster(cluster: ClusterSpec) -> ClusterForecast:
    """A cluster as a plan file has it; `cluster_of` makes it again."""
    return ClusterForecast(
        text=str(cluster),
        groups=tuple(
            NodesForecast(
                device=group.device,
                nodes=group.nodes,
                devices_per_node=group.devices_per_node,
                figures={name: float(value) for name, value in group.figures},
                node_usd_per_hour=group.node_usd_per_hour,
                source=group.source,
            )
            for group in cluster.groups
        ),
        tiers=tuple(
            TierForecast(
                nodes=tier.nodes, oversubscription=tier.oversubscription, latency_s=tier.latency_s
            )
            for tier in cluster.tiers
        ),
        fingerprint=cluster_hash(cluster),
    )


def cluster_of(described: ClusterForecast) -> ClusterSpec:
    """The cluster that a plan's predictions are for.

    Raises:
        ClusterError: If its device is not in the catalogue, or a figure is wrong.
    """
    return ClusterSpec(
        groups=tuple(
            NodeGroup(
                device=group.device,
                nodes=group.nodes,
                devices_per_node=group.devices_per_node,
                figures=tuple(group.figures.items()),
                node_usd_per_hour=group.node_usd_per_hour,
                source=group.source,
            )
            for group in described.groups
        ),
        tiers=tuple(
            Tier(nodes=t.nodes, oversubscription=t.oversubscription, latency_s=t.latency_s)
            for t in described.tiers
        ),
    )


# Ranks


def _ranks(
    evaluator: Evaluator, plan: Plan, found: Prediction, memory_known: bool
) -> tuple[RankForecast, ...]:
    devices = devices_of(evaluator.cluster, plan, schedule_of(plan))
    ranks = []
    for cost in found.ranks:
        tree = {part.name: part.parts for part in time_tree(found, cost.rank).parts}
        kernels = tree.get("computation", ())
        inline = tree.get("collectives in line", ())
        ranks.append(
            RankForecast(
                rank=cost.rank,
                stages=cost.memory.stages,
                device=devices[cost.rank].name,
                capacity_bytes=cost.capacity_bytes if memory_known else None,
                compute_s=cost.time.compute_s,
                inline_s=cost.time.inline_s,
                exposed_s=cost.time.exposed_s,
                idle_s=cost.time.idle_s,
                host_s=max(0.0, found.step_s - cost.time.step_s),
                kernels={part.name: part.value for part in kernels},
                collectives={part.name: part.value for part in inline},
                beside=beside_of(found, cost.rank),
                resident=_sizes(cost.memory.resident),
                peak=_sizes(cost.memory.peak),
                peak_at=cost.memory.where,
                allocated_bytes=cost.reserve.allocated_bytes,
                reserved_bytes=cost.reserve.reserved_bytes,
                context_bytes=cost.reserve.context_bytes,
            )
        )
    return tuple(ranks)


def _sizes(counted: Mapping[str, int]) -> dict[str, int]:
    """Largest first; nothing of what is not there."""
    return {
        kind: size for kind, size in sorted(counted.items(), key=lambda i: (-i[1], i[0])) if size
    }


def beside_of(found: Prediction, rank: int) -> dict[str, float]:
    """Seconds of collectives beside computation of a pipeline rank, by axes; largest first."""
    schedule = found.timeline.schedule
    seen: Counter[tuple[int, str]] = Counter(
        (action.stage, action.kind) for action in schedule.actions[rank]
    )
    total: defaultdict[str, float] = defaultdict(float)
    every = schedule.microbatches_per_update
    for (stage, kind), count in seen.items():
        cost = found.stages[stage]
        if kind in cost.programs:
            last = count // every
            for programs, times in ((cost.programs, count - last), (cost.last, last)):
                for axes, seconds in programs[kind].beside.items():
                    total[axes] += seconds * times
    return {axes: total[axes] for axes in sorted(total, key=lambda axes: -total[axes])}


# The timeline


def _timing(timing: Timing) -> TimingForecast:
    tasks: dict[tuple[str, bool, Task], list[int]] = {}
    for (stage, action, last), task in timing.tasks.items():
        tasks.setdefault((action, last, task), []).append(stage)
    messages: dict[tuple[str, float], list[tuple[int, int]]] = {}
    for (source, target, action), seconds in timing.messages.items():
        messages.setdefault((action, seconds), []).append((source, target))
    return TimingForecast(
        tasks=tuple(
            TaskForecast(
                stages=tuple(stages),
                kind=action,
                last=last,
                compute_s=task.compute_s,
                inline_s=task.inline_s,
                beside_s=task.beside_s,
                parts=task.parts,
                joins=task.joins,
            )
            for (action, last, task), stages in tasks.items()
        ),
        messages=tuple(
            MessageForecast(kind=action, seconds_s=seconds, pairs=tuple(pairs))
            for (action, seconds), pairs in messages.items()
        ),
        edges=tuple(sorted(timing.edges)),
        gradient_edges=tuple(sorted(timing.gradient_edges)),
        slowdown=timing.slowdown,
        factor=timing.factor,
    )
