"""Write a plan in the words of another engine.

What the engine cannot express is listed with its cost, in the file where it has comments and on
standard error; --strict makes it an error (exit 1). Nothing but the output file is written.
"""

from __future__ import annotations

import argparse
import json
import sys

from autopar.cli import options as shared
from autopar.export.result import TARGETS, Exported
from autopar.export.targets import export
from autopar.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    parser.add_argument(
        "--to",
        required=True,
        metavar="TARGET",
        help="; ".join(f"{name}: {TARGETS[name].summary}" for name in TARGETS),
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="where to (default: print it)")
    parser.add_argument(
        "--strict", action="store_true", help="exit 1 if anything of the plan is lost"
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Export, write and say what is lost."""
    plan = Plan.load(options.plan)
    if options.output:
        shared.check_writable(options.output, options.plan)
    exported = export(plan, options.to)
    code = 1 if options.strict and exported.losses else 0
    if options.output and not code:
        shared.write_output(options.output, exported.text)
    if options.json:
        print(json.dumps(as_json(exported, options.to), indent=2))
        return code
    if not options.output and not code:
        print(exported.text, end="")
    for note in exported.notes:
        print(f"note: {note}", file=sys.stderr)
    for loss in exported.losses:
        print(f"not expressed: {loss}", file=sys.stderr)
    return code


def as_json(exported: Exported, target: str) -> dict[str, object]:
    """The export as ``--json`` prints it."""
    return {
        "target": target,
        "text": exported.text,
        "losses": [loss.as_json() for loss in exported.losses],
        "notes": list(exported.notes),
    }
