"""What `autopar show` prints: stored texts, and what holds of any plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.text import Text

from autopar.cli.main import main
from autopar.plan.codec import read_plan
from autopar.plan.diff import differences, lines
from autopar.plan.fingerprint import choices_digest
from autopar.plan.plan import ParameterPlan, Plan, UnruledOp
from autopar.report.explain import explain, explain_json
from autopar.report.lacking import lacking
from autopar.report.ranks import kinds, ranks, time_parts
from autopar.report.show import show, show_json
from autopar.report.terminal import Page, bar, clean
from tests.unit.plan.mutations import Mutator
from tests.unit.report.golden import FOLDER, NAMES, plan_text, stored, texts

PLANS = Path(__file__).parents[2] / "data" / "plans"
"""Small plans."""


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_those_that_are_stored(name: str):
    for file, text in texts(name).items():
        expected = (FOLDER / file).read_text(encoding="utf-8")
        assert text + "\n" == expected, f"{file}: see tests/unit/report/golden.py"
        assert max(map(cell_len, text.splitlines())) <= int(file.split(".")[-2])


def test_no_line_is_wider_than_the_narrowest_terminal():
    for name in NAMES:
        for text in (show(stored(name), 40), explain(stored(name), 40)):
            assert max(map(cell_len, text.splitlines())) <= 40


@pytest.mark.parametrize("name", ["gpt3", "gpt3_pipeline", "trillion"])
def test_a_plan_of_gpt3_fits_on_a_screen(name: str):
    for width in (60, 80, 100, 200):
        for plan in (stored(name), crowded(stored(name))):
            assert len(show(plan, width).splitlines()) <= 60, (name, width)
    text = show(stored(name), 100)
    assert "blocks.{0..95}\n" in text or name == "trillion"
    assert "tp  splits heads" in text and "inside a node" in text and "across nodes" in text


def crowded(plan: Plan) -> Plan:
    """The plan with much to say beside it: ops without a rule, notes, stages that all differ."""
    unruled = tuple(
        UnruledOp(op=f"aten.op{number}.default", module="blocks.0", source="a.py:1", size_bytes=9)
        for number in range(9)
    )
    forecast = plan.forecast
    assert forecast is not None
    capacities = (80_000_000_000, 85_000_000_000)
    ranks = tuple(
        replace(rank, capacity_bytes=capacities[rank.rank % 2]) for rank in forecast.ranks
    )
    return replace(
        plan,
        unruled=unruled,
        notes=(*plan.notes, *(f"this is note {n}: " + 40 * "word " for n in range(12))),
        forecast=replace(forecast, ranks=ranks),
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name != "trillion"])
def test_stored_plans_hold_all_of_their_predictions(name: str):
    assert not list(lacking(stored(name)))


def test_what_is_left_out_is_counted():
    plan = crowded(stored("gpt3_pipeline"))
    text, whole = show(plan, 60), show(plan, 60, everything=True)
    assert "more notes (--all shows them)" in text and "more lines of ranks" in text
    assert "on rank 0: P parameters" in text and "fits" in text
    assert "--all shows" not in whole and "this is note 11" in whole and len(whole) > len(text)


def test_every_number_of_time_and_memory_says_predicted():
    for name in NAMES:
        for text in (show(stored(name), 100), explain(stored(name), 100)):
            for part in text.split("\n\n"):
                if " GB" in part or " ms" in part:
                    first = part.splitlines()
                    assert any(
                        word in line for line in first for word in ("predict", "no rule", "proven")
                    ), part


def test_colours_change_nothing_but_colours():
    for name in ("gpt3", "interleaved"):
        coloured = show(stored(name), 100, colour=True)
        assert "\x1b[" in coloured
        bare = subprocess_free_of_codes(coloured)
        assert [line.rstrip() for line in bare.splitlines()] == show(stored(name), 100).splitlines()


def subprocess_free_of_codes(text: str) -> str:

    return "\n".join(Text.from_ansi(line).plain for line in text.splitlines())


def test_hostile_names_are_written_out():
    plan = stored("ddp")
    evil = "\x1b[31m\u202eevil\n[bold]x[/bold] {0..3}"
    items = (ParameterPlan(fqn=evil, shape=(4,), dtype="float32", placement=("whole", "whole")),)
    found = show(replace(plan, parameters=items, notes=(evil,), strategy=evil), 100)
    assert "\x1b" not in found and "\u202e" not in found and "[bold]x[/bold]" in found
    assert clean("a\x00b\ud800") == "a\\x00b\\ud800" and clean("na\u00efve") == "na\u00efve"


@pytest.mark.parametrize("names", [(), pytest.param(NAMES, marks=pytest.mark.long)])
def test_any_valid_plan_is_shown(names: tuple[str, ...]):
    small = [file.read_text(encoding="utf-8") for file in sorted(PLANS.glob("*.json"))]
    mutator = Mutator([plan_text(name) for name in names] or small, seed=1)
    seen, count, other = 0, 3000 if names else 15, stored("interleaved")
    while seen < count:
        try:
            plan, faults = read_plan(mutator.next().decode())
        except UnicodeDecodeError:
            continue
        if plan is None or any(not fault.warning for fault in faults):
            continue
        seen += 1
        if plan.forecast is not None and seen % 2:  # what is stale is not shown
            again = replace(plan.forecast, choices=choices_digest(plan))
            plan = replace(plan, forecast=again)
        width = 40 + seen % 120
        for text in (show(plan, width, everything=seen % 5 == 0), explain(plan, width)):
            assert max(map(cell_len, text.splitlines()), default=0) <= width
            assert "\x1b" not in text
        json.dumps([show_json(plan), explain_json(plan)])
        if plan.num_stages < 64:  # a second for each of the largest
            assert all(fault.warning for fault in lacking(plan))
        for pair in ((other, plan), (plan, other)):
            assert all(line.isprintable() for line in lines(differences(*pair)))


def test_predictions_of_other_choices_are_not_shown():
    plan = replace(stored("llama3_8b"), notes=("a note",), zero=stored("ddp").zero)
    text = show(plan, 100)
    assert "are of other choices" in text and "8.07 s" not in text and "a note" in text
    assert show_json(plan)["predicted"] is None and "reprice" in explain(plan, 100)


def test_parts_add_up():
    for name in NAMES:
        forecast = stored(name).forecast
        for rank in forecast.ranks if forecast is not None else ():
            assert sum(kinds(rank).values()) == rank.device_bytes
            total = sum(part.seconds_s for part in time_parts(rank, "pp"))
            assert total == pytest.approx(rank.step_s, rel=1e-5)


def test_ranks_that_are_alike_share_a_line():
    plan = stored("trillion")
    rows = ranks(plan, plan.forecast)
    assert [row.first for row in rows] == [0, *(row.last + 1 for row in rows[:-1])]
    assert rows[-1].last == 63 and len(rows) <= 10
    assert rows[1].layers.startswith("blocks.{2..") and rows[1].layers.endswith(": 2 each")
    assert rows[0].fullest == 0 and rows[0].layers == "tokens to blocks.1"
    assert len(ranks(plan, plan.forecast, most=64)) > 10
    bare = ranks(plan, None)
    assert [(row.first, row.last) for row in bare] == [(0, 0), (1, 62), (63, 63)]


def test_bars_are_in_proportion():
    assert bar([("P", 1), ("A", 2)], 4, 8).plain == "PPAAAA.."
    assert bar([("P", 6)], 6, 6, limit=3).plain == "PPP|PP"
    assert bar([("P", 0)], 0, 4).plain == "...."
    page = Page(40)
    page.fact("name", "x" * 100)
    assert page.text.splitlines()[0] == "name       " + "x" * 29


def test_the_command(capsys, monkeypatch, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_text("interleaved"))
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["show", str(path)]) == 0
    assert capsys.readouterr().out == (FOLDER / "interleaved.show.100.txt").read_text()
    assert main(["show", str(path), "--width", "60"]) == 0
    assert capsys.readouterr().out == (FOLDER / "interleaved.show.60.txt").read_text()
    assert main(["show", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["fits"] is False and len(found["pipeline_ranks"]) == 4
    assert main(["show", str(path), "--width", "7"]) == 2
    assert "from 40 to" in capsys.readouterr().err


def test_piped_it_is_plain_and_quick(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_text("gpt3_pipeline"))
    code = (
        "import sys, time; from autopar.cli.main import main; main(['show', sys.argv[1]]);"
        "heavy = {'torch', 'numpy', 'networkx', 'ortools'} & set(sys.modules);"
        "print(sorted(heavy), time.process_time(), file=sys.stderr)"
    )
    env = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True,
        env=env,
    )  # fmt: skip
    assert done.stdout == (FOLDER / "gpt3_pipeline.show.100.txt").read_text()
    modules, seconds = done.stderr.split("] ")
    assert modules == "["
    assert float(seconds) < 1.0, "0.2 s of one idle core"


def test_what_is_stored_split_is_said():
    plan = replace(stored("ddp"), storage=("dp",), explicit=True, overrides={"a/b#0": ("batch",)})
    text = show(plan, 100)
    assert "dp  splits batch; parameters stored split" in text and "1 chosen one by one" in text
    again = replace(plan.pipeline, microbatches=2)
    assert "2 microbatches" in show(replace(plan, pipeline=again, recompute=("blocks.*",)), 100)


def test_shapes_beyond_any_tensor_are_shown():
    plan = stored("ddp")
    item = replace(plan.parameters[0], shape=(2**53,) * 30)
    assert "T" in show(replace(plan, parameters=(item,)), 100)


def test_axes_of_unequal_nodes():
    plan = stored("gpt3_pipeline")
    assert isinstance(plan, Plan) and plan.forecast is not None
    group = replace(plan.forecast.cluster.groups[0], devices_per_node=4, nodes=256)
    cluster = replace(plan.forecast.cluster, groups=(group,))
    text = show(replace(plan, forecast=replace(plan.forecast, cluster=cluster)), 100)
    assert "across nodes, 4 in each" in text
