"""The examples run, on one rank and on several, and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

DIGITS = ("digits.py", "--epochs", "4")
GPT = ("train_gpt.py", "--steps", "10", "--batch-size", "4", "--seq-len", "32")

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def run(*words: str, ranks: int = 1) -> str:
    """Standard output of an example, without the rank marks."""
    launcher = ["-m", "autopar.cli.main", "run", "-n", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / words[0]), *words[1:]],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.replace("[0] ", "")


def losses(output: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss ([\d.]+)", output)]


def test_digits_learns_the_same_on_four_ranks():
    alone, together = run(*DIGITS), run(*DIGITS, ranks=4)
    assert alone == together
    accuracy = re.search(r"test accuracy ([\d.]+)%", alone)
    assert accuracy is not None
    assert float(accuracy[1]) > 95.0


def test_gpt_learns_english_on_four_ranks():
    alone, together = losses(run(*GPT)), losses(run(*GPT, ranks=4))
    assert len(alone) == 1
    assert alone == pytest.approx(together, rel=1e-3)
    assert together[-1] < 4.0 < 5.545  # ln 256: all bytes alike


def test_llama_learns_english_on_four_ranks():
    alone = losses(run("hf_llama.py", "--steps", "10"))
    together = losses(run("hf_llama.py", "--steps", "10", ranks=4))
    assert alone == pytest.approx(together, rel=1e-3)
    assert together[-1] < 4.0


def test_plan_only_needs_no_cluster():
    output = run("plan_only.py")
    assert "64 devices" in output and "splits batch" in output
    assert "no plan searched is faster by more than" in output
    assert "a usual plan would take" in output
