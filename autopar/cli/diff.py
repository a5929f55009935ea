"""Compare two plans: meshes, splits, stages, memory savings, placements, predictions.

Exits 0 if nothing differs, 1 if something does.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from autopar.cli import options as shared
from autopar.plan.diff import differences, lines
from autopar.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("first", metavar="A", help="plan file (JSON)")
    parser.add_argument("second", metavar="B", help="another")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Load both, and print what differs."""
    found = differences(Plan.load(options.first), Plan.load(options.second))
    if options.json:
        rows = [asdict(item) for item in found]
        print(json.dumps({"equal": not found, "differences": rows}, indent=2))
    else:
        print("\n".join(lines(found)) or "the plans are equal")
    return 1 if found else 0
