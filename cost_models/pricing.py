"""Seconds of the programs of a stage: its kernels on a device, its collectives on the cluster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.collectives import axis_price
from autopar.cost_models.compute import (
    COLLECTIVE_LAUNCHES,
    Columns,
    Generation,
    Speeds,
    host_seconds,
    race,
    seconds_of,
)
from autopar.cost_models.device import Device
from autopar.cost_models.simulate import Task
from autopar.cost_models.stages import StageModel
from autopar.cost_models.work import Kernel, Move, Phase
from autopar.sharding.mesh import Mesh

PROGRAMS: Mapping[str, tuple[Phase, ...]] = {
    "F": ("forward",),
    "B": ("recompute", "input_gradient", "weight_gradient"),
    "I": ("recompute", "input_gradient"),
    "W": ("weight_gradient",),
}
"""Which phases of work each program does."""
WAITING = "waiting for the host"
"""What kernels take longer because the host has not launched them yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """What of the software decides seconds.

    Attributes:
        formats: Number format in which products of a dtype run, if not in their own.
        attention: Generation of the fused attention kernel.
        element_factor: Bytes that pointwise kernels move over those that the graph implies.
        time_factor: Measured over modelled seconds of computation.
        overlap: Share of a collective beside computation that can hide there.
        slowdown: Seconds that computation loses per second of a collective beside it.
        update_passes: How often an update reads or writes an element of a parameter's size.
        step_s: Work of the host once per step.
        launch_s: Time of the host per kernel, if another than the device's.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    attention: Generation = "flash2"
    element_factor: float = 1.0
    time_factor: float = 1.0
    overlap: float = 1.0
    slowdown: float = 0.0
    update_passes: float = 7.0
    step_s: float = 0.0
    launch_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """One run of a program.

    Attributes:
        kernels: Seconds by kind of kernel.
        inline: Seconds of the collectives for whose result computation waits, by axes.
        beside: Seconds of those beside computation, by axes.
        parts: Collectives beside computation.
    """

    kernels: Mapping[str, float]
    inline: Mapping[str, float]
    beside: Mapping[str, float]
    parts: int = 0

    @property
    def compute_s(self) -> float:
        """Seconds of all kernels."""
        return sum(self.kernels.values())

    def task(self, overlap: float, *, joins: bool) -> Task:
        """What a simulation needs to know."""
        beside = sum(self.beside.values())
        return Task(
            compute_s=self.compute_s,
            inline_s=sum(self.inline.values()) + (1 - overlap) * beside,
            beside_s=overlap * beside,
            parts=max(self.parts, 1),
            joins=joins,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """What a stage takes.

    Attributes:
        programs: A run of each program, by action kind.
        last: What the last backward of an update takes instead, by action kind.
        update_kernels_s: The optimizer.
        update: Seconds of the collectives after it, by axes.
    """

    programs: Mapping[str, ProgramCost]
    last: Mapping[str, ProgramCost]
    update_kernels_s: float
    update: Mapping[str, float]


class Prices:
    """Prices of collectives along the axes of a mesh on a cluster, each looked up once.

    Args:
        cluster: The cluster.
        mesh: All devices: the pipeline's axis and the sub-axes of the others.
        names: For each sub-axis the axis of the user's mesh.
    """

    def __init__(self, cluster: ClusterSpec, mesh: Mesh, names: Mapping[str, str]) -> None:
        self.cluster, self.mesh, self.names = cluster, mesh, names
        self._known: dict[tuple[str, int, tuple[str, ...]], float] = {}

    def seconds(self, move: Move) -> float:
        """Seconds of all runs of a collective."""
        key = (move.kind, move.size_bytes, move.axes)
        if key not in self._known:
            found = axis_price(move.kind, move.size_bytes, self.cluster, self.mesh, move.axes)
            self._known[key] = found.seconds
        return self._known[key] * move.count

    def label(self, axes: Iterable[str]) -> str:
        """The user's axes of sub-axes, such as ``"dp, tp"``."""
        return ", ".join(dict.fromkeys(self.names.get(axis, axis) for axis in axes))


