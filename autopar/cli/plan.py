"""Choose how to shard a model over a cluster, and write the choice to a file.

No process group, no GPU and no parameters are needed: the model may be on the meta device.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.cli import sizes
from autopar.errors import InputError, PlanError
from autopar.search.asked import OBJECTIVES, TIME
from autopar.units import format_bytes

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.runtime.loader import LoadedModel
    from autopar.search.find import Found
    from autopar.search.whatif import Change
    from autopar.sharding.mesh import Mesh

NO_FIT = (
    "note: whether it fits is not known, as the memory of these CPUs is not measured: "
    "`autopar profile -o cluster.yaml` measures this machine, and --cluster cluster.yaml plans "
    "for it"
)
TOP = 3
"""Runners-up that are printed where nobody says how many."""
NO_LOSS = (
    "note: no time and no memory is predicted, as the model returns no loss, so that there is no "
    "backward to price: return a scalar, or give loss_fn beside the model"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="MODEL", help=shared.MODEL_HELP)
    shared.add_choices(parser)
    shared.add_sizes(parser)
    parser.add_argument(
        "--strict", action="store_true", help="refuse operators that have no sharding rule"
    )
    parser.add_argument(
        "--search",
        metavar="HOW",
        help="exact (default with a cluster alone), expert, dp, ilp, mcmc, rl, or exhaustive",
    )
    parser.add_argument(
        "--effort",
        choices=("normal", "high"),
        default="normal",
        help="proven distance from the best plan at which a search stops: 1 %% or 0.5 %%",
    )
    parser.add_argument(
        "--objective",
        choices=OBJECTIVES,
        default=TIME,
        help="what is to be least: time of a step on all devices (default), the number of devices,"
        " or the cost per token, at the node_usd_per_hour of the cluster file",
    )
    parser.add_argument(
        "--step-within",
        type=float,
        metavar="S",
        help="with another objective than time: seconds that a step may take at most",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="seconds after which a search stops anyway"
    )
    parser.add_argument("--seed", type=int, default=0, help="of searches that draw numbers")
    parser.add_argument(
        "--top", type=int, metavar="K", help=f"runners-up to print (default: {TOP}, of those known)"
    )
    parser.add_argument(
        "--what-if",
        action="store_true",
        help="search again for other clusters and for less memory, and say what would change",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the plan here (JSON)")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Plan, save, print."""
    if options.top is not None and options.top < 0:
        raise InputError(f"--top {options.top}", expected="a number of plans from 0")
    loaded = None
    if sizes.may_differ(options.model, options.constraints):
        loaded = _load(options)
        sizes.take_from(options, loaded.args, loaded.kwargs)
    else:
        sizes.fill_in(options)
    kept = shared.read_search(options)  # before torch is imported
    mesh, constraints = (None, None) if kept is not None else shared.read_choices(options)
    if options.output:
        shared.check_writable(options.output)
    if options.search is not None:
        from autopar.search.find import STRATEGIES

        _ = STRATEGIES[options.search]  # that there is none is said at once
    loaded = loaded or _load(options)
    if kept is not None:
        return _search(options, loaded, *kept)
    from autopar import api

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
    _write(options, plan, [])
    if found is None and options.cluster:
        print(NO_FIT if plan.forecast is not None else NO_LOSS, file=sys.stderr)
    try:
        if found is not None:
            found.refuse_unless_fits()
    except PlanError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def _load(options: argparse.Namespace) -> LoadedModel:
    from autopar.runtime.loader import load_model

    return load_model(options.model, batch=options.global_batch_size, seq=options.seq_len)


def _search(
    options: argparse.Namespace,
    loaded: LoadedModel,
    mesh: Mesh | None,
    kept: dict[str, Any],
) -> int:
    """Search, save, print; Ctrl-C ends the search with the best plan so far."""
    from autopar import api
    from autopar.plan.build import refuse_unruled

    progress = shared.Progress()
    try:
        found = api.search(
            loaded.model,
            options.cluster or "4xcpu",
            loaded.args,
            loaded.kwargs,
            loss_fn=loaded.loss_fn,
            mesh=mesh,
            constraints=kept,
            strategy=options.search or "exact",
            effort=options.effort,
            time_limit_s=options.time_limit,
            objective=options.objective,
            step_within_s=options.step_within,
            top=options.top or 0,
            seed=options.seed,
            on_progress=progress,
        )
        if options.strict:
            refuse_unruled(found.plan.unruled)
    except PlanError as error:
        if error.where not in ("cluster", "search"):  # something that was asked for is wrong
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before a plan was found", file=sys.stderr)
        return 130
    finally:
        progress.end()
    more = _runners_up(found, TOP if options.top is None else options.top)
    plan, changes = found.plan, list(found.changes)
    if options.what_if:
        from autopar.search.told import with_changes
        from autopar.search.whatif import front, sensitivity

        changes += [*sensitivity(found.problem), *front(found.problem)]
        plan = with_changes(plan, changes)
    if changes:
        more += _what_if(found, changes)
    _write(options, plan, more)
    return 0


def _what_if(found: Found, changes: list[Change]) -> list[str]:
    """What other clusters, and less memory, would change."""
    assert found.result.best is not None
    now = found.result.best.step_s
    lines = ["what if (predicted)"]
    for item in changes:
        if item.step_s is None:
            lines.append(f"  {item.text:<36} nothing fits")
            continue
        peak = format_bytes(item.peak_bytes)
        change = item.step_s / now - 1
        lines.append(
            f"  {item.text:<36} {item.step_s:.4g} s ({change:+.1%}), {peak} live: {item.plan}"
        )
    return lines


def _runners_up(found: Found, count: int) -> list[str]:
    """The best other plans, and why they lost."""
    result = found.result
    assert result.best is not None
    lines = ["runners-up (predicted)"]
    for item in result.alternatives[:count]:
        slower = item.step_s / result.best.step_s - 1
        lines.append(f"  {item.candidate.point.text()}: {item.step_s:.4g} s, {slower:+.1%}")
    if len(lines) == 1:
        lines = ["runners-up: none was priced (--top K prices some)"] if count else []
    proof = result.certificate
    if proof.bound_s > 0:
        reasons = ", ".join(f"{count:,} by {name}" for name, count in proof.pruned.items() if count)
        lines.append(f"no plan takes less than {proof.bound_s:.4g} s (proven for: {proof.space})")
        if reasons:
            lines.append(f"ruled out unpriced: {reasons}")
    return lines


def _write(options: argparse.Namespace, plan: Plan, more: list[str]) -> None:
    if options.output:
        plan.save(options.output)
    if options.json:
        print(plan.to_json(), end="")
        return
    from autopar.report.show import show
    from autopar.report.terminal import check_width, in_colour

    print(show(plan, check_width(None), colour=in_colour()))
    for line in more:
        print(line)
    if options.output:
        print(f"saved to {options.output}", file=sys.stderr)
