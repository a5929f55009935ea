"""Seconds of a collective: start, steps and bytes, for every algorithm on every level it crosses.

A collective over a group takes

    start + (latency of its steps) + max or sum over levels of (bytes over a border / bandwidth)

Bytes over a border of one unit, in one direction, for a payload of S bytes, N ranks, F units of the
level, m ranks of the group in a unit and M in the unit above; `laps` is 2 for an all-reduce (reduce
and gather) and 1 for an all-gather or a reduce-scatter:

=================  =====================================  ====================================
algorithm          bytes over a border                    steps
=================  =====================================  ====================================
ring               laps (N-1)/N S, all levels at once     laps (N-1)/N of a lap over all edges
tree               2 S, all levels at once                2 log2 F over the network,
                                                          2 (m-1) along the chain in a node
hierarchical       laps (F-1)/F S, level after level      laps (F-1) at each level
pairwise           m (M-m)/N S by link, m (N-m)/N S by    N - 1
(all-to-all)       network, all levels at once
hierarchical       m (F-1)/F S, level after level         F - 1 at each level
(all-to-all)
ring, tree         S, all levels at once                  (N-1)/N of a lap; log2 F and a chain
(broadcast)
parameter_server   twice what the busiest of a worker     2
(all-reduce)       and a server sends
direct (send)      S over the outermost level             1
=================  =====================================  ====================================

S is what torch.distributed calls the size: the tensor of an all-reduce, a broadcast or a send, the
gathered tensor of an all-gather, the whole input of a reduce-scatter or an all-to-all. On one level
`hierarchical` is `ring`. The formulas are those of Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005, sections 3 and 4, and of NCCL 2.19
(``src/graph/tuning.cc``: rings and double binary trees, whose bandwidth it takes as 0.92 of a
ring's for twice the payload).

Against measured tables, with one link share per device (``test_collective_tables.py``): vTrain
all-reduce on 2 to 8 A100, 77 sizes, mean error 7.8 % (from 32 MiB 6.6 %); Galvatron on A100, 33
sizes each, all-reduce 14 % (5.6 %), all-to-all 10 % (7.9 %); vTrain on 2, 3 and 8 V100 5.1 %
(1.4 %), on 4 to 7 of them, whose wiring is irregular, 36 % (44 %); two nodes of eight with groups
that share the cards 15 %, after fitting the cards' bandwidth. What is not modelled: protocols for
small messages (NCCL's LL and LL128), reduction in switches (NVLS, SHARP), and that collectives take
multiprocessors from kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.spans import Hop, Span, axis_spans, send_spans
from autopar.errors import ClusterError
from autopar.sharding.mesh import Mesh

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]

TREE_SHARE = 0.92
"""Bandwidth of a tree over that of a ring: NCCL 2.19, ``src/graph/tuning.cc``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A part of a collective that starts when the one before it is over.

    Attributes:
        latency_s: Its steps, without any bytes.
        transfer_s: Its bytes over the slowest border.
        level: Level of that border.
    """

    latency_s: float
    transfer_s: float
    level: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a collective costs, and where that comes from.

    Attributes:
        kind: The collective.
        algorithm: How it is done; ``"none"`` for a single rank or no bytes.
        size_bytes: Payload, as torch.distributed counts it.
        start_s: Launches and set-up of all stages.
        latency_s: Steps of all stages.
        transfer_s: Bytes of all stages over their slowest borders.
        level: Level whose border takes longest.
    """

    kind: Kind
    algorithm: str
    size_bytes: float
    start_s: float
    latency_s: float
    transfer_s: float
    level: str

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.start_s + self.latency_s + self.transfer_s


Stages = tuple[Stage, ...]
Algorithm = Callable[[Span, float], Stages]


def sent_bytes(kind: Kind, size_bytes: float, ranks: int) -> float:
    """Bytes that each of `ranks` sends, at least, whatever the topology.

    Args:
        kind: The collective; of a broadcast and a send, the bytes that the sender sends.
        size_bytes: Payload, as torch.distributed counts it.
        ranks: Ranks of the group.

    Reference:
        Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
    """
    if ranks < 2:
        return 0.0
    if kind in ("broadcast", "send"):
        return size_bytes
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks * size_bytes


def price(
    kind: Kind,
    size_bytes: float,
    span: Span,
    *,
    algorithms: Mapping[Kind, tuple[str, ...]] | None = None,
) -> Price:
    """The price of a collective by its best algorithm.

    Args:
        kind: The collective.
        size_bytes: Payload, as torch.distributed counts it.
        span: What its group crosses.
        algorithms: Names of the algorithms to choose from; those of `LIBRARY` when None.

    Raises:
        ClusterError: If there is no such algorithm, or the size is negative.
    """
    if not size_bytes >= 0:
        raise ClusterError(f"size_bytes is {size_bytes!r}", expected="a number of bytes from 0")
    if span.size < 2 or not span.hops or size_bytes == 0:
        return Price(
            kind=kind, algorithm="none", size_bytes=size_bytes, start_s=0.0, latency_s=0.0,
            transfer_s=0.0, level="",
        )  # fmt: skip
    names = (algorithms or LIBRARY)[kind]
    return min(
        (_price_of(kind, name, size_bytes, span) for name in names),
        key=lambda found: found.seconds,
    )


