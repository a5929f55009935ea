"""What a plan runs on: nodes, their devices, and how all of them are joined.

The short form is ``nodes x devices x device``: ``8x8xH100-SXM``, ``4xcpu``; unequal nodes are
joined by a plus sign: ``2x8xA100+1x4xV100``. It takes everything else from the catalogue: the
link between devices, the machine that such devices usually sit in (cards, host memory, drives) and
a network without oversubscription.

A file (YAML, or JSON) says what differs. Only `device` and `devices_per_node` are required; every
figure has its unit at the end of its key, and a key that is not known is refused with its line::

    device: A100-80-SXM           # name or alias, see cost_models/devices
    nodes: 16                     # 1 when left out
    devices_per_node: 8
    node_usd_per_hour: 12.3       # price of one node, optional
    source: rented from ..., measured on 3 May
    node:                         # the machine; what is left out is as usual for the device
      nics: 4
      nic_gbit_per_s: 100         # of one card, one direction
      network_latency_us: 12      # one hop of a collective
      memory_gib: 1024            # host memory
      nvme_tb: 7.68
      nvme_read_gb_per_s: 12
      nvme_write_gb_per_s: 8
    link:                         # any figure of the device may be given, in sections
      gb_per_s_per_direction: 300 #   peak_dense, memory, link, host, node and efficiency
      domain_devices: 8           #   as in the device's own file
    efficiency:
      network_share: 0.7
    tiers:                        # the network above the nodes, innermost first; optional
      - nodes: 4                  # so many nodes hang on one switch of this tier,
        oversubscription: 2       # which has half as much bandwidth upwards;
        latency_us: 18            # a hop that passes through it upwards

Unequal nodes are given as a list of such groups, and ranks are numbered in its order::

    groups:
      - {device: A100-80-SXM, nodes: 2, devices_per_node: 8}
      - {device: V100-SXM2-16, nodes: 1, devices_per_node: 4}
    tiers: []

A link whose domain spans nodes (GB200 NVL72) joins the devices of consecutive nodes; the domains
are then joined by the network cards of all their nodes together.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.cost_models.figures import Figure, Table, read_yaml
from autopar.cost_models.hardware import (
    SECTIONS,
    Device,
    Figures,
    canonical_name,
    load_device,
    override,
    read_figures,
)
from autopar.errors import ClusterError

_TEXT = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x(?P<device>[A-Za-z][\w.\-]*)")
_FORM = '"nodes x devices x device" such as "8x8xH100-SXM", or "4xcpu" for one machine'

DEVICES_PER_NODE = Figure(key="devices_per_node", low=1, high=1024, whole=True)
NODES = Figure(key="nodes", low=1, high=1_000_000, required=False, whole=True)
PRICE = Figure(key="node_usd_per_hour", low=0, high=100_000, required=False)
TIER = (
    Figure(key="nodes", low=1, high=1_000_000, whole=True),
    Figure(key="oversubscription", low=1, high=1000),
    Figure(key="latency_us", low=0.01, high=100_000),
)
# Keys of sections that are often written outside of them.
_ELSEWHERE = {
    figure.key: section for section, figures in SECTIONS.items() for figure in reversed(figures)
}
_GROUP_KEYS = ("device", "devices_per_node", "nodes", PRICE.key, "source", *SECTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes with equal devices.

    Attributes:
        device: Name or alias of the device; groups are equal when the device is, by any name.
        devices_per_node: Devices, and ranks, per node.
        nodes: Number of nodes.
        figures: Figures that differ from the catalogue, as ``(section.key, value)`` pairs with the
            value in the unit of the key.
        node_usd_per_hour: Price of one node, None when not known.
        source: Where `figures` come from.

    Raises:
        ClusterError: If a number is below 1, the device is unknown or a figure is wrong.
    """

    device: str = field(compare=False)
    devices_per_node: int
    nodes: int = 1
    figures: Figures = ()
    node_usd_per_hour: float | None = None
    source: str | None = None
    _canonical: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("devices_per_node", "nodes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ClusterError(f"{name} is {value!r}", expected="a whole number from 1")
        device: object = self.device
        if not isinstance(device, str) or not re.fullmatch(r"[A-Za-z][\w.\-]*", device):
            raise ClusterError(
                f"device is {self.device!r}", expected='the name of a device, e.g. "H100-SXM"'
            )
        object.__setattr__(self, "_canonical", canonical_name(device))
        object.__setattr__(self, "figures", tuple(sorted(dict(self.figures).items())))
        if self.figures:
            _ = self.hardware  # a wrong figure is refused here rather than where it is used

    @property
    def num_devices(self) -> int:
        """Devices of all nodes together."""
        return self.nodes * self.devices_per_node

    @property
    def hardware(self) -> Device:
        """The device, with the figures of this group; its `node` is the machine it sits in."""
        return _hardware(self)

    def __str__(self) -> str:
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device}"


