"""What each stage of a plan asks of a rank: work, memory of its programs, parameters, messages.

`stage_models` tapes every distinct stage once: stages of the same layers, placed alike, share one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.cost_models.buckets import (
    FIRST_BYTES,
    LIMIT_BYTES,
    Bucket,
    LocalParameter,
    local_parameter,
    make_buckets,
    sync_moves,
)
from autopar.cost_models.events import schedule_of
from autopar.cost_models.handover import Passing, passing_of
from autopar.cost_models.implementation import Implementation
from autopar.cost_models.kernels import kernels_of, moves_of, saved_of
from autopar.cost_models.layout import KEPT, Layout, Placement
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.tape.liveness import Summary, summarise_stage
from autopar.cost_models.tape.program import Programs, split
from autopar.cost_models.tape.stage import Call, StageTask, tape_stage
from autopar.cost_models.tape.zero import bucket_bytes
from autopar.cost_models.work import Move, StageWork
from autopar.graph.blocks import Block
from autopar.graph.ir import ITEM_BYTES, Graph
from autopar.plan.plan import Plan
from autopar.plan.stages import Stages
from autopar.plan.strategies import split_axes
from autopar.schedules.make import SCHEDULES
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import PARTIAL, Pair
from autopar.sharding.sharded import replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value that passes between stages.

    Attributes:
        value: Its name.
        source: The stage that makes it.
        target: A stage that uses it.
        size_bytes: Local bytes.
        dtype: Its dtype.
        gradient: Whether its gradient comes back.
    """

    value: str
    source: int
    target: int
    size_bytes: int
    dtype: str
    gradient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """One stage on one rank.

    Stages of equal layers, placed alike, share all but messages; names are then those of the first.

    Attributes:
        index: Number of the stage.
        work: What it computes, moves and keeps.
        summaries: What a call of each of its programs does to live bytes, by action kind.
        parameters: Its parameters.
        buckets: How gradients lie together.
        messages: What it receives from and sends to other stages.
        passing: Which memory it passes on to other stages, and gets from them.
        buckets_live: Bytes of buckets live at each step of a program, where ZeRO makes them there.
        variants: Summaries of programs while others hold what they take, once asked for.
        version_bytes: Buffers that forward replaces and backward reads: each microbatch under way
            keeps the version that it has seen.
        programs: Its programs on shapes.
    """

    index: int
    work: StageWork
    summaries: Mapping[str, Summary]
    parameters: tuple[LocalParameter, ...]
    buckets: tuple[Bucket, ...]
    messages: tuple[Message, ...]
    passing: Passing = field(repr=False)
    buckets_live: Mapping[str, Sequence[int]] = field(repr=False)
    variants: dict[object, Summary] = field(repr=False, compare=False)
    version_bytes: int
    programs: Programs = field(repr=False)


def stage_models(
    placement: Placement,
    plan: Plan,
    loss: str | None,
    implementation: Implementation,
    *,
    again: frozenset[str] | None = None,
    coordinate: Sequence[int] | None = None,
    bucket_bytes: tuple[int, int] = (FIRST_BYTES, LIMIT_BYTES),
) -> tuple[StageModel, ...]:
    """All stages of a plan.

    Args:
        placement: How the plan places every value.
        plan: The plan.
        loss: Name of the loss; None for a graph without.
        implementation: How ops are carried out.
        again: Names of the nodes that backward computes again; by default what the plan's patterns
            say, which takes time to find out.
        coordinate: Place of the rank on the mesh of the sharded graph; by default that with the
            largest parts.
        bucket_bytes: Size at which the first, and any other, bucket of gradients is full.
    """
    return _Stages(
        placement, plan, loss, implementation, Rank.of(placement.sharded.mesh, coordinate),
        bucket_bytes, again,
    ).all()  # fmt: skip


