"""Units, registry, mesh, cluster and the lazy public names."""

from __future__ import annotations

import importlib
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar import units
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import AutoparError, ClusterError, PlanError, meant
from autopar.registry import Registry
from autopar.schedules.make import SCHEDULES
from autopar.sharding.mesh import Mesh

MESHES = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(
    lambda sizes: Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
)


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("dp=2,tp=2", (("dp", 2), ("tp", 2))),
        (" dp = 2 , tp=3 ", (("dp", 2), ("tp", 3))),
        ("pp=1", (("pp", 1),)),
    ],
)
def test_mesh_text(text, axes):
    mesh = Mesh.parse(text)
    assert mesh.axes == axes
    assert Mesh.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    "text",
    ["", "dp", "dp=", "dp=two", "=2", "dp=2,", "dp=2,dp=2", "dp=0", "dp=-1", "2=dp", "d p=2"],
)
def test_bad_mesh_text(text):
    with pytest.raises(PlanError):
        Mesh.parse(text)


def test_mesh_numbers_row_by_row():
    mesh = Mesh.parse("dp=2,tp=3")
    assert [mesh.coordinate(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert mesh.ranks_along(("tp",), 4) == (3, 4, 5)
    assert mesh.ranks_along(("dp",), 4) == (1, 4)
    assert mesh.ranks_along(("tp", "dp"), 4) == tuple(range(6))
    assert mesh.ranks_along((), 4) == (4,)
    assert mesh.groups(("dp",)) == ((0, 3), (1, 4), (2, 5))


@given(MESHES, st.data())
def test_mesh_groups_partition_the_ranks(mesh: Mesh, data: st.DataObject):
    axes = tuple(data.draw(st.permutations(mesh.names)))[: data.draw(st.integers(0, 4))]
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        coordinates = [mesh.coordinate(rank) for rank in group]
        assert coordinates == sorted(coordinates)
        assert list(group) == sorted(group)
        for name, values in zip(mesh.names, zip(*coordinates, strict=True), strict=True):
            assert name in axes or len(set(values)) == 1
    assert all(mesh.rank(mesh.coordinate(rank)) == rank for rank in range(mesh.size))


def test_mesh_refuses_another_world():
    with pytest.raises(ClusterError, match="has 4 ranks, but the job runs 3") as caught:
        Mesh.parse("dp=2,tp=2").check_world_size(3)
    assert caught.value.fix is not None and "torchrun --nproc-per-node 4" in caught.value.fix
    Mesh.parse("dp=2,tp=2").check_world_size(4)
    with pytest.raises(PlanError, match="needs 4 devices, and the cluster has 8"):
        Mesh.parse("dp=2,tp=2").check_devices(8)
    Mesh.parse("dp=2,tp=2").check_devices(4)
    with pytest.raises(PlanError, match="unknown mesh axis 'pp'"):
        Mesh.parse("dp=2").axis_size("pp")
    with pytest.raises(ClusterError, match="rank 2 is not in mesh"):
        Mesh.parse("dp=2").coordinate(2)


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "device"),
    [("8x8xH100-SXM", 8, 8, "H100-SXM"), ("4xcpu", 1, 4, "cpu"), ("2 x 4 x A100", 2, 4, "A100")],
)
def test_cluster_text(text, nodes, devices, device):
    cluster = ClusterSpec.parse(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.device) == (nodes, devices, device)
    assert cluster.num_devices == nodes * devices
    assert ClusterSpec.parse(str(cluster)) == cluster


@pytest.mark.parametrize("text", ["", "cpu", "4", "0xcpu", "4x", "x4xcpu", "2x2x2xcpu"])
def test_bad_cluster_text(text):
    with pytest.raises(ClusterError):
        ClusterSpec.parse(text)


def test_cluster_file(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("device: H100-SXM\nnodes: 2\ndevices_per_node: 8\n")
    assert ClusterSpec.load(file) == ClusterSpec.parse("2x8xH100-SXM")
    assert ClusterSpec.local(3) == ClusterSpec.parse("3xcpu")


@pytest.mark.parametrize(
    "content",
    ["device: H100", "- a\n- b", "device: H100\ndevices_per_node: 8\nracks: 2", "a: [", "",
     "device: H100\ndevices_per_node: eight", "device: 5\ndevices_per_node: 8"],
)  # fmt: skip
def test_bad_cluster_file(tmp_path, content):
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    with pytest.raises(ClusterError):
        ClusterSpec.load(file)
    with pytest.raises(ClusterError, match="cannot read cluster file"):
        ClusterSpec.load(tmp_path / "missing.yaml")


def test_registry_rejects_duplicates_and_explains_unknown_names():
    registry = Registry[int]("strategy", error=PlanError)
    registry.add("megatron", 1)

    @registry.register("double")
    def double(value: int) -> int:
        return 2 * value

    assert registry["megatron"] == 1
    assert double(2) == 4
    assert list(registry) == ["double", "megatron"]
    assert "ddp" not in registry and registry.get("ddp") is None and len(registry) == 2
    with pytest.raises(ValueError, match="strategy 'megatron' is registered twice"):
        registry.add("megatron", 2)
    with pytest.raises(PlanError, match="unknown strategy 'megatorn'") as caught:
        registry["megatorn"]
    assert caught.value.fix == "did you mean 'megatron'?"


@given(st.sampled_from(sorted(SCHEDULES)), st.data())
def test_a_name_with_a_slip_is_recognised(name: str, data: st.DataObject):
    place = data.draw(st.integers(0, len(name) - 1))
    slip = data.draw(st.sampled_from((name[:place] + name[place + 1 :], name + "s")))
    question = meant(slip, SCHEDULES)
    assert question is not None and question.startswith("did you mean ")
    assert meant(name.upper(), SCHEDULES) == f"did you mean {name!r}?"
    assert meant("", SCHEDULES) is None is meant("%%%", SCHEDULES)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_536_000, "1.54 MB"), (8e10, "80 GB")],
)
def test_bytes_text(size_bytes, text):
    assert units.format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("80GiB", 80 * 2**30), ("1.5 GB", 1.5e9), ("4096", 4096), ("7 kb", 7000), (" 2MiB ", 2**21)],
)
def test_bytes_from_text(text, size_bytes):
    assert units.parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "1.2.3 GB", "1 IB"])
def test_bad_bytes_text(text):
    with pytest.raises(ValueError, match=r"unit|number"):
        units.parse_bytes(text)


def test_other_units():
    assert [units.format_seconds(value) for value in (12, 0.0123, 4e-6, 7e-9)] == [
        "12 s", "12.3 ms", "4 us", "7 ns",
    ]  # fmt: skip
    assert [units.format_count(value) for value in (7, 3_170_304, 1.5e11)] == [
        "7", "3.17M", "150B",
    ]  # fmt: skip


def test_errors_cross_processes_whole():
    error = PlanError("what", expected="expected", fix="fix", where="where")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is PlanError
    assert (copy.what, copy.expected, copy.fix, copy.where) == (
        "what", "expected", "fix", "where",
    )  # fmt: skip
    assert str(copy) == str(error)


def test_public_names():
    for name in autopar.__all__:
        assert getattr(autopar, name) is not None
        assert name in dir(autopar)
    assert autopar.PlanError is PlanError and issubclass(PlanError, AutoparError)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        autopar.nonsense  # noqa: B018 (reading it is the test)


@pytest.mark.parametrize("name", ["plan", "trace"])
def test_packages_that_share_a_functions_name_can_be_called(name):
    package = importlib.import_module(f"autopar.{name}")
    assert getattr(autopar, name) is package
    assert callable(package)
