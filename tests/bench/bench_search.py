"""How long planning takes from command to plan file, how good it is proven, and its memory.

python -m tests.bench.bench_search [--effort normal|high] [preset ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CASES = (
    ("gpt2", "1x8xA100"),
    ("llama3-8b", "8x8xH100"),
    ("gpt3-175b", "128x8xA100"),
    ("megatron-1t", "384x8xA100"),
    ("mixtral-8x7b", "8x8xH100"),
    ("t5-11b", "8x8xA100"),
    ("vit-22b", "8x8xA100"),
    ("wide-resnet-13b", "8x8xA100"),
)
"""Presets and clusters."""


def run(preset: str, cluster: str, effort: str, limit_s: float | None) -> str:
    """A line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "plan.json")
        command = [sys.executable, "-m", "autopar", "plan", preset, "--cluster", cluster]
        command += ["--effort", effort, "-o", file]
        if limit_s is not None:
            command += ["--time-limit", str(limit_s)]
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            assert process.stdout is not None
            text = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - began
        cpu = usage.ru_utime + usage.ru_stime
        line = f"{preset:16} {cluster:>11} {took:7.1f} {cpu:7.1f} {usage.ru_maxrss / 2**20:6.2f}"
        if process.returncode:
            return f"{line}  failed: {text.strip().splitlines()[-1] if text.strip() else ''}"
        forecast = json.loads(Path(file).read_text(encoding="utf-8"))["forecast"]
    proof = forecast["certificate"]
    early = "" if proof["complete"] else ", stopped early"
    return f"{line} {forecast['step_s']:8.4g} {proof['gap']:7.2%}{early}"


def main() -> None:
    """Print seconds, memory and proven gap of every case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("presets", nargs="*", help="all by default")
    parser.add_argument("--effort", choices=("normal", "high", "both"), default="both")
    parser.add_argument("--time-limit", type=float, help="seconds of a search")
    options = parser.parse_args()
    efforts = ("normal", "high") if options.effort == "both" else (options.effort,)
    for effort in efforts:
        print(f"effort {effort}")
        print(
            f"{'preset':16} {'cluster':>11} {'wall s':>7} {'cpu s':>7} {'GiB':>6} {'step s':>8} gap"
        )
        for preset, cluster in CASES:
            if not options.presets or preset in options.presets:
                print(run(preset, cluster, effort, options.time_limit), flush=True)


if __name__ == "__main__":
    main()