def single_stage(
    placement: Placement,
    plan: Plan,
    loss: str | None,
    implementation: Implementation,
    again: frozenset[str] | None = None,
) -> tuple[StageTask, Mapping[int, int]]:
    """What a plan of one stage computes, ready to be taped.

    Args:
        placement: How the plan places every value.
        plan: The plan.
        loss: Name of the loss; None for a graph without.
        implementation: How ops are carried out.
        again: Names of the nodes that backward computes again, if that is known: copies of a block
            that differ in it are not folded. Those of the plan by default.

    Returns:
        The task, and for each node that is folded away, by index, the one that stands for it.
    """
    rank = Rank.of(placement.sharded.mesh)
    made = _Stages(placement, plan, loss, implementation, rank, (FIRST_BYTES, LIMIT_BYTES), again)
    folded = made.fold(made.stages.nodes[0])
    return made.task(0, folded), folded.stand_in


@dataclass(slots=True)
class _Taped:
    programs: Programs
    summaries: dict[str, Summary]
    work: StageWork
    parameters: tuple[LocalParameter, ...]
    buckets: tuple[Bucket, ...]
    buckets_live: dict[str, Sequence[int]]
    variants: dict[object, Summary] = field(default_factory=dict)


@dataclass(slots=True)
class _Folded:
    """Nodes of a stage without the copies of blocks left out.

    Attributes:
        counts: For each node that stays, by index, how many it stands for.
        stand_in: Node of a copy left out, by index, to the one that stands for it.
        alias: Value that a copy left out hands on to the one that stands for it.
        like: Parameter of a copy left out to the one that stands for it.
    """

    counts: dict[int, int]
    stand_in: dict[int, int] = field(default_factory=dict)
    alias: dict[str, str] = field(default_factory=dict)
    like: dict[str, str] = field(default_factory=dict)


