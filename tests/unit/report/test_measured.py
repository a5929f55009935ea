"""Measured steps: recorded in order, read back, laid beside predictions, fed back."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.cli.main import main
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator
from autopar.cost_models.forecast import forecast_of
from autopar.cost_models.residuals import (
    best_ratio,
    error_of,
    feed_back,
    mean_error,
    residuals,
)
from autopar.errors import InputError
from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.report.html import report
from autopar.report.measured import by_program, worst
from autopar.report.trace import Step, bars
from autopar.runtime.comm import Communicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.launch import LocalRanks
from autopar.schedules.chrome import Bar, RankStep, Recording, read_recording
from autopar.sharding.mesh import Mesh
from autopar.trace import trace
from tests.unit.report.golden import stored

NAME = "interleaved"
SLOW = {
    "efficiency.matmul_share": 0.1, "efficiency.memory_share": 0.1, "efficiency.launch_us": 100.0,
    "memory.bandwidth_tb_per_s": 0.001,
}  # fmt: skip


class Small(nn.Module):
    """Two blocks, so that there is something to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(16, 8, 32, generator=torch.Generator().manual_seed(1))


def measure(comm: Communicator, plan: str) -> tuple[Recording, list[float]]:
    """On a rank: losses of steps, one of which is measured."""
    torch.manual_seed(0)
    compiled = CompiledModel(Small(), comm, CompileOptions(plan=Plan.from_json(plan)))
    first = float(compiled.step(batch()))
    recording = compiled.profile(batch())
    return recording, [first, float(compiled.step(batch()))]


def plain(comm: Communicator, plan: str) -> list[float]:
    """On a rank: the same steps, none measured."""
    torch.manual_seed(0)
    compiled = CompiledModel(Small(), comm, CompileOptions(plan=Plan.from_json(plan)))
    losses = [float(compiled.step(batch())) for _ in range(3)]
    return [losses[0], losses[2]]


@pytest.mark.distributed
def test_a_real_step_is_measured_and_mends_its_cluster(ranks2: LocalRanks, tmp_path, capsys):
    torch.manual_seed(0)
    traced = trace(Small(), (batch(),), {}, None)
    cluster = ClusterSpec.parse("2xcpu").with_figures(SLOW, source="wrong on purpose")
    held = Evaluator(traced.graph, traced.loss, cluster)
    plan, _ = make_plan(traced.graph, Mesh.parse("pp=2"), "ddp,microbatches=4,schedule=1f1b")
    plan = replace(plan, forecast=forecast_of(held, plan)[0])
    (recording, losses), (other, _) = ranks2.run(measure, plan.to_json())
    assert recording == other
    assert losses == ranks2.run(plain, plan.to_json())[0]
    schedule = Step.of(plan).timeline.schedule
    for step in recording.ranks:
        assert [bar.name for bar in step.actions] == [
            str(action) for action in schedule.actions[step.pipeline_rank]
        ]
        ends = [0.0, *(bar.end_s for bar in step.actions)]
        assert all(
            end <= bar.start_s + 1e-9 and bar.start_s <= bar.end_s
            for end, bar in zip(ends, step.actions, strict=False)
        )
        assert step.actions[-1].end_s <= recording.step_s
    file = tmp_path / "trace.json.gz"
    recording.save(file)
    found = residuals(plan, recording)
    mended, _ = feed_back(plan, found, source="a test")
    anew = Evaluator(traced.graph, traced.loss, mended)
    after = residuals(replace(plan, forecast=forecast_of(anew, plan)[0]), recording)
    assert mean_error(after) < mean_error(found) / 2
    assert main(["profile", "--from", str(file), "-o", str(tmp_path / "c.yaml")]) == 0
    assert "measured / predicted" in capsys.readouterr().out
    again, _ = feed_back(plan, residuals(plan, read_recording(file)), source="a test")
    assert ClusterSpec.load(tmp_path / "c.yaml").hardware(0) == again.hardware(0)


