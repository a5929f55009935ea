"""What a group of ranks has to cross when it communicates, and how fast that goes.

A `Span` says, for every level of the topology that a group spreads over, among how many units, and
what bandwidth the group has over the border of one of them while all groups that communicate at
the same time share it: the eight data-parallel groups of a node with eight tensor-parallel ranks
have an eighth of its network cards each. It is all that the price of a collective depends on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.topology import HOST, LINK, Composition, Layout, Level
from autopar.errors import ClusterError
from autopar.sharding.mesh import MICROBATCH, Mesh

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """One level that a group crosses.

    Attributes:
        level: Name of the level, e.g. ``"link"`` or ``"network"``.
        network: Whether network cards are used.
        fan: Units that the group spreads over within one unit of the level, at most.
        members: Ranks of the group within one of those, at most.
        together: Ranks of the group within one unit of the level, at most.
        edges: Edges of a ring over the group, in rank order, that cross this level.
        bytes_per_s: What the group can move over the border of one unit, in one direction, while
            the other groups communicate too.
        latency_s: One step across.
    """

    level: str
    network: bool
    fan: int
    members: int
    together: int
    edges: int
    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A group of ranks as far as prices depend on it.

    Attributes:
        size: Ranks of the group.
        start_s: What a collective takes before its first byte moves.
        all_to_all_start_s: The same of an all-to-all.
        hops: Levels that the group crosses, innermost first; none for a single rank.
    """

    size: int
    start_s: float
    all_to_all_start_s: float
    hops: tuple[Hop, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """A `Hop` in whole numbers: how many, not yet how fast.

    `borders` holds, for every different unit that the group spreads over: what it is made of, the
    ranks of the group in it, and how many groups cross its border at the same time.
    """

    level: str
    network: bool
    tier: int
    fan: int
    members: int
    together: int
    edges: int
    borders: frozenset[tuple[Composition, Composition, int]]


_Pattern = tuple[int, frozenset[int], tuple[_Crossing, ...]]
"""Size of a group, node groups that it touches, and what it crosses."""


def spans(cluster: ClusterSpec, groups: Iterable[Sequence[int]]) -> tuple[Span, ...]:
    """What groups cross that communicate at the same time.

    Args:
        cluster: The cluster.
        groups: Disjoint groups of ranks. Only different outcomes are returned.

    Raises:
        ClusterError: If a rank is not in the cluster.
    """
    known = tuple(tuple(sorted(group)) for group in groups)
    _check_ranks(known, cluster)
    layout = Layout.of(cluster)
    return _priced(cluster, _patterns(layout, known, _crowds(layout, known)))


def axis_groups(mesh: Mesh, axes: Iterable[str]) -> Groups:
    """All groups of ranks that vary `axes` of a mesh and keep every other coordinate.

    The same as `Mesh.groups`, but for thousands of ranks. The axis of microbatches, which runs over
    time, is left out.

    Raises:
        PlanError: If an axis is unknown.
    """
    wanted = set(axes)
    for name in wanted:
        mesh.axis_size(name)
    moving, fixed = [0], [0]
    for name, size in mesh.axes:
        if name == MICROBATCH:
            continue
        moving = [rank * size for rank in moving]
        fixed = [rank * size for rank in fixed]
        if name in wanted:
            moving = [rank + index for rank in moving for index in range(size)]
        else:
            fixed = [rank + index for rank in fixed for index in range(size)]
    return tuple(tuple(start + offset for offset in moving) for start in fixed)


def axis_spans(cluster: ClusterSpec, mesh: Mesh, axes: Iterable[str]) -> tuple[Span, ...]:
    """What the groups along `axes` of a mesh cross, all of them communicating at the same time.

    Args:
        cluster: The cluster; rank r of the mesh is its device r.
        mesh: Axes of all ranks.
        axes: The axes that vary within a group.

    Raises:
        PlanError: If an axis is unknown.
        ClusterError: If the mesh has more ranks than the cluster devices.
    """
    _check_mesh(mesh, cluster)
    wanted = tuple(name for name in mesh.names if name in set(axes))
    for name in axes:
        mesh.axis_size(name)
    return _priced(cluster, _axis_patterns(Layout.of(cluster), mesh, wanted))


def send_spans(
    cluster: ClusterSpec, mesh: Mesh, axis: str, *, around: bool = False
) -> tuple[tuple[Span, ...], ...]:
    """What the sends from every position of an axis to the next cross, all at the same time.

    Args:
        cluster: The cluster.
        mesh: Axes of all ranks.
        axis: The axis of the pipeline.
        around: Whether the last position sends to the first (interleaved stages).

    Returns:
        The different spans of every pair of neighbouring positions, in order.

    Raises:
        PlanError: If the axis is unknown.
        ClusterError: If the mesh has more ranks than the cluster devices.
    """
    _check_mesh(mesh, cluster)
    found = _send_patterns(Layout.of(cluster), mesh, axis, around)
    known = {patterns: _priced(cluster, patterns) for patterns in dict.fromkeys(found)}
    return tuple(map(known.__getitem__, found))


def _check_mesh(mesh: Mesh, cluster: ClusterSpec) -> None:
    size = mesh.size // (mesh.axis_size(MICROBATCH) if MICROBATCH in mesh.names else 1)
    if size > cluster.num_devices:
        raise ClusterError(
            f"mesh {mesh} has {size} ranks, cluster {cluster} only {cluster.num_devices} devices",
            expected=f"a mesh of at most {cluster.num_devices} ranks",
        )


def _check_ranks(groups: Groups, cluster: ClusterSpec) -> None:
    count = cluster.num_devices
    for rank in itertools.chain.from_iterable(groups):
        if not 0 <= rank < count:
            raise ClusterError(
                f"rank {rank} is not in cluster {cluster}",
                expected=f"a rank from 0 to {count - 1}",
            )


@functools.lru_cache(maxsize=4096)
def _axis_patterns(layout: Layout, mesh: Mesh, axes: tuple[str, ...]) -> tuple[_Pattern, ...]:
    groups = axis_groups(mesh, axes)
    return _patterns(layout, groups, _crowds(layout, groups))


@functools.lru_cache(maxsize=1024)
def _send_patterns(
    layout: Layout, mesh: Mesh, axis: str, around: bool
) -> tuple[tuple[_Pattern, ...], ...]:
    groups = axis_groups(mesh, (axis,))
    positions = mesh.axis_size(axis)
    count = positions if around and positions > 1 else positions - 1
    pairs = [
        tuple((group[start], group[(start + 1) % positions]) for group in groups)
        for start in range(count)
    ]
    crowds = _crowds(layout, tuple(itertools.chain.from_iterable(pairs)), sends=True)
    return tuple(_patterns(layout, part, crowds) for part in pairs)


def _distinct(layout: Layout, groups: Groups) -> dict[tuple[int, ...], int]:
    """One of the groups for each sequence of domains that groups are in, and how many there are.

    They cross the same borders, but for those of their own devices, which no two groups share.
    """
    inner = layout.levels[0]
    domain_of = (inner.unit_of if inner.name == LINK else inner.child_of).__getitem__
    found: dict[tuple[int, ...], list[Any]] = {}
    for group in groups:
        found.setdefault(tuple(map(domain_of, group)), [group, 0])[1] += 1
    return dict(found.values())


def _crowds(layout: Layout, groups: Groups, *, sends: bool = False) -> tuple[Counter[int], ...]:
    """For every level, child to the number of groups that cross its border at the same time.

    In a collective every member sends, so a group counts at the border of every unit it is in; of
    a pair that sends, only the first. Nothing is counted at the borders of devices.
    """
    crowds = []
    distinct = _distinct(layout, groups).items()
    for level in layout.levels:
        crowd: Counter[int] = Counter()
        for group, count in distinct if level.name != LINK else ():
            ranks, _ = _spread(level, group)
            for child in [level.child_of[group[0]]] if sends and ranks else ranks:
                crowd[child] += count
        crowds.append(crowd)
    return tuple(crowds)


def _patterns(
    layout: Layout, groups: Groups, crowds: tuple[Counter[int], ...]
) -> tuple[_Pattern, ...]:
    """The different patterns of `groups`."""
    shape_of = _shape_of(layout)
    patterns: dict[_Pattern, None] = {}
    for group in _distinct(layout, groups):
        found = (
            _cross(level, group, crowd, shape_of)
            for level, crowd in zip(layout.levels, crowds, strict=True)
        )
        touched = frozenset(map(shape_of.__getitem__, group))
        crossings = [crossing for crossing in found if crossing is not None]
        patterns[len(group), touched, _close_ring(crossings)] = None
    return tuple(patterns)


@functools.lru_cache(maxsize=16)
def _shape_of(layout: Layout) -> tuple[int, ...]:
    """For every rank the number of its group of equal nodes."""
    return tuple(
        index
        for index, shape in enumerate(layout.shapes)
        for _ in range(shape.devices * shape.nodes)
    )


def _spread(level: Level, group: tuple[int, ...]) -> tuple[Counter[int], Counter[int]]:
    """Ranks of a group in every child whose border it crosses, and children it has in every unit.

    Over the network a group crosses the border of every child it is in, when it is in several.
    Within a domain or a node it does so only where several of its children meet.
    """
    ranks = Counter(map(level.child_of.__getitem__, group))
    if len(ranks) == 1:
        return Counter(), Counter({level.parent[level.child_of[group[0]]]: 1})
    units = Counter(map(level.parent.__getitem__, ranks))
    if not level.network and min(units.values()) == 1:
        ranks = Counter({c: n for c, n in ranks.items() if units[level.parent[c]] > 1})
    return ranks, units


def _cross(
    level: Level, group: tuple[int, ...], crowd: Counter[int], shape_of: tuple[int, ...]
) -> _Crossing | None:
    ranks, units = _spread(level, group)
    fan = max(units.values())
    if fan == 1:
        return None
    together: Counter[int] = Counter()
    for child, count in ranks.items():
        together[level.parent[child]] += count
    mixed: dict[int, Counter[int]] = {}
    if len(set(map(shape_of.__getitem__, group))) > 1:
        for rank in group:
            mixed.setdefault(level.child_of[rank], Counter())[shape_of[rank]] += 1
    only = shape_of[group[0]]
    borders = {
        (
            level.children[child],
            tuple(sorted(mixed[child].items())) if mixed else ((only, count),),
            max(1, crowd[child]),
        )
        for child, count in ranks.items()
    }
    return _Crossing(
        level=level.name,
        network=level.network,
        tier=level.tier,
        fan=fan,
        members=max(ranks.values()),
        together=max(together.values()),
        edges=units.total() - len(units),
        borders=frozenset(borders),
    )


def _close_ring(crossings: list[_Crossing]) -> tuple[_Crossing, ...]:
    """Adds the edge that closes a ring, which crosses the outermost level."""
    if not crossings:
        return ()
    last = crossings[-1]
    return (*crossings[:-1], dataclasses.replace(last, edges=last.edges + 1))


def _priced(cluster: ClusterSpec, patterns: Iterable[_Pattern]) -> tuple[Span, ...]:
    found: dict[Span, None] = {}
    for size, touched, crossings in patterns:
        links = [cluster.groups[index].hardware.link for index in touched]
        span = Span(
            size=size,
            start_s=max(link.start_s for link in links),
            all_to_all_start_s=max(link.all_to_all_start_s for link in links),
            hops=tuple(_hop(cluster, crossing, touched) for crossing in crossings),
        )
        found[span] = None
    return tuple(found)


def _hop(cluster: ClusterSpec, crossing: _Crossing, touched: frozenset[int]) -> Hop:
    devices = [cluster.groups[index].hardware for index in touched]
    if crossing.level == LINK:
        latency_s = max(device.link.latency_s for device in devices)
    elif crossing.level == HOST:
        latency_s = max(device.host_latency_s for device in devices)
    elif crossing.tier:
        latency_s = cluster.tiers[crossing.tier - 1].latency_s
    else:
        latency_s = max(device.node.network_latency_s for device in devices)
    return Hop(
        level=crossing.level,
        network=crossing.network,
        fan=crossing.fan,
        members=crossing.members,
        together=crossing.together,
        edges=crossing.edges,
        bytes_per_s=min(
            _border_bytes_per_s(cluster, crossing, made, mine, crowd)
            for made, mine, crowd in crossing.borders
        ),
        latency_s=latency_s,
    )


def _border_bytes_per_s(
    cluster: ClusterSpec,
    crossing: _Crossing,
    made: Composition,
    mine: Composition,
    crowd: int,
) -> float:
    """What a group with the ranks `mine` in a unit gets of its border, shared by `crowd` groups."""
    border = own = 0.0
    for index, count in made:
        device = cluster.groups[index].hardware
        share = device.efficiency
        if crossing.level == LINK:
            border += count * share.link_share * device.link.bytes_per_s
        elif crossing.level == HOST:
            border += count * share.link_share * device.host_bytes_per_s
        else:
            cards = device.node.nics * device.node.nic_bytes_per_s
            border += count * share.network_share * cards
    for tier in cluster.tiers[: crossing.tier]:
        border /= tier.oversubscription
    for index, count in mine:
        device = cluster.groups[index].hardware
        share = device.efficiency
        if crossing.level == LINK:
            wires = min(device.link.bytes_per_s, (crossing.fan - 1) * device.link.peer_bytes_per_s)
            own += count * share.link_share * wires
        elif crossing.level == HOST:
            own += count * share.link_share * device.host_bytes_per_s
        else:
            cards = max(1.0, device.node.nics / device.node.devices)
            own += count * share.network_share * cards * device.node.nic_bytes_per_s
    return min(own, border / crowd)
