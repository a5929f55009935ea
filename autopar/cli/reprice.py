"""Predict a plan anew: for another cluster, batch size or sequence length, or after an edit.

The choices stay; what the plan takes is predicted again, and what that changes is printed. A plan
of another model is refused with the first difference. Exits 0 if the plan fits, 1 if not.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from autopar.cli import options as shared
from autopar.errors import PlanError
from autopar.plan.plan import Plan
from autopar.plan.sizes import sizes_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    parser.add_argument("model", metavar="MODEL", help=shared.MODEL_HELP)
    parser.add_argument(
        "--cluster", metavar="C", help="the cluster (default: the one the plan was made for)"
    )
    shared.add_sizes(parser)
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan here (JSON)")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Price, save, print what changed."""
    plan = Plan.load(options.plan)  # before torch is imported
    if options.output:
        shared.check_writable(options.output)

    from autopar import api
    from autopar.plan.diff import differences, lines
    from autopar.runtime.loader import load_model

    sizes = (options.global_batch_size, options.seq_len)
    if ":" not in options.model:  # functions have sizes of their own
        known = sizes_of(plan)
        sizes = (sizes[0] or known[0], sizes[1] or known[1])
    loaded = load_model(options.model, batch=sizes[0], seq=sizes[1])
    made, found = api.reprice(
        plan, loaded.model, options.cluster, loaded.args, loaded.kwargs, loss_fn=loaded.loss_fn
    )
    if options.output:
        made.save(options.output)
    changed = differences(plan, made)
    if options.json:
        rows = [asdict(item) for item in changed]
        print(json.dumps({"fits": found.fits, "step_s": found.step_s, "differences": rows}))
    else:
        print("\n".join(lines(changed)) or "nothing changes")
    try:
        found.refuse_unless_fits()
    except PlanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
