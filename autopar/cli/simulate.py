"""Write the predicted step of a plan as a Chrome trace, and print it in short.

chrome://tracing and ui.perfetto.dev show the file: a process for each pipeline rank (all ranks at
one place of the pipeline do the same) with threads for computation, collectives beside it and
messages, arrows from sends to receives, and memory by kind.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from autopar.cli import options as shared
from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.report.trace import Step, facts, summary, trace_events
from autopar.schedules.chrome import write_trace
from autopar.units import format_bytes

_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON) with predictions")
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the trace here; packed if it ends in .gz"
    )
    parser.add_argument(
        "--ranks", default="all", metavar="LIST",
        help='pipeline ranks of the trace, such as "0,3,8-11,last" (default: all)',
    )  # fmt: skip
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Time the schedule, write the trace, print a summary."""
    if options.output:
        shared.check_writable(options.output, options.plan)
    step = Step.of(Plan.load(options.plan))
    ranks = read_pipeline_ranks(options.ranks, step.num_ranks)
    count = 0
    if options.output:
        count = write_trace(options.output, trace_events(step, ranks), facts(step))
    if options.json:
        splits = step.timeline.splits
        rows = [
            {
                "rank": rank,
                "compute_s": splits[rank].compute_s,
                "inline_s": splits[rank].inline_s,
                "exposed_s": splits[rank].exposed_s,
                "idle_s": splits[rank].idle_s,
                "device_bytes": step.forecast.ranks[rank].device_bytes,
            }
            for rank in ranks
        ]
        found = {
            "predicted": True, "step_s": step.forecast.step_s, "ranks_alike": step.alike,
            "ranks": rows, "output": options.output, "events": count,
        }  # fmt: skip
        print(json.dumps(found, indent=2))
        return 0
    print("\n".join(summary(step)))
    if options.output:
        size = format_bytes(Path(options.output).stat().st_size)
        print(f"\n{count:,} events, {size}, written to {options.output}")
        print("open it in https://ui.perfetto.dev or chrome://tracing")
    return 0


def read_pipeline_ranks(text: str, count: int) -> tuple[int, ...]:
    """The pipeline ranks that `text` lists.

    Args:
        text: Such as ``"0,3,8-11,last"``, or ``"all"``.
        count: Pipeline ranks there are.

    Raises:
        InputError: If it cannot be read, or there is no such rank.
    """
    found: set[int] = set()
    for word in text.replace(" ", "").split(","):
        match = _RANGE.fullmatch(word)
        if word == "all":
            low, high = 0, count - 1
        elif word == "last":
            low = high = count - 1
        elif match:
            low, high = int(match[1]), int(match[2])
        elif word.isascii() and word.isdigit() and len(word) < 10:
            low = high = int(word)
        else:
            raise InputError(
                f"--ranks {text!r}: cannot read {word!r}",
                expected='numbers, ranges, "last" or "all", such as "0,3,8-11,last"',
            )
        if not low <= high < count:
            raise InputError(
                f"--ranks {text!r}: there is no {word!r}",
                expected=f"pipeline ranks from 0 to {count - 1}",
            )
        found |= set(range(low, high + 1))
    return tuple(sorted(found))
