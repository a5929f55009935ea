"""Measure this machine, and write a cluster file that plans can be priced on.

With --from, nothing is measured: a step that ``compiled.profile`` measured is laid beside its
prediction, and the figures of the plan's cluster are mended with what differs.

Kernels and collectives are timed while all ranks work at once, as they do in training; the figures
of the cost model are then fitted to them. On CPUs local ranks are started; on GPUs the command is
started once per device, as by torchrun. The file is read by `--cluster` and `ClusterSpec.load`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.cost_models.calibrate import Calibration
    from autopar.cost_models.residuals import Mended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write the cluster here (YAML)")
    parser.add_argument(
        "--from", dest="trace", metavar="TRACE",
        help="mend the figures of a plan's cluster with a step that compiled.profile measured",
    )  # fmt: skip
    parser.add_argument(
        "--plan", metavar="PLAN",
        help="plan file of that step, with predictions (default: the one that the trace holds)",
    )  # fmt: skip
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="local ranks (default: one per core)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller samples: a quarter of the time"
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, fit, write, print."""
    if options.trace:
        return _feed_back(options)
    if options.plan:
        raise InputError("--plan is given without --from", expected="--from TRACE beside it")
    if not options.output:
        raise InputError("no output is given", expected="-o FILE, to which the cluster is written")
    if options.ranks is not None and options.ranks < 1:
        raise InputError(f"-n {options.ranks}", expected="at least 1 rank")
    _check_output(options.output)
    from rich.console import Console

    from autopar import api
    from autopar.runtime.comm_torch import from_environment
    from autopar.runtime.environment import read_environment

    job = None if options.ranks is not None else read_environment(os.environ)
    comm = from_environment() if job is not None else None
    first = comm is None or comm.rank == 0
    console = Console(stderr=options.json, quiet=not first)
    begun = time.perf_counter()
    with _Progress(console) as progress:
        found = api.measure(options.ranks, quick=options.quick, comm=comm, on_progress=progress)
    if not first:
        return 0
    found.cluster.save(options.output)
    if options.json:
        print(json.dumps(_as_json(found, options.output), indent=2))
    else:
        _print(console, found)
        console.print(
            f"{time.perf_counter() - begun:.0f} s; {found.cluster} written to {options.output}",
            markup=False,
            highlight=False,
        )
    return 0


def _check_output(path: str) -> None:
    """Refuse a file that cannot be written, without changing one that can."""
    shared.check_writable(path)
    existed = os.path.lexists(path)
    try:
        with open(path, "a", encoding="utf-8"):  # noqa: PTH123
            pass
    except OSError as error:
        raise InputError(
            f"output {path!r} cannot be written: {error.strerror}", expected="a file to write"
        ) from None
    if not existed:
        os.unlink(path)  # noqa: PTH108


def _feed_back(options: argparse.Namespace) -> int:
    """Mend a cluster with a measured step."""
    import datetime

    from rich.console import Console

    from autopar.cost_models.residuals import feed_back, mean_error, residuals
    from autopar.plan.plan import Plan
    from autopar.schedules.chrome import read_recording

    if options.ranks is not None or options.quick:
        raise InputError("--from is given, and how to measure", expected="one of them")
    if options.output:
        _check_output(options.output)
    recording = read_recording(options.trace)
    if options.plan:
        plan = Plan.load(options.plan)
    else:
        plan = Plan.from_json(json.dumps(recording.plan), f"{options.trace}: otherData.plan")
    found = residuals(plan, recording)
    day = datetime.datetime.now(tz=datetime.UTC).date()
    source = f"mended by autopar profile --from a step measured on {recording.device}, {day}"
    cluster, mended = feed_back(plan, found, source=source)
    if options.output:
        cluster.save(options.output)
    if options.json:
        told = {
            "output": options.output, "cluster": str(cluster), "mean_error": mean_error(found),
            "mended": [dataclasses.asdict(item) for item in mended],
        }  # fmt: skip
        print(json.dumps(told, indent=2))
        return 0
    _print_mended(Console(), mended, mean_error(found))
    if options.output:
        print(f"{cluster} written to {options.output}")
    return 0


def _print_mended(console: Console, mended: tuple[Mended, ...], error: float) -> None:
    from rich.table import Table

    from autopar.cost_models.hardware import figure_at

    print(f"mean error of the actions that compute (predicted / measured): {error:.1%}\n")
    parts = Table("part", "actions", "measured / predicted", "mean error before", "after", box=None,
                  pad_edge=False)  # fmt: skip
    for item in mended:
        edge = ", a figure at its limit" if item.at_edge else ""
        parts.add_row(
            item.what + edge, str(item.samples), f"{item.ratio:.3g}", f"{item.before:.1%}",
            f"{item.after:.1%}",
        )  # fmt: skip
    console.print(parts, highlight=False)
    console.print()
    figures = Table("figure", "before", "mended", "unit", box=None, pad_edge=False)
    for item in mended:
        for path, (before, after) in item.figures.items():
            figures.add_row(path, f"{before:g}", f"{after:g}", figure_at(path).unit)
    console.print(figures, highlight=False)


class _Progress:
    """A bar with the name of what is being timed."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            TextColumn("{task.description:<14}"), BarColumn(), TimeElapsedColumn(),
            console=console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total)


def _as_json(found: Calibration, output: str) -> dict[str, Any]:
    return {
        "output": output,
        "cluster": str(found.cluster),
        "constants": [dataclasses.asdict(item) for item in found.constants],
        "fits": [dataclasses.asdict(item) for item in found.fits],
    }


def _print(console: Console, found: Calibration) -> None:
    from rich.table import Table

    from autopar.cost_models.hardware import figure_at

    figures = Table("figure", "value", "unit", "how", box=None, pad_edge=False)
    figures.columns[0].min_width = max(len(item.path) for item in found.constants)
    figures.columns[1].justify = "right"
    for item in found.constants:
        how = item.how + (", at its limit" if item.at_edge else "")
        figures.add_row(item.path, f"{item.value:g}", figure_at(item.path).unit, how)
    console.print(figures, highlight=False)
    console.print()
    fits = Table("predicted / measured", "samples", "mean error", "largest", "of", box=None,
                 pad_edge=False)  # fmt: skip
    for fit in found.fits:
        fits.add_row(
            fit.work, str(fit.count), f"{fit.mean_error:.1%}", f"{fit.max_error:.1%}", fit.worst
        )
    console.print(fits, highlight=False)
