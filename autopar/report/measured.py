"""A measured step beside its prediction: residuals, in words and as tables of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autopar.cost_models.residuals import Residual, mean_error
from autopar.report.html_table import table, text
from autopar.report.trace import Step
from autopar.schedules.chrome import Recording
from autopar.units import format_seconds

WORST = 15
"""Single actions that are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Actions of one kind of a stage together; seconds are means.

    Attributes:
        stage: The stage.
        kind: Kind of action.
        count: Actions.
        predicted_s: Predicted seconds of one.
        measured_s: Measured seconds of one.
        compute_s: What of `predicted_s` is computation.
        measured_compute_s: What of `measured_s` is.
        inline_s: Predicted seconds of its collectives.
        measured_inline_s: Measured seconds of them.
        known: Whether that is more than an upper bound.
    """

    stage: int
    kind: str
    count: int
    predicted_s: float
    measured_s: float
    compute_s: float
    measured_compute_s: float
    inline_s: float
    measured_inline_s: float
    known: bool


def by_program(found: Iterable[Residual]) -> tuple[Program, ...]:
    """Residuals of equal actions together, those first whose difference costs most."""
    groups: dict[tuple[int, str], list[Residual]] = {}
    for item in found:
        groups.setdefault((item.action.stage, item.action.kind), []).append(item)
    rows = [_program(stage, kind, items) for (stage, kind), items in groups.items()]
    return tuple(sorted(rows, key=lambda row: -abs(row.measured_s - row.predicted_s) * row.count))


def _program(stage: int, kind: str, items: Sequence[Residual]) -> Program:
    count = len(items)
    return Program(
        stage=stage,
        kind=kind,
        count=count,
        predicted_s=sum(item.predicted_s for item in items) / count,
        measured_s=sum(item.measured_s for item in items) / count,
        compute_s=sum(item.compute_s for item in items) / count,
        measured_compute_s=sum(item.measured_compute_s for item in items) / count,
        inline_s=sum(item.inline_s for item in items) / count,
        measured_inline_s=sum(item.measured_inline_s for item in items) / count,
        known=all(item.known for item in items),
    )


def worst(found: Iterable[Residual], count: int = WORST) -> tuple[Residual, ...]:
    """The actions whose measured seconds differ most from the predicted ones."""
    return tuple(sorted(found, key=lambda item: -abs(item.difference_s))[:count])


def ratio_text(measured_s: float, predicted_s: float) -> str:
    """Measured over predicted, such as ``1.25``; nothing if nothing was predicted."""
    return f"{measured_s / predicted_s:.2f}" if predicted_s > 0 else ""


def measured_section(step: Step, recording: Recording, found: Sequence[Residual]) -> str:
    """The part of the report about a measured step."""
    error = mean_error(found)
    over = recording.step_s / step.forecast.step_s - 1 if step.forecast.step_s > 0 else 0.0
    programs = [
        (
            f"stage {row.stage} {row.kind}", f"{row.count:,}", format_seconds(row.predicted_s),
            format_seconds(row.measured_s), ratio_text(row.measured_s, row.predicted_s),
            ratio_text(row.measured_compute_s, row.compute_s),
            format_seconds(row.inline_s) if row.inline_s else "",
            _bound(row.known) + format_seconds(row.measured_inline_s)
            if row.measured_inline_s else "",
        )
        for row in by_program(found)
    ]  # fmt: skip
    single = [
        (
            str(item.action), str(item.pipeline_rank), format_seconds(item.predicted_s),
            format_seconds(item.measured_s), ratio_text(item.measured_s, item.predicted_s),
            format_seconds(item.difference_s),
        )
        for item in worst(found)
    ]  # fmt: skip
    names = (
        "actions", ">number", ">each, predicted", ">each, measured", ">measured / predicted",
        ">computation alone", ">collectives, predicted", ">collectives, measured",
    )  # fmt: skip
    return (
        '<section id="measured"><h2>Measured beside predicted</h2>'
        f"<p>The step took {text(format_seconds(recording.step_s))} (measured on "
        f"{text(recording.device)}), {over:+.1%} against "
        f"{text(format_seconds(step.forecast.step_s))} (predicted). Mean "
        f"error of the actions that compute: {error:.1%}. In the timeline the "
        "lower half of each row is measured. A receive lasts as long as its rank waits.</p>"
        "<h3>By program</h3>"
        + table(names, programs, label="Residuals by program")
        + f"<h3>The {len(single)} worst actions</h3>"
        + table(
            ("action", ">pipeline rank", ">predicted", ">measured", ">measured / predicted",
             ">difference"),
            single,
            label="The worst actions",
        )
        + "</section>"
    )  # fmt: skip


def _bound(known: bool) -> str:
    return "" if known else "at most "
