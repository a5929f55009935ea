"""What a plan takes: seconds of a step and bytes of every rank, and where they come from.

The one door to the cost model: pure, without torch, deterministic. `Evaluator` holds what depends
on the model and the cluster alone, so that a search can price thousands of plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.cost_models.allocator import FRAGMENTATION, Reserve, reserve
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.device import Device
from autopar.cost_models.events import schedule_of
from autopar.cost_models.implementation import CPU, CUDA, Implementation
from autopar.cost_models.layout import Layout, Placement
from autopar.cost_models.memory import RankMemory, rank_memory, stage_edges
from autopar.cost_models.messages import Messages
from autopar.cost_models.optimizer import OPTIMIZERS, OptimizerMemory
from autopar.cost_models.pricing import Prices, Speed, StageCost, price_stage
from autopar.cost_models.sharing import faster, faster_cost, idle_cores_factor
from autopar.cost_models.simulate import Split, Task, Timeline
from autopar.cost_models.software import (
    SLOWDOWN,
    SoftwareStack,
    generation_of,
    implementation_of,
    on_device,
)
from autopar.cost_models.software import stack as find_stack
from autopar.cost_models.stages import StageModel, stage_models
from autopar.cost_models.static import KnownStatic
from autopar.cost_models.timing import Timing
from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.plan import Plan
from autopar.plan.strategies import split_axes
from autopar.schedules.actions import Schedule
from autopar.sharding.mesh import Mesh
from autopar.units import format_bytes

_PLACED = 64
_REMEDIES: Mapping[str, str] = {
    "parameters": "zero=3, a larger tensor or pipeline axis",
    "gradients": "zero=2, a larger tensor or pipeline axis",
    "optimizer": "zero=1 over the data axes",
    "saved": "recompute=selective or full, more microbatches, sequence parallelism (megatron_sp)",
    "temporary": "more microbatches, a tensor axis over the vocabulary",
    "boundary": "more microbatches, sequence parallelism (megatron_sp)",
}
"""What makes each kind of memory smaller."""
UPDATE_PASSES: Mapping[str, float] = {"single": 20.0, "foreach": 20.0, "fused": 7.0}
"""How often an Adam update touches an element of a parameter, by `OptimizerMemory.loop`:
fused reads weight, gradient and two moments and writes three; torch's loops run the ten ops of the
formula one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How the plan is carried out: what decides memory, and what decides seconds.

    Attributes:
        implementation: Kernels, as far as work and memory depend on them.
        speed: Kernels and host, as far as seconds do.
        optimizer: What the optimizer keeps and does.
        gloo: Whether collectives need the memory that gloo needs; else NCCL's.
        context_bytes: Memory of a device outside of the allocator.
        reserved_factor: What the allocator holds over what tensors need.
    """

    implementation: Implementation = CPU
    speed: Speed = field(default_factory=Speed)
    optimizer: OptimizerMemory = field(default_factory=lambda: OPTIMIZERS["adamw"])
    gloo: bool = False
    context_bytes: int = 0
    reserved_factor: float = FRAGMENTATION

    @classmethod
    def of(
        cls,
        device: Device,
        optimizer: str = "adamw",
        stack: str = "autopar",
        *,
        formats: Mapping[str, str] | None = None,
    ) -> Software:
        """How a software stack carries plans out on a device.

        Args:
            device: The device.
            optimizer: Name of an optimizer; that of other stacks than this package's is fused.
            stack: Name of a stack, see `autopar.cost_models.software`; this package's runtime by
                default.
            formats: Number format in which products of a dtype run if not in their own, such as
                ``{"bfloat16": "fp8"}``; float32 runs as tf32 on other stacks than this package's.

        Raises:
            InputError: If the optimizer or the stack is unknown.
        """
        found = OPTIMIZERS[optimizer]
        if stack != "autopar":
            chosen = on_device(find_stack(stack), device.name)
            return cls._of_stack(chosen, found, {"float32": "tf32", **(formats or {})})
        passes = UPDATE_PASSES[found.loop] * (found.moments + 1.5) / 3.5
        cpu = device.kind == "cpu"
        return cls(
            implementation=CPU if cpu else CUDA,
            speed=Speed(
                formats=dict(formats or {}),
                update_passes=passes,
                slowdown=1.0 if cpu else SLOWDOWN,
            ),
            optimizer=found,
            gloo=cpu,
            context_bytes=0 if cpu else find_stack(stack).context_bytes,
        )

    @classmethod
    def _of_stack(
        cls, found: SoftwareStack, optimizer: OptimizerMemory, formats: Mapping[str, str]
    ) -> Software:
        """The same constants with which published rows are priced."""
        return cls(
            implementation=implementation_of(found),
            speed=Speed(
                formats=formats,
                attention=generation_of(found),
                element_factor=found.element_factor,
                time_factor=found.time_factor,
                overlap=found.overlap,
                slowdown=SLOWDOWN,
                update_passes=found.update_bytes / 2,  # of parameters in 16 bits
                step_s=found.step_s,
                launch_s=found.launch_s,
            ),
            optimizer=optimizer,
            context_bytes=found.context_bytes,
            reserved_factor=found.reserved_factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """One pipeline rank: all ranks at its place do and hold the same.

    Attributes:
        rank: The pipeline rank.
        time: Where its step goes.
        memory: What it holds.
        reserve: What the allocator makes of that.
        capacity_bytes: What its device has for it.
    """

    rank: int
    time: Split
    memory: RankMemory
    reserve: Reserve
    capacity_bytes: int

    @property
    def over_bytes(self) -> int:
        """Bytes beyond the capacity, negative if it fits."""
        return self.reserve.device_bytes - self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Everything predicted of a plan.

    Attributes:
        step_s: Seconds of a training step.
        timeline: All actions of all pipeline ranks.
        stages: What each stage takes.
        ranks: Each pipeline rank.
        timing: What the timeline was made from.
    """

    step_s: float
    timeline: Timeline
    stages: tuple[StageCost, ...]
    ranks: tuple[RankCost, ...]
    timing: Timing

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory."""
        return all(rank.over_bytes <= 0 for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of live tensors on any rank."""
        return max(rank.memory.peak_bytes for rank in self.ranks)

    def refuse_unless_fits(self) -> None:
        """Refuse a plan for which some device has too little memory.

        Raises:
            PlanError: Names the rank with least room, by how much it is over, and what is largest.
        """
        if self.fits:
            return
        rank = max(self.ranks, key=lambda rank: (rank.over_bytes, -rank.rank))
        peak = sorted(rank.memory.peak.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in peak if size)
        raise PlanError(
            f"the plan does not fit: pipeline rank {rank.rank} needs"
            f" {format_bytes(rank.reserve.device_bytes)} (predicted),"
            f" {format_bytes(rank.over_bytes)} more than its device has; largest is {peak[0][0]}",
            expected=f"at most {format_bytes(rank.capacity_bytes)}; live tensors at the peak"
            f" ({rank.memory.where or 'start of the step'}): {parts}",
            fix=_REMEDIES.get(peak[0][0], "divide the model among more devices"),
            where="plan",
        )


