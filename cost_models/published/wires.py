"""Collectives of many jobs as columns: the prices of `autopar.cost_models.collectives`, refittable.

The seconds of a collective by one algorithm are a fixed part and bytes over the slower of link and
network, each inversely proportional to its share of the bandwidth. So every collective of a job is
asked for once, at full bandwidth, and a fit only divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.cluster import ClusterSpec, NodeGroup
from autopar.cost_models.collectives import ALGORITHMS, LIBRARY, Kind, price
from autopar.cost_models.hardware import load_device
from autopar.cost_models.published import tables
from autopar.cost_models.published.jobs import Job
from autopar.cost_models.published.tables import Shift
from autopar.cost_models.spans import Span, axis_spans, send_spans
from autopar.sharding.mesh import Mesh

if TYPE_CHECKING:
    from autopar.cost_models.published.tables import Floats

(
    FORWARD, BACKWARD, SPARSE_FORWARD, SPARSE_BACKWARD, FIRST, LAST, EXCHANGE, ROUTE, GATHER,
    REDUCE, SUM, SPREAD, BROADCAST, SEND,
) = range(14)  # fmt: skip
"""What a collective is for: tensor collectives of a block and of the ends, keys of context ranks,
tokens to experts, weights and gradients of ZeRO-3 per microbatch, gradients and weights per step,
weights of InternEvo's ranks one after the other, a message to the next stage."""
SLOTS = SEND + 1
BUCKET_BYTES = 1e9
"""Bytes of gradients that are summed at once (DeepSpeed's ``reduce_bucket_size``: 5e8 elements)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A collective that a job does.

    Attributes:
        slot: What it is for.
        kind: The collective.
        size_bytes: Payload, as torch.distributed counts it.
        axes: Axes of the job's mesh; those of a message are the pipeline's.
        count: How often.
    """

    slot: int
    kind: Kind
    size_bytes: float
    axes: tuple[str, ...]
    count: float = 1.0


