"""The space of plans: everything that is chosen, as points.

A point fixes a mesh (pipeline, data and tensor axis, and their order on the devices), what the
tensor axis splits, ZeRO, the number of microbatches and the schedule. Where the stages are cut and
what each layer computes again is chosen for each point (`autopar.search.stage_cut`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.plan import Plan
from autopar.plan.strategies import ROLES
from autopar.schedules.steady import stage_ranks

SYNCHRONOUS = ("1f1b", "interleaved_1f1b", "zb_h1", "zbv")
"""Schedules that train exactly as one device would; GPipe is 1F1B with more memory."""
_INNER = ("zero", "data_outside")
"""Fields in which the points of a group differ."""
MAX_CHUNKS = 8
MAX_SAMPLES, MAX_TOKENS = 256, 2**16
"""Most samples, and tokens, of a microbatch on a rank: larger ones are no faster per sample."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Point:
    """Everything of a plan but cuts and what is computed again.

    Attributes:
        pipeline: Ranks of the pipeline.
        data: Size of the data axis.
        tensor: Size of the tensor axis.
        role: What it splits; a key of `ROLES`, or ``""`` for a size of 1.
        microbatches: Microbatches of a step.
        zero: ZeRO stage over the data axis.
        schedule: Name of the pipeline's schedule.
        chunks: Stages per pipeline rank.
        data_outside: Whether neighbours in the pipeline are nearer than data ranks.
    """

    pipeline: int = 1
    data: int = 1
    tensor: int = 1
    role: str = ""
    microbatches: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    data_outside: bool = False

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.pipeline * self.chunks

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """For each stage its pipeline rank."""
        return stage_ranks(self.schedule, self.pipeline, self.chunks)

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        """Axes and sizes, outermost first; axes of one rank are left out."""
        axes = [("pp", self.pipeline), ("dp", self.data), ("tp", self.tensor)]
        if self.data_outside:
            axes[0], axes[1] = axes[1], axes[0]
        return tuple(axis for axis in axes if axis[1] > 1) or (("dp", 1),)

    @property
    def order(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What every axis but the pipeline's splits."""
        names = [name for name, _ in self.mesh if name != "pp"]
        return tuple((name, ("batch",) if name == "dp" else ROLES[self.role]) for name in names)

    def plan(self, cuts: tuple[str, ...] = (), strategy: str = "search") -> Plan:
        """The point as a plan, without what depends on the model.

        Args:
            cuts: Key of the first op of every stage but the first.
            strategy: Name of the strategy.
        """
        return Plan(
            mesh=self.mesh,
            strategy=strategy,
            order=self.order,
            pipeline=PipelinePlan(
                schedule=self.schedule,
                microbatches=self.microbatches,
                chunks=self.chunks,
                cuts=cuts,
            ),
            zero=ZeroPlan(stage=self.zero, axes=("dp",) if self.zero else ()),
        )

    def text(self) -> str:
        """The point in a few words, such as ``pp=8 dp=16 tp=8 megatron_sp m=64 zero=1 1f1b``."""
        parts = [f"{name}={size}" for name, size in self.mesh]
        parts += [self.role] if self.role else []
        parts += [f"m={self.microbatches}"] + ([f"zero={self.zero}"] if self.zero else [])
        if self.pipeline > 1:
            parts.append(self.schedule + (f" v={self.chunks}" if self.chunks > 1 else ""))
        return " ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is searched.

    Attributes:
        num_devices: Ranks, all of which are used.
        batch: Samples of a step.
        units: Most stages.
        layers: Units that are copies of blocks: more than two chunks per rank divide them evenly.
        roles: What a tensor axis may split on this model.
        tensor_limit: Largest tensor axis.
        schedules: Names of schedules.
        samples: Most samples of a microbatch on a rank.
        microbatched: Whether the model can be computed in microbatches.
        allowed: What points may be, see `value`; the rest is free.
    """

    num_devices: int
    batch: int
    units: int
    layers: int
    roles: tuple[str, ...]
    tensor_limit: int
    schedules: tuple[str, ...] = SYNCHRONOUS
    samples: int = MAX_SAMPLES
    microbatched: bool = True
    allowed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    def points(self) -> Iterator[Point]:
        """All points, in a fixed order."""
        for group in self.groups():
            yield from self.members(group)

    def members(self, group: Point) -> Iterator[Point]:
        """Points that differ from a group's in ZeRO and in the order of axes."""
        for zero in (0, 1, 2, 3) if group.data > 1 else (0,):
            for outside in (False, True) if group.pipeline > 1 and group.data > 1 else (False,):
                point = replace(group, zero=zero, data_outside=outside)
                if self._allows(point):
                    yield point

    def num_members(self, group: Point) -> int:
        """Number of `members`, without making them where nothing is fixed."""
        if any(name in self.allowed for name in _INNER):
            return sum(1 for _ in self.members(group))
        return (4 if group.data > 1 else 1) * (2 if group.pipeline > 1 and group.data > 1 else 1)

    def value(self, point: Point, name: str) -> object:
        """What `allowed` speaks of: a field or a property of a point, or one of these.

        ``micro_batch`` are the samples of a data rank at a time, ``sharding`` is the size of the
        tensor axis with what it splits.
        """
        if name == "micro_batch":
            return self.batch / (point.microbatches * point.data)
        if name == "sharding":
            return point.tensor, point.role
        return getattr(point, name)

    def _allows(self, point: Point) -> bool:
        return all(self.value(point, name) in values for name, values in self.allowed.items())

    def groups(self) -> Iterator[Point]:
        """One point for all that differ in ZeRO and in the order of axes only."""
        loose = replace(self, allowed={k: v for k, v in self.allowed.items() if k not in _INNER})
        for pipeline in divisors(self.num_devices):
            if pipeline > self.units:
                continue
            rest = self.num_devices // pipeline
            for tensor in divisors(rest):
                if tensor > self.tensor_limit:
                    continue
                for role in self.roles if tensor > 1 else ("",):
                    for group in self._in_time(pipeline, rest // tensor, tensor, role):
                        if loose._allows(group):
                            yield group

    def _in_time(self, pipeline: int, data: int, tensor: int, role: str) -> Iterator[Point]:
        if data > self.batch:
            return
        for microbatches in divisors(self.batch):
            samples = self.batch // microbatches
            if samples < data or (samples > self.samples * data and microbatches < self.batch):
                continue
            if microbatches > 1 and not self.microbatched:
                continue
            for schedule, chunks in self._schedules(pipeline, microbatches):
                yield Point(
                    pipeline=pipeline, data=data, tensor=tensor, role=role,
                    microbatches=microbatches, schedule=schedule, chunks=chunks,
                )  # fmt: skip

    def _schedules(self, pipeline: int, microbatches: int) -> Iterator[tuple[str, int]]:
        if pipeline == 1:
            yield "1f1b", 1
            return
        for name in self.schedules:
            if name == "interleaved_1f1b":
                for chunks in range(2, MAX_CHUNKS + 1):
                    even = chunks == 2 or self.layers % (chunks * pipeline) == 0
                    even = even or "num_stages" in self.allowed  # their cuts are given
                    fits = chunks * pipeline <= self.units and microbatches % pipeline == 0
                    if fits and even:
                        yield name, chunks
            elif name == "zbv":
                if 2 * pipeline <= self.units:
                    yield name, 2
            else:
                yield name, 1


def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    return tuple(n for n in range(1, number + 1) if number % n == 0)