def price_stage(
    model: StageModel, device: Device, prices: Prices, speed: Speed, update_bytes: float
) -> StageCost:
    """Seconds of everything a stage does.

    Args:
        model: The stage.
        device: What it runs on.
        prices: Of collectives.
        speed: What of the software decides.
        update_bytes: Bytes that the optimizer reads and writes.
    """
    if speed.launch_s is not None:
        efficiency = replace(device.efficiency, launch_s=speed.launch_s)
        device = replace(device, efficiency=efficiency)
    kernels, hosts = _kernel_seconds(model.work.kernels, device, speed)
    known = {item.name for item in model.parameters}
    kinds = [kind for kind in PROGRAMS if kind in model.summaries]
    programs, last = {}, {}
    for kind in kinds:
        own = defaultdict[str, float](float)
        for phase in PROGRAMS[kind]:
            for name, seconds in kernels.get(phase, {}).items():
                own[name] += seconds
        host = sum(hosts.get(phase, 0.0) for phase in PROGRAMS[kind])
        call_s = 0.0 if device.kind == "cpu" else device.efficiency.launch_s
        moves = [move for move in model.work.moves if move.phase in PROGRAMS[kind]]
        often = [move for move in moves if move.per == "microbatch" and move.kind != "send"]
        programs[kind] = _program(own, often, prices, known, host, call_s)
        ends = [move for move in moves if move.per == "step"]
        last[kind] = (
            _program(own, [*often, *ends], prices, known, host, call_s) if ends else programs[kind]
        )
    update = defaultdict[str, float](float)
    for move in model.work.moves:
        if move.phase == "update":
            update[prices.label(move.axes)] += prices.seconds(move)
    memory = device.memory_bytes_per_s * device.efficiency.memory_share
    return StageCost(
        programs=programs,
        last=last,
        update_kernels_s=update_bytes / memory,
        update=dict(update),
    )


def _kernel_seconds(
    kernels: tuple[Kernel, ...], device: Device, speed: Speed
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Seconds of the device by phase and kind of kernel, and of the host by phase."""
    columns = Columns.of(kernels)
    speeds = Speeds.of(
        device, columns, formats=speed.formats, generation=speed.attention,
        element_factor=speed.element_factor,
    )  # fmt: skip
    seconds = seconds_of(columns, speeds) * speed.time_factor
    found: dict[str, dict[str, float]] = {}
    for kernel, took in zip(kernels, np.asarray(seconds).tolist(), strict=True):
        phase = found.setdefault(kernel.phase, defaultdict(float))
        phase[kernel.kind] += took
    hosts: dict[str, float] = defaultdict(float)
    for kernel, took in zip(kernels, host_seconds(columns, speeds).tolist(), strict=True):
        hosts[kernel.phase] += took
    return found, hosts


def _program(
    kernels: Mapping[str, float],
    moves: Iterable[Move],
    prices: Prices,
    parameters: set[str],
    host_s: float,
    call_s: float,
) -> ProgramCost:
    """A program whose kernels take the host `host_s` to launch, and a collective `call_s`."""
    inline, beside = defaultdict[str, float](float), defaultdict[str, float](float)
    parts = 0
    for move in moves:
        # Only parameters and their gradients can be fetched ahead, or sent behind.
        free = move.phase == "weight_gradient" or move.node in parameters
        (beside if free else inline)[prices.label(move.axes)] += prices.seconds(move)
        parts += move.count if free else 0
        host_s += COLLECTIVE_LAUNCHES * call_s * move.count
    device_s = sum(kernels.values()) + sum(inline.values())
    late = float(race(device_s, host_s)) - device_s
    found = {**kernels, WAITING: late} if late > 0 else dict(kernels)
    return ProgramCost(kernels=found, inline=inline, beside=beside, parts=parts)
