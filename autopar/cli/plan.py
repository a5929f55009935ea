"""Choose how to shard a model over a cluster, and write the choice to a file.

No process group, no GPU and no parameters are needed: the model may be on the meta device.
"""

from __future__ import annotations

import argparse
import sys

from autopar.cli import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="MODEL", help=shared.MODEL_HELP)
    shared.add_choices(parser)
    parser.add_argument(
        "--strict", action="store_true", help="refuse operators that have no sharding rule"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan here (JSON)")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Plan, save, print."""
    mesh, constraints = shared.read_choices(options)  # before torch is imported
    if options.output:
        shared.check_writable(options.output)

    from autopar.runtime.loader import load_model

    loaded = load_model(options.model)
    from autopar import api

    plan = api.plan(
        loaded.model,
        None,
        loaded.args,
        loaded.kwargs,
        loss_fn=loaded.loss_fn,
        mesh=mesh,
        constraints=constraints,
        strict=options.strict,
    )
    if options.output:
        plan.save(options.output)
    if options.json:
        print(plan.to_json(), end="")
    else:
        print(plan.summary())
        if options.output:
            print(f"saved to {options.output}", file=sys.stderr)
    return 0