class Evaluator:
    """Prices plans of one model on one cluster.

    Args:
        graph: The model.
        loss: Name of the value that is the loss, None without.
        cluster: The cluster.
        software: How plans are carried out; this package's runtime by default.
    """

    def __init__(
        self,
        graph: Graph,
        loss: str | None,
        cluster: ClusterSpec,
        software: Software | None = None,
    ) -> None:
        self.graph, self.loss, self.cluster = graph, loss, cluster
        self.software = software or Software.of(cluster.hardware(0))
        self.layout = Layout.of(graph)
        self._inputs = _given_bytes(graph)
        self._placed: dict[object, Placement] = {}

    def evaluate(self, plan: Plan, again: frozenset[str] | None = None) -> Prediction:
        """Seconds and bytes of a plan.

        Args:
            plan: The plan.
            again: Names of the nodes that backward computes again, if known already.

        Raises:
            PlanError: If the plan does not fit the model or the cluster.
        """
        models = stage_models(
            self.place(plan), plan, self.loss, self.software.implementation, again=again
        )
        return self.price(plan, models)

    def place(self, plan: Plan) -> Placement:
        """How the plan places values; plans that differ in other things share it."""
        overrides = tuple(sorted(plan.overrides.items()))
        key = (
            plan.mesh, plan.strategy, plan.order, plan.storage, plan.explicit, overrides,
            plan.parameters, plan.pipeline, plan.zero,
        )  # fmt: skip
        if key not in self._placed:
            if len(self._placed) >= _PLACED:
                self._placed.clear()
            self._placed[key] = self.layout.place(plan)
        return self._placed[key]

    def price(self, plan: Plan, models: tuple[StageModel, ...]) -> Prediction:
        """The same of stages that are known."""
        schedule = schedule_of(plan)
        devices = devices_of(self.cluster, plan, schedule)
        mesh, names = fine_mesh_of(plan)
        prices = Prices(self.cluster, mesh, names)
        known = KnownStatic(self.software.optimizer)
        costs = _stage_costs(models, schedule.stage_ranks, devices, prices, self.software, known)
        timing = _timing(plan, schedule, models, costs, prices, self.software.speed)
        timeline = timing.timeline(schedule)
        factor = idle_cores_factor(timeline, devices[0].node, plan.device_mesh.size)
        timeline, timing = faster(timeline, factor), replace(timing, factor=factor)
        costs = tuple(faster_cost(cost, factor) for cost in costs)
        ranks = tuple(
            self._rank(plan, models, rank, split, devices[rank], known)
            for rank, split in enumerate(timeline.splits)
        )
        return Prediction(
            step_s=timeline.step_s + self.software.speed.step_s,
            timeline=timeline,
            stages=costs,
            ranks=ranks,
            timing=timing,
        )

    def memory_options(self) -> dict[str, Any]:
        """What `rank_memory` is told of the software and the inputs."""
        return {
            "optimizer": self.software.optimizer,
            "gloo": self.software.gloo,
            "input_bytes": self._inputs["input"] + self._inputs["constant"],
            "buffer_bytes": self._inputs["buffer"],
        }

    def _rank(
        self,
        plan: Plan,
        models: tuple[StageModel, ...],
        rank: int,
        split: Split,
        device: Device,
        known: KnownStatic,
    ) -> RankCost:
        software = self.software
        memory = rank_memory(models, plan, rank, known=known, **self.memory_options())
        return RankCost(
            rank=rank,
            time=split,
            memory=memory,
            reserve=reserve(
                memory,
                context_bytes=software.context_bytes,
                factor=software.reserved_factor,
                caching=device.kind != "cpu",
            ),
            capacity_bytes=device.usable_bytes,
        )


