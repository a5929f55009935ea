"""What the model says of every row, beside what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.cost_models.published.features import Work, work_of
from autopar.cost_models.published.folds import SET_APART, counts
from autopar.cost_models.published.jobs import Job, read_job
from autopar.cost_models.published.known import Unpriceable
from autopar.cost_models.published.memory import Memory, stage_memory, worst_memory
from autopar.cost_models.published.price import Batch
from autopar.cost_models.published.rows import Row
from autopar.cost_models.published.stats import Ranking, Stats, error_stats, ranking
from autopar.errors import AutoparError

QUANTITIES = (
    "step_time_s",
    "static_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_device_bytes",
)
SMALLEST_SET = 3
"""Fewest plans of one job on one cluster that are ranked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measured number and its prediction.

    Attributes:
        row: The row.
        quantity: One of `QUANTITIES`.
        measured: What the row states.
        predicted: What the model says.
        assumed: What the row does not state and was taken to be.
        counts: Whether it counts in the totals.
    """

    row: Row
    quantity: str
    measured: float
    predicted: float
    assumed: tuple[str, ...]
    counts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All comparisons, and the rows without.

    Attributes:
        comparisons: One per measured number that could be predicted.
        skipped: Row and the reason why nothing of it could be.
    """

    comparisons: tuple[Comparison, ...]
    skipped: tuple[tuple[Row, str], ...]

    def overall(self) -> dict[str, Stats]:
        """Statistics of every quantity over what counts."""
        return _by_quantity(item for item in self.comparisons if item.counts)

    def groups(self) -> dict[str, dict[str, Stats]]:
        """Statistics by source."""
        found: dict[str, list[Comparison]] = defaultdict(list)
        for item in self.comparisons:
            if item.row.id not in SET_APART:
                found[item.row.group].append(item)
        return {name: _by_quantity(items) for name, items in sorted(found.items())}

    def rankings(self) -> dict[str, Ranking]:
        """How well sets of plans of one job on one cluster are ordered, by the name of the set."""
        found: dict[str, list[Comparison]] = defaultdict(list)
        for item in self.comparisons:
            if item.quantity == "step_time_s" and item.row.id not in SET_APART:
                found[job_name(item.row)].append(item)
        return {
            name: ranking([item.predicted for item in items], [item.measured for item in items])
            for name, items in sorted(found.items())
            if len(items) >= SMALLEST_SET
        }


def job_name(row: Row) -> str:
    """What plans must share to be compared: source, devices, model, sequence, batch, precision."""
    model, plan, hardware = (row.sections[key] for key in ("model", "plan", "hardware"))
    parts = (
        row.group, hardware["gpu"], f"{hardware['gpus']} devices",
        f"{model['layers']}x{model['hidden']}", f"seq {model['seq_len']}",
        f"batch {plan['global_batch']}", plan["precision"],
    )  # fmt: skip
    return " / ".join(map(str, parts))


def validate(
    rows: Sequence[Row], *, assume_recompute: str | None = None,
    wanted: Callable[[Job], bool] = lambda job: True,
) -> Validation:  # fmt: skip
    """Predict everything that `rows` measured.

    Args:
        rows: The rows.
        assume_recompute: See `read_job`.
        wanted: Which jobs to predict.
    """
    skipped: list[tuple[Row, str]] = []
    kept: list[tuple[Row, Job]] = []
    for row in rows:
        try:
            job = read_job(row, assume_recompute=assume_recompute)
        except Unpriceable as reason:
            skipped.append((row, str(reason)))
            continue
        if row.step_time_s is None and not _memory_fields(row):
            skipped.append((row, "neither step time nor memory is stated"))
        elif wanted(job):
            kept.append((row, job))
    timed: list[tuple[Row, Job]] = []
    works: list[Work] = []
    for row, job in kept:
        if row.step_time_s is not None and _has_time(row):
            try:
                works.append(work_of(job))
            except AutoparError as reason:  # sizes that no model of the kind can have
                skipped.append((row, f"the model cannot be built: {reason.what}"))
                continue
            timed.append((row, job))
    batch = Batch([job for _, job in timed], works)
    seconds = batch.price().step_s if timed else ()
    found = []
    for (row, job), predicted in zip(timed, seconds, strict=True):
        assert row.step_time_s is not None, row.id
        found.append(
            Comparison(
                row=row, quantity="step_time_s", measured=row.step_time_s,
                predicted=float(predicted), assumed=job.assumed, counts=counts(row),
            )
        )  # fmt: skip
    refused = {row.id for row, _ in skipped}
    for row, job in kept:
        if row.id in refused:
            continue
        try:
            found += _memory(row, job)
        except AutoparError as reason:
            skipped.append((row, f"the model cannot be built: {reason.what}"))
    return Validation(comparisons=tuple(found), skipped=tuple(skipped))


def _has_time(row: Row) -> bool:
    """Whether the source means the time to be used."""
    return not any("for memory only" in flag for flag in row.flags)


def _memory_fields(row: Row) -> dict[str, float]:
    """Measured bytes by quantity."""
    found = {}
    allocated, peak = (row.get("measured", key) for key in ("mem_allocated_gib", "peak_mem_gib"))
    if allocated is not None:
        found["static_bytes"] = allocated * 2**30
    quantity = memory_quantity(row.get("measured", "peak_mem_kind") or "")
    if peak is not None and quantity is not None:
        found[quantity] = peak * 2**30
    return found


def memory_quantity(kind: str) -> str | None:
    """The quantity that a stated kind of memory is, None if the words do not say."""
    kind = kind.lower()
    if "max allocated" in kind:
        return "peak_allocated_bytes"
    if "reserved" in kind:
        return "peak_reserved_bytes"
    if any(word in kind for word in ("nvidia-smi", "flagperf", "total used device")):
        return "peak_device_bytes"
    return None


def _memory(row: Row, job: Job) -> list[Comparison]:
    measured = _memory_fields(row)
    if not measured:
        return []
    last = "last rank" in (row.get("measured", "peak_mem_kind") or "")
    peak = any(quantity != "static_bytes" for quantity in measured)
    memory: Memory = stage_memory(job, job.pp - 1, peak=peak) if last else worst_memory(job)
    return [
        Comparison(
            row=row, quantity=quantity, measured=value, predicted=getattr(memory, quantity),
            assumed=job.assumed, counts=row.id not in SET_APART,
        )
        for quantity, value in measured.items()
    ]  # fmt: skip


def _by_quantity(items: Iterable[Comparison]) -> dict[str, Stats]:
    found: dict[str, list[Comparison]] = defaultdict(list)
    for item in items:
        found[item.quantity].append(item)
    return {
        quantity: error_stats(
            [item.predicted for item in found[quantity]],
            [item.measured for item in found[quantity]],
        )
        for quantity in QUANTITIES
        if quantity in found
    }


def as_json(result: Validation) -> dict[str, Any]:
    """The result in the form that ``autopar validate --json`` prints."""

    def stats(found: Mapping[str, Stats]) -> dict[str, dict[str, float]]:
        return {quantity: item.as_dict() for quantity, item in found.items()}

    return {
        "overall": stats(result.overall()),
        "groups": {name: stats(found) for name, found in result.groups().items()},
        "rows": [
            {
                "id": item.row.id, "quantity": item.quantity, "measured": item.measured,
                "predicted": item.predicted, "assumed": list(item.assumed),
            }
            for item in result.comparisons
        ],
        "skipped": [{"id": row.id, "reason": reason} for row, reason in result.skipped],
    }  # fmt: skip
