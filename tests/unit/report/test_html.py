"""``autopar report``: one file, nothing in it that a plan could run, charts that say what is so."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from autopar.cli.main import main
from autopar.cost_models.replay import memory_over_time, timeline_of
from autopar.errors import PlanError
from autopar.plan.codec import read_plan
from autopar.plan.fingerprint import choices_digest
from autopar.plan.forecast import AlternativeForecast
from autopar.plan.plan import ParameterPlan, Plan, UnruledOp
from autopar.report.html import report
from autopar.report.html_data import TICKS
from autopar.report.terminal import clean
from autopar.report.trace import Step, summary, trace_events
from autopar.schedules.actions import KINDS, Action
from tests.unit.plan.mutations import Mutator
from tests.unit.report.golden import plan_text, stored

NAME = "interleaved"
MANY = (NAME, "llama3_8b", "t5")
PLANS = Path(__file__).parents[2] / "data" / "plans"
"""Small plans."""
HOSTILE = (
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{script}}{{data}}",
    "</script><script>alert(2)//", "' onmouseover='alert(3)", "<!--", "\u2028\u202e&lt;b&gt;",
)  # fmt: skip
SECTIONS = ("timeline", "memory", "parameters", "alternatives", "ranks")


class Page(HTMLParser):
    """Tags, their attributes, and texts of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.seen = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._inside:
            self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif not self._inside:
            self.seen += data

    @property
    def data(self) -> Any:
        """What charts are drawn from."""
        return json.loads(zlib.decompress(base64.b64decode(self.scripts[0])))


def hostile() -> Plan:
    """A plan whose every text is an attack."""
    plan = stored(NAME)
    forecast = plan.forecast
    assert forecast is not None
    bad = " ".join(HOSTILE)
    other = AlternativeForecast(
        text=bad, mesh=((bad, 8),), recompute=bad, step_s=2.0, fits=False, over_bytes=5,
        device_bytes=10, capacity_bytes=5, peak={bad: 3}, compute_s=1.0, inline_s=0.5,
        exposed_s=0.25, idle_s=0.25, host_s=0.0, collectives={bad: 0.5},
    )  # fmt: skip
    names = tuple(
        ParameterPlan(
            fqn=f"{text}.{place}.weight", shape=(8, 8), dtype=text,
            placement=plan.parameters[0].placement,
        )
        for place, text in enumerate(HOSTILE)
    )  # fmt: skip
    forecast = replace(
        forecast,
        cluster=replace(forecast.cluster, text=bad),
        cost_model=replace(forecast.cost_model, software=bad, optimizer=bad, precision=bad),
        ranks=tuple(replace(rank, peak_at=bad, device=bad) for rank in forecast.ranks),
        alternatives=(other,),
        certificate=forecast.certificate
        and replace(forecast.certificate, space=bad, strategy=bad, pruned={bad: 3}),
    )
    unruled = (UnruledOp(op=bad, module=bad, source=bad, size_bytes=3),)
    return replace(
        plan, parameters=(*plan.parameters, *names), notes=HOSTILE, unruled=unruled,
        strategy=bad, searched=False, forecast=forecast,
    )  # fmt: skip


@pytest.fixture
def attack(monkeypatch: pytest.MonkeyPatch) -> Page:
    """The page of a hostile plan, whose forecast is taken as it is."""
    monkeypatch.setattr("autopar.cost_models.replay.is_stale", lambda plan: False)
    return Page(report(hostile()))


def test_text_of_a_plan_is_text(attack: Page):
    assert len(attack.scripts) == 2
    plain = Page(report(stored(NAME)))
    assert {tag for tag, _ in attack.tags} <= {tag for tag, _ in plain.tags}
    for tag, attributes in attack.tags:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert attributes.get("href", "#") in {"#" + name for name in SECTIONS} | {"#", "data:,"}
        assert "src" not in attributes
    for text in HOSTILE:
        assert clean(text) in attack.seen
        assert not set(attack.seen) & {"\u2028", "\u202e"}
    assert attack.scripts[1] == plain.scripts[1]
    assert attack.data["points"][1]["text"] == clean(" ".join(HOSTILE))


