"""Prices against measured tables; what is tested is the form of the prices, so shares are pinned.

A device has one share of its link for all sizes, groups and collectives of all tables, and the
start and the latency of the catalogue.

Groups of 4 to 7 V100 get 2 to 6 links of the hybrid cube mesh, as it happens to be wired; the
catalogue knows only "a link per pair" and is off by up to a factor of two there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.collectives import axis_price, price, send_prices
from autopar.cost_models.spans import spans
from autopar.sharding.mesh import Mesh

TABLES = json.loads(Path(__file__).with_name("collective_tables.json").read_text())
MIB32, MIB256 = 2**25, 2**28
NODES = {
    device: ClusterSpec.parse(f"8x{device}").with_figures(
        {"efficiency.link_share": share}, source="fitted on these tables"
    )
    for device, share in (("A100", 0.68), ("V100", 0.9))
}


def errors(table: str) -> dict[tuple[str, str, bool], list[float]]:
    """Device, collective, whether 32 MiB or more, to predicted over measured seconds, minus 1."""
    found: dict[tuple[str, str, bool], list[float]] = defaultdict(list)
    for device, kind, ranks, size_bytes, seconds in TABLES[table]["rows"]:
        (span,) = spans(NODES[device], [range(ranks)])
        odd = " odd" if device == "V100" and 3 < ranks < 8 else ""
        key = (device + odd, kind, size_bytes >= MIB32)
        found[key].append(price(kind, size_bytes, span).seconds / seconds - 1)
    return found


# table, device, collective, 32 MiB or more: mean and largest |error| that is accepted. Reached:
# 9 26, 7 13, 10 22, 1.4 7, 27 53, 44 59, 25 41, 6 14, 13 79, 8 22 %.
LIMITS = {
    ("vtrain", "A100", "all_reduce", False): (0.10, 0.28),
    ("vtrain", "A100", "all_reduce", True): (0.08, 0.15),
    ("vtrain", "V100", "all_reduce", False): (0.11, 0.24),
    ("vtrain", "V100", "all_reduce", True): (0.02, 0.08),
    ("vtrain", "V100 odd", "all_reduce", False): (0.30, 0.55),
    ("vtrain", "V100 odd", "all_reduce", True): (0.46, 0.62),
    ("galvatron", "A100", "all_reduce", False): (0.27, 0.45),
    ("galvatron", "A100", "all_reduce", True): (0.07, 0.16),
    ("galvatron", "A100", "all_to_all", False): (0.15, 0.85),
    ("galvatron", "A100", "all_to_all", True): (0.10, 0.25),
}


@pytest.mark.parametrize("table", ["vtrain", "galvatron"])
def test_one_node(table):
    found = errors(table)
    assert {(table, *key) for key in found} == {key for key in LIMITS if key[0] == table}
    for key, values in found.items():
        limits = LIMITS[(table, *key)]
        reached = mean(map(abs, values)), max(map(abs, values))
        assert reached <= limits, (key, reached)


def test_two_nodes_that_share_their_cards():
    """Bus bandwidths of groups that run at once; of the network only the sum is fitted: 60 GB/s."""
    figures = {
        "node.nic_gbit_per_s": 100, "efficiency.network_share": 0.6, "efficiency.link_share": 0.68,
    }  # fmt: skip
    spec = ClusterSpec.parse("2x8xA100").with_figures(figures, source="test")
    found = []
    for kind, ranks, _, bus in TABLES["galvatron_two_nodes"]["rows"]:
        mesh = Mesh((("a", ranks), ("b", 16 // ranks)))
        if kind == "send":
            seconds = max(part.seconds for part in send_prices(MIB256, spec, mesh, "a"))
            sent = MIB256
        else:
            seconds = axis_price(kind, MIB256, spec, mesh, ("a",)).seconds
            sent = 2 * (ranks - 1) / ranks * MIB256
        found.append(sent / seconds / bus - 1)
    # Groups with four and eight ranks in a node reach less of the cards than those with one.
    assert len(found) == 8
    assert mean(map(abs, found)) < 0.17
    assert max(map(abs, found)) < 0.45
