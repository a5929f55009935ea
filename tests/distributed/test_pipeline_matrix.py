"""Schedules, pipeline lengths, what is beside them, and models: all train exactly.

Every run has half of a set of cells that covers all pairs, the long mode has all cells.
"""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.schedules.make import SCHEDULES
from tests.distributed.pipeline_matrix import MICROBATCHES, Cell, cells, covering


def check(cell: Cell, **options) -> None:
    """Loss, gradients, buffers and the parameters after 5 steps are those of one device."""
    report = cell.run(**options)
    assert report.equal, f"{cell}\n{report.summary()}"
    assert report.worst.error <= 1e-11
    kinds = {row.kind for row in report.rows}
    assert kinds >= {"loss", "gradient", "parameter"}
    assert ("buffer" in kinds) == (cell.model in ("llama", "resnet"))
    assert sum(row.kind == "loss" for row in report.rows) == 5
    words = f"{MICROBATCHES} microbatches"
    assert (words in report.reference) == (cell.asynchronous or cell.model == "resnet")
    assert ("old" in report.reference) == cell.asynchronous


SHORT = covering()[::4]


@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_cells_train_as_one_device_does(cell: Cell):
    check(cell)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", sorted(set(cells()) - set(SHORT)), ids=str)
def test_all_others_do_too(cell: Cell):
    check(cell)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "pipedream", "zb_h1"])
def test_sgd_with_momentum(schedule: str):
    check(Cell(schedule, 2, "zero1", "unet"), optimizer="sgd")


@pytest.mark.parametrize("cell", [
    Cell("1f1b", 2, "zero3", "gpt2"),
    Cell("zbv", 2, "dp", "resnet"),
    Cell("interleaved_1f1b", 2, "tp", "llama"),
    Cell("pipedream", 4, "alone", "unet"),
    Cell("gpipe", 4, "alone", "unet"),
], ids=str)  # fmt: skip
@pytest.mark.distributed
def test_on_processes(cell: Cell, ranks4):
    check(cell, threads=False, ranks=ranks4)


@pytest.mark.parametrize("schedule", [n for n in SCHEDULES if SCHEDULES[n].asynchronous])
def test_what_cannot_be_is_refused(schedule: str):
    with pytest.raises(PlanError, match="ZeRO stage 2 with schedule " + schedule):
        Cell(schedule, 2, "zero2", "unet").run()
    with pytest.raises(PlanError, match="ZeRO stage 3 with schedule " + schedule):
        Cell(schedule, 2, "zero3", "unet").run()
    with pytest.raises(PlanError, match=r"share parameter shared\.weight"):
        Cell(schedule, 2, "alone", "t5").run()