def _given_bytes(graph: Graph) -> Counter[str]:
    """Bytes of inputs of the step, constants and buffers, which lie whole on every rank."""
    found = Counter[str]()
    for item in graph.inputs:
        found[item.kind] += item.value.spec.size_bytes
    return found


def evaluate(
    plan: Plan,
    graph: Graph,
    cluster: ClusterSpec,
    *,
    loss: str | None = None,
    software: Software | None = None,
) -> Prediction:
    """Seconds and bytes of a plan; see `Evaluator` to price many of one model.

    Args:
        plan: The plan.
        graph: The model it was made for.
        cluster: What it runs on.
        loss: Name of the value that is the loss; None for the graph's first output.
        software: How it is carried out; this package's runtime by default.

    Raises:
        PlanError: If the plan does not fit the model or the cluster.
    """
    return Evaluator(graph, loss, cluster, software).evaluate(plan)


def devices_of(cluster: ClusterSpec, plan: Plan, schedule: Schedule) -> tuple[Device, ...]:
    """The slowest device at every place of the pipeline."""
    mesh = plan.device_mesh
    if mesh.size > cluster.num_devices:
        raise PlanError(
            f"the plan needs {mesh.size} devices, cluster {cluster} has {cluster.num_devices}",
            fix="plan for this cluster, or name a larger one",
            where="plan: mesh",
        )
    if cluster.is_uniform:
        return (cluster.hardware(0),) * schedule.num_ranks
    found: list[list[Device]] = [[] for _ in range(schedule.num_ranks)]
    axis = plan.pipeline.axis
    place = mesh.names.index(axis) if axis in mesh.names else None
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)[place] if place is not None else 0
        found[at].append(cluster.hardware(rank))
    return tuple(min(devices, key=lambda device: device.peak("bf16")) for devices in found)


def fine_mesh_of(plan: Plan) -> tuple[Mesh, dict[str, str]]:
    """All devices with the sub-axes that choices are made of, and whose sub-axes they are."""
    axes: list[tuple[str, int]] = []
    names: dict[str, str] = {}
    for name, size in plan.mesh:
        whole = name == plan.pipeline.axis
        fine = [(name, size)] if whole else list(split_axes(Mesh(((name, size),)))[0].axes)
        axes += fine
        names |= {sub: name for sub, _ in fine}
    return Mesh(tuple(axes)), names


def _stage_costs(
    models: tuple[StageModel, ...],
    places: tuple[int, ...],
    devices: tuple[Device, ...],
    prices: Prices,
    software: Software,
    static: KnownStatic,
) -> tuple[StageCost, ...]:
    """What every stage takes; equal stages are priced once."""
    known: dict[object, StageCost] = {}
    found = []
    for model in models:
        device = devices[places[model.index]]
        key = (id(model.work.kernels), device.name)
        if key not in known:
            held = static.of(model.parameters, model.buckets)
            touched = held.updated * software.speed.update_passes
            touched *= _streamed(device) / update_bandwidth(device)
            known[key] = price_stage(model, device, prices, software.speed, touched)
        found.append(known[key])
    return tuple(found)


def _streamed(device: Device) -> float:
    """Bandwidth of kernels that stream through memory."""
    return device.memory_bytes_per_s * device.efficiency.memory_share


def update_bandwidth(device: Device) -> float:
    """Bytes per second of the optimizer: of the cache where that is known, else of memory."""
    return device.cache_bytes_per_s or _streamed(device)


def _timing(
    plan: Plan,
    schedule: Schedule,
    models: tuple[StageModel, ...],
    costs: tuple[StageCost, ...],
    prices: Prices,
    speed: Speed,
) -> Timing:
    """What the simulator is told, as if all ranks were always busy."""
    edges, gradient_edges = stage_edges(models)
    tasks: dict[tuple[int, str, bool], Task] = {}
    for stage, cost in enumerate(costs):
        for last, programs in ((False, cost.programs), (True, cost.last)):
            for kind, program in programs.items():
                joins = kind == "F" or not last
                tasks[stage, kind, last] = program.task(speed.overlap, joins=joins)
        tasks[stage, "UPDATE", False] = Task(
            compute_s=cost.update_kernels_s, inline_s=sum(cost.update.values())
        )
    return Timing(
        tasks=tasks,
        messages=Messages(plan, schedule, models, prices).seconds(),
        edges=edges,
        gradient_edges=gradient_edges,
        slowdown=speed.slowdown,
    )
