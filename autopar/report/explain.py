"""Why a plan is as it is: where seconds and bytes come from, what binds, and what others cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.text import Text

from autopar.cost_models.explain import Part
from autopar.errors import InputError
from autopar.plan.forecast import (
    CertificateForecast,
    ChangeForecast,
    Forecast,
    RankForecast,
    room_words,
)
from autopar.plan.plan import Plan
from autopar.report.alternatives import WhyNot, memory_words, signed, time_words, why_not
from autopar.report.overview import axes, current_forecast
from autopar.report.show import NO_FORECAST, STALE
from autopar.report.terminal import Page, clean, percent
from autopar.report.trees import memory_of_rank, over, time_of_rank, time_of_stage
from autopar.units import counted, format_bytes, format_seconds

_TIGHT = 0.05
"""A device with less than this share of its memory free is nearly full."""
_HOW_WHAT_IF = (
    "not in this file: `autopar plan MODEL --cluster C --what-if -o PLAN` searches again for other "
    "clusters and for less memory, and writes down what would change"
)
_HOW_SEARCH = (
    "none in this file: `autopar plan MODEL --cluster C -o PLAN` searches, and writes down the "
    "plans next to the best and the faster ones that do not fit"
)


def explain(
    plan: Plan,
    width: int,
    *,
    rank: int | None = None,
    stage: int | None = None,
    colour: bool = False,
) -> str:
    """An explanation of a plan as text.

    Args:
        plan: The plan.
        width: Columns that no line goes beyond.
        rank: Pipeline rank to explain; by default the one that waits least, and the fullest.
        stage: A stage whose actions are explained as well.
        colour: Whether the text holds codes for colours.

    Raises:
        InputError: If there is no such rank or stage.
    """
    page = Page(width, colour=colour)
    forecast = current_forecast(plan)
    _check(plan, rank, stage)
    if forecast is None or not forecast.ranks:
        page.note(NO_FORECAST if plan.forecast is None else STALE, indent=0)
        return page.text
    slow, full = _chosen(forecast, rank)
    page.heading("what binds (predicted)")
    for line in binding(plan, forecast):
        page.note(line)
    page.heading("where the time goes (predicted)")
    _tree(page, time_of_rank(slow))
    if slow.beside:
        each = ", ".join(f"{over(a)} {format_seconds(s)}" for a, s in slow.beside.items())
        page.note(f"beside computation, and not in these sums: collectives over {each}")
    if stage is not None:
        _tree(page, time_of_stage(plan, forecast, stage))
    page.heading("where the memory goes, at the high-water mark (predicted)")
    _tree(page, memory_of_rank(full))
    _why_not(page, plan, forecast)
    page.heading("what is proven")
    page.note(certificate_words(forecast.certificate))
    page.heading("what if (predicted)")
    _what_if(page, forecast)
    return page.text.lstrip("\n")


def explain_json(plan: Plan, *, rank: int | None = None, stage: int | None = None) -> Any:
    """What `explain` says, as data; everything is predicted.

    Raises:
        InputError: If there is no such rank or stage.
    """
    forecast = current_forecast(plan)
    _check(plan, rank, stage)
    if forecast is None or not forecast.ranks:
        return {"predicted": None, "why": NO_FORECAST if plan.forecast is None else STALE}
    slow, full = _chosen(forecast, rank)
    return {
        "predicted": {
            "binding": binding(plan, forecast),
            "time": asdict(time_of_rank(slow)),
            "stage": None if stage is None else asdict(time_of_stage(plan, forecast, stage)),
            "memory": asdict(memory_of_rank(full)),
            "alternatives": [asdict(item) for item in why_not(plan, forecast)],
            "certificate": forecast.certificate and asdict(forecast.certificate),
            "changes": [asdict(item) for item in forecast.changes],
        }
    }


def _check(plan: Plan, rank: int | None, stage: int | None) -> None:
    count = plan.pipeline.ranks(plan.mesh)
    for name, value, most in (("rank", rank, count), ("stage", stage, plan.num_stages)):
        if value is not None and not 0 <= value < most:
            raise InputError(
                f"--{name} {value}: the plan has {counted(most, f'pipeline {name}')}",
                expected=f"a number from 0 to {most - 1}",
            )


def _chosen(forecast: Forecast, rank: int | None) -> tuple[RankForecast, RankForecast]:
    """The ranks whose time and whose memory are explained."""
    if rank is None:
        return forecast.slowest, forecast.fullest
    found = next((item for item in forecast.ranks if item.rank == rank), None)
    if found is None:
        known = ", ".join(str(item.rank) for item in forecast.ranks[:8])
        raise InputError(f"nothing was predicted of pipeline rank {rank}", expected=known)
    return found, found


# What binds


def binding(plan: Plan, forecast: Forecast) -> list[str]:
    """What keeps the step from being shorter: sentences, that of time first."""
    return [_binding_time(plan, forecast), _binding_memory(forecast)]


def _binding_time(plan: Plan, forecast: Forecast) -> str:
    slow = forecast.slowest
    shares = {
        "computation": slow.compute_s,
        "communication": slow.inline_s + slow.exposed_s,
        "bubble": slow.idle_s,
        "host": slow.host_s,
    }
    name = max(shares, key=lambda key: shares[key])
    share = percent(shares[name], slow.step_s)
    where = f" of pipeline rank {slow.rank}" if len(forecast.ranks) > 1 else ""
    if name == "computation":
        kernel = next(iter(slow.kernels), "")
        most = f", most of it {kernel}" if kernel else ""
        return f"time: computation is {share} of the step{where}{most}"
    if name == "communication":
        return f"time: {_link(plan, slow)} is {share} of the step{where}"
    if name == "bubble":
        return (
            f"time: waiting for other stages is {share} of the step{where}: more microbatches, "
            "fewer stages, or a schedule with a smaller bubble would shorten it"
        )
    return f"time: work of the host is {share} of the step{where}"


def _link(plan: Plan, slow: RankForecast) -> str:
    """The communication of a rank, and where its largest part runs."""
    found = {**slow.beside, **slow.collectives} if slow.collectives else dict(slow.beside)
    name = max(found, key=lambda key: found[key], default="")
    if not name:
        return "communication"
    known = {axis.name: axis for axis in axes(plan)}
    axis = known.get(name)
    inside = axis is not None and axis.per_node == axis.size
    where = "" if axis is None or axis.per_node is None else (
        ", inside a node" if inside else ", across nodes"
    )  # fmt: skip
    return f"communication, most of it over {over(name)}{where},"


def _binding_memory(forecast: Forecast) -> str:
    full = forecast.fullest
    kind = next(iter(full.peak), "")
    most = f"; most of it is {kind}, {format_bytes(full.peak[kind])}" if kind else ""
    faster = [a for a in forecast.alternatives if not a.fits and a.step_s < forecast.step_s]
    text = f"memory: {room_words(forecast)}{most}"
    if faster:
        gain = 1 - min(item.step_s for item in faster) / forecast.step_s
        return text + (
            f". It binds: {counted(len(faster), 'plan')} up to {100 * gain:.2g} % faster, below, "
            "would need more"
        )
    if full.capacity_bytes and -full.over_bytes < _TIGHT * full.capacity_bytes:
        return f"{text}. It is nearly full"
    return text


# Trees


def _tree(page: Page, tree: Part) -> None:
    """A tree: values, shares of the whole, and names; parts add up to what is above them."""
    rows: list[list[str | Text]] = []

    def add(part: Part, depth: int) -> None:
        value = (
            format_seconds(part.value) if part.unit == "s" else format_bytes(part.value)
        )  # fmt: skip
        share = percent(part.value, tree.value)
        name = Text("  " * depth + clean(part.name), "bold" if not depth else "")
        rows.append([value, share, name])
        for inner in part.parts:
            add(inner, depth + 1)

    add(tree, 0)
    page.table([">", ">", ""], rows, gives=2)


# Alternatives


def _why_not(page: Page, plan: Plan, forecast: Forecast) -> None:
    page.heading("why not another plan (predicted)")
    found = why_not(plan, forecast)
    if not found:
        page.note(_HOW_SEARCH)
    for item in found:
        page.note(", ".join(item.changes))
        page.note(why(item, forecast), indent=4)


def why(item: WhyNot, forecast: Forecast) -> str:
    """What an alternative costs, and why it was not taken."""
    share = f"{100 * item.slower:+.2g} %"
    parts = [f"{share} time ({format_seconds(item.step_s)})"]
    time = time_words(item, forecast.step_s)
    text = parts[0] + (f": {time}" if time else "")
    more = signed(format_bytes, item.more_bytes)
    memory = memory_words(item, forecast.fullest.device_bytes)
    text += f"; {more} on the fullest rank" + (f": {memory}" if memory else "")
    if item.over_bytes is None:
        return text
    if item.over_bytes > 0:
        return f"{text}; over by {format_bytes(item.over_bytes)}"
    return f"{text}; fits"


# Certificate


def certificate_words(proof: CertificateForecast | None) -> str:
    """What a search has proven, in full."""
    if proof is None:
        return "nothing: no search chose this plan"
    seen = (
        f"The search ({proof.strategy}) took {format_seconds(proof.seconds_s)} for "
        f"{counted(proof.points, 'point')}, of which it priced {counted(proof.evaluated, 'plan')}"
    )
    ruled = ", ".join(f"{n:,} by {name}" for name, n in proof.pruned.items() if n)
    seen += f" and ruled out {ruled} before that" if ruled else ""
    seen += "." if proof.complete else "; it was stopped early."
    if proof.bound_s is None:
        return f"{seen} It has no bound: there may be faster plans that it has not seen."
    return (
        f"{seen} No plan of what was searched takes less than {format_seconds(proof.bound_s)} "
        f"as the cost model predicts it, so that none is faster by more than "
        f"{100 * proof.gap:.2g} %. What was searched: {proof.space}."
    )


# Sensitivity


def _what_if(page: Page, forecast: Forecast) -> None:
    if not forecast.changes:
        page.note(_HOW_WHAT_IF)
        return
    rows = [_change(item, forecast.step_s) for item in forecast.changes]
    if page.width >= 90:
        page.table(["", ">step", ">change", ">most live", "plan"], rows, gives=4, wrap=True)
        return
    page.table(["", ">step", ">change"], [row[:3] for row in rows], wrap=True)


def _change(item: ChangeForecast, now_s: float) -> Sequence[str]:
    if item.step_s is None:
        return [item.text, "-", "", "", "nothing fits"]
    share = f"{100 * (item.step_s / now_s - 1):+.1f} %" if now_s > 0 else ""
    return [
        item.text, format_seconds(item.step_s), share, format_bytes(item.peak_bytes), item.plan,
    ]  # fmt: skip
