"""How the devices of a cluster are joined: levels of units, each made of units of the level below.

The innermost level joins devices by their link, into domains; where a node holds several domains,
the next joins those through the host; then the network joins nodes (or domains that span nodes),
and every tier of switches joins the switches below it::

    link       devices  -> domain      NVLink, xGMI, PCIe or memory
    host       domains  -> node        only where a node has several domains
    network    nodes    -> switch      the network cards of the nodes
    tier 1     switches -> cluster     only with tiers; `tier 2`, ... above it

What crosses the border of a unit shares what joins it to its level: the links of a device, the
network cards of a node, the uplinks of a switch. `Layout` holds where ranks are, in whole numbers;
bandwidths are looked up in the cluster when something is priced, so a layout serves any figures.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cost_models.cluster import ClusterSpec, NodeGroup
from autopar.errors import ClusterError

LINK, HOST, NETWORK = "link", "host", "network"

Composition = tuple[tuple[int, int], ...]
"""``(index of a node group, count)`` pairs: what a unit, or the part of a group in it, is made of.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """Shape of equal nodes.

    Attributes:
        devices: Devices per node.
        nodes: Number of nodes.
        domain: Devices per domain of the link: those of a node, fewer, or those of several whole
            nodes.
    """

    devices: int
    nodes: int
    domain: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of units.

    Attributes:
        name: ``"link"``, ``"host"``, ``"network"`` or ``"tier 1"``, ``"tier 2"``, ...
        child_of: Rank to the unit of the level below that it is in; ranks at the innermost level.
        unit_of: Rank to the unit of this level that it is in.
        parent: Child to the unit of this level that it is in.
        children: Child to what it is made of: devices up to the level of the host, nodes above.
    """

    name: str
    child_of: tuple[int, ...]
    unit_of: tuple[int, ...]
    parent: tuple[int, ...]
    children: tuple[Composition, ...]

    @property
    def network(self) -> bool:
        """Whether this level is crossed by network cards."""
        return self.name not in (LINK, HOST)

    @property
    def tier(self) -> int:
        """Tiers of switches below this level: 0 for the links and the nodes' own network."""
        return int(self.name.split()[1]) if self.name.startswith("tier") else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the ranks of a cluster are.

    Attributes:
        shapes: Shape of every group of nodes, in the order of the ranks.
        tiers: Nodes below one switch, for every tier of switches.
    """

    shapes: tuple[NodeShape, ...]
    tiers: tuple[int, ...] = ()

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Layout:
        """The layout of `cluster`."""
        return cls(
            shapes=tuple(_shape(group) for group in cluster.groups),
            tiers=tuple(tier.nodes for tier in cluster.tiers),
        )

    @property
    def num_devices(self) -> int:
        """Devices, and ranks, in all."""
        return sum(shape.devices * shape.nodes for shape in self.shapes)

    @property
    def levels(self) -> tuple[Level, ...]:
        """Levels at which some unit has several children, innermost first."""
        return _levels(self)

    def level_of(self, ranks: Iterable[int]) -> Level | None:
        """The innermost level one unit of which holds all `ranks`; None for a single rank.

        Raises:
            ClusterError: If a rank is not in the cluster.
        """
        known = set(ranks)
        if not known or min(known) < 0 or max(known) >= self.num_devices:
            raise ClusterError(
                f"ranks {sorted(known)} are not all in a cluster of {self.num_devices} devices",
                expected=f"ranks from 0 to {self.num_devices - 1}",
            )
        if len(known) == 1:
            return None
        for level in self.levels:
            if len({level.unit_of[rank] for rank in known}) == 1:
                return level
        raise AssertionError("the outermost level holds every rank")


def _shape(group: NodeGroup) -> NodeShape:
    link = group.hardware.link
    devices = group.devices_per_node
    domain = min(link.domain_devices, devices)
    if link.spans_nodes and link.domain_devices > devices:
        domain = link.domain_devices // devices * devices
    return NodeShape(devices=devices, nodes=group.nodes, domain=domain)


@functools.lru_cache(maxsize=64)
def _levels(layout: Layout) -> tuple[Level, ...]:
    places = _places(layout)
    below, parts = _renumber(places.inner, places.nodes, places.node_parts)
    ranks = tuple(range(len(places.domains)))
    devices = tuple(((places.parts[domain][0][0], 1),) for domain in places.domains)
    levels = [
        _level(LINK, ranks, places.domains, devices),
        _level(HOST, places.domains, below, places.parts),
    ]
    for index, size in enumerate((*layout.tiers, 0)):
        above = tuple(node // size if size else 0 for node in places.inner)
        unit_of, unit_parts = _renumber(above, below, parts)
        name = f"tier {index}" if index else NETWORK
        levels.append(_level(name, below, unit_of, parts))
        below, parts = unit_of, unit_parts
    joining = (level for level in levels if len(set(level.unit_of)) < len(set(level.child_of)))
    return tuple(joining) or (levels[0],)


def _level(
    name: str,
    child_of: tuple[int, ...],
    unit_of: tuple[int, ...],
    children: tuple[Composition, ...],
) -> Level:
    parent = dict(zip(child_of, unit_of, strict=True))
    return Level(
        name=name,
        child_of=child_of,
        unit_of=unit_of,
        parent=tuple(parent[child] for child in range(len(children))),
        children=children,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Domain, node and innermost unit below the network of every rank.

    The last is the node, or the first node of a domain that spans several. `parts` and
    `node_parts` say what domains are made of, in devices, and nodes, in nodes.
    """

    domains: tuple[int, ...]
    nodes: tuple[int, ...]
    inner: tuple[int, ...]
    parts: tuple[Composition, ...]
    node_parts: tuple[Composition, ...]


def _places(layout: Layout) -> _Places:
    domains: list[int] = []
    nodes: list[int] = []
    inner: list[int] = []
    sizes: dict[int, list[int]] = {}
    node_parts: list[Composition] = []
    for index, shape in enumerate(layout.shapes):
        start, per_node = len(sizes), -(-shape.devices // shape.domain)
        for device in range(shape.devices * shape.nodes):
            node, local = divmod(device, shape.devices)
            first = node
            if shape.domain > shape.devices:
                domain = device // shape.domain
                first = domain * shape.domain // shape.devices
            else:
                domain = node * per_node + local // shape.domain
            domains.append(start + domain)
            nodes.append(len(node_parts) + node)
            inner.append(len(node_parts) + first)
            sizes.setdefault(start + domain, [index, 0])[1] += 1
        node_parts.extend(((index, 1),) for _ in range(shape.nodes))
    return _Places(
        domains=tuple(domains),
        nodes=tuple(nodes),
        inner=tuple(inner),
        parts=tuple(((index, size),) for index, size in sizes.values()),
        node_parts=tuple(node_parts),
    )


def _renumber(
    above: tuple[int, ...], below: tuple[int, ...], parts: tuple[Composition, ...]
) -> tuple[tuple[int, ...], tuple[Composition, ...]]:
    """Units of `above` numbered from 0, and what each is made of, from the units `below`."""
    numbers: dict[int, int] = {}
    members: dict[int, set[int]] = {}
    for upper, lower in zip(above, below, strict=True):
        members.setdefault(numbers.setdefault(upper, len(numbers)), set()).add(lower)
    made: list[Composition] = []
    for unit in range(len(numbers)):
        total: dict[int, int] = {}
        for lower in members[unit]:
            for index, amount in parts[lower]:
                total[index] = total.get(index, 0) + amount
        made.append(tuple(sorted(total.items())))
    return tuple(numbers[upper] for upper in above), tuple(made)
