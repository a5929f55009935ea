"""When nothing fits: the plan that needs least, what it needs it for, and what would help."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Prediction
from autopar.errors import PlanError
from autopar.search.bounds import Bounds
from autopar.search.polish import leanest
from autopar.search.problem import Outcome, Problem
from autopar.search.result import SearchResult
from autopar.search.space import Point
from autopar.units import format_bytes

TRIED, FEW = 24, 4
"""Points of least memory that are priced exactly, here and on larger clusters."""
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
    least = least_memory(problem)
    if least is None:
        return PlanError(
            f"the model cannot be placed on {problem.cluster} in any way that is searched",
            expected=result.certificate.space,
            fix="name a strategy (--strategy) to see why",
            where="cluster",
        )
    if least.fits:
        return PlanError(
            f"strategy {result.strategy} found none of {result.certificate.evaluated} plans to fit",
            fix=f"search with exact: {least.candidate.point.text()} is one that fits (predicted)",
            where="search",
        )
    return PlanError(
        f"no plan fits {problem.cluster}: the one that needs least, {least.candidate.point.text()},"
        f" is {format_bytes(least.over_bytes)} over the memory of a device (predicted)",
        expected=_parts(problem, least, problem.predict(least.candidate)),
        fix=_fixes(problem),
        where="cluster",
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
    for point in problem.space.points():
        if point.data_outside or point.schedule != "1f1b" or (point.zero < 3 and point.data > 1):
            continue
        yield point


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
    return (
        f"at most {format_bytes(room)} per device; pipeline rank {rank.rank} needs"
        f" {format_bytes(room + least.over_bytes)}, at its peak for {text}"
    )


def _fixes(problem: Problem) -> str:
    """Relaxations, cheapest first."""
    found = []
    if problem.options[0] != "full":
        found.append("let layers be computed again (recompute is fixed)")
    if problem.space.allowed:
        found.append("fix less: " + ", ".join(sorted(problem.space.allowed)))
    more = fewest_devices(problem)
    if more is not None:
        found.append(f"take {more.num_devices} devices, the fewest tried that are enough ({more})")
    if problem.space.batch > 1 and not problem.space.microbatched:
        found.append("a smaller batch: the model cannot be computed in microbatches")
    return "; ".join(found) or "a smaller model, batch or sequence, or devices with more memory"


def fewest_devices(problem: Problem) -> ClusterSpec | None:
    """The cluster with the least multiple of the nodes on which something fits."""
    if problem.room_bytes(problem.device) <= 0:
        return None
    for multiple in MULTIPLES:
        groups = tuple(
            replace(group, nodes=group.nodes * multiple) for group in problem.cluster.groups
        )
        cluster = replace(problem.cluster, groups=groups)
        least = least_memory(problem.on(cluster), tried=FEW)
        if least is not None and least.fits:
            return cluster
    return None
