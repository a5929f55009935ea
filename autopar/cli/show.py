"""Print a plan."""

from __future__ import annotations

import argparse

from autopar.cli import options as shared
from autopar.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Load, check and print the plan."""
    plan = Plan.load(options.plan)
    print(plan.to_json().rstrip() if options.json else plan.summary())
    return 0
