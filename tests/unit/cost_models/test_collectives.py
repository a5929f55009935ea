"""Prices of collectives: exact bytes, limits, monotonicity, and a count of every byte sent."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.collectives import (
    ALGORITHMS,
    EVERY,
    LIBRARY,
    axis_price,
    parameter_server,
    price,
    send_prices,
    sent_bytes,
)
from autopar.cost_models.spans import Hop, Span, axis_groups, spans
from autopar.errors import ClusterError
from autopar.sharding.mesh import Mesh

LINK_RATE, CARD_RATE = 300e9, 25e9
GROUP_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def one_level(ranks: int, *, rate: float = 1e9, latency: float = 0.0, start: float = 0.0) -> Span:
    hop = Hop(
        level="link", network=False, fan=ranks, members=1, together=ranks, edges=ranks,
        bytes_per_s=rate, latency_s=latency,
    )  # fmt: skip
    return Span(size=ranks, start_s=start, all_to_all_start_s=start, hops=(hop,))


def two_levels(devices: int, nodes: int, *, link: float, card: float, start: float = 0.0) -> Span:
    size = devices * nodes
    inner = Hop(
        level="link", network=False, fan=devices, members=1, together=devices,
        edges=size - nodes, bytes_per_s=link, latency_s=1e-6,
    )  # fmt: skip
    outer = Hop(
        level="network", network=True, fan=nodes, members=devices, together=size,
        edges=nodes, bytes_per_s=card, latency_s=1e-5,
    )  # fmt: skip
    return Span(size=size, start_s=start, all_to_all_start_s=start, hops=(inner, outer))


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_bytes_per_rank_are_the_textbooks(ranks):
    size = 12e6
    exact = {
        "all_reduce": 2 * (ranks - 1) / ranks * size,
        "all_gather": (ranks - 1) / ranks * size,
        "reduce_scatter": (ranks - 1) / ranks * size,
        "all_to_all": (ranks - 1) / ranks * size,
        "broadcast": size,
    }
    for kind, sent in exact.items():
        assert sent_bytes(kind, size, ranks) == pytest.approx(sent, rel=1e-15)
        found = price(kind, size, one_level(ranks, rate=1e9))
        assert found.transfer_s == pytest.approx(sent / 1e9, rel=1e-12)
        assert (found.latency_s, found.start_s, found.level) == (0, 0, "link")
    assert sent_bytes("send", size, 2) == size
    assert sent_bytes("all_reduce", size, 1) == 0


@pytest.mark.parametrize(
    ("kind", "steps"),
    [("all_reduce", 14), ("all_gather", 7), ("reduce_scatter", 7), ("all_to_all", 7),
     ("broadcast", 7)],
)  # fmt: skip
def test_steps_are_the_textbooks(kind, steps):
    found = price(kind, 1e-9, one_level(8, latency=1e-6, start=5e-6))
    assert found.latency_s == pytest.approx(steps * 1e-6)
    assert found.seconds == pytest.approx(5e-6 + steps * 1e-6)


def test_two_levels_by_hand():
    """Eight devices in each of four nodes; S = 32 MB; link 100 GB/s, cards of a node 40 GB/s."""
    span, size = two_levels(8, 4, link=100e9, card=40e9, start=1e-5), 32e6

    def of(kind, name):
        return price(kind, size, span, algorithms={kind: (name,)})

    ring = of("all_reduce", "ring")
    assert ring.transfer_s == pytest.approx(2 * 31 / 32 * size / 40e9)
    assert ring.latency_s == pytest.approx(2 * 31 / 32 * (28 * 1e-6 + 4 * 1e-5))
    assert ring.level == "network"
    tree = of("all_reduce", "tree")
    assert tree.transfer_s == pytest.approx(2 * size / 0.92 / 40e9)
    assert tree.latency_s == pytest.approx(2 * (2 * 1e-5 + 7 * 1e-6))
    levels = of("all_reduce", "hierarchical")
    assert levels.start_s == pytest.approx(3e-5)
    assert levels.transfer_s == pytest.approx(2 * (7 / 8 * size / 100e9 + 3 / 4 * size / 40e9))
    assert levels.latency_s == pytest.approx(2 * (7 * 1e-6 + 3 * 1e-5))
    gather = of("all_gather", "hierarchical")
    assert gather.transfer_s == pytest.approx(7 / 8 * size / 100e9 + 3 / 4 * size / 40e9)
    assert gather.start_s == pytest.approx(2e-5)
    pairwise = of("all_to_all", "pairwise")
    assert pairwise.transfer_s == pytest.approx(8 * 24 / 32 * size / 40e9)
    assert pairwise.latency_s == pytest.approx(7 * 1e-6 + 24 * 1e-5)
    exchange = of("all_to_all", "hierarchical")
    assert exchange.transfer_s == pytest.approx(7 / 8 * size / 100e9 + 8 * 3 / 4 * size / 40e9)
    assert exchange.latency_s == pytest.approx(7 * 1e-6 + 3 * 1e-5)
    cast = of("broadcast", "tree")
    assert cast.transfer_s == pytest.approx(size / 0.92 / 40e9)
    assert cast.latency_s == pytest.approx(2 * 1e-5 + 7 * 1e-6)
    assert of("broadcast", "ring").transfer_s == pytest.approx(size / 40e9)
    send = price("send", size, two_levels(1, 2, link=1, card=40e9))
    assert (send.transfer_s, send.latency_s) == (pytest.approx(size / 40e9), 1e-5)


def test_the_best_algorithm_depends_on_size_and_group():
    span = two_levels(8, 64, link=200e9, card=150e9, start=1e-5)
    small, large = (price("all_reduce", size, span) for size in (1e4, 1e12))
    assert (small.algorithm, large.algorithm) == ("tree", "ring")
    for size in (1e3, 1e5, 1e7, 1e9):
        for kind in GROUP_KINDS:
            every = [
                price(kind, size, span, algorithms={kind: (name,)}) for name in ALGORITHMS[kind]
            ]
            best = price(kind, size, span, algorithms=EVERY)
            assert best.seconds == min(found.seconds for found in every)
            assert best.seconds <= price(kind, size, span).seconds
    gather = price("all_gather", 1e4, span, algorithms=EVERY)
    assert gather.algorithm == "hierarchical"
    assert price("all_gather", 1e4, span).algorithm == "ring"
    assert set(LIBRARY) == set(EVERY) == set(ALGORITHMS)
    for kind, names in LIBRARY.items():
        assert set(names) <= set(EVERY[kind])


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_hierarchical_is_flat_on_one_level(kind, ranks):
    span = one_level(ranks, rate=3e9, latency=2e-6, start=1e-5)
    flat, levels = (
        price(kind, 7e6, span, algorithms={kind: (name,)})
        for name in ("pairwise" if kind == "all_to_all" else "ring", "hierarchical")
    )
    assert levels.seconds == pytest.approx(flat.seconds, rel=1e-12)


def test_parameter_servers():
    size, ranks = 8e6, 8
    span = one_level(ranks, rate=1e9, latency=1e-6, start=1e-5)
    every = parameter_server(size, span, servers=ranks)
    assert every.transfer_s == pytest.approx(2 * 7 / 8 * size / 1e9)
    one = parameter_server(size, span, servers=1)
    assert one.transfer_s == pytest.approx(2 * 7 * size / 1e9)
    assert one.latency_s == pytest.approx(2e-6)
    assert (one.algorithm, one.start_s) == ("parameter_server", pytest.approx(2e-5))
    seconds = [parameter_server(size, span, servers=n).seconds for n in range(1, 9)]
    assert seconds == sorted(seconds, reverse=True)
    # Two nodes of four, one server: its node takes the tensors of the four ranks outside.
    far = parameter_server(size, two_levels(4, 2, link=100e9, card=1e9), servers=1)
    assert far.transfer_s == pytest.approx(2 * 4 * size / 1e9)
    assert parameter_server(size, one_level(1), servers=1).seconds == 0
    with pytest.raises(ClusterError, match="9 servers for 8 ranks"):
        parameter_server(size, span, servers=9)


def test_nothing_costs_nothing():
    for kind in ALGORITHMS:
        assert price(kind, 0, one_level(4, start=1)).seconds == 0
        alone = price(kind, 1e6, Span(size=1, start_s=1.0, all_to_all_start_s=1.0, hops=()))
        assert (alone.seconds, alone.algorithm) == (0, "none")
    with pytest.raises(ClusterError, match="size_bytes is -1"):
        price("all_reduce", -1, one_level(4))
    with pytest.raises(ClusterError, match="unknown algorithm 'magic' for all_reduce"):
        price("all_reduce", 1, one_level(4), algorithms={"all_reduce": ("magic",)})


def test_the_slowest_group_decides():
    spec = ClusterSpec.parse("8xA100+8xV100")
    mesh = Mesh.parse("dp=2,tp=8")
    slow = price("all_reduce", 1e8, spans(spec, [range(8, 16)])[0])
    assert axis_price("all_reduce", 1e8, spec, mesh, ("tp",)) == slow
    assert slow.seconds > price("all_reduce", 1e8, spans(spec, [range(8)])[0]).seconds


def test_an_nvlink_domain_that_spans_nodes_pays():
    mesh = Mesh.parse("dp=2,ep=32")
    wide = axis_price("all_to_all", 1e8, ClusterSpec.parse("16x4xGB200"), mesh, ("ep",))
    narrow = ClusterSpec.parse("16x4xGB200").with_figures({"link.domain_devices": 4}, source="x")
    assert wide.level == "link"
    assert axis_price("all_to_all", 1e8, narrow, mesh, ("ep",)).seconds > 5 * wide.transfer_s


def test_sends_are_priced_per_border():
    found = send_prices(1e8, ClusterSpec.parse("2x8xH100"), Mesh.parse("pp=4,tp=4"), "pp")
    assert [part.level for part in found] == ["link", "network", "link"]
    assert found[1].seconds > 5 * found[0].seconds
    assert send_prices(1e8, ClusterSpec.parse("8xH100"), Mesh.parse("pp=1,tp=8"), "pp") == ()


# Every byte counted -------------------------------------------------------------------------------


@st.composite
def jobs(draw: st.DrawFn) -> tuple[ClusterSpec, Mesh, tuple[str, ...]]:
    """Equal nodes full of ranks, and a mesh whose axes fall on nodes evenly or not at all."""
    devices = draw(st.sampled_from([1, 2, 4, 8]))
    nodes = draw(st.sampled_from([1, 2, 3, 4]))
    cards = draw(st.sampled_from([1, 2, 8]))
    inner = draw(st.sampled_from([size for size in (1, 2, 4, 8) if devices % size == 0]))
    mesh = Mesh((("dp", nodes), ("pp", devices // inner), ("tp", inner)))
    axes = draw(st.sets(st.sampled_from(mesh.names), min_size=1))
    figures = {
        "node.nics": cards, "node.nic_gbit_per_s": 200, "efficiency.link_share": 1,
        "efficiency.network_share": 1,
    }  # fmt: skip
    spec = ClusterSpec.parse(f"{nodes}x{devices}xA100").with_figures(figures, source="test")
    return spec, mesh, tuple(sorted(axes))


def seconds_of_bytes(spec: ClusterSpec, links: Counter, ranks: Counter, nodes: Counter) -> float:
    """The busiest link, share of the cards of a rank, or set of cards of a node."""
    machine = spec.hardware().node
    cards = max(1.0, machine.nics / machine.devices) * CARD_RATE
    return max(
        0.0,
        *(sent / LINK_RATE for sent in links.values()),
        *(sent / cards for sent in ranks.values()),
        *(sent / (machine.nics * CARD_RATE) for sent in nodes.values()),
    )


@given(jobs())
@settings(max_examples=30, deadline=None)
def test_all_to_all_counts_every_byte(job):
    spec, mesh, axes = job
    size, groups = 1e9, axis_groups(mesh, axes)
    links: Counter[int] = Counter({0: 0})
    ranks: Counter[int] = Counter({0: 0})
    nodes: Counter[int] = Counter({0: 0})
    per_node = spec.devices_per_node
    for group in groups:
        for sender, receiver in itertools.permutations(group, 2):
            part = size / len(group)
            if sender // per_node == receiver // per_node:
                links[sender] += part
            else:
                ranks[sender] += part
                nodes[sender // per_node] += part
    found = axis_price("all_to_all", size, spec, mesh, axes)
    assert found.transfer_s == pytest.approx(seconds_of_bytes(spec, links, ranks, nodes))


@given(jobs(), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
@settings(max_examples=30, deadline=None)
def test_rings_count_every_byte(job, kind):
    spec, mesh, axes = job
    size, groups = 1e9, axis_groups(mesh, axes)
    links: Counter[int] = Counter({0: 0})
    ranks: Counter[int] = Counter({0: 0})
    nodes: Counter[int] = Counter({0: 0})
    per_node = spec.devices_per_node
    for group in groups:
        sent = sent_bytes(kind, size, len(group))
        members = Counter(rank // per_node for rank in group)
        for rank in group:
            node = rank // per_node
            if members[node] > 1:
                links[rank] += sent
            if len(members) > 1:
                # Rings leave a node from each of its ranks in turn.
                ranks[rank] += sent / members[node]
                nodes[node] += sent / members[node]
    found = axis_price(kind, size, spec, mesh, axes, algorithms={kind: ("ring",)})
    assert found.transfer_s == pytest.approx(seconds_of_bytes(spec, links, ranks, nodes))


@given(jobs(), st.sampled_from(GROUP_KINDS), st.floats(1, 1e10), st.floats(1, 10))
@settings(max_examples=30, deadline=None)
def test_more_bytes_take_longer_and_never_less_than_they_must(job, kind, size, factor):
    spec, mesh, axes = job
    less, more = (
        axis_price(kind, payload, spec, mesh, axes, algorithms=EVERY)
        for payload in (size, factor * size)
    )
    assert less.seconds <= more.seconds <= factor * less.seconds * (1 + 1e-9)
    ranks = math.prod(mesh.axis_size(axis) for axis in axes)
    assert less.transfer_s >= sent_bytes(kind, size, ranks) / LINK_RATE * (1 - 1e-9)
    # With many bytes, bytes are all that counts.
    huge = axis_price(kind, 1e15, spec, mesh, axes)
    if ranks > 1:
        assert huge.transfer_s == pytest.approx(huge.seconds, rel=1e-3)


@given(jobs(), st.sampled_from(GROUP_KINDS))
@settings(max_examples=25, deadline=None)
def test_company_never_makes_a_group_faster(job, kind):
    spec, mesh, axes = job
    groups = axis_groups(mesh, axes)
    alone = price(kind, 1e8, spans(spec, groups[:1])[0])
    assert axis_price(kind, 1e8, spec, mesh, axes).seconds >= alone.seconds * (1 - 1e-12)


@given(jobs(), st.sampled_from(GROUP_KINDS), st.sampled_from(
    ["efficiency.link_share", "efficiency.network_share", "link.start_us", "link.latency_us",
     "node.network_latency_us"]))  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_better_figures_never_cost_more(job, kind, figure):
    spec, mesh, axes = job
    share = figure.startswith("efficiency")
    worse = spec.with_figures({figure: 0.3 if share else 90}, source="test")
    here, there = (axis_price(kind, 1e6, one, mesh, axes).seconds for one in (spec, worse))
    assert here <= there