def test_only_its_own_script_may_run():
    page = Page(report(stored(NAME)))
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(page.scripts[1].encode()).digest()).decode()
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    for word in ("innerHTML", "eval(", "document.write", "fetch(", "http:", "https:"):
        assert word not in page.scripts[1]


def test_every_part_says_where_its_numbers_come_from():
    page = Page(report(stored(NAME)))
    ids = [a["id"] for tag, a in page.tags if tag == "section" and "id" in a]
    assert ids == list(SECTIONS)
    tiles = sum(a.get("class") == "tile" for _, a in page.tags)
    tags = sum((a.get("class") or "").startswith("tag") for _, a in page.tags)
    assert tags >= tiles + len(SECTIONS) - 1  # parameters are facts of the plan
    labels = [a for tag, a in page.tags if tag == "canvas"]
    assert len(labels) == 4 and all(a.get("role") == "img" and a["aria-label"] for a in labels)


def test_the_timeline_of_the_charts_is_the_predicted_one():
    plan = stored(NAME)
    data, timeline = Page(report(plan)).data, timeline_of(plan)
    assert data["tick_s"] == timeline.step_s / TICKS
    for rank, row in enumerate(data["rows"]):
        count = row["n"][0]
        shown = []
        at = 0
        for place in range(count):
            at += row["t"][place]
            kind = KINDS[row["k"][place]]
            peer = None if row["p"][place] < 0 else row["p"][place]
            action = Action(kind, row["s"][place], row["m"][place], peer)
            shown.append((action, at, at + row["d"][place]))
        for (action, start, end), event in zip(shown, timeline.events(rank), strict=True):
            assert action == event.action
            assert abs(start * data["tick_s"] - event.start_s) <= data["tick_s"]
            assert abs(end * data["tick_s"] - event.end_s) <= data["tick_s"]
        assert len(row["k"]) == count + len(timeline.beside[rank])


def test_memory_of_the_charts_reaches_the_predicted_peak():
    plan = stored(NAME)
    memory = Page(report(plan)).data["memory"]
    for rank, row in enumerate(memory["ranks"]):
        top = max(row["r"], key=lambda number: sum(memory["rows"][number]))
        held = dict(zip(memory["kinds"], memory["rows"][top], strict=True))
        assert {k: v for k, v in held.items() if v} == dict(memory_over_time(plan, rank).peak)
        assert min(row["t"]) >= 0


def test_the_command_writes_a_page(tmp_path: Path, capsys):
    plan, file = tmp_path / "plan.json", tmp_path / "report.html"
    plan.write_text(plan_text(NAME))
    assert main(["report", str(plan), "-o", str(file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["size_bytes"] == file.stat().st_size
    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    plan.write_text(replace(stored(NAME), forecast=None).to_json())
    assert main(["report", str(plan), "-o", str(file)]) == 2
    assert main(["report", str(plan), "-o", str(tmp_path)]) == 2


@pytest.mark.long
def test_thousands_of_ranks_stay_small():
    assert len(report(stored("trillion"))) <= 5_000_000


@pytest.mark.parametrize("names", [(), pytest.param(MANY, marks=pytest.mark.long)])
def test_any_valid_plan_is_reported_and_simulated_or_refused(names: tuple[str, ...]):
    small = [file.read_text(encoding="utf-8") for file in sorted(PLANS.glob("*.json"))]
    mutator = Mutator([plan_text(name) for name in names] or small, seed=7)
    seen, made, count = 0, 0, 2000 if names else 12
    while seen < count:
        try:
            plan, _ = read_plan(mutator.next().decode())
        except UnicodeDecodeError:
            continue
        if plan is None or plan.forecast is None:
            continue
        seen += 1
        again = replace(plan.forecast, choices=choices_digest(plan))
        plan = replace(plan, forecast=again)
        try:
            page = Page(report(plan))
            step = Step.of(plan)
            assert page.data["step_s"] == step.timeline.step_s
            assert len(page.scripts) == 2 and summary(step)
            json.dumps(list(trace_events(step, range(step.num_ranks))), allow_nan=False)
            made += 1
        except PlanError:
            continue
    assert made > count / 2
