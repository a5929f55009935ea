"""Plan, verify and train a small GPT on four local CPU ranks (data x tensor parallel, 2 x 2).

The text is Python's own reference manual, the model predicts it byte by byte. The same training
runs on one device as well: both losses are printed side by side.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from autopar.cli import options as shared
from autopar.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from autopar.runtime.comm import Communicator

MODEL = "autopar.runtime.tiny_gpt:build"
MESH = "dp=2,tp=2"
LEARNING_RATE = 3e-4
BATCH_SIZE, SEQ_LEN = 8, 128  # as MODEL's inputs
# Sums in another order round differently, and training amplifies that; a wrong gradient is
# off by far more within a few steps.
TOLERANCE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="training steps")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Run the tour."""
    if options.steps < 1:
        raise InputError(f"--steps {options.steps}", expected="at least 1")
    from rich.console import Console

    from autopar import api
    from autopar.cost_models.cluster import ClusterSpec
    from autopar.report.show import show
    from autopar.report.terminal import LEAST_WIDTH
    from autopar.runtime.launch import LocalRanks
    from autopar.runtime.loader import load_model
    from autopar.sharding.mesh import Mesh

    console = Console(stderr=options.json)
    start = time.perf_counter()
    mesh = Mesh.parse(MESH)
    loaded = load_model(MODEL)
    count = sum(parameter.numel() for parameter in loaded.model.parameters())
    console.rule(f"A GPT of {count / 1e6:.1f} M parameters on {mesh.size} local CPU ranks")
    plan = api.plan(
        loaded.model,
        ClusterSpec.local(mesh.size),
        loaded.args,
        loaded.kwargs,
        mesh=mesh,
        constraints="megatron",
    )
    console.print(show(plan, max(console.width, LEAST_WIDTH)), markup=False, highlight=False)

    with LocalRanks(mesh.size) as ranks:
        console.rule("Is it the same model? Sharded against one device")
        report = api.verify(MODEL, plan=plan, steps=1, ranks=ranks)
        console.print(report.summary(), markup=False, highlight=False)

        console.rule(f"Training, {options.steps} steps of {BATCH_SIZE} x {SEQ_LEN} bytes")
        with _Progress(console, options.steps) as progress:
            sharded = ranks.run(train_sharded, plan, options.steps, on_report=progress.sharded)[0]
            single = _train_single(options.steps, progress)
    difference = max(abs(a - b) for a, b in zip(sharded, single, strict=True))
    equal = bool(report.equal) and difference <= TOLERANCE
    _print_losses(console, sharded, single)
    console.print(
        f"largest difference {difference:.1e} nats per byte; "
        f"{time.perf_counter() - start:.0f} s in all"
    )
    if options.json:
        document = {
            "equal": equal,
            "plan": json.loads(plan.to_json()),
            "losses": {"sharded": sharded, "single": single},
            "largest_difference": difference,
        }
        print(json.dumps(document, indent=2))
    return 0 if equal else 1


def train_sharded(comm: Communicator, plan: Any, steps: int) -> list[float]:
    """What every rank runs: compile under `plan`, train, return the losses."""
    from autopar import api
    from autopar.cost_models.cluster import ClusterSpec
    from autopar.runtime.tiny_gpt import build

    model, args, kwargs = build()
    compiled = api.compile(
        model,
        ClusterSpec.local(comm.world_size),
        example_inputs=args,
        example_kwargs=kwargs,
        plan=plan,
        optimizer="adamw",
        lr=LEARNING_RATE,
        comm=comm,
    )
    losses = []
    for tokens, targets in _batches(steps):
        losses.append(float(compiled.step(tokens, targets)))
        if comm.rank == 0:
            comm.report(losses[-1])
    return losses


def _train_single(steps: int, progress: _Progress) -> list[float]:
    """The same training, written as for one device."""
    import torch

    from autopar.runtime.tiny_gpt import build

    model, _, _ = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for tokens, targets in _batches(steps):
        optimizer.zero_grad()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress.single(losses[-1])
    return losses


def _batches(steps: int) -> Any:
    from itertools import islice

    from autopar.runtime.tiny_gpt import text_batches

    return islice(text_batches(BATCH_SIZE, SEQ_LEN), steps)


class _Progress:
    """Two bars with the latest losses."""

    def __init__(self, console: Console, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            console=console,
        )
        self._sharded = self._bars.add_task(f"{MESH}", total=steps, loss=float("nan"))
        self._single = self._bars.add_task("one device", total=steps, loss=float("nan"))

    def __enter__(self) -> _Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def sharded(self, rank: int, loss: float) -> None:
        """A step of the sharded training is done."""
        self._bars.update(self._sharded, advance=1, loss=loss)

    def single(self, loss: float) -> None:
        """A step on one device is done."""
        self._bars.update(self._single, advance=1, loss=loss)


def _print_losses(console: Console, sharded: list[float], single: list[float]) -> None:
    from rich.table import Table

    table = Table("step", MESH, "one device", "difference", title="loss, nats per byte")
    for column in table.columns:
        column.justify = "right"
    every = max(1, len(sharded) // 5)
    for step in sorted({*range(0, len(sharded), every), len(sharded) - 1}):
        a, b = sharded[step], single[step]
        table.add_row(str(step + 1), f"{a:.5f}", f"{b:.5f}", f"{abs(a - b):.1e}")
    console.print(table)
