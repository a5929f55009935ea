"""What a plan decides beside placements: stages, who holds them, their schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from autopar.plan.plan import Plan
from autopar.plan.stages import Stages, assign_stages
from autopar.plan.strategies import split_axes
from autopar.runtime.execute import Boundary
from autopar.runtime.groups import copied_axes, summed_axes, used_axes
from autopar.runtime.mesh import MeshContext
from autopar.runtime.parameters import Item
from autopar.runtime.unit import StageTask
from autopar.schedules.actions import Action, Schedule, only
from autopar.schedules.communicate import add_communication
from autopar.schedules.make import make_schedule
from autopar.sharding.mesh import MICROBATCH, Mesh
from autopar.sharding.placement import PARTIAL, REPLICATE, Pair
from autopar.sharding.sharded import ShardedGraph, replicated


def device_mesh(mesh: Mesh, pipeline: str) -> Mesh:
    """The axes of all ranks: every axis in prime sub-axes, but that of the pipeline whole."""
    axes: list[tuple[str, int]] = []
    for name, size in mesh.axes:
        axes += [(name, size)] if name == pipeline else split_axes(Mesh(((name, size),)))[0].axes
    return Mesh(tuple(axes))


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Stages and schedule of a sharded graph.

    Attributes:
        sharded: The graph.
        loss: Name of the loss value, None if there is none.
        stages: The cut.
        schedule: The schedule, with messages.
        devices: Axes of all ranks.
        axis: The pipeline's axis, None when there is one stage per rank everywhere.
        zero: ZeRO stage.
        zero_axes: Sub-axes over which it divides.
        recompute: Graph nodes whose results backward computes again.
    """

    sharded: ShardedGraph
    loss: str | None
    stages: Stages
    schedule: Schedule
    devices: Mesh
    axis: str | None = None
    zero: int = 0
    zero_axes: tuple[str, ...] = ()
    recompute: frozenset[str] = frozenset()
    _evaluation: list[Schedule] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def single(cls, sharded: ShardedGraph, loss: str | None) -> Execution:
        """One stage, one microbatch."""
        mesh = sharded.mesh
        count = dict(mesh.axes).get(MICROBATCH, 1)
        return cls(
            sharded=sharded,
            loss=loss,
            stages=assign_stages(sharded.graph, sharded.factors, 1),
            schedule=make_schedule("gpipe", 1, count),
            devices=Mesh(tuple(axis for axis in mesh.axes if axis[0] != MICROBATCH)),
        )

    @classmethod
    def of_plan(cls, plan: Plan, sharded: ShardedGraph, loss: str | None) -> Execution:
        """What `plan` says.

        Raises:
            PlanError: If the stages or the schedule cannot be.
        """
        from autopar.plan.recompute import resolve_recompute

        graph, part = sharded.graph, plan.pipeline
        mesh = plan.device_mesh
        axis = part.axis if part.axis in mesh.names else None
        stages = assign_stages(
            graph, sharded.factors, plan.num_stages, part.cuts or None, where="plan: pipeline.cuts"
        )
        schedule = make_schedule(
            part.schedule,
            mesh.axis_size(axis) if axis else 1,
            part.microbatches,
            chunks=part.chunks,
            update_every=part.update_every or None,
            vertical_sync=part.vertical_sync,
        )
        edges = stages.edges()
        schedule = add_communication(
            schedule,
            {(edge.source, edge.target) for edge in edges},
            {(edge.source, edge.target) for edge in edges if edge.gradient},
        )
        devices = device_mesh(mesh, part.axis)
        fine = {
            name: split_axes(Mesh(((name, size),)))[0].names
            for name, size in mesh.axes
            if name in plan.zero.axes
        }
        return cls(
            sharded=sharded,
            loss=loss,
            stages=stages,
            schedule=schedule,
            devices=devices,
            axis=axis,
            zero=plan.zero.stage,
            zero_axes=tuple(sub for name in plan.zero.axes for sub in fine[name]),
            recompute=resolve_recompute(graph, plan.recompute),
        )

    @property
    def asynchronous(self) -> bool:
        """Whether weights are updated while later microbatches are under way."""
        return self.schedule.updates > 1 or any(self.schedule.delays)

    @property
    def splits_backward(self) -> bool:
        """Whether backward is run in two parts."""
        return any(action.kind == "I" for row in self.schedule for action in row)

    # Who holds what

    def pipeline_rank(self, rank: int) -> int:
        """Place of a rank in its pipeline."""
        if self.axis is None:
            return 0
        return self.devices.coordinate(rank)[self.devices.names.index(self.axis)]

    def _at(self, rank: int, pipeline_rank: int) -> int:
        """The rank with the coordinates of `rank` but another place in the pipeline."""
        if self.axis is None:
            return rank
        here = list(self.devices.coordinate(rank))
        here[self.devices.names.index(self.axis)] = pipeline_rank
        return self.devices.rank(tuple(here))

    def stages_of(self, context: MeshContext) -> tuple[int, ...]:
        """Stages that this rank holds."""
        return self.schedule.stages_of(self.pipeline_rank(context.comm.rank))

    def rank_of(self, stage: int, context: MeshContext) -> int:
        """The rank that holds `stage` for this rank's other coordinates."""
        return self._at(context.comm.rank, self.schedule.stage_ranks[stage])

    def pipeline_ranks(self, context: MeshContext) -> tuple[int, ...]:
        """All ranks of this rank's pipeline."""
        if self.axis is None:
            return (context.comm.rank,)
        return self.devices.ranks_along((self.axis,), context.comm.rank)

    def users(self, name: str) -> tuple[int, ...]:
        """Stages that use a parameter."""
        if name in self.stages.shared:
            return self.stages.shared[name]
        return tuple(s for s in range(self.stages.count) if name in self.stages.inputs[s])

    def parameters_of(self, stage: int) -> tuple[str, ...]:
        """Parameters that a stage uses."""
        return self.stages.inputs_of(stage, self.sharded.graph, "parameter")

    def items(self, stage: int, context: MeshContext) -> tuple[Item, ...]:
        """The parameters that a stage uses, as this rank holds them."""
        targets = {item.value.name: item.target for item in self.sharded.graph.inputs}
        return tuple(self._item(name, targets[name], context) for name in self.parameters_of(stage))

    def _item(self, name: str, fqn: str, context: MeshContext) -> Item:
        spec = self.sharded.graph.spec(name)
        pair = self.sharded.inputs[name]
        axes = summed_axes(pair, context.time)
        users = self.users(name)
        divided = tuple(axis for axis in axes if context.mesh.names[axis] in self.zero_axes)
        rest = tuple(axis for axis in axes if axis not in divided)
        return Item(
            name=name,
            fqn=fqn,
            shape=context.grid.local_shape(spec.shape, pair.forward),
            dtype=getattr(torch, spec.dtype),
            trainable=spec.requires_grad,
            ranks=self.ranks_over(users, context, axes),
            zero_ranks=context.ranks(divided),
            rest_ranks=context.ranks(rest),
            alone=(context.comm.rank,),
            shared=len(users) > 1,
        )

    def shared_names(self) -> tuple[str, ...]:
        """Trainable parameters that several stages use."""
        spec = self.sharded.graph.spec
        return tuple(sorted(name for name in self.stages.shared if spec(name).requires_grad))

    def ranks_over(
        self, users: tuple[int, ...], context: MeshContext, axes: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Ranks that hold a parameter of the stages `users` and differ only along `axes`."""
        names = tuple(context.mesh.names[axis] for axis in axes)
        return self._ranks_over(users, context.comm.rank, names)

    def _ranks_over(
        self, users: tuple[int, ...], rank: int, names: tuple[str, ...]
    ) -> tuple[int, ...]:
        alike = self.devices.ranks_along(names, rank)
        if len(users) == 1:
            return alike
        places = {self.schedule.stage_ranks[stage] for stage in users}
        return tuple(sorted({self._at(other, place) for other in alike for place in places}))

    def prepare_groups(self, context: MeshContext) -> None:
        """Create every group and channel that this plan needs, in one order everywhere."""
        names, ranks = context.mesh.names, range(self.devices.size)
        divided = tuple(axis for axis, name in enumerate(names) if name in self.zero_axes)
        groups: list[tuple[int, ...]] = []
        for axes in sorted(used_axes(self.sharded, context.time, divided)):
            groups += self.devices.groups(tuple(names[axis] for axis in axes))
        if self.axis is not None:
            groups += self.devices.groups((self.axis,))
        for name in self.stages.shared:
            pair, users = self.sharded.inputs[name], self.stages.shared[name]
            for axes in summed_axes(pair, context.time), copied_axes(pair, context.time):
                along = tuple(names[axis] for axis in axes)
                groups += [self._ranks_over(users, rank, along) for rank in ranks]
        channels: set[tuple[int, int]] = set()
        for edge in self.stages.edges():
            ends = (self.schedule.stage_ranks[s] for s in (edge.source, edge.target))
            source, target = ends
            if source != target:
                ahead = {(self._at(rank, source), self._at(rank, target)) for rank in ranks}
                channels |= ahead
                if edge.gradient:
                    channels |= {(to, sender) for sender, to in ahead}
        context.comm.prepare(list(dict.fromkeys(groups)), sorted(channels))

    # What a stage does

    @property
    def loss_stage(self) -> int:
        """The stage that makes the loss."""
        assert self.loss is not None
        return self.stages.owner[self.loss]

    def loss_pair(self, context: MeshContext) -> Pair:
        """Placement of the loss: it may stay a partial sum, backward need not wait for it."""
        assert self.loss is not None
        forward = list(self.sharded.pairs()[self.loss].forward)
        if context.time is not None:
            forward[context.time] = PARTIAL
        return Pair(tuple(forward), replicated(self.sharded.mesh).gradient)

    def boundaries(self, context: MeshContext) -> tuple[Boundary, ...]:
        """What passes between stages, as ranks with this one's coordinates hold it."""
        pairs = self.sharded.pairs()
        found = []
        for item in self.stages.boundaries:
            spec = self.sharded.graph.spec(item.value)
            found.append(
                Boundary(
                    name=item.value,
                    source=item.source,
                    targets=item.targets,
                    shape=context.grid.local_shape(spec.shape, pairs[item.value].forward),
                    dtype=getattr(torch, spec.dtype),
                    differentiable=item.gradient,
                )
            )
        return tuple(found)

    def task(
        self, index: int, context: MeshContext, buffers: Mapping[str, str], *, train: bool = True
    ) -> StageTask:
        """What stage `index` computes.

        Args:
            index: The stage.
            context: The rank.
            buffers: New value of each buffer that forward writes, by FQN.
            train: For a training step; else for the model's outputs only.
        """
        everything = self.boundaries(context)
        whole = replicated(self.sharded.mesh)
        mine = set(self.stages.outputs[index])
        common = {
            "index": index,
            "arriving": tuple(item for item in everything if index in item.targets),
            "leaving": tuple(item for item in everything if item.source == index),
        }
        if not train:
            wanted = dict.fromkeys(
                out.value
                for out in self.sharded.graph.outputs
                if out.kind == "user" and out.value in mine
            )
            outputs = tuple((str(name), self.output_pair(str(name), context)) for name in wanted)
            return StageTask(**common, outputs=outputs)  # type: ignore[arg-type]
        new = dict.fromkeys(value for value in buffers.values() if value in mine)
        return StageTask(
            **common,  # type: ignore[arg-type]
            loss=(self.loss, self.loss_pair(context))
            if self.loss is not None and self.loss_stage == index
            else None,
            buffers=tuple((name, whole) for name in new),
            splits_backward=self.splits_backward,
            recompute=self.recompute,
        )

    def output_pair(self, name: str, context: MeshContext) -> Pair:
        """An output's placement: whole, but for the microbatch axis, which is put together."""
        pair = self.sharded.pairs()[name]
        forward = [
            pair.forward[axis] if axis == context.time else REPLICATE
            for axis in range(len(pair.forward))
        ]
        return Pair(tuple(forward), replicated(self.sharded.mesh).gradient)

    def actions(self, context: MeshContext) -> Sequence[Action]:
        """What this rank does in a step."""
        return self.schedule.actions[self.pipeline_rank(context.comm.rank)]

    def evaluation(self, context: MeshContext) -> Sequence[Action]:
        """What this rank does for the model's outputs."""
        if not self._evaluation:
            self._evaluation.append(only(self.schedule, ("F", "SEND_F", "RECV_F")))
        return self._evaluation[0].actions[self.pipeline_rank(context.comm.rank)]
