"""Run a model sharded on local CPU ranks beside one device, and compare everything.

Compared are the loss, every gradient, every buffer and, after some optimizer steps, every
parameter. Exits 0 when all are equal within rounding, 1 when not.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli import sizes
from autopar.errors import InputError
from autopar.plan.plan import Plan

if TYPE_CHECKING:
    from autopar.api import VerifyReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "targets", nargs="+", metavar="[PLAN] MODEL", help=f"a plan file, and {shared.MODEL_HELP}"
    )
    shared.add_choices(parser)
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps")
    parser.add_argument(
        "--dtype",
        choices=["float64"],
        help="run both sides in this dtype, in which only a wrong plan can differ",
    )
    parser.add_argument(
        "--optimizer",
        choices=["adamw", "sgd"],
        default="adamw",
        help="what takes the steps: AdamW, or SGD with momentum",
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Verify and print the table."""
    *plans, target = options.targets
    if len(plans) > 1:
        raise InputError(f"{len(plans) + 1} targets are given", expected="[PLAN] MODEL")
    if options.steps < 1:
        raise InputError(f"--steps {options.steps}", expected="at least 1")
    mesh, constraints, plan = None, None, None
    if plans:
        if given := [f"--{name}" for name in shared.STEERING if getattr(options, name) is not None]:
            raise InputError(
                f"{', '.join(given)} beside a plan", expected="a plan, or options, not both"
            )
        plan = Plan.load(plans[0])
    else:
        if sizes.may_differ(target, options.constraints):
            from autopar.runtime.loader import load_model

            call = load_model(target)
            sizes.take_from(options, call.args, call.kwargs)
        mesh, constraints = shared.read_choices(options)

    from autopar import api
    from autopar.planning import fitted
    from autopar.runtime.loader import load_planned
    from autopar.trace import trace

    if plan is not None:
        asked = plan
        loaded = load_planned(target, asked)
        traced = trace(loaded.model, loaded.args, dict(loaded.kwargs), loaded.loss_fn)
        plan = fitted(asked, traced)
        shared.tell_changes(asked, plan)
    report = api.verify(
        target,
        mesh=mesh,
        constraints=constraints,
        plan=plan,
        steps=options.steps,
        dtype=options.dtype,
        optimizer=options.optimizer,
    )
    print(json.dumps(as_json(report), indent=2) if options.json else report.summary())
    return 0 if report.equal else 1


def as_json(report: VerifyReport) -> dict[str, Any]:
    """The report as ``--json`` prints it; an infinite error (presence or shape differs) is null."""
    return {
        "equal": report.equal,
        "tolerance": report.tolerance,
        "reference": report.reference,
        "traffic_bytes": dict(report.traffic),
        "rows": [
            {key: None if value == math.inf else value for key, value in asdict(row).items()}
            for row in report.rows
        ],
    }
