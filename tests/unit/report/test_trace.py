"""``autopar simulate``: the trace is the predicted timeline, and says so."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.cli.simulate import read_pipeline_ranks
from autopar.cost_models.replay import memory_over_time, timeline_of
from autopar.errors import InputError, PlanError
from autopar.report.trace import Step, summary, trace_events
from autopar.schedules.actions import RECEIVES, SENDS
from autopar.schedules.chrome import STREAMS, micro
from tests.unit.report.golden import plan_text, stored

NAME = "interleaved"


def events_of(name: str) -> list[dict[str, Any]]:
    step = Step.of(stored(name))
    return list(trace_events(step, range(step.num_ranks)))


def test_bars_are_the_events_of_the_timeline():
    timeline = timeline_of(stored(NAME))
    shown = Counter(
        (e["pid"], e["tid"], e["name"], e["ts"], e["dur"])
        for e in events_of(NAME)
        if e["ph"] == "X" and e["name"] != "host"
    )
    expected: Counter[Any] = Counter()
    for rank in range(timeline.schedule.num_ranks):
        rows = [(event, str(event.action)) for event in timeline.events(rank)]
        rows += [(event, f"{event.action} collectives") for event in timeline.beside[rank]]
        for event, name in rows:
            thread = STREAMS.index(event.stream) + 1
            expected[rank, thread, name, micro(event.start_s), micro(event.duration_s)] += 1
    assert shown == expected


def test_every_message_has_an_arrow_from_its_send_to_its_receive():
    timeline = timeline_of(stored(NAME))
    arrows: dict[int, dict[str, dict[str, Any]]] = {}
    for event in events_of(NAME):
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    sends = {
        event.action: (rank, micro(event.start_s))
        for rank in range(timeline.schedule.num_ranks)
        for event in timeline.events(rank)
        if event.action.kind in SENDS
    }
    assert len(arrows) == len(sends) > 0
    assert all(pair["s"]["ts"] <= pair["f"]["ts"] for pair in arrows.values())
    starts = Counter((pair["s"]["pid"], pair["s"]["ts"]) for pair in arrows.values())
    assert starts == Counter(sends.values())
    ends = Counter((pair["f"]["pid"], pair["f"]["ts"]) for pair in arrows.values())
    assert ends == Counter(
        (rank, micro(event.end_s))
        for rank in range(timeline.schedule.num_ranks)
        for event in timeline.events(rank)
        if event.action.kind in RECEIVES
    )


def test_counters_reach_the_predicted_peak_by_kind():
    plan = stored(NAME)
    highest: dict[int, dict[str, int]] = {}
    for event in events_of(NAME):
        if event["ph"] == "C":
            row = event["args"]
            if sum(row.values()) > sum(highest.get(event["pid"], {}).values()):
                highest[event["pid"]] = row
    for rank, row in highest.items():
        assert {k: v for k, v in row.items() if v} == dict(memory_over_time(plan, rank).peak)
    assert len(highest) == Step.of(plan).num_ranks


def test_events_come_in_the_order_of_time_after_the_names():
    found = events_of(NAME)
    times = [event.get("ts", -1.0) for event in found]
    assert times == sorted(times)
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert all("(predicted)" in name and "ranks alike" in name for name in names)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_command_writes_what_it_says(name: str, tmp_path: Path, capsys):
    plan, file = tmp_path / "plan.json", tmp_path / name
    plan.write_text(plan_text(NAME))
    assert main(["simulate", str(plan), "-o", str(file), "--ranks", "0,last"]) == 0
    told = capsys.readouterr().out
    data = file.read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert f"{len(trace['traceEvents']):,} events" in told and "predicted" in told
    assert {e["pid"] for e in trace["traceEvents"]} == {0, Step.of(stored(NAME)).num_ranks - 1}
    assert trace["otherData"]["kind"] == "predicted"
    assert main(["simulate", str(plan), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"] and len(found["ranks"]) == Step.of(stored(NAME)).num_ranks


def test_bad_input_is_refused(tmp_path: Path, capsys):
    plan = tmp_path / "plan.json"
    plan.write_text(replace(stored(NAME), forecast=None).to_json())
    assert main(["simulate", str(plan)]) == 2
    assert "nothing was predicted" in capsys.readouterr().err
    assert main(["simulate", str(plan), "-o", str(tmp_path)]) == 2
    for text in ("x", "-1", "4", "3-1", "2-9", "", "1,,2", "1²", "9" * 30):
        with pytest.raises(InputError):
            read_pipeline_ranks(text, 4)
    assert read_pipeline_ranks("0,2-3, last", 4) == (0, 2, 3)
    assert read_pipeline_ranks("all", 3) == (0, 1, 2)
    with pytest.raises(PlanError):
        Step.of(replace(stored(NAME), forecast=None))


def test_long_pipelines_are_told_in_short(monkeypatch: pytest.MonkeyPatch):
    step = Step.of(stored(NAME))
    whole = summary(step)
    assert len(whole) == 4 + step.num_ranks
    monkeypatch.setattr("autopar.report.trace.MOST_ROWS", 2)
    short = summary(step)
    assert len(short) == 4 + 3 and f"{step.num_ranks - 2} more" in short[-2]
    assert [short[-3], short[-1]] == [whole[4], whole[-1]]
