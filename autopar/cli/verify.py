"""Run a model sharded on local CPU ranks beside one device, and compare everything.

Compared are the loss, every gradient, every buffer and, after some optimizer steps, every
parameter. Exits 0 when all are equal within rounding, 1 when not.
"""

from __future__ import annotations

import argparse

from autopar.cli import options as shared
from autopar.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "targets", nargs="+", metavar="[PLAN] MODEL", help=f"a plan file, and {shared.MODEL_HELP}"
    )
    shared.add_choices(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps")
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], help="convert the model and its inputs first"
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Verify and print the table."""
    *plans, target = options.targets
    if len(plans) > 1:
        raise InputError(f"{len(plans) + 1} targets are given", expected="[PLAN] MODEL")
    if options.steps < 0:
        raise InputError(f"--steps {options.steps}", expected="0 or more")
    choices = {}
    if plans:
        steering = ("cluster", "mesh", "strategy", "constraints")
        if given := [f"--{name}" for name in steering if getattr(options, name)]:
            raise InputError(
                f"{', '.join(given)} beside a plan", expected="a plan, or options, not both"
            )
    else:
        cluster, choices = shared.read_choices(options)
        choices["cluster"] = cluster

    from autopar import api

    if plans:
        choices["plan"] = api.load_plan(plans[0])
    report = api.verify(target, steps=options.steps, dtype=options.dtype, **choices)
    print(report.to_json() if options.json else report.table())
    return 0 if report.equal else 1
