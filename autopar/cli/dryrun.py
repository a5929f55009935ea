"""Execute ranks of a plan without their devices, and report what they hold.

The programs and the schedule of each asked rank are those of a real run, on tensors without memory:
no parameters are allocated, no process group is made. Counted is the memory of tensors in a
training step in steady state; workspaces of libraries and rounding of allocators are not.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from autopar.cli import options as shared
from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.units import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    parser.add_argument("model", metavar="MODEL", help=shared.MODEL_HELP)
    parser.add_argument(
        "--ranks",
        default="first,middle,last",
        metavar="R,...",
        help="numbers, or first, middle and last (default: all three)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda",
        help="what the ranks compute on (default: cuda); no such device is needed",
    )
    parser.add_argument(
        "--optimizer", default="adamw", metavar="NAME", help="a class of torch.optim, or none"
    )
    parser.add_argument(
        "--by-node",
        action="store_true",
        help="run every program node by node: the same bytes, slowly (for --device cpu)",
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Load, execute, print."""
    plan = Plan.load(options.plan)
    ranks = read_ranks(options.ranks, plan.device_mesh.size)

    from autopar.planning import fitted
    from autopar.runtime.dryrun import dry_run
    from autopar.runtime.dryrun_report import as_json, as_text
    from autopar.runtime.loader import load_planned
    from autopar.trace import trace

    loaded = load_planned(options.model, plan)
    traced = trace(loaded.model, loaded.args, dict(loaded.kwargs), loaded.loss_fn)
    fit = fitted(plan, traced)
    shared.tell_changes(plan, fit)
    plan = fit
    found = dry_run(
        traced,
        plan,
        ranks,
        device=options.device,
        optimizer=None if options.optimizer == "none" else options.optimizer,
        by_node=options.by_node,
    )
    report: dict[str, Any] | str = as_json(found) if options.json else as_text(found, plan)
    print(json.dumps(report, indent=1) if options.json else report)
    return 0


def read_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """The ranks that `text` lists.

    Raises:
        InputError: If one is no rank of the job.
    """
    names = {"first": 0, "middle": world_size // 2, "last": world_size - 1}
    found: list[int] = []
    for word in text.split(","):
        name = word.strip()
        if not re.fullmatch(r"\d+", name) and name not in names:
            raise InputError(
                f"--ranks {text!r}: cannot read {name!r}",
                expected='numbers, first, middle or last, such as "0,17,last"',
            )
        rank = names[name] if name in names else int(name)
        if rank >= world_size:
            raise InputError(
                f"--ranks {text!r}: the plan has {counted(world_size, 'rank')}",
                expected=f"0 to {world_size - 1}",
            )
        found.append(rank)
    return tuple(dict.fromkeys(found))
