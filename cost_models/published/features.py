"""The kernels of a job, from the traced graph of its preset.

A model with one block of each kind is built on the meta device, traced, placed on the job's tensor
ranks as its plan says and taped: what the ops then compute is sorted by the part of the model that
asks for it. Jobs that differ only in depth, pipeline and data parallelism share a trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from autopar.cost_models.implementation import Implementation
from autopar.cost_models.kernels import kernels_of, moves_of, saved_of
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.published import tables
from autopar.cost_models.published.as_run import as_run
from autopar.cost_models.published.jobs import Job
from autopar.cost_models.published.tables import Piece, Shift
from autopar.cost_models.software import implementation_of
from autopar.cost_models.tape.program import split
from autopar.cost_models.tape.stage import Call, StageTask, tape_stage
from autopar.cost_models.work import Move
from autopar.graph.ir import Graph, Node
from autopar.plan.build import make_plan
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import build_decoder
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one rank does for one microbatch: one block of each kind, and the ends.

    Attributes:
        pieces: Its kernels.
        shifts: Its collectives over the tensor ranks.
    """

    pieces: tuple[Piece, ...]
    shifts: tuple[Shift, ...]


def work_of(job: Job) -> Work:
    """The work of one rank of `job`, as its graph implies it."""
    config = shallow(job)

    def work(config: DecoderConfig, tp: int) -> Work:
        return _work(
            config,
            job.micro_batch,
            job.seq // job.cp,
            tp,
            job.sequence_parallel,
            "float32" if job.dtype == "tf32" else "bfloat16",
            implementation_of(job.stack),
        )

    found = work(config, job.tp)
    if job.stack.local_ends and job.tp > 1:
        ends = work(replace(config, vocab=config.vocab // job.tp), 1)
        found = Work(
            pieces=tuple(item for item in found.pieces if item.part not in _OUTER)
            + tuple(item for item in ends.pieces if item.part in _OUTER),
            shifts=tuple(item for item in found.shifts if item.part not in _OUTER),
        )
    return replace(found, pieces=tuple(as_run(found.pieces, found.shifts, job)))


_OUTER = (tables.FIRST, tables.LAST)


def shallow(job: Job) -> DecoderConfig:
    """The job's model with one block of each kind."""
    config = job.config
    kinds = 2 if config.experts and config.dense_layers else 1
    config = replace(config, layers=kinds, dense_layers=min(config.dense_layers, kinds - 1))
    return replace(config, dropout=0.1) if job.stack.dropout else config


@cache
def _work(
    config: DecoderConfig,
    batch: int,
    seq: int,
    tp: int,
    sequence_parallel: bool,
    dtype: str,
    implementation: Implementation,
) -> Work:
    graph = traced(config, batch, seq, dtype)
    mesh = Mesh((("tp", tp),))
    _, sharded = make_plan(graph, mesh, "megatron_sp" if sequence_parallel else "megatron")
    rank = Rank.of(sharded.mesh)
    programs = split(tape_stage(stage_task(sharded, config), rank, implementation))
    cores = {node.name for node in graph.nodes if "scaled_dot_product" in node.op}
    pieces = tuple(
        Piece(
            kernel=replace(kernel, count=count), part=part, core=kernel.node in cores, rotary=rotary
        )
        for kernel in kernels_of(programs)
        for part, rotary, count in _parts(kernel.count)
    )
    modules = {node.name: node.module for node in graph.nodes}
    shifts = tuple(
        Shift(move=replace(move, count=count), part=_home(move, part, modules))
        for move in moves_of(programs, rank)
        for part, _, count in _parts(move.count)
    )
    return Work(pieces=pieces, shifts=shifts)


def _home(move: Move, part: int, modules: Mapping[str, str]) -> int:
    """The part of the model that a collective belongs to: of what embeds tokens, the first one.

    What enters the first block is summed, and its gradient gathered, where the block begins; the
    next blocks do not do that again.
    """
    embeds = modules.get(move.node) in _ENDS and move.phase == "forward"
    gathers = move.phase == "weight_gradient" and move.module.startswith("blocks.0.")
    return tables.FIRST if embeds or gathers else part


def _parts(count: int) -> Iterator[tuple[int, bool, int]]:
    """What a count with digits stands for: part, whether it rotates, and how often."""
    for rotary, digits in ((False, _DIGITS), (True, _ROTARY_DIGITS)):
        for part, digit in digits.items():
            if count // digit % _BASE:
                yield part, rotary, count // digit % _BASE


def _digit(node: Node, config: DecoderConfig) -> int:
    """What a node counts for."""
    part = part_of(node.module, config)
    inside = node.module.endswith(".attention") and config.positions == "rope"
    rotates = inside and node.op.split(".")[1] in _ROTARY
    return _ROTARY_DIGITS[part] if rotates else _DIGITS[part]


_ENDS = ("tokens", "places", "drop")
"""Modules before the blocks."""
_BASE = 10**4
_DIGITS = {
    tables.FIRST: 1, tables.BLOCK: _BASE, tables.SPARSE: _BASE**2, tables.LAST: _BASE**3,
}  # fmt: skip
"""A node counts for its part's digit: equal kernels are summed, and digits tell them apart."""
_ROTARY_DIGITS = {tables.BLOCK: _BASE**4, tables.SPARSE: _BASE**5}
"""The same of nodes that rotate queries and keys."""
_ROTARY = frozenset((
    "arange", "neg", "div", "pow", "mul", "cos", "sin", "to", "slice", "sub", "add", "cat",
))  # fmt: skip
"""Ops of a rotary embedding; what else the attention module itself does are other ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes that forward leaves for backward on one rank, for one microbatch.

    Attributes:
        block: Of one block.
        scores: What of it is the core of attention: probabilities and masks.
        inputs: Of the input of a block.
        first: Of what comes before the blocks.
    """

    block: float
    scores: float
    inputs: float
    first: float


@cache
def activations_of(job: Job) -> Activations:
    """What the graph of a job saves for backward."""
    config = shallow(job)
    dtype = "float32" if job.dtype == "tf32" else "bfloat16"
    seq = job.seq // job.cp
    graph = traced(config, job.micro_batch, seq, dtype)
    strategy = "megatron_sp" if job.sequence_parallel else "megatron"
    _, sharded = make_plan(graph, Mesh((("tp", job.tp),)), strategy)
    implementation = replace(implementation_of(job.stack), regather=job.sequence_parallel)
    task = stage_task(sharded, config)
    calls = tuple(replace(call, count=1) for call in task.calls)
    programs = split(tape_stage(replace(task, calls=calls), Rank.of(sharded.mesh), implementation))
    cores = {node.name for node in graph.nodes if "scaled_dot_product" in node.op}
    parts = dict.fromkeys(_DIGITS, 0.0)
    scores = 0.0
    for item in saved_of(programs):
        size = float(item.size_bytes * item.count)
        parts[part_of(item.module, config)] += size
        if item.node in cores and job.stack.attention == "unfused":
            scores += size
    kinds = int(parts[tables.BLOCK] > 0) + int(parts[tables.SPARSE] > 0)
    width = 4 if dtype == "float32" else 2
    inputs = job.micro_batch * seq * config.hidden * width
    return Activations(
        block=(parts[tables.BLOCK] + parts[tables.SPARSE]) / max(kinds, 1),
        scores=scores,
        inputs=inputs / (job.tp if job.sequence_parallel else 1),
        first=parts[tables.FIRST],
    )


@cache
def traced(config: DecoderConfig, batch: int, seq: int, dtype: str) -> Graph:
    """The canonical graph of a decoder for a batch."""
    from autopar.trace import trace  # imports torch, which reading rows does not need

    config = replace(config, context=max(config.context, seq))
    model, args, kwargs = build_decoder(config, batch=batch, seq=seq, dtype=dtype)
    return trace(model, args, kwargs, None).graph


def stage_task(sharded: ShardedGraph, config: DecoderConfig) -> StageTask:
    """All of a sharded graph as one stage, each node counting for its part."""
    graph, pairs = sharded.graph, sharded.pairs()
    parts = zip(graph.nodes, sharded.factors.rules, sharded.choices, sharded.calls, strict=True)
    loss = graph.outputs[0].value
    assert loss is not None, "a decoder returns its loss"
    return StageTask(
        index=0,
        calls=tuple(
            Call(
                node=node,
                rule=rule,
                choices=choices,
                placement=placement,
                count=_digit(node, config),
            )
            for node, rule, choices, placement in parts
        ),
        spec=graph.spec,
        pair=pairs.__getitem__,
        kinds={item.value.name: item.kind for item in graph.inputs},
        loss=(loss, pairs[loss]),
    )


def part_of(module: str, config: DecoderConfig) -> int:
    """The part of the model that the module at path `module` belongs to."""
    if module.startswith("blocks."):
        place = int(module.split(".")[1])
        return tables.SPARSE if config.experts and place >= config.dense_layers else tables.BLOCK
    return tables.FIRST if module in _ENDS else tables.LAST
