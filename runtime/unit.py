"""A stage on one rank: its programs, and everything that outlives a microbatch."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.graph.ir import Graph
from autopar.runtime.comm import Communicator
from autopar.runtime.execute import Boundary, Compiled
from autopar.runtime.lower import Custom, LocalForward, lower
from autopar.runtime.mesh import MeshContext
from autopar.runtime.parameters import Item, Parameters
from autopar.runtime.programs.accumulate import accumulate, finish_order
from autopar.runtime.programs.buckets import Bucket, Reduction, make_buckets, reduce_buckets
from autopar.runtime.programs.capture import capture
from autopar.runtime.programs.overlap import SMALL_BYTES, advance_inputs, overlap
from autopar.runtime.programs.program import Boxed, Joint, Program, Slot
from autopar.runtime.programs.prologue import hoist_prologue
from autopar.runtime.programs.recording import RecordingCommunicator
from autopar.runtime.programs.split import split
from autopar.runtime.programs.zero import gather_parameters, gradient_buckets, scatter_gradients
from autopar.schedules.actions import Schedule
from autopar.sharding.placement import Pair
from autopar.sharding.sharded import ShardedGraph
from autopar.trace.compat import no_collection

BACKWARD = ("B", "I", "W")
# Ranks may be threads, and torch's tracer keeps global state.
_CAPTURING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTask:
    """What a stage has to do on this rank.

    Attributes:
        index: Number of the stage.
        arriving: What it reads of earlier stages, in one order on all ranks.
        leaving: What it makes for later stages, in the same order.
        loss: The loss value and its placement, if the stage makes it.
        buffers: New values of buffers it makes, with the placement in which they are kept.
        outputs: Values to return to the user, with their placements.
        splits_backward: Whether backward is run as I and W.
        recompute: Graph nodes whose results are not kept for backward.
    """

    index: int
    arriving: tuple[Boundary, ...] = ()
    leaving: tuple[Boundary, ...] = ()
    loss: tuple[str, Pair] | None = None
    buffers: tuple[tuple[str, Pair], ...] = ()
    outputs: tuple[tuple[str, Pair], ...] = ()
    splits_backward: bool = False
    recompute: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Buckets of a stage.

    Attributes:
        zero: ZeRO stage.
        buckets: Of gradients, by the kind of the program that makes them.
        absent: Trainable parameters that no gradient reaches.
        gathered: With ZeRO-3, the bucket of gradients that belongs to each one of parameters.
    """

    zero: int = 0
    buckets: Mapping[str, tuple[Bucket, ...]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    gathered: Mapping[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class StagePrograms:
    """The programs of a stage before they are bound to a communicator.

    Attributes:
        task: The stage.
        local: The forward it was captured from.
        joint: Forward and backward as one graph.
        prologue: Sums over the batch that inputs alone determine, None if there are none.
        parts: Program by action kind: F and B, or F, I and W.
        layout: How gradients and parameters lie in buckets.
    """

    task: StageTask
    local: LocalForward
    joint: Joint
    prologue: Program | None
    parts: dict[str, Program]
    layout: Layout

    def later(self, kind: str) -> frozenset[Slot]:
        """Slots that programs after `kind` read of the same microbatch."""
        order: list[str] = [name for name in ("F", "I", "B", "W") if name in self.parts]
        after = order[order.index(kind) + 1 :]
        return frozenset(slot for name in after for slot in self.parts[name].inputs)


def build_programs(
    sharded: ShardedGraph,
    context: MeshContext,
    task: StageTask,
    custom: Custom | None,
    items: Sequence[Item],
    zero: int = 0,
    *,
    gradients: bool = True,
    rewrite: Callable[[Joint], Joint] | None = None,
) -> StagePrograms:
    """Lower, capture and cut a stage for the rank of `context`, whose device need not exist.

    `rewrite` may change what was captured before it is cut.
    """
    comm = context.comm
    recorder = RecordingCommunicator(comm.rank, comm.world_size, comm.device)
    traced = MeshContext(context.mesh, recorder, context.grid, context.devices)
    pairs = sharded.pairs()
    wanted: list[tuple[Slot, Pair]] = [
        (Slot("boundary", item.name), pairs[item.name]) for item in task.leaving
    ]
    if task.loss is not None:
        wanted.append((Slot("loss", task.loss[0]), task.loss[1]))
    wanted += [(Slot("buffer", name), pair) for name, pair in task.buffers]
    wanted += [(Slot("output", name), pair) for name, pair in task.outputs]
    local = lower(
        sharded, traced, [(slot.name, pair) for slot, pair in wanted],
        **({"custom": custom} if custom else {}),
        arriving=tuple(item.name for item in task.arriving),
    )  # fmt: skip
    examples = [(slot, _example(slot, sharded, context, gradients)) for slot in local.inputs]
    with _CAPTURING:
        joint = capture(
            local.module, examples, [slot for slot, _ in wanted], local.origins,
            gradients=gradients, name=f"stage {task.index}", device=comm.device,
        )  # fmt: skip
    if rewrite is not None:
        joint = rewrite(joint)
    prologue, joint = hoist_prologue(joint)
    uses = _use_order(sharded.graph)
    return cut_programs(
        local, joint, prologue, task, items, uses, zero if gradients else 0, gradients=gradients
    )


def _parts(joint: Joint, recompute: Collection[str], weight: bool) -> dict[str, Program]:
    programs = split(joint, recompute=recompute, weight=weight)
    if programs.weight is not None:
        return {"F": programs.forward, "I": programs.backward, "W": programs.weight}
    return {"F": programs.forward, "B": programs.backward}


def cut_programs(
    local: LocalForward,
    joint: Joint,
    prologue: Program | None,
    task: StageTask,
    items: Sequence[Item],
    uses: Sequence[str],
    zero: int,
    *,
    gradients: bool,
) -> StagePrograms:
    """Cut a captured stage into programs and lay its parameters and gradients into buckets."""
    if not gradients:
        forward = _parts(joint, (), weight=False)["F"]
        return StagePrograms(
            task=task,
            local=local,
            joint=joint,
            prologue=prologue,
            parts={"F": forward},
            layout=Layout(),
        )
    parts = _parts(joint, task.recompute, task.splits_backward)
    by_name = {item.name: item for item in items}
    orders = {kind: finish_order(program) for kind, program in parts.items() if kind != "F"}
    known = {name for order in orders.values() for name in order}
    absent = tuple(item.name for item in items if item.trainable and item.name not in known)
    buckets: dict[str, tuple[Bucket, ...]] = {}
    gathered: dict[str, str] = {}
    # Gradients are finished about in the reverse order of first uses. The order of the graph is the
    # same on all ranks, that of the programs may differ where parts are uneven.
    orders = {
        kind: tuple(name for name in reversed(uses) if name in set(order))
        for kind, order in orders.items()
    }
    if zero == 3:
        flat: list[Bucket] = []
        for kind, wanted in orders.items():
            prefix = f"stage {task.index} {kind} parameters"
            made = _buckets(wanted, by_name, zero, prefix)
            mine = gradient_buckets(made, f"stage {task.index} {kind} gradients")
            buckets[kind] = mine
            for parameter, gradient in zip(made, mine, strict=True):
                if len(parameter.ranks) > 1:
                    gathered[parameter.name] = gradient.name
                    flat.append(parameter)
        joint = gather_parameters(joint, flat)
        parts = _parts(joint, task.recompute | gathered.keys(), task.splits_backward)
    else:
        for kind, order in orders.items():
            prefix = f"stage {task.index} {kind} gradients"
            buckets[kind] = _buckets(order, by_name, zero, prefix)
    layout = Layout(zero=zero, buckets=buckets, absent=absent, gathered=gathered)
    return StagePrograms(
        task=task, local=local, joint=joint, prologue=prologue, parts=parts, layout=layout
    )


def _use_order(graph: Graph) -> tuple[str, ...]:
    """Parameters in the order of their first use."""
    parameters = {item.value.name for item in graph.parameters()}
    uses = (name for node in graph.nodes for name in node.operands if name in parameters)
    return tuple(dict.fromkeys(uses))


def _buckets(
    order: Sequence[str], items: Mapping[str, Item], zero: int, prefix: str
) -> tuple[Bucket, ...]:
    """Put parameters into buckets; those that several stages use only where they must be."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in order:
        item = items[name]
        if not item.shared or zero >= 2:
            groups.setdefault(() if not zero or item.shared else item.rest_ranks, []).append(name)
    found: list[Bucket] = []
    for number, names in enumerate(groups.values()):
        found += make_buckets(
            names,
            {name: items[name].shape for name in names},
            {name: items[name].dtype for name in names},
            {name: _bucket_ranks(items[name], zero) for name in names},
            prefix=f"{prefix} {number}",
            small_end=True,
        )
    # In the order in which they are full, whatever their group: they start one after the other.
    place = {name: number for number, name in enumerate(order)}
    return tuple(sorted(found, key=lambda bucket: place[bucket.members[-1].name]))


def _bucket_ranks(item: Item, zero: int) -> tuple[int, ...]:
    if item.shared:
        return item.alone
    return item.zero_ranks if zero else item.ranks


def _example(slot: Slot, sharded: ShardedGraph, context: MeshContext, gradients: bool) -> Tensor:
    """A tensor without memory that has the shape of what `slot` stands for on this rank."""
    if slot.kind in ("seed", "microbatch"):
        return torch.empty((), dtype=torch.int64, device="meta")
    spec = sharded.graph.spec(slot.name)
    pair = sharded.inputs.get(slot.name) or sharded.pairs()[slot.name]
    shape = context.grid.local_shape(spec.shape, pair.forward)
    made = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
    wants = slot.kind in ("parameter", "boundary") and spec.requires_grad
    return made.requires_grad_(gradients and wants)


@dataclass(slots=True)
class _Count:
    """How many backward programs of each kind have run in the current update."""

    done: dict[str, int] = field(default_factory=dict)

    def next(self, kind: str) -> int:
        position = self.done.get(kind, 0)
        self.done[kind] = position + 1
        return position


class StageUnit:
    """A stage ready to run; see `autopar.runtime.execute.Unit`.

    Args:
        programs: Its programs.
        items: Its parameters.
        values: Their local initial values by name.
        tensors: Buffers and constants by name; buffers are replaced when they are updated.
        comm: Communicator of all ranks.
        schedule: The schedule.
        buffer_targets: Buffer by the name of the value that replaces it.
        update: Takes an optimizer step for a stage.
    """

    def __init__(
        self,
        programs: StagePrograms,
        items: Sequence[Item],
        values: Mapping[str, Tensor],
        tensors: dict[str, Tensor],
        comm: Communicator,
        *,
        schedule: Schedule,
        buffer_targets: Mapping[str, str],
        update: Callable[[StageUnit], None],
    ) -> None:
        task = programs.task
        self.index, self.arriving, self.leaving = task.index, task.arriving, task.leaving
        self.programs, self.tensors, self.comm = programs, tensors, comm
        self.schedule, self.take_step = schedule, update
        self.per_update = schedule.microbatches_per_update
        self.buffer_targets = buffer_targets
        self.delay = schedule.delay(task.index)
        self.updates_before = self.updates = 0
        self.evaluates = False
        self.count = _Count()
        self.prologue: dict[str, Tensor] = {}
        self._compiled: dict[tuple[str, bool, bool], Compiled] = {}
        self._sources: dict[str, Program] = {}
        self.layout = programs.layout
        buckets = [bucket for made in self.layout.buckets.values() for bucket in made]
        self.parameters = Parameters(
            items, values, buckets, self.layout.absent, self.layout.zero, comm
        )
        self.loss_slot = Slot("tangent", task.loss[0]) if task.loss else None
        # An update's loss is the mean over its own microbatches, a step's over all of them.
        self.scale = float(max(schedule.updates, 1))
        self._scale: Tensor | None = None
        self.versions = {0: self._current()}
        self.active = self.versions[0]

    def variant(self, kind: str, *, first: bool, last: bool) -> Program:
        """The program of an action, for the first or last microbatch of an update or another."""
        program = self.programs.parts[kind]
        if kind in BACKWARD:
            buckets = self.layout.buckets[kind]
            if self.layout.zero >= 2:
                program = accumulate(program, first=True)
                program = scatter_gradients(program, buckets, first=first)
            else:
                program = accumulate(program, first=first)
                alone = [bucket for bucket in buckets if len(bucket.ranks) == 1]
                wide = [bucket for bucket in buckets if len(bucket.ranks) > 1]
                how: Reduction = "reduce_scatter" if self.layout.zero else "all_reduce"
                program = reduce_buckets(program, alone, "none")
                program = reduce_buckets(program, wide, how if last else "none")
        else:
            program = advance_inputs(program)
        # What ZeRO-3 gathers is what it saved: no more than one bucket ahead.
        ahead = 1 if self.layout.zero == 3 else None
        return overlap(program, limit_count=ahead, small_bytes=SMALL_BYTES)

    def program(self, kind: str, microbatch: int) -> Compiled:
        """See `Unit.program`."""
        first = last = False
        if kind in BACKWARD:
            position = self.count.next(kind)
            first, last = position == 0, position == self.per_update - 1
            if last:
                self.count.done[kind] = 0
        key = (kind, first, last)
        if key not in self._compiled:
            with no_collection():
                program = self.variant(kind, first=first, last=last)
            self._compiled[key] = Compiled(
                run=self.compile(program),
                inputs=program.inputs,
                outputs=program.outputs,
                later=self.programs.later(kind),
            )
        return self._compiled[key]

    def compile(self, program: Program) -> Boxed:
        """A program as a function; a dry run makes it otherwise."""
        return program.compile(self.comm)

    def start_step(self, updates_before: int) -> None:
        """Forget what an interrupted step left.

        Args:
            updates_before: Updates taken in earlier steps.
        """
        self.count.done.clear()
        self.updates_before = updates_before
        if self.evaluates:
            self.active = self._current()

    def _current(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.parameters.values.items()}

    def begin(self, microbatch: int) -> None:
        """See `Unit.begin`."""
        if self.delay:
            version = self.schedule.version(
                self.index, microbatch, updates_before=self.updates_before
            )
            # After a load there are no older weights.
            self.active = self.versions[max(version, min(self.versions))]

    def tensor(self, slot: Slot) -> Any:
        """See `Unit.tensor`."""
        if slot.kind == "parameter":
            # Programs for the model's outputs take whole parameters: with ZeRO-3 they are gathered.
            whole = self.active.get(slot.name)
            return self.parameters.whole_value(slot.name) if whole is None else whole
        if slot.kind in ("buffer", "constant"):
            return self.tensors[slot.name]
        if slot.kind == "gradient":
            return self.parameters.gradients[slot.name]
        if slot.kind == "bucket":
            return self.parameters.held[slot.name].gradients
        if slot.kind == "shard":
            if slot.name in self.layout.gathered:
                return self.parameters.held[self.layout.gathered[slot.name]].parameters
            return self.parameters.held[slot.name].gradients
        if slot.kind == "prologue":
            return self.prologue[slot.name]
        if slot == self.loss_slot:
            return self._loss_tangent()
        raise AssertionError(f"stage {self.index} has nothing for {slot}")

    def _loss_tangent(self) -> Tensor:
        if self._scale is None:
            holder = self.programs.joint.input_nodes()[self.loss_slot]  # type: ignore[index]
            like = holder.meta["val"]
            self._scale = torch.full(
                like.shape, self.scale, dtype=like.dtype, device=self.comm.device
            )
        return self._scale

    def keep(self, slot: Slot, value: Any) -> None:
        """See `Unit.keep`."""
        if slot.kind == "handle":
            self.parameters.held[slot.name].handle = value
        elif slot.kind == "buffer":
            self.tensors[self.buffer_targets[slot.name]] = value
        else:
            raise AssertionError(f"stage {self.index} does not expect {slot}")

    def run_prologue(self, values: Mapping[Slot, Any], numbers: Sequence[Tensor]) -> None:
        """Sum what inputs alone determine over all microbatches."""
        program = self.programs.prologue
        if program is None:
            return
        if "prologue" not in self._sources:
            self._sources["prologue"] = program
            self._run_prologue = self.compile(program)
        totals: dict[str, Tensor] = {}
        for number in numbers:
            arguments = [
                number
                if slot.kind == "microbatch"
                else values[slot]
                if slot in values
                else self.tensor(slot)
                for slot in program.inputs
            ]
            results = self._run_prologue(arguments)
            for slot, value in zip(program.outputs, results, strict=True):
                if slot.name not in totals:
                    totals[slot.name] = value
                elif value.dtype == torch.bool:
                    totals[slot.name] = totals[slot.name] | value
                else:
                    totals[slot.name] = totals[slot.name] + value
        self.prologue = totals

    def reduce(self, update: int) -> None:
        """See `Unit.reduce`."""
        self.parameters.finish_reduce()

    def update(self, update: int) -> None:
        """See `Unit.update`."""
        if self.delay:
            self.parameters.renew()
        self.take_step(self)
        self.updates += 1
        if self.delay:
            self.versions[self.updates] = self._current()
            for old in [v for v in self.versions if v < self.updates - self.delay]:
                del self.versions[old]

    def forget_versions(self) -> None:
        """Keep only the current weights, as after a load."""
        self.active = self._current()
        self.versions = {self.updates: self.active}

    def evaluating(self, programs: StagePrograms) -> StageUnit:
        """This stage with other programs, for the model's outputs."""
        other = copy.copy(self)
        other.programs, other._compiled, other._sources = programs, {}, {}
        other.evaluates, other.delay = True, 0  # with the newest weights
        return other
