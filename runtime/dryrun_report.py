"""A dry run as a table for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from autopar.plan.plan import Plan
from autopar.runtime.dryrun import DryRun, RankMemory
from autopar.runtime.dryrun_ledger import Moment
from autopar.runtime.programs.liveness import MemoryKind
from autopar.units import counted

WIDTH = 48
"""Columns of the longest bar over time."""
ROWS = 16
"""Most rows of a table over time."""


def as_json(run: DryRun) -> dict[str, Any]:
    """Everything, with the full series over time."""
    return {
        "device": run.device,
        "optimizer": run.optimizer,
        "ranks": [
            {
                "rank": rank.rank,
                "stages": list(rank.stages),
                "peak_bytes": rank.peak_bytes,
                "peak_at": rank.where,
                "peak": dict(rank.peak),
                "resident_bytes": rank.resident_bytes,
                "resident": dict(rank.resident),
                "actions": [
                    {
                        "action": moment.what,
                        "peak_bytes": moment.peak_bytes,
                        "live_bytes": moment.live_bytes,
                        "live": dict(moment.live),
                    }
                    for moment in rank.moments
                ],
            }
            for rank in run.ranks
        ],
    }


def as_text(run: DryRun, plan: Plan) -> str:
    """Bytes by kind of each rank, and their course over the step."""
    schedule = f"{plan.pipeline.schedule}, {counted(plan.pipeline.microbatches, 'microbatch')}"
    mesh = ", ".join(f"{name}={size}" for name, size in plan.mesh)
    lines = [
        f"dry run   {mesh}; {schedule}; ZeRO-{plan.zero.stage}; {run.optimizer}; {run.device}",
        "",
        *_kinds(run.ranks),
    ]
    for rank in run.ranks:
        lines += ["", *_course(rank)]
    return "\n".join(lines)


def size(size_bytes: int) -> str:
    """Bytes for people: ``37.17 GiB``."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.2f} {unit}" if unit != "B" else f"{size_bytes} B"
        value /= 1024
    return f"{value:.2f} TiB"


def _kinds(ranks: Sequence[RankMemory]) -> list[str]:
    """Bytes by kind: at the peak, and before the step."""
    rows = [["bytes at the peak", *(f"rank {rank.rank}" for rank in ranks)]]
    rows.append(["  stages", *(", ".join(map(str, rank.stages)) for rank in ranks)])
    for kind in get_args(MemoryKind):
        cells = [rank.peak.get(kind, 0) for rank in ranks]
        if any(cells):
            rows.append([f"  {kind}", *map(size, cells)])
    rows.append(["peak", *(size(rank.peak_bytes) for rank in ranks)])
    rows.append(["before the step", *(size(rank.resident_bytes) for rank in ranks)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        row[0].ljust(widths[0])
        + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]


def _course(rank: RankMemory) -> list[str]:
    """The peak of each stretch of the step, as bars."""
    moments = [moment for moment in rank.moments if moment.peak_bytes]
    lines = [f"rank {rank.rank}: peak {size(rank.peak_bytes)} in {rank.where}"]
    highest = max((moment.peak_bytes for moment in moments), default=1)
    for stretch in _stretches(moments):
        top = max(stretch, key=lambda moment: moment.peak_bytes)
        name = stretch[0].what
        if len(stretch) > 1:
            name = f"{name} .. {stretch[-1].what}"
        bar = "#" * round(WIDTH * top.peak_bytes / highest)
        lines.append(f"  {name:<30}{size(top.peak_bytes):>12}  {bar}")
    return lines


def _stretches(moments: Sequence[Moment]) -> list[Sequence[Moment]]:
    """The step in at most `ROWS` pieces of about equal length."""
    count = min(ROWS, len(moments))
    cuts = [round(len(moments) * part / count) for part in range(count + 1)] if count else []
    return [moments[low:high] for low, high in pairwise(cuts)]
