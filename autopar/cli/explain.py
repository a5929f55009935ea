"""Explain a plan: where seconds and bytes come from, what binds, why no other plan was taken."""

from __future__ import annotations

import argparse
import json

from autopar.cli import options as shared
from autopar.plan.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    parser.add_argument(
        "--rank",
        type=int,
        metavar="R",
        help="pipeline rank (default: for time the one that waits least, for memory the fullest)",
    )
    parser.add_argument("--stage", type=int, metavar="S", help="what a stage's actions take, too")
    shared.add_width(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Load, check and explain the plan."""
    from autopar.report.explain import explain, explain_json
    from autopar.report.terminal import check_width, in_colour

    width = check_width(options.width)
    plan = Plan.load(options.plan)
    if options.json:
        print(json.dumps(explain_json(plan, rank=options.rank, stage=options.stage), indent=2))
        return 0
    print(
        explain(plan, width, rank=options.rank, stage=options.stage, colour=in_colour())
    )  # fmt: skip
    return 0
