"""Print a plan: what is split over what, and why it fits; predicted memory, time and pipeline."""

from __future__ import annotations

import argparse
import json

from autopar.cli import options as shared
from autopar.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    parser.add_argument("--all", action="store_true", help="do not shorten long tables")
    shared.add_width(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Load, check and print the plan."""
    from autopar.report.show import show, show_json
    from autopar.report.terminal import check_width, in_colour

    width = check_width(options.width)
    plan = Plan.load(options.plan)
    if options.json:
        print(json.dumps(show_json(plan), indent=2))
    else:
        print(show(plan, width, colour=in_colour(), everything=options.all))
    return 0
