"""When nothing fits: the plan that needs least, what it needs it for, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Prediction
from autopar.errors import PlanError
from autopar.search import exact
from autopar.search.asked import Asked
from autopar.search.bounds import Bounds
from autopar.search.polish import leanest
from autopar.search.problem import Outcome, Problem
from autopar.search.result import SearchResult
from autopar.search.space import Point
from autopar.search.starts import GRID
from autopar.units import format_bytes, format_seconds

TRIED, FEW = 24, 4
"""Points of least memory that are priced exactly, here and on larger clusters."""
GAP, LIMIT_S = 0.1, 8.0
"""Where a search ends that is to say whether something fits without a constraint."""
MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""How many times the devices are tried."""


def explain_infeasible(problem: Problem, result: SearchResult) -> PlanError:
    """The error that says why no plan fits, and what to change.

    Args:
        problem: The problem.
        result: A search that found nothing.
    """
    if not result.certificate.complete:
        return PlanError(
            f"no plan was found within {result.seconds:.0f} s",
            fix="give the search more time (--time-limit)",
            where="search",
        )
    if not result.certificate.points:
        return _outside(problem, result.strategy)
    least, asked = least_memory(problem), problem.asked.text()
    where = f"{problem.cluster} with {asked}" if asked else f"{problem.cluster}"
    if least is None:
        return PlanError(
            f"the model cannot be placed on {where} in any way that is searched",
            expected=result.certificate.space,
            fix="; ".join((*_freed(problem), "name a strategy (--strategy) to see why")),
            where="cluster",
        )
    if least.fits:
        return PlanError(
            f"strategy {result.strategy} found none of {result.certificate.evaluated} plans to fit",
            fix=f"search with exact: {least.candidate.point.text()} is one that fits (predicted)",
            where="search",
        )
    return PlanError(
        f"no plan fits {where}: the one that needs least, {least.candidate.point.text()},"
        f" is {format_bytes(least.over_bytes)} over the memory of a device (predicted)",
        expected=_parts(problem, least, problem.predict(least.candidate)),
        fix=_fixes(problem, least),
        where="cluster",
    )


def _outside(problem: Problem, strategy: str) -> PlanError:
    """That a strategy looks at no plan that keeps what is asked for."""
    asked = problem.asked.text()
    return PlanError(
        f"strategy {strategy} covers no plan on {problem.cluster}"
        + (f" with {asked}" if asked else ""),
        expected=f"what it covers: {GRID}",
        fix="search with exact, which covers these and others",
        where="search",
    )


def least_memory(problem: Problem, *, tried: int = TRIED) -> Outcome | None:
    """The plan with least bytes beyond the memory of a device among those that promise it.

    Args:
        problem: The problem.
        tried: Points that are priced at most; fewer where no other can need less.
    """
    bounds, points = Bounds(problem), list(_points(problem))
    bounds.know_largest(points)
    ordered = sorted((_promise(problem, bounds, point), point) for point in points)
    best: Outcome | None = None
    least = math.inf  # bytes of tensors on a rank of the best
    for promise, point in ordered:
        if math.isinf(promise) or promise >= least or tried == 0:
            break
        outcome = leanest(problem, bounds, point)
        if outcome is None:
            continue
        tried -= 1
        if best is None or outcome.over_bytes < best.over_bytes:
            best = outcome
            device = problem.devices(point)[0]
            over = outcome.over_bytes / problem.reserved_factor(device)
            least = problem.room_bytes(device) + over
        if best.fits:
            break
    return best


def _points(problem: Problem) -> Iterable[Point]:
    """Of points alike the one with least memory."""
    best: dict[object, tuple[tuple[bool, int, int], Point]] = {}
    for point in problem.space.points():
        key = (point.pipeline, point.tensor, point.role, point.microbatches)
        leaner = (point.schedule == "1f1b", point.zero, -point.chunks)
        if key not in best or leaner > best[key][0]:
            best[key] = leaner, point
    return [point for _, point in best.values()]


def _promise(problem: Problem, bounds: Bounds, point: Point) -> float:
    """Bytes of tensors that some rank needs at least: those of all, spread evenly."""
    largest = bounds.largest(point)
    totals = bounds.totals(largest)
    if totals is None:
        return math.inf
    share = problem.samples(point) / problem.samples(largest)
    under_way = min(point.pipeline, point.microbatches)
    saved = totals.least_bytes * share * under_way
    return (bounds.held(point, totals, point.zero) + saved) / point.pipeline


