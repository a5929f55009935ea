"""A plan as one HTML file: no network, nothing outside of it, nothing in it that a plan could run.

Text from plans is escaped, data for charts is packed and read as data only, and the page's own
policy lets no script run but the one that is written into it here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from importlib.resources import files

from autopar.cost_models.residuals import Residual
from autopar.plan.forecast import Forecast
from autopar.plan.plan import Plan
from autopar.report.alternatives import WhyNot, why_not
from autopar.report.explain import certificate_words, why
from autopar.report.html_data import chart_data
from autopar.report.html_table import table, text
from autopar.report.measured import measured_section
from autopar.report.overview import axes, num_devices, parameters
from autopar.report.trace import Step
from autopar.schedules.chrome import Recording
from autopar.units import counted, format_bytes, format_count, format_seconds

_SLOT = re.compile(r"\{\{(\w+)\}\}")
MOST_RANKS = 128
"""Pipeline ranks that the table of ranks lists one by one."""


def report(
    plan: Plan, *, recording: Recording | None = None, found: Sequence[Residual] = ()
) -> str:
    """The report of a plan.

    Args:
        plan: The plan, with predictions.
        recording: A measured step of it.
        found: Its residuals.

    Returns:
        HTML text.

    Raises:
        PlanError: If nothing was predicted of the plan.
    """
    step = Step.of(plan)
    folder = files("autopar.report")
    script = "".join(
        (folder / name).read_text(encoding="utf-8") for name in ("charts.js", "page.js")
    )
    data = json.dumps(chart_data(step, recording), separators=(",", ":"), allow_nan=False)
    packed = base64.b64encode(zlib.compress(data.encode(), 9)).decode()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    slots = {
        "title": text(f"{plan.device_mesh} on {step.forecast.cluster.text}"),
        "policy": f"sha256-{digest}",
        "style": (folder / "page.css").read_text(encoding="utf-8"),
        "facts": _facts(step, recording),
        "about": _about(step),
        "certificate": text(certificate_words(step.forecast.certificate)),
        "ranks": _ranks(step),
        "options": _options(step),
        "parameters": _parameters(plan),
        "alternatives": _alternatives(plan, step.forecast),
        "changes": _changes(step.forecast),
        "measured": "" if recording is None else measured_section(step, recording, found),
        "data": packed,
        "script": script,
    }
    page = (folder / "page.html").read_text(encoding="utf-8")
    return _SLOT.sub(lambda match: slots[match[1]], page)


# Facts


def _facts(step: Step, recording: Recording | None) -> str:
    forecast = step.forecast
    full = forecast.fullest
    tiles = [("step", format_seconds(forecast.step_s), "of training", "predicted")]
    if recording is not None:
        tiles.append(("step", format_seconds(recording.step_s), recording.device, "measured"))
    if forecast.global_batch_size and forecast.step_s > 0:
        rate = forecast.global_batch_size / forecast.step_s
        tokens = forecast.sequence_length
        each = f"{format_count(rate * tokens)} tokens/s" if tokens else "each step the whole batch"
        tiles.append(("throughput", f"{_rate(rate)} samples/s", each, "predicted"))
    room = f"of {format_bytes(full.capacity_bytes)}" if full.capacity_bytes else "size not known"
    word = "fits" if forecast.fits else "DOES NOT FIT"
    tiles.append(("fullest rank", format_bytes(full.device_bytes), f"{room}: {word}", "predicted"))
    bubble = step.timeline.bubble_fraction
    tiles.append(("idle", f"{bubble:.1%}", "of all ranks' time waits for stages", "predicted"))
    slow = forecast.slowest
    if forecast.step_s > 0:
        share = (slow.inline_s + slow.exposed_s) / forecast.step_s
        tiles.append(("communication", f"{share:.1%}", "of the step is exposed", "predicted"))
    return "".join(
        f'<div class="tile"><div class="k">{text(name)}</div><div class="v">{text(value)}'
        f'</div><div class="n">{text(note)}</div><span class="tag {tag}">{tag}</span></div>'
        for name, value, note, tag in tiles
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _about(step: Step) -> str:
    plan, forecast = step.plan, step.forecast
    model = forecast.cost_model
    part = plan.pipeline
    rows = [
        ("cluster", f"{forecast.cluster.text}: {counted(num_devices(forecast.cluster), 'device')}"),
        ("mesh", f"{plan.device_mesh}: {counted(plan.device_mesh.size, 'rank')}"),
    ]
    for axis in axes(plan):
        also = "".join(f"; {word}" for word in axis.also)
        near = {None: "", 1: "; across nodes", axis.size: "; inside a node"}.get(
            axis.per_node, f"; {axis.per_node} in each node"
        )
        splits = ", ".join(axis.splits) or "nothing"
        rows.append(
            (f"axis {axis.name}", f"{counted(axis.size, 'rank')}: splits {splits}{also}{near}")
        )
    batch = (
        counted(forecast.global_batch_size, "sample") if forecast.global_batch_size else "unknown"
    )
    if forecast.sequence_length:
        batch += f" of {counted(forecast.sequence_length, 'token')}"
    rows += [
        ("batch", f"{batch}, {counted(part.microbatches, 'microbatch')}"),
        ("pipeline", f"{counted(plan.num_stages, 'stage')}, schedule {part.schedule}"),
        ("strategy", "chosen by a search" if plan.searched else plan.strategy),
        ("model", f"{format_count(sum(view.elements for view in parameters(plan)))} parameters"),
        ("priced as", f"{model.precision}, {model.optimizer}, {model.software}, cost model "
         f"{model.version}"),
    ]  # fmt: skip
    if plan.recompute:
        rows.append(("computed again", ", ".join(plan.recompute[:6])))
    rows += [("note", note) for note in plan.notes if not note.startswith("predicted ")]
    rows += [
        ("no rule", f"{op.op} in {op.module or 'the model'} runs whole on every rank, "
         f"{format_bytes(op.size_bytes)}")
        for op in plan.unruled
    ]  # fmt: skip
    return "".join(f"<dt>{text(k)}</dt><dd>{text(v)}</dd>" for k, v in rows)


# Tables


def _ranks(step: Step) -> str:
    ranks = step.forecast.ranks
    rows = [
        (
            str(rank.rank), ", ".join(map(str, rank.stages)), format_seconds(rank.compute_s),
            format_seconds(rank.inline_s), format_seconds(rank.exposed_s),
            format_seconds(rank.idle_s), format_seconds(rank.host_s),
            format_bytes(rank.device_bytes),
            format_bytes(rank.capacity_bytes) if rank.capacity_bytes else "not known",
            rank.peak_at,
        )
        for rank in ranks[:MOST_RANKS]
    ]  # fmt: skip
    names = (
        ">pipeline rank", "stages", ">computation", ">collectives in line", ">waiting for others",
        ">idle", ">host", ">memory", ">capacity", "peak at",
    )  # fmt: skip
    more = len(ranks) - len(rows)
    rest = f"<p>{counted(more, 'more rank')} in the charts.</p>" if more > 0 else ""
    return table(names, rows, label="Pipeline ranks, predicted") + rest


def _options(step: Step) -> str:
    full = step.forecast.fullest.rank
    return "".join(
        f'<option value="{rank}"{" selected" if rank == full else ""}>pipeline rank {rank}'
        f"{' (fullest)' if rank == full else ''}</option>"
        for rank in range(step.num_ranks)
    )


def _parameters(plan: Plan) -> str:
    views = parameters(plan)
    whole = sum(view.elements for view in views) or 1
    rows = [
        (
            view.block or "-", view.name, f"{view.count:,}", view.shape, view.dtype,
            format_count(view.elements), f"{view.elements / whole:.1%}", view.stored,
        )
        for view in views
    ]  # fmt: skip
    names = (
        "block", "parameters", ">tensors", "shape / split", "dtype", ">elements", ">share",
        "stored",
    )  # fmt: skip
    return table(names, rows, label="Parameters by block")


def _alternatives(plan: Plan, forecast: Forecast) -> str:
    items = why_not(plan, forecast)
    if not items:
        return "<p>The plan file holds no other plans: no search has chosen it.</p>"
    rows = [_alternative(item, forecast) for item in items]
    names = ("plan", ">step", ">slower by", "fits", "what differs, and what it costs")
    return table(names, rows, label="Alternatives, predicted")


def _alternative(item: WhyNot, forecast: Forecast) -> tuple[str, ...]:
    fits = "yes" if item.fits else "no"
    return (
        item.text, format_seconds(item.step_s), f"{item.slower:+.1%}", fits,
        "; ".join((", ".join(item.changes), why(item, forecast))).strip("; "),
    )  # fmt: skip


def _changes(forecast: Forecast) -> str:
    if not forecast.changes:
        return (
            "<p>Not in this file: <code>autopar plan --what-if</code> asks what other clusters, "
            "and less memory, would change.</p>"
        )
    rows = [
        (
            item.text,
            "nothing fits" if item.step_s is None else format_seconds(item.step_s),
            "" if item.step_s is None or forecast.step_s <= 0
            else f"{item.step_s / forecast.step_s - 1:+.1%}",
            format_bytes(item.peak_bytes) if item.step_s is not None else "",
            item.plan,
        )
        for item in forecast.changes
    ]  # fmt: skip
    names = ("if there were", ">step", ">change", ">most live bytes", "best plan then")
    return table(names, rows, label="Sensitivity, predicted")