def test_collectives_beside_computation_are_told_apart_and_nothing_stays_behind():
    torch.manual_seed(0)
    traced = trace(Small(), (batch(),), {}, None)

    def body(comm: Communicator) -> Recording:
        options = CompileOptions(mesh=Mesh.parse("dp=2"), constraints="ddp,microbatches=2,zero=1")
        compiled = CompiledModel(Small(), comm, options, traced)
        recording = compiled.profile(batch())
        assert not [name for name in vars(comm) if name in ("_all_gather", "_reduce_scatter")]
        return recording

    recording = run_threads(2, body, timeout_s=60.0)[0]
    moved = [bar for bar in recording.ranks[0].bars if bar.stream == "collective"]
    beside = [bar for bar in moved if bar.details["beside"]]
    assert {bar.name for bar in beside} == {"reduce_scatter", "all_gather"}
    for bar in moved:
        assert bar.details["ranks"] == [0, 1] and bar.details["size_bytes"] > 0
        assert 0 <= bar.details.get("waited_s", 0.0) <= bar.duration_s + 1e-9
    scattered = [bar.details["action"] for bar in beside if bar.name == "reduce_scatter"]
    assert set(scattered) == {"0B1"}
    assert {bar.details["action"] for bar in beside if bar.name == "all_gather"} == {"0UPDATE0"}
    assert sum(bar.name == "0UPDATE0" for bar in recording.ranks[1].actions) == 1


# Synthetic steps


def recorded(change: Callable[[Bar], float] = lambda bar: 1.0) -> Recording:
    """The stored plan's own prediction as if it was measured, durations times `change`."""
    plan = stored(NAME)
    step = Step.of(plan)
    assert plan.forecast is not None
    ranks = []
    for rank in range(plan.device_mesh.size):
        place = plan.device_mesh.coordinate(rank)[plan.device_mesh.names.index("pp")]
        found = [
            replace(bar, end_s=bar.start_s + bar.duration_s * change(bar))
            for bar in bars(step, place)
            if bar.stream != "collective" and bar.name != "host"
        ]
        ranks.append(RankStep(rank=rank, pipeline_rank=place, bars=tuple(found)))
    return Recording(
        choices=plan.forecast.choices, device="cpu", step_s=step.timeline.step_s,
        ranks=tuple(ranks), plan=json.loads(plan.to_json()),
    )  # fmt: skip


def test_what_was_predicted_has_no_residual():
    found = residuals(stored(NAME), recorded())
    assert found and max(abs(item.difference_s) for item in found) < 1e-9
    assert mean_error(found) < 1e-6


def test_one_slow_action_is_the_worst_and_twice_as_slow_is_a_ratio_of_two():
    plan = stored(NAME)
    name = next(bar.name for bar in recorded().ranks[0].actions if "B" in bar.name[1:3])
    found = residuals(plan, recorded(lambda bar: 9.0 if bar.name == name else 1.0))
    assert str(worst(found)[0].action) == name
    rows = by_program(residuals(plan, recorded(lambda bar: 2.0)))
    work = [row for row in rows if row.kind in "FBIW" and row.predicted_s > 0]
    assert work
    assert all(row.measured_s == pytest.approx(2 * row.predicted_s, rel=1e-6) for row in work)


def test_waiting_for_a_late_rank_is_not_charged_to_the_link():
    """Both ranks of a group leave at one time; what the last one sees is what it took."""
    recording = recorded()
    first = recording.ranks[0]
    bar = next(bar for bar in first.actions if bar.name.startswith("0F"))
    mates = [step for step in recording.ranks if step.pipeline_rank == first.pipeline_rank][:2]
    details = {"action": bar.name, "ranks": [step.rank for step in mates], "beside": False}
    ranks = list(recording.ranks)
    for step, start in zip(mates, (0.1, 0.9), strict=True):
        span = bar.duration_s
        moved = Bar(
            name="all_reduce", stream="collective", start_s=bar.start_s + start * span,
            end_s=bar.end_s, details=details,
        )  # fmt: skip
        ranks[step.rank] = replace(step, bars=(*step.bars, moved))
    found = residuals(stored(NAME), replace(recording, ranks=tuple(ranks)))
    item = next(i for i in found if str(i.action) == bar.name and i.pipeline_rank == 0)
    same = sum(step.pipeline_rank == 0 for step in ranks)
    others = 0.0 if same > 2 else 0.1 * bar.duration_s
    assert item.measured_inline_s == pytest.approx(others)
    held = (0.9 + 0.1) * bar.duration_s / same
    assert item.measured_compute_s == pytest.approx(bar.duration_s - held)


def test_the_page_tells_measured_from_predicted():
    plan, recording = stored(NAME), recorded(lambda bar: 1.5)
    text = report(plan, recording=recording, found=residuals(plan, recording))
    assert '<section id="measured">' in text and "worst actions" in text
    assert text.count('class="tag measured"') == 1