def _parts(problem: Problem, least: Outcome, found: Prediction) -> str:
    """What the rank with least room needs its memory for."""
    rank = max(found.ranks, key=lambda item: item.over_bytes)
    parts = sorted(rank.memory.peak.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:5] if size)
    room = problem.capacity_bytes(problem.devices(least.candidate.point)[rank.rank])
    beyond = rank.reserve.device_bytes - rank.memory.peak_bytes
    if beyond > 0:
        text += f"; {format_bytes(beyond)} of it are not tensors (context, reserved memory)"
    return (
        f"at most {format_bytes(room)} per device; pipeline rank {rank.rank} needs"
        f" {format_bytes(room + least.over_bytes)}, at its peak for {text}"
    )


def _fixes(problem: Problem, least: Outcome) -> str:
    """Relaxations, cheapest first."""
    found = _freed(problem)
    found += [
        f"use {cluster} only: {format_seconds(best.step_s)} per step (predicted)"
        for cluster, best in alone(problem)
    ]
    more = None if found else fewest_devices(problem)
    if problem.asked.texts() and not found:
        found.append("fixing less is not enough: with nothing fixed nothing fits, either")
    if more is not None:
        free = ", if nothing is fixed" if problem.asked.texts() else ""
        best = _good(problem, Asked(), more)
        took = f": {format_seconds(best.step_s)} per step (predicted)" if best is not None else ""
        enough = f"the fewest tried that are enough{free} ({more}){took}"
        found.append(f"take {more.num_devices} devices, {enough}")
    if problem.space.batch > 1 and not problem.space.microbatched:
        found.append("a smaller batch: the model cannot be computed in microbatches")
    needed = problem.capacity_bytes(problem.device) + least.over_bytes
    if not found:
        found.append("a smaller model, batch or sequence")
    return "; ".join((*found, f"devices with {format_bytes(needed)} of memory"))


def _freed(problem: Problem) -> list[str]:
    """What each constraint keeps from fitting, if something fits without."""
    return [
        f"without {text} there is a plan of {format_seconds(best.step_s)} (predicted):"
        f" {best.candidate.point.text()}"
        for text, best in without(problem)
    ]


def without(problem: Problem) -> list[tuple[str, Outcome]]:
    """Constraints without which something fits, and a good plan then.

    Args:
        problem: A problem of which nothing fits.

    Returns:
        Those that are in the way by themselves; all of them together if none is.
    """
    texts = problem.asked.texts()
    free = _good(problem, Asked()) if texts else None
    if free is None:
        return []
    if len(texts) == 1:
        return [(text, free) for text in texts.values()]
    each = [(text, _good(problem, problem.asked.without(name))) for name, text in texts.items()]
    found = [(text, best) for text, best in each if best is not None]
    found.sort(key=lambda item: item[1].step_s)
    return found or [(problem.asked.text(), free)]


def alone(problem: Problem, limit_s: float = LIMIT_S) -> list[tuple[ClusterSpec, Outcome]]:
    """A good plan on each kind of node of an unequal cluster, the others left idle.

    Args:
        problem: The problem.
        limit_s: Seconds for each search.
    """
    found = []
    for group in problem.cluster.groups if not problem.cluster.is_uniform else ():
        cluster = replace(problem.cluster, groups=(group,), tiers=())
        best = _good(problem, problem.asked, cluster, limit_s)
        if best is not None:
            found.append((cluster, best))
    return found


def _good(
    problem: Problem, asked: Asked, cluster: ClusterSpec | None = None, limit_s: float = LIMIT_S
) -> Outcome | None:
    """A good plan where only so much is asked for; None if there is none, or not at once."""
    try:
        other = problem.like(asked=asked, cluster=cluster, memory_bytes=problem.memory_bytes)
        return exact.search(other, gap=GAP, time_limit_s=limit_s).best
    except PlanError:  # the space is empty
        return None


def fewest_devices(problem: Problem) -> ClusterSpec | None:
    """The cluster with the fewest nodes on which something fits; of unequal ones, multiples."""
    if problem.room_bytes(problem.device) <= 0:
        return None
    few = 1
    for many in MULTIPLES:
        best = _more(problem.cluster, many)
        if _fits(problem, best):
            break
        few = many
    else:
        return None
    nodes = problem.cluster.groups[0].nodes
    few, many = few * nodes, many * nodes  # too few, and enough
    while len(best.groups) == 1 and many - few > 1:
        middle = (few + many) // 2
        cluster = replace(best, groups=(replace(best.groups[0], nodes=middle),))
        if _fits(problem, cluster):
            best, many = cluster, middle
        else:
            few = middle
    return best


def _more(cluster: ClusterSpec, multiple: int) -> ClusterSpec:
    """The cluster with so many times the nodes."""
    groups = tuple(replace(group, nodes=group.nodes * multiple) for group in cluster.groups)
    return replace(cluster, groups=groups)


def _fits(problem: Problem, cluster: ClusterSpec) -> bool:
    """Whether a plan was found that fits a cluster."""
    least = least_memory(problem.on(cluster), tried=FEW)
    return least is not None and least.fits