def axis_price(
    kind: Kind,
    size_bytes: float,
    cluster: ClusterSpec,
    mesh: Mesh,
    axes: Iterable[str],
    *,
    algorithms: Mapping[Kind, tuple[str, ...]] | None = None,
) -> Price:
    """The price of a collective along mesh axes, by the slowest of the groups that do it at once.

    Args:
        kind: The collective, none of them a send.
        size_bytes: Payload of one rank, as torch.distributed counts it.
        cluster: The cluster; rank r of the mesh is its device r.
        mesh: Axes of all ranks.
        axes: The axes that vary within a group.
        algorithms: As for `price`.

    Raises:
        PlanError: If an axis is unknown.
        ClusterError: If the cluster has too few devices, or an algorithm is unknown.
    """
    return _slowest(kind, size_bytes, axis_spans(cluster, mesh, axes), algorithms)


def send_prices(
    size_bytes: float, cluster: ClusterSpec, mesh: Mesh, axis: str, *, around: bool = False
) -> tuple[Price, ...]:
    """The price of a send from every position of an axis to the next, all at the same time.

    Args:
        size_bytes: Bytes of one rank.
        cluster: The cluster; rank r of the mesh is its device r.
        mesh: Axes of all ranks.
        axis: The axis of the pipeline.
        around: Whether the last position sends to the first, too.

    Raises:
        PlanError: If the axis is unknown.
        ClusterError: If the cluster has too few devices.
    """
    found = send_spans(cluster, mesh, axis, around=around)
    return tuple(_slowest("send", size_bytes, spans, None) for spans in found)


def parameter_server(size_bytes: float, span: Span, *, servers: int) -> Price:
    """The price of an all-reduce in which `servers` of the ranks keep the sum, in equal parts.

    Servers are spread over nodes as evenly as possible. Every rank pushes its tensor to them, and
    pulls the sum. With as many servers as ranks a rank sends ``2 (N-1)/N`` of the tensor, as in a
    ring.

    Args:
        size_bytes: The tensor.
        span: What the group crosses.
        servers: Ranks that serve, from 1 to the size of the group.

    Raises:
        ClusterError: If there are no servers, or more than ranks.
    """
    if not 1 <= servers <= span.size:
        raise ClusterError(
            f"{servers} servers for {span.size} ranks", expected=f"from 1 to {span.size}"
        )
    if span.size < 2 or not span.hops or size_bytes == 0:
        return price("all_reduce", size_bytes, span)
    stages = _served(span, size_bytes, servers)
    return _total("all_reduce", "parameter_server", size_bytes, span, stages)


def _slowest(
    kind: Kind,
    size_bytes: float,
    spans: Iterable[Span],
    algorithms: Mapping[Kind, tuple[str, ...]] | None,
) -> Price:
    prices = (price(kind, size_bytes, span, algorithms=algorithms) for span in spans)
    return max(prices, key=lambda found: found.seconds)


def _price_of(kind: Kind, name: str, size_bytes: float, span: Span) -> Price:
    if name not in ALGORITHMS[kind]:
        raise ClusterError(
            f"unknown algorithm {name!r} for {kind}",
            expected="one of " + ", ".join(ALGORITHMS[kind]),
        )
    return _total(kind, name, size_bytes, span, ALGORITHMS[kind][name](span, size_bytes))


def _total(kind: Kind, name: str, size_bytes: float, span: Span, stages: Stages) -> Price:
    start_s = span.all_to_all_start_s if kind == "all_to_all" else span.start_s
    return Price(
        kind=kind,
        algorithm=name,
        size_bytes=size_bytes,
        start_s=len(stages) * start_s,
        latency_s=sum(stage.latency_s for stage in stages),
        transfer_s=sum(stage.transfer_s for stage in stages),
        level=max(stages, key=lambda stage: stage.transfer_s).level,
    )


def _stage(latency_s: float, traffic: Iterable[tuple[Hop, float]]) -> Stage:
    """A stage whose bytes cross all levels at once: the slowest border takes longest."""
    slowest = max(
        ((size_bytes / hop.bytes_per_s, hop.level) for hop, size_bytes in traffic),
        key=lambda item: item[0],
    )
    return Stage(latency_s=latency_s, transfer_s=slowest[0], level=slowest[1])


