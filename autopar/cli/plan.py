"""Choose how to shard a model over a cluster, and write the choice to a file.

No process group, no GPU and no parameters are needed: the model may be on the meta device.
"""

from __future__ import annotations

import argparse
import sys

from autopar.cli import options as shared
from autopar.errors import PlanError


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
    from autopar.cost_models.explain import memory_tree, time_tree

    plan, found = api.plan_and_predict(
        loaded.model,
        options.cluster,
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
        if found is not None:
            lines = [*time_tree(found).lines(), *memory_tree(found).lines()]
            print("predicted", *(f"  {line}" for line in lines), sep="\n")
        if options.output:
            print(f"saved to {options.output}", file=sys.stderr)
    try:
        if found is not None:
            found.refuse_unless_fits()
    except PlanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
