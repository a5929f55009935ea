"""Spoilt plan files: never a traceback, never a hang, always the place of the fault."""

from __future__ import annotations

import builtins
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.plan.codec import MOST_BYTES
from tests.unit.plan.mutations import Mutator

PLANS = Path(__file__).parents[2] / "data" / "plans"
TEXTS = [file.read_text(encoding="utf-8") for file in sorted(PLANS.glob("*.json"))]
PLACE = re.compile(r"\$[.\[]|\$$|\$:|\d+:\d+")
SLOW_S = 5.0
"""No command takes longer on a file of this size."""


def ends_well(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a command that may refuse, but neither fails nor hangs."""
    start = time.perf_counter()
    code = main(words)
    took = time.perf_counter() - start
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert code in (0, 1, 2), text
    assert "Traceback" not in text and "error in autopar" not in text
    assert took < SLOW_S, (words, took)
    assert "\x1b" not in text and "\x07" not in text
    return code, text


def spoil(count: int, seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Lint, show and compare spoilt files; returns how many were refused."""
    mutator, refused = Mutator(TEXTS, seed), 0
    sound = folder / "sound.json"
    sound.write_text(TEXTS[-1], encoding="utf-8")
    file = folder / "spoilt.json"
    for number in range(count):
        file.write_bytes(mutator.next())
        code, text = ends_well(["lint", str(file), "--json"], capsys)
        told = json.loads(text)
        assert told["ok"] == (code == 0)
        for fault in told["faults"]:
            assert PLACE.match(fault["path"]), fault
        others = [["lint", str(file)], ["show", str(file)], ["diff", str(sound), str(file)]]
        for words in others if number % 4 == 0 else others[1:]:
            answer, text = ends_well(words, capsys)
            if words[0] == "lint":
                assert answer == code
            elif code:
                assert answer == 2 and PLACE.search(text), text
            else:
                assert answer in (0, 1), text
        refused += code
    return refused


def test_spoilt_files_are_refused_with_the_place(tmp_path, capsys):
    assert 200 < spoil(300, 0, tmp_path, capsys) < 300


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_spoilt_files(seed, tmp_path, capsys):
    assert spoil(1000, seed, tmp_path, capsys) > 500


@pytest.mark.parametrize("text", TEXTS)
def test_sound_files_are_sound(text, tmp_path, capsys):
    file = tmp_path / "plan.json"
    file.write_text(text, encoding="utf-8")
    assert ends_well(["lint", str(file)], capsys)[0] == 0


def test_a_plan_file_opens_no_other_file_and_runs_nothing(tmp_path, capsys, monkeypatch):
    """Nothing that a plan file names is opened, imported or run, whatever the file says.

    The codec makes dataclasses of JSON and calls nothing by a name from the file; this holds it.
    """
    held = json.loads(TEXTS[-1])
    trap = tmp_path / "trap.py"
    trap.write_text("raise SystemExit('ran')")
    for name in ("strategy", "graph"):
        held[name] = str(trap)
    held["notes"] = [f"!!python/object/apply:os.system ['touch {tmp_path}/made']", "$(id)"]
    held["unruled"] = [{"op": "os.system", "module": "trap", "source": f"{trap}:1",
                        "size_bytes": 1}]  # fmt: skip
    held["recompute"] = [f"__import__('runpy').run_path({str(trap)!r})"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(held))
    before = sorted(path.name for path in tmp_path.iterdir())
    opened: list[str] = []
    real_open, real_io_open, real_os_open = builtins.open, io.open, os.open

    def noted(real):  # type: ignore[no-untyped-def]
        def call(path, *args, **kwargs):  # type: ignore[no-untyped-def]
            if str(path).startswith(str(tmp_path)):
                opened.append(str(path))
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr(builtins, "open", noted(real_open))
    monkeypatch.setattr(io, "open", noted(real_io_open))
    monkeypatch.setattr(os, "open", noted(real_os_open))
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(os, "system", None)
    modules = set(sys.modules)
    for command in ("lint", "show"):
        ends_well([command, str(file)], capsys)
    ends_well(["diff", str(file), str(file)], capsys)
    assert set(opened) <= {str(file)}
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert not [name for name in set(sys.modules) - modules if "autopar" not in name]


def test_code_that_reads_plans_calls_nothing_by_name():
    """No eval, no pickle, no import by a name that comes from a file, no subprocess."""
    folder = Path(__file__).parents[3] / "autopar" / "plan"
    found = [
        f"{file.name}: {word}"
        for file in folder.glob("*.py")
        for word in re.findall(
            r"\b(?:eval|exec|pickle|marshal|shelve|__import__|import_module|subprocess|yaml)\b",
            file.read_text(),
        )
    ]
    assert not found


def test_huge_files_are_not_read(tmp_path, capsys):
    file = tmp_path / "huge.json"
    with file.open("wb") as stream:
        stream.truncate(MOST_BYTES + 1)
    code, text = ends_well(["lint", str(file)], capsys)
    assert code == 1 and "1:1" in text