def _lap_s(span: Span) -> float:
    """One step over every edge of a ring."""
    return sum(hop.edges * hop.latency_s for hop in span.hops)


def _ring(laps: int) -> Algorithm:
    def stages(span: Span, size_bytes: float) -> Stages:
        part = laps * (span.size - 1) / span.size
        traffic = ((hop, part * size_bytes) for hop in span.hops)
        return (_stage(part * _lap_s(span), traffic),)

    return stages


def _descent_s(span: Span) -> float:
    """From the root of a tree over nodes to its leaves, and down the chain within a node."""
    nodes = math.prod(hop.fan for hop in span.hops if hop.network)
    return sum(
        math.log2(hop.fan) * hop.latency_s if hop.network else hop.edges / nodes * hop.latency_s
        for hop in span.hops
    )


def _tree(span: Span, size_bytes: float) -> Stages:
    traffic = ((hop, 2 * size_bytes / TREE_SHARE) for hop in span.hops)
    return (_stage(2 * _descent_s(span), traffic),)


def _by_level(laps: int) -> Algorithm:
    def stages(span: Span, size_bytes: float) -> Stages:
        once = [
            _stage((hop.fan - 1) * hop.latency_s, [(hop, (hop.fan - 1) / hop.fan * size_bytes)])
            for hop in span.hops
        ]
        if laps == 1:
            return tuple(once)
        # Up level by level; on the outermost both halves are one collective; and down again.
        top = Stage(
            latency_s=2 * once[-1].latency_s,
            transfer_s=2 * once[-1].transfer_s,
            level=once[-1].level,
        )
        return (*once[:-1], top, *reversed(once[:-1]))

    return stages


def _pairwise(span: Span, size_bytes: float) -> Stages:
    each = size_bytes / span.size
    traffic = [
        (hop, hop.members * ((span.size if hop.network else hop.together) - hop.members) * each)
        for hop in span.hops
    ]
    latency_s = sum((hop.together - hop.members) * hop.latency_s for hop in span.hops)
    return (_stage(latency_s, traffic),)


def _exchange_by_level(span: Span, size_bytes: float) -> Stages:
    return tuple(
        _stage(
            (hop.fan - 1) * hop.latency_s,
            [(hop, hop.members * (hop.fan - 1) / hop.fan * size_bytes)],
        )
        for hop in span.hops
    )


def _broadcast_ring(span: Span, size_bytes: float) -> Stages:
    latency_s = (span.size - 1) / span.size * _lap_s(span)
    return (_stage(latency_s, ((hop, size_bytes) for hop in span.hops)),)


def _broadcast_tree(span: Span, size_bytes: float) -> Stages:
    traffic = ((hop, size_bytes / TREE_SHARE) for hop in span.hops)
    return (_stage(_descent_s(span), traffic),)


def _send(span: Span, size_bytes: float) -> Stages:
    hop = span.hops[-1]
    return (_stage(hop.latency_s, [(hop, size_bytes)]),)


def _served(span: Span, size_bytes: float, servers: int) -> Stages:
    part = size_bytes / servers
    traffic = []
    for hop in span.hops:
        units = max(1, round(span.size / hop.members))
        most, least = -(-servers // units), servers // units
        others = (span.size if hop.network else hop.together) - hop.members
        outside = servers - least if hop.network else min(servers, others)
        pushed = hop.members * outside * part
        received = min(most, hop.members) * others * part
        traffic.append((hop, max(pushed, received)))
    stage = _stage(span.hops[-1].latency_s, traffic)
    return (stage, stage)


ALGORITHMS: dict[Kind, dict[str, Algorithm]] = {
    "all_reduce": {"ring": _ring(2), "tree": _tree, "hierarchical": _by_level(2)},
    "all_gather": {"ring": _ring(1), "hierarchical": _by_level(1)},
    "reduce_scatter": {"ring": _ring(1), "hierarchical": _by_level(1)},
    "all_to_all": {"pairwise": _pairwise, "hierarchical": _exchange_by_level},
    "broadcast": {"ring": _broadcast_ring, "tree": _broadcast_tree},
    "send": {"direct": _send},
}
"""Collective to algorithm to its stages for a span and a number of bytes."""

LIBRARY: Mapping[Kind, tuple[str, ...]] = {
    "all_reduce": ("ring", "tree"),
    "all_gather": ("ring",),
    "reduce_scatter": ("ring",),
    "all_to_all": ("pairwise",),
    "broadcast": ("ring", "tree"),
    "send": ("direct",),
}
"""What NCCL, and so torch.distributed, chooses from."""

EVERY: Mapping[Kind, tuple[str, ...]] = {kind: tuple(names) for kind, names in ALGORITHMS.items()}
"""Every algorithm, those made of several collectives of torch.distributed included."""
