"""Files that nobody should give, and places that nobody should write to: one clear error each."""

from __future__ import annotations

import gzip
import os
from itertools import pairwise
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.errors import InputError
from autopar.imports.document import parse_yaml
from autopar.runtime.loader import load_model

GOLDEN = Path(__file__).parents[1] / "golden" / "ddp.json.gz"


def _plan(folder: Path) -> Path:
    path = folder / "plan.json"
    path.write_bytes(gzip.decompress(GOLDEN.read_bytes()))
    return path


def _bomb(levels: int) -> str:
    names = "abcdefghijklmnop"[:levels]
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    for before, name in pairwise(names):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]")
    return "\n".join([*lines, "num_processes: 8"])


def test_aliases_of_yaml_stand_for_some_values_only():
    small = parse_yaml(_bomb(3), "small.yaml").data
    assert small["c"][8][8] == ["x"] * 9
    with pytest.raises(InputError, match=r"aliases stand for more than .* \(line \d+\)"):
        parse_yaml(_bomb(9), "bomb.yaml")
    with pytest.raises(InputError, match="a part of"):
        parse_yaml("a: &a [*a]\nb: 1", "loop.yaml")


def test_sizes_of_calls_have_a_limit():
    with pytest.raises(InputError, match="batch 1000000"):
        load_model("gpt2", batch=10**20)


@pytest.mark.parametrize("command", ["report", "simulate", "export --to deepspeed"])
def test_outputs_do_not_replace_inputs(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    plan = _plan(tmp_path)
    before = plan.read_bytes()
    name, *options = command.split()
    assert main([name, str(plan), *options, "-o", str(plan)]) == 2
    assert "is the input itself" in capsys.readouterr().err
    assert plan.read_bytes() == before


def test_what_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    plan, out = str(_plan(tmp_path)), str(tmp_path / "ds.json")
    monkeypatch.setattr(Path, "write_text", refuse)
    assert main(["export", plan, "--to", "deepspeed", "-o", out]) == 2
    assert "cannot be written: Permission denied" in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_devices_and_pipes_are_no_plan_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    os.mkfifo(tmp_path / "pipe.json")
    assert main(["lint", str(tmp_path / "pipe.json")]) == 2
    assert "a device or a pipe" in capsys.readouterr().err
