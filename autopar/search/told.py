"""What a search found, as the plan's file says it: certificate, alternatives, what would change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.cost_models.evaluate import Prediction
from autopar.cost_models.explain import slowest, time_tree
from autopar.cost_models.forecast import forecast_of
from autopar.errors import PlanError
from autopar.plan.forecast import (
    AlternativeForecast,
    CertificateForecast,
    ChangeForecast,
    Forecast,
)
from autopar.plan.plan import Plan
from autopar.plan.shapes import finite
from autopar.search.problem import Candidate, Outcome, Problem
from autopar.search.result import SearchResult
from autopar.search.whatif import Change

if TYPE_CHECKING:
    from autopar.search.find import Found

FITTING, OVER = 4, 4
"""Other plans that are written down: those that fit, and faster ones that do not."""


def forecast_found(found: Found, optimizer: str, *, memory_known: bool = True) -> Forecast:
    """The forecast of a plan that was searched for.

    Args:
        found: The plan and its search.
        optimizer: Name of the optimizer that was priced.
        memory_known: Whether the memory of devices is more than a guess.
    """
    problem, best = found.problem, found.result.best
    assert best is not None
    light = problem.plan(best.candidate)
    forecast, _ = forecast_of(
        problem.evaluator, found.plan, optimizer=optimizer, priced=light,
        again=problem.again(best.candidate), memory_known=memory_known,
    )  # fmt: skip
    return replace(
        forecast,
        certificate=certificate_of(found.result),
        alternatives=(
            *_described(problem, found.result.alternatives, FITTING, memory_known),
            *_described(problem, too_large(problem, best), OVER, memory_known),
        ),
    )


def with_changes(plan: Plan, changes: Iterable[Change]) -> Plan:
    """The plan with what other clusters, and less memory, would change."""
    if plan.forecast is None:
        return plan
    rows = tuple(
        ChangeForecast(
            text=item.text,
            step_s=item.step_s,
            plan=item.plan,
            peak_bytes=item.peak_bytes,
            gap=finite(item.gap),
        )
        for item in changes
    )
    return replace(plan, forecast=replace(plan.forecast, changes=rows))


def certificate_of(result: SearchResult) -> CertificateForecast:
    """What a search has proven."""
    proof = result.certificate
    bound = finite(proof.bound_s)
    return CertificateForecast(
        strategy=result.strategy,
        bound_s=bound if bound else None,
        gap=min(result.gap, 1.0),
        space=proof.space,
        points=proof.points,
        pruned=dict(proof.pruned),
        evaluated=proof.evaluated,
        complete=proof.complete,
        seconds_s=result.seconds,
    )


def too_large(problem: Problem, best: Outcome) -> list[Outcome]:
    """Plans that are faster than the best but do not fit: of every point the fastest."""
    fastest: dict[object, Outcome] = {}
    for outcome in problem.outcomes:
        if outcome.fits or outcome.step_s >= best.step_s:
            continue
        point = outcome.candidate.point
        if point not in fastest or outcome.step_s < fastest[point].step_s:
            fastest[point] = outcome
    return sorted(fastest.values(), key=lambda item: (item.step_s, item.over_bytes))


def _described(
    problem: Problem, outcomes: Iterable[Outcome], count: int, memory_known: bool
) -> list[AlternativeForecast]:
    found: list[AlternativeForecast] = []
    for outcome in outcomes:
        if len(found) == count:
            break
        try:
            prediction = problem.predict(outcome.candidate)
        except PlanError:
            continue
        found.append(_alternative(problem, outcome, prediction, memory_known))
    return found


def _alternative(
    problem: Problem, outcome: Outcome, prediction: Prediction, memory_known: bool
) -> AlternativeForecast:
    slow = slowest(prediction)
    fullest = max(range(len(outcome.rank_over_bytes)), key=outcome.rank_over_bytes.__getitem__)
    full = prediction.ranks[fullest]
    tree = {part.name: part.parts for part in time_tree(prediction, slow.rank).parts}
    peak = sorted(full.memory.peak.items(), key=lambda item: -item[1])
    return AlternativeForecast(
        text=outcome.candidate.point.text(),
        mesh=outcome.candidate.point.mesh,
        recompute=recompute_text(problem, outcome.candidate),
        step_s=outcome.step_s,
        fits=outcome.fits,
        over_bytes=outcome.over_bytes if memory_known else 0,
        device_bytes=full.reserve.device_bytes,
        capacity_bytes=full.reserve.device_bytes - outcome.over_bytes if memory_known else None,
        peak={kind: size for kind, size in peak if size},
        compute_s=slow.time.compute_s,
        inline_s=slow.time.inline_s,
        exposed_s=slow.time.exposed_s,
        idle_s=slow.time.idle_s,
        host_s=max(0.0, prediction.step_s - slow.time.step_s),
        collectives={part.name: part.value for part in tree.get("collectives in line", ())},
    )


def recompute_text(problem: Problem, candidate: Candidate) -> str:
    """What the layers of a candidate compute again, such as ``12 of 96 layers selective``."""
    units = problem.units
    chosen = [
        problem.options[option]
        for unit, option in enumerate(problem.options_of(candidate))
        if units.block[unit] >= 0
    ]
    counts = {name: chosen.count(name) for name in dict.fromkeys(chosen) if name != "none"}
    if not counts:
        return "none"
    if len(counts) == 1 and (only := next(iter(counts.items())))[1] == len(chosen):
        return only[0]
    parts = [f"{count} of {len(chosen)} layers {name}" for name, count in counts.items()]
    return ", ".join(parts)