def cluster_of(job: Job) -> ClusterSpec:
    """The machines of a job."""
    found = job.hardware
    usual = load_device(found.device).node
    per_node = min(found.per_node, job.gpus)
    cards = max(1, round(usual.nics * per_node / usual.devices))
    network = found.network_bytes_per_s * per_node / found.per_node
    figures = {"node.nic_gbit_per_s": network * 8e-9 / cards}
    if found.domain > found.per_node:
        figures["link.domain_devices"] = found.domain
    group = NodeGroup(
        device=found.device,
        devices_per_node=per_node,
        nodes=-(-job.gpus // per_node),
        figures=tuple(figures.items()),
        source=f"row {job.id}",
    )
    return ClusterSpec(groups=(group,))


def mesh_of(job: Job) -> Mesh:
    """The ranks of a job: tensor ranks are neighbours, stages farthest apart.

    The data axis is cut where a shard group, or the ranks that share experts, end.
    """
    inner = job.zero_group or job.ep
    inner = inner if inner and job.dp % inner == 0 else 1
    axes = (("pp", job.pp), ("do", job.dp // inner), ("di", inner), ("cp", job.cp), ("tp", job.tp))
    return Mesh(axes)


def asks_of(job: Job, shifts: Iterable[Shift]) -> Iterator[Ask]:
    """Everything that a job communicates."""
    for shift in shifts:
        yield _of_tensor(shift, job)
    width = 4 if job.dtype == "tf32" else 2
    activation = float(job.micro_batch * (job.seq // job.cp) * job.config.hidden * width)
    if job.cp > 1:
        heads = job.config.heads if job.stack.eager_ring else job.config.kv_heads
        features = 2 * heads * job.config.head_dim / job.tp
        keys = job.micro_batch * job.seq * features * width
        yield Ask(slot=EXCHANGE, kind="all_gather", size_bytes=keys, axes=("cp",))
    if job.ep > 1:
        routed = activation * max(job.config.top_k, 0) / (job.tp if job.sequence_parallel else 1)
        yield Ask(slot=ROUTE, kind="all_to_all", size_bytes=routed, axes=("di",))
    if job.pp > 1:
        whole = not (job.sequence_parallel or job.stack.scatter_messages)
        sent = activation / (1 if whole else job.tp)
        yield Ask(slot=SEND, kind="send", size_bytes=sent, axes=("pp",))
        if job.tp > 1 and job.stack.scatter_messages and not job.sequence_parallel:
            yield Ask(slot=SEND, kind="all_gather", size_bytes=activation, axes=("tp",))
    if job.dp * job.cp > 1:
        yield from _of_data(job, width)


def _of_tensor(shift: Shift, job: Job) -> Ask:
    move = shift.move
    gathers = move.kind == "all_gather" and shift.part in (tables.BLOCK, tables.SPARSE)
    narrow = gathers and job.dtype in ("fp8", "fp4") and job.stack.low_gather
    backward = move.phase in ("input_gradient", "weight_gradient")
    slots = {
        tables.BLOCK: BACKWARD if backward else FORWARD,
        tables.SPARSE: SPARSE_BACKWARD if backward else SPARSE_FORWARD,
        tables.FIRST: FIRST,
        tables.LAST: LAST,
    }
    return Ask(
        slot=slots[shift.part], kind=move.kind, axes=("tp",), count=move.count,
        size_bytes=move.size_bytes / (2 if narrow else 1),
    )  # fmt: skip


def _of_data(job: Job, width: int) -> Iterator[Ask]:
    """Gradients and weights over data and context ranks."""
    layers, block, outer = local_params(job)
    stack, low = job.stack, job.dtype in ("fp8", "fp4")
    every, inside = ("do", "di", "cp"), ("di", "cp")
    shards = inside if job.zero_group else every
    if job.zero == 3:
        gathered = 1 if low and stack.low_gather else width
        for size, count in ((block, layers), (outer, 1)):
            yield Ask(
                slot=GATHER, kind="all_gather", size_bytes=size * gathered, axes=shards, count=count
            )
            yield Ask(
                slot=REDUCE, kind="reduce_scatter", size_bytes=size * stack.gradient_bytes,
                axes=shards, count=count,
            )  # fmt: skip
            if job.zero_group:  # the parts, over the groups that hold the same ones
                part = size * stack.gradient_bytes / _shard_ranks(job)
                yield Ask(
                    slot=REDUCE, kind="all_reduce", size_bytes=part, axes=("do",), count=count
                )
        return
    params = layers * block + outer
    summed = params * stack.gradient_bytes
    count = math.ceil(summed / BUCKET_BYTES)
    kind: Kind = "reduce_scatter" if job.zero and not job.zero_group else "all_reduce"
    yield Ask(slot=SUM, kind=kind, size_bytes=summed / count, axes=every, count=count)
    if not job.zero:
        return
    if one_by_one(job):
        ranks = job.dp * job.cp
        yield Ask(
            slot=BROADCAST, kind="broadcast", size_bytes=params * width / ranks, axes=every,
            count=ranks,
        )  # fmt: skip
    else:
        count = math.ceil(params * width / BUCKET_BYTES)
        yield Ask(
            slot=SPREAD, kind="all_gather", size_bytes=params * width / count, axes=shards,
            count=count,
        )  # fmt: skip


def _shard_ranks(job: Job) -> int:
    """Ranks that a job's parameters are divided over."""
    return dict(mesh_of(job).axes)["di"] * job.cp


def one_by_one(job: Job) -> bool:
    """Whether every rank broadcasts the weights that it has updated, one after the other."""
    return job.stack.name == "internevo" and job.zero == 1 and not job.zero_group


def local_params(job: Job) -> tuple[int, float, float]:
    """Of the rank that holds most: its blocks, parameters of one, and parameters of the ends.

    Data-parallel ranks have not shared them yet.
    """
    config = job.config
    sparse = config.layers - config.dense_layers if config.experts else 0
    dense = config.block_params(False) / job.tp
    one = (3 if config.gated else 2) * config.hidden * config.expert_ffn
    spread = config.experts * one
    routed = (config.block_params(True) - spread) / job.tp + spread / job.tp / job.ep
    block = (dense * (config.layers - sparse) + routed * sparse) / config.layers
    stages = [sum(job.stage_layers[rank :: job.pp]) for rank in range(job.pp)]
    embedding = config.vocab * config.hidden / job.tp
    outer = embedding * (2 if job.pp == 1 and not config.tied else 1)
    if max(stages) * block > stages[0] * block + outer:
        return max(stages), block, 0.0
    return stages[0], block, outer


class Wires:
    """Collectives of jobs, ready to be priced for any shares of their bandwidths.

    Args:
        jobs: The jobs.
        shifts: The tensor collectives of each.
    """

    def __init__(self, jobs: Sequence[Job], shifts: Sequence[Iterable[Shift]]) -> None:
        rows: list[tuple[int, int, float]] = []
        costs: list[tuple[float, ...]] = []
        self.calls = np.zeros((SLOTS, len(jobs)))
        for place, (job, moves) in enumerate(zip(jobs, shifts, strict=True)):
            cluster, mesh = cluster_of(job), mesh_of(job)
            for ask in asks_of(job, moves):
                found = _costs(cluster, mesh, ask.kind, ask.size_bytes, ask.axes)
                if found is not None:
                    rows.append((place, ask.slot, ask.count))
                    costs.append(found)
                    self.calls[ask.slot, place] += ask.count
        self.jobs = len(jobs)
        self.job = np.array([place for place, _, _ in rows], dtype=np.int64)
        slot = np.array([slot for _, slot, _ in rows], dtype=np.int64)
        self.key = slot * max(1, self.jobs) + self.job
        self.count = np.array([count for _, _, count in rows], dtype=np.float64)
        self.cost = np.array(costs, dtype=np.float64).reshape(-1, 6)

    def price(self, link_share: Floats, network_share: Floats) -> Floats:
        """Seconds of all collectives, by slot and job."""
        link, network = link_share[self.job], network_share[self.job]
        first, second = (
            fixed + np.maximum(near / link, far / network)
            for fixed, near, far in (self.cost[:, :3].T, self.cost[:, 3:].T)
        )
        seconds = np.minimum(first, second) * self.count
        found = np.bincount(self.key, seconds, minlength=SLOTS * self.jobs)
        return found.astype(np.float64).reshape(SLOTS, self.jobs)


@cache
def _spans(cluster: ClusterSpec, mesh: Mesh, axes: tuple[str, ...]) -> tuple[Span, ...]:
    if axes == ("pp",):
        return tuple(span for pair in send_spans(cluster, mesh, "pp") for span in pair)
    return axis_spans(cluster, mesh, axes)


def _costs(
    cluster: ClusterSpec, mesh: Mesh, kind: Kind, size_bytes: float, axes: tuple[str, ...]
) -> tuple[float, ...] | None:
    """Fixed seconds, and those over link and network at full bandwidth, of two algorithms."""
    spans = [span for span in _spans(cluster, mesh, axes) if span.size > 1 and span.hops]
    if not spans or not size_bytes:
        return None
    span = max(spans, key=lambda span: price(kind, size_bytes, span).seconds)
    share = cluster.hardware().efficiency
    names = LIBRARY[kind]
    found: list[float] = []
    for name in (names[0], names[-1]):
        algorithm = ALGORITHMS[kind][name]
        (fixed,) = algorithm(_only(span, None), size_bytes)
        (link,) = algorithm(_only(span, False), size_bytes)
        (network,) = algorithm(_only(span, True), size_bytes)
        start = span.all_to_all_start_s if kind == "all_to_all" else span.start_s
        found += [
            start + fixed.latency_s,
            link.transfer_s * share.link_share,
            network.transfer_s * share.network_share,
        ]
    return tuple(found)


def _only(span: Span, network: bool | None) -> Span:
    """The span as if bytes crossed only the network, only what is within nodes, or nothing."""
    hops = tuple(
        hop if hop.network == network else replace(hop, bytes_per_s=math.inf) for hop in span.hops
    )
    return replace(span, hops=hops)
