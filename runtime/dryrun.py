"""Dry run: execute a rank's programs and schedule without its device, and report live bytes.

The engine, the executor and the optimizer are those of a real run, on fake tensors and a
communicator of one rank. Programs are captured as always and then summarised: what a call does to
live bytes is walked over once, not once per microbatch. With ``by_node`` they are run node by node.

Not counted: memory inside an op (workspaces of cuBLAS and cuDNN, communication libraries), rounding
and fragmentation of the allocator, and the module that the user made.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.errors import InputError, PlanError
from autopar.graph.ir import TensorSpec
from autopar.plan.build import apply_plan
from autopar.plan.plan import Plan
from autopar.runtime.dryrun_comm import DryCommunicator
from autopar.runtime.dryrun_ledger import Ledger, Moment
from autopar.runtime.dryrun_unit import DryUnit, Walker
from autopar.runtime.engine import Engine
from autopar.runtime.execute import Executor, Outcome
from autopar.runtime.execution import Execution
from autopar.runtime.mesh import MeshContext
from autopar.runtime.optimizers import Factory, optimizer_factory
from autopar.runtime.parameters import Item
from autopar.runtime.programs import compat
from autopar.runtime.programs.device_map import as_cuda
from autopar.runtime.programs.liveness import Bytes
from autopar.runtime.programs.program import Program
from autopar.runtime.programs.recording import RecordingCommunicator
from autopar.runtime.programs.scratch import with_gloo_scratch
from autopar.runtime.unit import StagePrograms, StageUnit, build_programs
from autopar.schedules.actions import Action
from autopar.schedules.deliveries import Deliveries
from autopar.sharding.sharded import ShardedGraph
from autopar.trace import Traced

DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What one rank holds during a training step in steady state.

    Attributes:
        rank: The rank.
        stages: Pipeline stages it holds.
        resident: Bytes by kind before the step, the inputs of the step included.
        peak: Bytes by kind at the high-water mark of the step.
        where: The action, program and node of that mark.
        moments: Live bytes over the step, action by action.
    """

    rank: int
    stages: tuple[int, ...]
    resident: Bytes
    peak: Bytes
    where: str
    moments: tuple[Moment, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at one time."""
        return sum(self.peak.values())

    @property
    def resident_bytes(self) -> int:
        """Bytes live before the step."""
        return sum(self.resident.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Ranks of a plan, dry.

    Attributes:
        device: For which device the programs are.
        optimizer: Name of the optimizer.
        ranks: What each asked rank holds.
    """

    device: str
    optimizer: str
    ranks: tuple[RankMemory, ...] = field(default=())


def dry_run(
    traced: Traced,
    plan: Plan,
    ranks: Sequence[int],
    *,
    device: str = "cpu",
    optimizer: str | type[torch.optim.Optimizer] | Factory | None = "adamw",
    optimizer_options: Mapping[str, Any] | None = None,
    by_node: bool = False,
) -> DryRun:
    """Execute ranks of a job that need not exist.

    Args:
        traced: The model, on any device, also meta.
        plan: The plan.
        ranks: Which ranks of its mesh.
        device: ``"cpu"`` or ``"cuda"``. For CUDA on a machine without it, ops that differ there
            are replaced by what they would be, see `autopar.runtime.programs.device_map`.
        optimizer: See `autopar.compile`; its state counts as it really is.
        optimizer_options: Options of the optimizer.
        by_node: Run every program node by node on fake tensors. Gives the same bytes, slowly.

    Returns:
        Live bytes of each rank.

    Raises:
        InputError: For a rank outside of the mesh, or an unknown device.
        PlanError: If the plan does not fit the model, or the model returns no loss.
    """
    if device not in DEVICES:
        raise InputError(f"device {device!r}", expected=" or ".join(DEVICES))
    if traced.loss is None:
        raise PlanError(
            "the model returns no loss, so there is no training step to run dry",
            fix="pass loss_fn, or return the loss from the model",
        )
    if by_node and device == "cuda" and not _can_trace(device):
        raise InputError(
            "by_node is asked for CUDA of a torch without CUDA",
            expected="programs that this torch can run on fake tensors",
            fix='leave by_node out, or take device="cpu"',
        )
    world_size = plan.device_mesh.size
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise InputError(f"rank {rank} of {world_size}", expected=f"0 to {world_size - 1}")
    sharded = apply_plan(plan, traced.graph)
    job = _Job(
        traced=traced,
        sharded=sharded,
        execution=Execution.of_plan(plan, sharded, traced.loss),
        world_size=world_size,
        device=device,
        factory=optimizer_factory(optimizer, optimizer_options or {}),
        by_node=by_node,
    )
    return DryRun(
        device=device,
        optimizer=optimizer if isinstance(optimizer, str) else str(optimizer),
        ranks=tuple(job.run(rank) for rank in ranks),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What the ranks share."""

    traced: Traced
    sharded: ShardedGraph
    execution: Execution
    world_size: int
    device: str
    factory: Factory | None
    by_node: bool

    @property
    def place(self) -> torch.device:
        """Device of all fake tensors."""
        return torch.device(self.device if _can_trace(self.device) else "cpu")

    def run(self, rank: int) -> RankMemory:
        """Build a rank, take two steps, and report the second: the first has no optimizer state."""
        walker = Walker(
            ledger=Ledger(),
            rewrite=with_gloo_scratch if self.device == "cpu" else _unchanged,
            by_node=self.by_node,
            device=self.place,
        )
        programs = self._programs(rank)
        ledger = walker.ledger
        with compat.fake_mode(), ledger, torch.no_grad():
            engine = self._engine(rank, walker, programs)
            inputs = {
                item.value.name: self._empty(item.value.spec)
                for item in self.sharded.graph.inputs
                if item.kind == "input"
            }
            engine.dry_step(inputs)
            gc.collect()  # what building left behind
            ledger.restart()
            resident = +ledger.live
            engine.dry_step(inputs)
        return RankMemory(
            rank=rank,
            stages=tuple(engine.units),
            resident=resident,
            peak=ledger.peak,
            where=ledger.where,
            moments=tuple(ledger.moments),
        )

    def _programs(self, rank: int) -> dict[int, StagePrograms]:
        """The programs of a rank's stages."""
        comm = RecordingCommunicator(rank, self.world_size, self.place)
        context = MeshContext.create(self.sharded.mesh, comm, self.execution.devices)
        names = {node.name: node.op for node in self.sharded.graph.nodes}
        mapped = self.device != self.place.type
        buffers = {
            out.target: out.value
            for out in self.sharded.graph.outputs
            if out.kind == "buffer" and out.value
        }
        return {
            index: build_programs(
                self.sharded,
                context,
                self.execution.task(index, context, buffers),
                self._custom,
                self.execution.items(index, context),
                self.execution.zero,
                rewrite=functools.partial(as_cuda, names=names) if mapped else None,
            )
            for index in self.execution.stages_of(context)
        }

    def _engine(
        self, rank: int, walker: Walker, programs: Mapping[int, StagePrograms]
    ) -> _DryEngine:
        comm = DryCommunicator(
            rank, self.world_size, self.place, walker.ledger, gloo=self.device == "cpu"
        )
        context = MeshContext.create(self.sharded.mesh, comm, self.execution.devices)
        tensors = {
            item.target: self._empty(item.value.spec)
            for item in self.sharded.graph.inputs
            if item.kind != "input"
        }
        engine = _DryEngine(self, context, tensors, walker, programs)
        if self.device == "cuda" and engine.optimizer is not None:
            for group in engine.optimizer.param_groups:
                # What torch chooses by itself for CUDA parameters.
                if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                    group["foreach"] = True
        return engine

    def _empty(self, spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self.place)

    def _custom(self, op: str) -> Callable[..., Any]:
        return self.traced.custom[op.removeprefix("autopar.custom_function.")]


def _can_trace(device: str) -> bool:
    return device == "cpu" or torch.backends.cuda.is_built()


def _unchanged(program: Program) -> Program:
    return program


class _DryExecutor(Executor):
    """Executes actions and notes each in the ledger."""

    def __init__(
        self,
        comm: DryCommunicator,
        rank_of: Callable[[int], int],
        ledger: Ledger,
        deliveries: Deliveries,
    ) -> None:
        super().__init__(comm, rank_of)
        self.ledger, self.deliveries, self.position = ledger, deliveries, 0
        comm.arrived = self._arrived

    def run(self, *args: Any, **kwargs: Any) -> Outcome:
        """See `Executor.run`."""
        self.position = 0
        return super().run(*args, **kwargs)

    def prepare(self, num_microbatches: int) -> list[Tensor]:
        """See `Executor.prepare`."""
        numbers = super().prepare(num_microbatches)
        self.ledger.label(numbers, "inputs")
        return numbers

    def _act(self, action: Action, updates: bool) -> None:
        self.action = action
        self.ledger.begin(str(action))
        super()._act(action, updates)
        self.ledger.end()
        self.position += 1

    def _arrived(self) -> Callable[[], bool]:
        action = self.action
        return lambda: self.deliveries.arrived(action, self.position)


class _DryEngine(Engine):
    """An engine on fake tensors whose programs are known and not run."""

    def __init__(
        self,
        job: _Job,
        context: MeshContext,
        tensors: Mapping[str, Tensor],
        walker: Walker,
        programs: Mapping[int, StagePrograms],
    ) -> None:
        self.walker, self.made = walker, programs
        super().__init__(
            job.sharded,
            context,
            tensors,
            loss=job.traced.loss,
            execution=job.execution,
            optimizer=job.factory,
            check_finite=False,
        )
        walker.ledger.label(
            [self.tensors[n] for n, item in self.items.items() if item.kind == "buffer"], "buffers"
        )
        walker.ledger.label(
            [self.tensors[n] for n, item in self.items.items() if item.kind == "constant"], "inputs"
        )
        self._label()

    def _prepare_groups(self) -> None:
        """There is nobody to agree with."""

    def _programs(self, index: int, items: Sequence[Item]) -> StagePrograms:
        return self.made[index]

    def _unit(
        self, programs: StagePrograms, items: Sequence[Item], values: Mapping[str, Tensor]
    ) -> StageUnit:
        return DryUnit(programs, items, values, **self._unit_options(), walker=self.walker)

    def _executor(self) -> Executor:
        comm = self.comm
        assert isinstance(comm, DryCommunicator)
        return _DryExecutor(
            comm,
            lambda stage: self.execution.rank_of(stage, self.context),
            self.walker.ledger,
            Deliveries(self.execution.schedule, self.execution.pipeline_rank(comm.rank)),
        )

    def _label(self) -> None:
        ledger = self.walker.ledger
        for unit in self.units.values():
            assert isinstance(unit, DryUnit)
            unit.label()
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                ledger.label(state, "optimizer")

    def dry_step(self, inputs: Mapping[str, Tensor]) -> None:
        """`step`, noted in the ledger."""
        ledger = self.walker.ledger
        ledger.label(dict(inputs), "inputs")
        loss = self.backward(inputs)
        ledger.begin("update")
        self.update()
        del loss
        self._label()
        ledger.end()
