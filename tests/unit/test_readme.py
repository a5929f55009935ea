"""What README shows exists: its commands parse, its blocks run, its files are there."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

import autopar
from autopar.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Transcript lines, and commands inside of lines that say more than a name."""
    shown = re.findall(r"^    \$ (autopar .+)$", README, re.MULTILINE)
    inline = re.findall(r"`(autopar \w+ [^`]+)`", README.replace("\n", " "))
    return [*shown, *inline]


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_have_the_options_shown(line: str):
    name, *words = shlex.split(line)[1:]
    parser = argparse.ArgumentParser()
    importlib.import_module(f"autopar.cli.{name}").add_arguments(parser)
    parser.parse_args(words)  # exits, and so fails, if it does not know them


def test_every_command_is_shown():
    assert [name for name in COMMANDS if f"autopar {name}" not in README] == []


def test_files_that_it_names_are_there():
    names = set(re.findall(r"examples/[\w.]+\.\w+", README))
    assert len(names) > 5
    assert [name for name in sorted(names) if not (ROOT / name).is_file()] == []


def test_the_cluster_file_is_read(tmp_path: Path):
    (text,) = blocks("yaml")
    (tmp_path / "cluster.yaml").write_text(text)
    cluster = autopar.ClusterSpec.load(tmp_path / "cluster.yaml")
    assert (cluster.num_devices, len(cluster.tiers)) == (128, 1)


def test_the_model_trains(capsys: pytest.CaptureFixture[str]):
    (text,) = blocks("python")
    exec(compile(text, "README.md", "exec"), {"__name__": "__main__"})
    assert 0 < float(capsys.readouterr().out.split()[1]) < 2


def test_it_is_short():
    assert len(README.splitlines()) <= 400