@functools.lru_cache(maxsize=256)
def _hardware(group: NodeGroup) -> Device:
    device = load_device(group.device)
    usual = device.node
    share = group.devices_per_node / usual.devices
    node = dataclasses.replace(
        usual,
        devices=group.devices_per_node,
        nics=max(1, round(usual.nics * share)),
        memory_bytes=round(usual.memory_bytes * share),
        nvme_bytes=round(usual.nvme_bytes * share),
        nvme_read_bytes_per_s=usual.nvme_read_bytes_per_s * share,
        nvme_write_bytes_per_s=usual.nvme_write_bytes_per_s * share,
    )
    device = dataclasses.replace(device, node=node)
    return override(device, group.figures, group.source or "given for this cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """One tier of switches above the nodes.

    Attributes:
        nodes: Nodes below one switch of the tier.
        oversubscription: Bandwidth of its nodes over its bandwidth upwards, from 1.
        latency_s: One hop of a collective that passes through it upwards.
    """

    nodes: int
    oversubscription: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes with devices, and the network that joins them.

    Ranks are numbered node by node, group by group.

    Attributes:
        groups: Groups of equal nodes.
        tiers: Tiers of switches above the nodes, innermost first; above the last, and when there
            is none, the network has the bandwidth that reaches it.

    Raises:
        ClusterError: If there is no group, or a tier joins no more nodes than the one below it.

    Example:
        >>> ClusterSpec.parse("8x8xH100-SXM").num_devices
        64
    """

    groups: tuple[NodeGroup, ...]
    tiers: tuple[Tier, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            raise ClusterError("a cluster without nodes", expected="at least one group of nodes")
        for below, above in itertools.pairwise(self.tiers):
            if above.nodes <= below.nodes or above.nodes % below.nodes:
                raise ClusterError(
                    f"a tier of {above.nodes} nodes above one of {below.nodes}",
                    expected="a multiple: every switch joins whole switches of the tier below",
                )

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """The cluster written as ``"8x8xH100-SXM"``, ``"4xcpu"`` or ``"2x8xA100+4xV100"``.

        Raises:
            ClusterError: If the text is no cluster, or a device is unknown.
        """
        groups = []
        for part in text.replace(" ", "").split("+"):
            match = _TEXT.fullmatch(part)
            if match is None:
                raise ClusterError(f"cannot read cluster {text!r}", expected=_FORM)
            groups.append(
                NodeGroup(
                    device=match["device"],
                    devices_per_node=int(match["devices"]),
                    nodes=int(match["nodes"] or 1),
                )
            )
        return cls(groups=tuple(groups))

    @classmethod
    def local(cls, count: int, *, device: str = "cpu") -> ClusterSpec:
        """`count` ranks on this machine.

        Raises:
            ClusterError: If `count` is below 1, or the device is unknown.
        """
        return cls(groups=(NodeGroup(device=device, devices_per_node=count),))

    @classmethod
    def load(cls, path: str | Path) -> ClusterSpec:
        """The cluster described by a YAML (or JSON) file; the module says how.

        Raises:
            ClusterError: If the file is missing, is no YAML, or has wrong keys or values; with the
                line, and the key that was probably meant.
        """
        table = read_yaml(Path(path), kind="cluster file")
        if "groups" in table:
            table.check_keys(("groups", "tiers"), ("groups",))
            groups = tuple(_read_group(part) for part in _tables(table, "groups"))
        else:
            table.check_keys((*_GROUP_KEYS, "tiers"), _GROUP_KEYS[:2], elsewhere=_ELSEWHERE)
            groups = (_read_group(table, extra=("tiers",)),)
        parts = _tables(table, "tiers") if "tiers" in table else []
        return cls(groups=groups, tiers=tuple(_read_tier(part) for part in parts))

    def save(self, path: str | Path) -> None:
        """Write a file that `load` reads back as this cluster.

        Raises:
            ClusterError: If the file cannot be written.
        """
        import yaml  # here: it costs import time that parse() need not pay

        data: dict[str, Any] = {"groups": [_group_data(group) for group in self.groups]}
        if len(self.groups) == 1:
            data = data["groups"][0]
        if self.tiers:
            data["tiers"] = [
                {figure.key: figure.from_si(getattr(tier, figure.name)) for figure in TIER}
                for tier in self.tiers
            ]
        text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClusterError(
                f"cannot write cluster file {str(path)!r}: {error.strerror}",
                expected="a file in a folder that exists",
            ) from None

    @property
    def num_devices(self) -> int:
        """Devices, and ranks, in all."""
        return sum(group.num_devices for group in self.groups)

    @property
    def nodes(self) -> int:
        """Nodes in all."""
        return sum(group.nodes for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are of one kind and all nodes have equally many."""
        return len({(g._canonical, g.devices_per_node, g.figures) for g in self.groups}) == 1

    @property
    def device(self) -> str:
        """Name of the device, when all are of one kind.

        Raises:
            ClusterError: If there are several kinds.
        """
        return self._only("device")

    @property
    def devices_per_node(self) -> int:
        """Devices per node, when all nodes have equally many.

        Raises:
            ClusterError: If they differ.
        """
        return self._only("devices_per_node")

    def _only(self, name: str) -> Any:
        values = {getattr(group, name): None for group in self.groups}
        if len(values) > 1:
            raise ClusterError(
                f"{name} differs between the nodes of {self}",
                expected="a cluster of equal nodes",
                fix="look at its `groups`",
            )
        return next(iter(values))

    @property
    def usd_per_hour(self) -> float | None:
        """Price of the whole cluster, None when that of some nodes is not known."""
        total = 0.0
        for group in self.groups:
            if group.node_usd_per_hour is None:
                return None
            total += group.nodes * group.node_usd_per_hour
        return total

    def hardware(self, rank: int = 0) -> Device:
        """The device of `rank`, with the figures of this cluster.

        Raises:
            ClusterError: If there is no such rank.
        """
        return self._place(rank)[0].hardware

    def node_of(self, rank: int) -> int:
        """Index of the node of `rank`.

        Raises:
            ClusterError: If there is no such rank.
        """
        group, first_rank, first_node = self._place(rank)
        return first_node + (rank - first_rank) // group.devices_per_node

    def _place(self, rank: int) -> tuple[NodeGroup, int, int]:
        """Group of `rank`, and first rank and first node of that group."""
        first_rank = first_node = 0
        if rank >= 0:
            for group in self.groups:
                if rank < first_rank + group.num_devices:
                    return group, first_rank, first_node
                first_rank += group.num_devices
                first_node += group.nodes
        raise ClusterError(
            f"rank {rank} is not in cluster {self}",
            expected=f"a rank from 0 to {self.num_devices - 1}",
        )

    def with_figures(self, figures: Mapping[str, float], *, source: str) -> ClusterSpec:
        """This cluster with other figures for all its devices.

        Args:
            figures: ``"section.key"`` to value in the unit of the key, e.g.
                ``{"efficiency.matmul_share": 0.8}``.
            source: Where they come from.

        Raises:
            ClusterError: If there is no such figure, or its value is not plausible.
        """
        groups = tuple(
            dataclasses.replace(
                group,
                figures=tuple({**dict(group.figures), **figures}.items()),
                source=source if group.source is None else f"{group.source}; {source}",
            )
            for group in self.groups
        )
        return dataclasses.replace(self, groups=groups)

    def __str__(self) -> str:
        return "+".join(map(str, self.groups))


def _tables(table: Table, key: str) -> list[Table]:
    parts = table.entries[key]
    if not isinstance(parts, list) or not all(isinstance(part, Table) for part in parts):
        raise ClusterError(f"{key} is no list of mappings", where=table.where(key))
    return parts


def _read_group(table: Table, extra: tuple[str, ...] = ()) -> NodeGroup:
    table.check_keys((*_GROUP_KEYS, *extra), _GROUP_KEYS[:2], elsewhere=_ELSEWHERE)
    device = table.text("device")
    try:
        canonical_name(device)
    except ClusterError as error:
        raise ClusterError(
            error.what, expected=error.expected, fix=error.fix, where=table.where("device")
        ) from None
    return NodeGroup(
        device=device,
        devices_per_node=int(table.number(DEVICES_PER_NODE)),
        nodes=int(table.number(NODES)) if NODES.key in table else 1,
        figures=read_figures(table, [section for section in SECTIONS if section in table]),
        node_usd_per_hour=table.number(PRICE) if PRICE.key in table else None,
        source=table.text("source") if "source" in table else None,
    )


def memory_is_known(cluster: ClusterSpec) -> bool:
    """Whether the memory of devices is more than a guess."""
    measured = ("memory.memory_gib" in dict(group.figures) for group in cluster.groups)
    return all(
        group.hardware.kind != "cpu" or known
        for group, known in zip(cluster.groups, measured, strict=True)
    )


def _read_tier(table: Table) -> Tier:
    keys = [figure.key for figure in TIER]
    table.check_keys(keys, keys)
    values: dict[str, Any] = {figure.name: table.number(figure) for figure in TIER}
    return Tier(**values)


def _group_data(group: NodeGroup) -> dict[str, Any]:
    data: dict[str, Any] = {
        "device": group.device,
        "nodes": group.nodes,
        "devices_per_node": group.devices_per_node,
    }
    if group.node_usd_per_hour is not None:
        data[PRICE.key] = group.node_usd_per_hour
    if group.source is not None:
        data["source"] = group.source
    for path, value in group.figures:
        section, _, key = path.partition(".")
        data.setdefault(section, {})[key] = value
    return data
