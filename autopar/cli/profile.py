"""Measure this machine, and write a cluster file that plans can be priced on.

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="write the cluster here (YAML)"
    )
    parser.add_argument(
        "-n", "--ranks", type=int, metavar="N", help="local ranks (default: one per core)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer and smaller samples: a quarter of the time"
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, fit, write, print."""
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
