"""The command line: help, exit codes, errors as text and as JSON, the local launcher."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import autopar
from autopar.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_takes_json(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"autopar {autopar.__version__}"


@pytest.mark.parametrize("words", [["nonsense"], ["plan"], ["run", "-n", "two", "x.py"]])
def test_bad_words_exit_with_two(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["planx"], "plan"),
        (["plan", "m.py:build", "--stratgy=ddp"], "--strategy"),
        (["plan", "m.py:build", "--effort", "hgih"], "high"),
    ],
)
def test_slips_are_asked_about(words, name, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert f"did you mean {name!r}?" in capsys.readouterr().err


def test_no_words_print_help(capsys):
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "missing.json"], "cannot read the plan file"),
        (["plan", "missing.py:build"], "no file 'missing.py'"),
        (["plan", "m.py:build", "--mesh", "dp"], "cannot read 'dp' in mesh"),
        (["plan", "m.py:build", "--cluster", "many"], "cannot read cluster 'many'"),
        (["plan", "m.py:build", "--constraints", "missing.json"], "cannot read constraints"),
        (["plan", "m.py:build", "--constraints", "{"], "constraints are no JSON"),
        (["plan", "m.py:build", "--constraints", "{}", "--strategy", "ddp"], "both given"),
        (["plan", "m.py:build", "-o", "missing_folder/plan.json"], "is in no folder"),
        (["verify", "a.json", "b.json", "m.py:build"], "3 targets"),
        (["verify", "a.json", "m.py:build", "--mesh", "dp=2"], "--mesh beside a plan"),
        (["verify", "m.py:build", "--steps", "0"], "--steps 0"),
        (["plan", "m.py:build", "--mesh", "dp=3", "--cluster", "4xcpu"], "dp=3 needs 3 devices"),
        (["quickstart", "--steps", "0"], "--steps 0"),
        (["run", "-n", "0", "x.py"], "-n 0"),
        (["run", "-n", "2", "missing.py"], "no file 'missing.py'"),
    ],
)
def test_bad_input_exits_with_two_and_says_why(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert main([words[0], "--json", *words[1:]]) == 2
    assert message in json.loads(capsys.readouterr().out)["error"]["what"]


MODELS = """
import torch
from torch import nn

def silent():
    return nn.Linear(4, 4), (torch.zeros(4, 4),), {}

def loud():
    return {"model": nn.Linear(4, 4), "args": (torch.zeros(4, 4),), "loss_fn": loss}

def loss(outputs, *inputs):
    return outputs.square().mean()
"""


def test_why_something_is_not_predicted_is_said(tmp_path, capsys):
    (tmp_path / "models.py").write_text(MODELS)
    words = ["--cluster", "2xcpu", "--mesh", "dp=2", "--strategy", "ddp"]
    assert main(["plan", f"{tmp_path / 'models.py'}:silent", *words]) == 0
    shown = capsys.readouterr()
    assert "the model returns no loss" in shown.err and "give loss_fn" in shown.err
    assert "not measured" not in shown.err
    assert main(["plan", f"{tmp_path / 'models.py'}:loud", *words]) == 0
    shown = capsys.readouterr()
    assert "whether it fits is not known" in shown.err and "autopar profile" in shown.err
    assert "time of a step (predicted)" in shown.out and "no loss" not in shown.err


def run_autopar(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autopar.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_run_starts_ranks_and_marks_their_lines(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:])\n"
    )
    done = run_autopar("run", "-n", "3", str(script), "--steps", "2")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} 3 ['--steps', '2']" for rank in range(3)
    ]


def test_run_stops_all_when_one_fails(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(7)\n"
        "time.sleep(50)\n"
    )  # fmt: skip
    done = run_autopar("run", "-n", "3", "--json", str(script))
    assert done.returncode == 7
    assert "rank 1 failed with exit code 7" in done.stderr
    assert json.loads(done.stdout)["exit_codes"][1] == 7
