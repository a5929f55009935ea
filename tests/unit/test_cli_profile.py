"""``autopar profile``: what it refuses before it measures, what it writes and says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar import api
from autopar.cli.main import main
from autopar.cost_models.calibrate import Calibration, Constant, Fit
from autopar.cost_models.cluster import ClusterSpec

SOURCE = "measured by autopar profile on 2026-01-31"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Instead of measuring, what was to be measured is noted."""
    seen: list[object] = []

    def measure(ranks, *, quick, comm, on_progress):
        seen.append((ranks, quick))
        on_progress("matmul", 1, 2)
        cluster = ClusterSpec.local(ranks or 2).with_figures({"node.cores": 2}, source=SOURCE)
        constants = (
            Constant(path="node.cores", value=2, how="measured"),
            Constant(path="efficiency.matmul_share", value=1.0, how="fitted", at_edge=True),
        )
        fits = (Fit(work="matmul", count=9, mean_error=0.05, max_error=0.2, worst="8 x 8 x 8"),)
        return Calibration(cluster=cluster, constants=constants, fits=fits)

    monkeypatch.setattr(api, "measure", measure)
    return seen


def test_it_writes_a_cluster_and_says_how_it_fits(asked, tmp_path: Path, capsys):
    file = tmp_path / "cluster.yaml"
    assert main(["profile", "-o", str(file), "-n", "3"]) == 0
    spec = ClusterSpec.load(file)
    assert (spec.num_devices, spec.groups[0].source) == (3, SOURCE)
    text = capsys.readouterr().out
    for word in ("measured", "fitted, at its limit", "5.0%", "8 x 8 x 8"):
        assert word in text
    assert asked == [(3, False)]


def test_json_says_the_same(asked, tmp_path: Path, capsys):
    assert main(["profile", "-o", str(tmp_path / "c.yaml"), "--quick", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["constants"][0]["how"] == "measured"
    assert said["constants"][1]["at_edge"] is True
    assert said["fits"][0]["mean_error"] == 0.05
    assert asked == [(None, True)]


@pytest.mark.parametrize("words", [["-n", "0"], ["-o", "nowhere/c.yaml"], ["-o", "."]])
def test_bad_input_is_refused_before_measuring(words, asked, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = words if "-o" in words else ["-o", "c.yaml", *words]
    assert main(["profile", *given]) == 2
    assert not asked
    assert "error" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_stays_until_it_is_replaced(tmp_path: Path, monkeypatch):
    file = tmp_path / "cluster.yaml"
    file.write_text("kept")

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "measure", fails)
    assert main(["profile", "-o", str(file)]) == 130
    assert file.read_text() == "kept"


@pytest.mark.long
@pytest.mark.distributed
def test_two_ranks_are_measured(tmp_path: Path):
    file = tmp_path / "cluster.yaml"
    assert main(["profile", "-o", str(file), "-n", "2", "--quick"]) == 0
    device = ClusterSpec.load(file).hardware()
    assert device.sources["efficiency.link_share"].text.startswith("measured by autopar profile on")
    assert device.node.devices == 2
    assert 1e8 < device.peak("float32") < 1e13