# Traces


def test_recordings_come_back_as_they_were(tmp_path: Path):
    recording = recorded(lambda bar: 1.25)
    for name in ("a.json", "a.json.gz"):
        recording.save(tmp_path / name)
        found = read_recording(tmp_path / name)
        assert replace(found, ranks=()) == replace(recording, ranks=())
        for mine, other in zip(recording.ranks, found.ranks, strict=True):
            assert [bar.name for bar in mine.bars] == [bar.name for bar in other.bars]
            for a, b in zip(mine.bars, other.bars, strict=True):
                assert math.isclose(a.end_s, b.end_s, abs_tol=2e-9) and a.details == b.details
    with pytest.raises(InputError):
        recording.save(tmp_path / "no" / "a.json")


def test_other_traces_are_refused(tmp_path: Path):
    plan, recording = stored(NAME), recorded()
    with pytest.raises(InputError, match="another plan"):
        residuals(plan, replace(recording, choices="0"))
    with pytest.raises(InputError, match="ranks"):
        residuals(plan, replace(recording, ranks=recording.ranks[:-1]))
    first = recording.ranks[0]
    swapped = replace(first, bars=(first.bars[1], first.bars[0], *first.bars[2:]))
    for bars_ in (swapped, replace(first, bars=first.bars[:-1])):
        with pytest.raises(InputError, match="in the trace is"):
            residuals(plan, replace(recording, ranks=(bars_, *recording.ranks[1:])))
    with pytest.raises(InputError, match="cannot be read"):
        read_recording(tmp_path / "none.json")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"{}" * 1000)[:-9])
    with pytest.raises(InputError):
        read_recording(tmp_path / "cut.gz")


SMALL: dict[str, Any] = {
    "otherData": {
        "format": "autopar step", "version": 1, "kind": "measured", "choices": "c", "device": "cpu",
        "step_s": 1.0, "ranks": [[0, 0]], "plan": {},
    },
    "traceEvents": [
        {"ph": "X", "name": "0F0", "cat": "compute", "pid": 0, "tid": 1, "ts": 0, "dur": 1,
         "args": {}},
    ],
}  # fmt: skip
PLACES = [("otherData", key) for key in SMALL["otherData"]] + [
    ("traceEvents", key) for key in SMALL["traceEvents"][0]
]


@given(
    place=st.sampled_from(PLACES),
    value=st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=3),
        st.just([]), st.just([[0]]), st.just({}),
    ),
)  # fmt: skip
def test_a_damaged_trace_is_read_or_refused(place: tuple[str, str], value: Any, tmp_path_factory):
    data = json.loads(json.dumps(SMALL))
    holder = data[place[0]] if place[0] == "otherData" else data[place[0]][0]
    holder[place[1]] = value
    file = tmp_path_factory.getbasetemp() / "damaged.json"
    file.write_text(json.dumps(data))
    try:
        found = read_recording(file)
    except InputError:
        return
    assert isinstance(found, Recording) and math.isfinite(found.step_s)


# Ratios

seconds = st.floats(1e-6, 1e3)


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=9), st.floats(1e-3, 1e3))
def test_no_ratio_has_a_smaller_error(pairs: list[tuple[float, float]], other: float):
    best = error_of(pairs, best_ratio(pairs))
    tried = [other, 1.0, *(measured / predicted for predicted, measured in pairs)]
    assert all(best <= error_of(pairs, ratio) * (1 + 1e-9) + 1e-12 for ratio in tried)


def test_figures_move_as_one_and_stay_plausible():
    plan = stored(NAME)
    found = residuals(plan, recorded(lambda bar: 3.0))
    cluster, mended = feed_back(plan, found, source="a test")
    names = Counter(item.what for item in mended)
    assert names["computation"] == 1
    item = next(item for item in mended if item.what == "computation")
    assert item.ratio > 1 and item.after <= item.before
    before = ClusterSpec.parse(str(cluster)).hardware(0)
    after = cluster.hardware(0)
    for number in ("bf16", "fp32"):
        rates = [device.peak(number) * device.efficiency.matmul_share for device in (before, after)]
        assert rates[0] / rates[1] == pytest.approx(item.ratio, rel=1e-4)
    streams = [d.memory_bytes_per_s * d.efficiency.memory_share for d in (before, after)]
    assert streams[0] / streams[1] == pytest.approx(item.ratio, rel=1e-4)
