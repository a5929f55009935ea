"""Where ranks are, what groups cross, and what they get of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.cluster import ClusterSpec, NodeGroup, Tier
from autopar.cost_models.spans import Span, axis_groups, axis_spans, send_spans, spans
from autopar.cost_models.topology import Layout
from autopar.errors import ClusterError, PlanError
from autopar.sharding.mesh import MICROBATCH, Mesh

PERFECT = {"efficiency.link_share": 1, "efficiency.network_share": 1}


def perfect(text: str, **figures: float) -> ClusterSpec:
    """The cluster `text` without losses; ``link__latency_us`` stands for ``link.latency_us``."""
    more = {name.replace("__", "."): value for name, value in figures.items()}
    return ClusterSpec.parse(text).with_figures({**PERFECT, **more}, source="test")


def summary(span: Span) -> list[tuple[str, int, int, float]]:
    """Level, fan, members and GB/s of every hop."""
    return [(hop.level, hop.fan, hop.members, hop.bytes_per_s / 1e9) for hop in span.hops]


def test_levels_of_equal_nodes():
    layout = Layout.of(ClusterSpec.parse("4x8xH100"))
    assert [level.name for level in layout.levels] == ["link", "network"]
    assert layout.level_of([3]) is None
    assert layout.level_of([0, 7]).name == "link"
    assert layout.level_of([7, 8]).name == "network"
    outermost = [Layout.of(ClusterSpec.parse(t)).levels[-1].name for t in ("8xA100", "4x1xA100")]
    assert outermost == ["link", "network"]
    with pytest.raises(ClusterError, match="not all in a cluster of 32 devices"):
        layout.level_of([0, 32])


def test_a_single_device_has_no_hops():
    spec = ClusterSpec.local(1)
    assert spans(spec, [[0]])[0].hops == ()
    assert axis_spans(ClusterSpec.parse("2x8xH100"), Mesh.parse("dp=16,tp=1"), ("tp",))[0].size == 1


def test_groups_in_and_between_nodes_share_the_cards():
    spec = perfect("4x8xH100")
    mesh = Mesh.parse("dp=4,tp=8")
    (tp,) = axis_spans(spec, mesh, ("tp",))
    assert summary(tp) == [("link", 8, 1, 450)]
    # Eight groups share the eight cards of a node: one each.
    (dp,) = axis_spans(spec, mesh, ("dp",))
    assert summary(dp) == [("network", 4, 1, 50)]
    (both,) = axis_spans(spec, mesh, ("dp", "tp"))
    assert summary(both) == [("link", 8, 1, 450), ("network", 4, 8, 400)]
    assert [hop.edges for hop in both.hops] == [28, 4]
    # The only group that communicates has no more than the cards of its ranks.
    (alone,) = spans(spec, [[0, 8, 16, 24]])
    assert summary(alone) == [("network", 4, 1, 50)]
    (two,) = axis_spans(spec, Mesh.parse("dp=8,tp=4"), ("dp",))
    assert summary(two) == [("link", 2, 1, 450), ("network", 4, 2, 100)]


def test_fewer_cards_than_devices_are_shared():
    spec = perfect("4x8xA100", node__nics=2, node__nic_gbit_per_s=200)
    (dp,) = axis_spans(spec, Mesh.parse("dp=4,tp=8"), ("dp",))
    assert summary(dp) == [("network", 4, 1, 50 / 8)]
    (alone,) = spans(spec, [[0, 8, 16, 24]])
    assert summary(alone) == [("network", 4, 1, 25)]


def test_more_cards_than_devices():
    spec = perfect("2x4xH100", node__nics=8)
    (dp,) = axis_spans(spec, Mesh.parse("dp=2,tp=4"), ("dp",))
    assert summary(dp) == [("network", 2, 1, 100)]


def test_a_domain_may_span_nodes():
    spec = perfect("36x4xGB200")
    (ep,) = axis_spans(spec, Mesh.parse("dp=2,ep=72"), ("ep",))
    assert summary(ep) == [("link", 72, 1, 900)]
    (dp,) = axis_spans(spec, Mesh.parse("dp=2,ep=72"), ("dp",))
    assert summary(dp) == [("network", 2, 1, 50)]
    (all_ranks,) = axis_spans(spec, Mesh.parse("dp=144"), ("dp",))
    assert summary(all_ranks) == [("link", 72, 1, 900), ("network", 2, 72, 72 * 50)]
    # Domains of whole nodes only: 72 is no multiple of 5.
    assert Layout.of(ClusterSpec.parse("20x5xGB200")).shapes[0].domain == 70


def test_domains_within_a_node_meet_through_the_host():
    spec = perfect("2x4xA100", link__domain_devices=2)
    names = [level.name for level in Layout.of(spec).levels]
    assert names == ["link", "host", "network"]
    (tp,) = axis_spans(spec, Mesh.parse("dp=2,tp=4"), ("tp",))
    assert summary(tp) == [("link", 2, 1, 300), ("host", 2, 2, 64)]
    (pairs,) = axis_spans(spec, Mesh.parse("dp=4,tp=2"), ("tp",))
    assert summary(pairs) == [("link", 2, 1, 300)]
    (across,) = axis_spans(spec, Mesh.parse("dp=2,pp=2,tp=2"), ("pp",))
    assert summary(across) == [("host", 2, 1, 32)]
    # A node of three has a domain of two and one of one.
    assert Layout.of(perfect("3xA100", link__domain_devices=2)).levels[0].unit_of == (0, 0, 1)


def test_devices_wired_pair_by_pair():
    spec = perfect("8xV100")
    for size, rate in ((2, 25), (3, 50), (7, 150), (8, 150)):
        (span,) = spans(spec, [range(size)])
        assert summary(span) == [("link", size, 1, rate)]


def test_tiers_divide_what_comes_from_below():
    base = perfect("8x8xH100")
    tiers = (
        Tier(nodes=2, oversubscription=2, latency_s=20e-6),
        Tier(nodes=4, oversubscription=4, latency_s=30e-6),
    )
    spec = ClusterSpec(groups=base.groups, tiers=tiers)
    (span,) = axis_spans(spec, Mesh.parse("dp=64"), ("dp",))
    assert summary(span) == [
        ("link", 8, 1, 450), ("network", 2, 8, 400), ("tier 1", 2, 16, 400), ("tier 2", 2, 32, 200)
    ]  # fmt: skip
    assert [hop.latency_s for hop in span.hops[1:]] == [14e-6, 20e-6, 30e-6]
    assert [hop.edges for hop in span.hops] == [56, 4, 2, 2]
    assert Layout.of(spec).level_of([0, 31]).name == "tier 1"
    # All of 16 groups between the halves share the topmost border.
    (half,) = axis_spans(spec, Mesh.parse("pp=2,dp=32"), ("pp",))
    assert summary(half) == [("tier 2", 2, 1, 200 / 32)]


def test_unequal_nodes_go_as_fast_as_the_slowest():
    spec = ClusterSpec(
        groups=(
            *perfect("2x8xA100").groups,
            *perfect("4xV100", node__nics=1).groups,
        )
    )
    assert spec.num_devices == 20
    (span,) = spans(spec, [range(20)])
    assert span.size == 20
    assert summary(span) == [("link", 8, 1, 150), ("network", 3, 8, 12.5)]
    assert [hop.edges for hop in span.hops] == [17, 3]
    slow, fast = spans(spec, [range(16, 20), range(8)])
    assert summary(slow) == [("link", 4, 1, 75)]
    assert summary(fast) == [("link", 8, 1, 300)]
    assert slow.start_s == spec.hardware(16).link.start_s


def test_a_spanning_domain_beside_ordinary_nodes():
    group = NodeGroup(device="GB200", devices_per_node=4, nodes=20)
    spec = ClusterSpec(groups=(*ClusterSpec.parse("2x8xH100").groups, group))
    layout = Layout.of(spec)
    assert [level.name for level in layout.levels] == ["link", "network"]
    assert layout.level_of([16, 16 + 71]).name == "link"
    assert layout.level_of([15, 16]).name == "network"
    assert layout.level_of([87, 88]).name == "network"
    # Two nodes, a full domain of 18 and one of the remaining two.
    assert layout.levels[1].children == (((0, 1),), ((0, 1),), ((1, 18),), ((1, 2),))


def test_sends_between_stages():
    spec = perfect("4x8xH100")
    inside, border = send_spans(spec, Mesh.parse("pp=3,tp=8"), "pp")
    assert inside == border
    assert summary(border[0]) == [("network", 2, 1, 50)]
    mesh = Mesh.parse("dp=2,pp=4,tp=4")
    found = send_spans(spec, mesh, "pp")
    assert [summary(part[0])[0][0] for part in found] == ["link", "network", "link"]
    # Four ranks of a node send over eight cards.
    assert summary(found[1][0]) == [("network", 2, 1, 50)]
    assert len(send_spans(spec, mesh, "pp", around=True)) == 4
    assert len(send_spans(spec, Mesh.parse("pp=1,dp=8"), "pp", around=True)) == 0
    # Eight ranks of a node send over two cards.
    few = perfect("4x8xA100", node__nics=2, node__nic_gbit_per_s=200)
    assert summary(send_spans(few, Mesh.parse("pp=4,tp=8"), "pp")[0][0]) == [
        ("network", 2, 1, 50 / 8)
    ]


def test_mistakes_are_explained():
    spec = ClusterSpec.parse("2x8xH100")
    with pytest.raises(PlanError, match="unknown mesh axis 'pp'"):
        axis_spans(spec, Mesh.parse("dp=16"), ("pp",))
    with pytest.raises(ClusterError, match="mesh dp=32 has 32 ranks"):
        axis_spans(spec, Mesh.parse("dp=32"), ("dp",))
    with pytest.raises(ClusterError, match="rank 16 is not in cluster"):
        spans(spec, [[15, 16]])


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mesh = Mesh(tuple((f"a{index}", size) for index, size in enumerate(sizes)))
    axes = draw(st.sets(st.sampled_from(mesh.names), min_size=1))
    return mesh, tuple(sorted(axes))


@given(meshes())
@settings(max_examples=30, deadline=None)
def test_groups_of_a_mesh_are_the_runtimes(case):
    mesh, axes = case
    assert tuple(sorted(axis_groups(mesh, axes))) == mesh.groups(axes)
    timed = Mesh(((MICROBATCH, 3), *mesh.axes))
    assert axis_groups(timed, axes) == axis_groups(mesh, axes)


@given(meshes(), st.integers(1, 8), st.integers(1, 4), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=30, deadline=None)
def test_hops_describe_the_group(case, devices, cards, domain):
    mesh, axes = case
    nodes = -(-mesh.size // devices)
    spec = perfect(f"{nodes}x{devices}xA100", node__nics=cards, link__domain_devices=domain)
    for span in axis_spans(spec, mesh, axes):
        assert span.size == math.prod(mesh.axis_size(axis) for axis in axes)
        if span.size > 1:
            assert sum(hop.edges for hop in span.hops) == span.size
        for hop in span.hops:
            assert 1 < hop.fan <= hop.together <= span.size
            assert hop.members * hop.fan >= hop.together
            assert 0 < hop.bytes_per_s <= max(300e9, hop.members * cards * 25e9)