class _Stages:
    def __init__(
        self,
        placement: Placement,
        plan: Plan,
        loss: str | None,
        implementation: Implementation,
        rank: Rank,
        bucket_bytes: tuple[int, int],
        again: frozenset[str] | None = None,
    ) -> None:
        self.placement, self.plan, self.loss, self.rank = placement, plan, loss, rank
        self.layout: Layout = placement.layout
        self.graph: Graph = self.layout.graph
        self.implementation, self.bucket_bytes = implementation, bucket_bytes
        self.stages: Stages = self.layout.stages(plan.num_stages, plan.pipeline.cuts)
        self.again = self.layout.recompute(plan.recompute) if again is None else again
        self.splits = SCHEDULES[plan.pipeline.schedule].splits_backward
        self.places = schedule_of(plan).stage_ranks
        self.zero_axes = frozenset(
            sub
            for name, size in plan.mesh
            if name in plan.zero.axes
            for sub in split_axes(Mesh(((name, size),)))[0].names
        )
        self.known: dict[object, _Taped] = {}
        self.sizes: dict[str, int] = {}

    def all(self) -> tuple[StageModel, ...]:
        return tuple(self.stage(index) for index in range(self.stages.count))

    def stage(self, index: int) -> StageModel:
        folded = self.fold(self.stages.nodes[index])
        task = self.task(index, folded)
        key = self.signature(task)
        taped = self.known.get(key)
        if taped is None:
            taped = self.known[key] = self.tape(task, folded)
        messages = self.messages(index)
        moves = (*taped.work.moves, *self.sends(index, messages))
        return StageModel(
            index=index,
            work=replace(taped.work, stage=index, moves=moves),
            summaries=taped.summaries,
            parameters=taped.parameters,
            buckets=taped.buckets,
            messages=messages,
            passing=passing_of(task, taped.programs, self.stages.boundaries, self.message_bytes),
            buckets_live=taped.buckets_live,
            variants=taped.variants,
            version_bytes=self.version_bytes(taped.programs),
            programs=taped.programs,
        )

    def tape(self, task: StageTask, folded: _Folded) -> _Taped:
        taped = tape_stage(task, self.rank, self.implementation)
        programs = split(taped, self.again, weight=self.splits)
        parameters = self.parameters(task.index, folded, programs)
        buckets = make_buckets(
            parameters, self.uses(task.index), self.plan.zero.stage, self.rank,
            first_bytes=self.bucket_bytes[0], limit_bytes=self.bucket_bytes[1],
        )  # fmt: skip
        moves = (
            *moves_of(programs, self.rank),
            *sync_moves(parameters, buckets, self.rank, self.plan.pipeline.axis),
        )
        work = StageWork(
            stage=task.index,
            kernels=kernels_of(programs),
            moves=moves,
            saved=saved_of(programs),
        )
        live = self.buckets_live(programs, buckets)
        summaries = summarise_stage(programs, live)
        return _Taped(programs, summaries, work, parameters, buckets, live)

    def buckets_live(
        self, programs: Programs, buckets: Sequence[Bucket]
    ) -> dict[str, Sequence[int]]:
        """Bytes of the buckets of ZeRO during each program."""
        if self.plan.zero.stage < 2:
            return {}
        rows = self.implementation.device == "cpu"
        return {
            kind: bucket_bytes(programs, kind, buckets, exchanges_rows=rows)
            for kind in programs.parts
        }

    # What a stage computes

    def task(self, index: int, folded: _Folded) -> StageTask:
        graph, stages, placement = self.graph, self.stages, self.placement
        sharded, indexes, members = placement.sharded, self.layout.indexes, self.layout.members
        calls = []
        for place, count in folded.counts.items():
            like, member = indexes[place], members.get(place)
            calls.append(
                Call(
                    node=graph.nodes[place],
                    rule=sharded.factors.rules[like],
                    choices=sharded.choices[like],
                    placement=sharded.calls[like],
                    count=count,
                    copy=member.copy if member is not None else -1,
                )
            )
        mine = set(stages.outputs[index])
        whole = replicated(sharded.mesh)
        buffers = dict.fromkeys(
            out.value
            for out in graph.outputs
            if out.kind == "buffer" and out.value is not None and out.value in mine
        )
        return StageTask(
            index=index,
            calls=calls,
            spec=graph.spec,
            pair=placement.pair,
            kinds=self.layout.kinds,
            arriving=tuple(item.value for item in stages.received(index)),
            leaving=tuple(item.value for item in stages.sent(index)),
            loss=self.loss_of(index),
            buffers=tuple((name, whole) for name in buffers),
            alias=folded.alias,
            like=folded.like,
        )

    def loss_of(self, index: int) -> tuple[str, Pair] | None:
        """The loss, which may stay a partial sum over microbatches."""
        if self.loss is None or self.stages.owner.get(self.loss) != index:
            return None
        forward = list(self.placement.pair(self.loss).forward)
        if self.rank.time is not None:
            forward[self.rank.time] = PARTIAL
        return self.loss, Pair(tuple(forward), replicated(self.placement.sharded.mesh).gradient)

    def fold(self, nodes: Sequence[int]) -> _Folded:
        """Of copies of a block in a row the first, the second and the last, that are whole."""
        layout = self.layout
        folded = _Folded(dict.fromkeys(nodes, 1))
        sizes: dict[int, dict[int, int]] = {}
        for node in nodes:
            member = layout.members.get(node)
            if member is not None:
                copies = sizes.setdefault(member.block, {})
                copies[member.copy] = copies.get(member.copy, 0) + 1
        for number, copies in sizes.items():
            block = layout.blocks[number]
            whole = [copy for copy, size in sorted(copies.items()) if size == block.size]
            for run in self.runs(block, whole):
                second, last = run[1], run[-1]
                for place in block.nodes[second]:
                    folded.counts[place] = len(run) - 2
                for copy in run[2:-1]:
                    for place in block.nodes[copy]:
                        del folded.counts[place]
                    folded.stand_in.update(zip(block.nodes[copy], block.nodes[second], strict=True))
                    folded.like.update(zip(block.inputs[copy], block.inputs[second], strict=True))
                folded.alias.update(
                    zip(block.outputs[last - 1], block.outputs[second], strict=True)
                )
        return folded

    def runs(self, block: Block, copies: Sequence[int]) -> list[list[int]]:
        """Runs of more than three copies in a row that backward treats alike."""
        nodes = self.graph.nodes
        found: list[list[int]] = []
        before: tuple[bool, ...] = ()
        for copy in copies:
            mine = tuple([nodes[i].name in self.again for i in block.nodes[copy]])
            if not found or before != mine or found[-1][-1] != copy - 1:
                found.append([])
            found[-1].append(copy)
            before = mine
        return [run for run in found if len(run) > KEPT]

    def signature(self, task: StageTask) -> object:
        """Equal for stages whose programs are equal but for names."""
        layout, again, names = self.layout, self.again, self.layout.names
        number: dict[str, int] = {}

        def rename(name: str) -> int:
            name = task.alias.get(name, name)
            return number.setdefault(name, len(number))

        body = []
        for call in task.calls:
            node = call.node
            operands = tuple([rename(name) for name in node.operands])
            for value in node.outputs:
                rename(value.name)
            like = layout.indexes[layout.positions[node.name]]
            body.append((like, call.count, node.name in again, operands))
        ends = (task.arriving, task.leaving, tuple([name for name, _ in task.buffers]))
        roles = tuple(
            [tuple([(rename(name), names.get(name, name)) for name in group]) for group in ends]
        )
        shared = tuple(
            [
                (names.get(name, name), self.stages.shared[name])
                for name in self.stages.inputs[task.index]
                if name in self.stages.shared
            ]
        )
        return tuple(body), roles, task.loss is not None, shared

    # What a stage holds and passes on

    def parameters(
        self, index: int, folded: _Folded, programs: Programs
    ) -> tuple[LocalParameter, ...]:
        names, shared = self.layout.names, self.stages.shared
        known: dict[object, LocalParameter] = {}
        found = []
        for name in self.stages.inputs[index]:
            if self.layout.kinds[name] != "parameter":
                continue
            made_by = programs.made_by.get(folded.like.get(name, name), "")
            users = shared.get(name, (index,))
            key = (names.get(name, name), made_by, users)
            item = known.get(key)
            if item is None:
                item = known[key] = local_parameter(
                    name, self.graph.spec(name), self.placement.pair(name), self.rank,
                    made_by=made_by, zero_axes=self.zero_axes, users=len(users),
                    places=len({self.places[user] for user in users}),
                )  # fmt: skip
            found.append(item if item.name == name else item.renamed(name))
        return tuple(found)

    def uses(self, index: int) -> list[str]:
        """Parameters of a stage in the order of their first use in the graph."""
        order = self.layout.uses
        mine = self.stages.inputs[index]
        return sorted((name for name in mine if name in order), key=order.__getitem__)

    def messages(self, index: int) -> tuple[Message, ...]:
        """Values that come to, or leave, a stage."""
        found = []
        for item in self.stages.boundaries:
            for target in item.targets:
                if index in (item.source, target):
                    found.append(
                        Message(
                            value=item.value,
                            source=item.source,
                            target=target,
                            size_bytes=self.message_bytes(item.value),
                            dtype=self.graph.spec(item.value).dtype,
                            gradient=item.gradient,
                        )
                    )
        return tuple(found)

    def message_bytes(self, value: str) -> int:
        """Local bytes of a value where it is made."""
        size = self.sizes.get(value)
        if size is None:
            spec, pair = self.graph.spec(value), self.placement.pair(value)
            shape = self.rank.grid.local_shape(spec.shape, pair.forward)
            size = self.sizes[value] = math.prod(shape) * ITEM_BYTES[spec.dtype]
        return size

    def sends(self, index: int, messages: Sequence[Message]) -> list[Move]:
        """What a stage sends to stages of other ranks, for one microbatch."""
        found = []
        for item in messages:
            if self.places[item.source] == self.places[item.target]:
                continue
            ahead = item.source == index
            if ahead or item.gradient:
                found.append(
                    Move(
                        kind="send",
                        size_bytes=item.size_bytes,
                        axes=(self.plan.pipeline.axis,),
                        group=2,
                        phase="forward" if ahead else "input_gradient",
                        node=item.value,
                        dtype=item.dtype,
                    )
                )
        return found

    def version_bytes(self, programs: Programs) -> int:
        replaced = self.layout.replaced
        return sum(memory.size_bytes for memory in programs.buffers if memory.name in replaced)
