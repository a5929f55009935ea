"""Points to begin with: what experts would take, so that there is something to beat."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.search.bounds import Bounds
from autopar.search.problem import Question
from autopar.search.space import Point

TRIED, STARTS = 24, 3
"""Points whose cuts are looked at first, and of which so many are evaluated."""
FEW_SAMPLES = 2
"""Most samples of a microbatch on a rank of a pipeline."""


GRID = (
    "ranks of data with ZeRO 0 to 3; or ZeRO 0 or 1, a tensor axis (megatron or megatron_sp) inside"
    " of data ranks, and stages outside of them, by 1f1b or interleaved_1f1b with 2 chunks"
)
"""What `is_expert` says, in words."""


def is_expert(point: Point) -> bool:
    """Whether experts would try a point.

    They take data parallelism with any ZeRO, or Megatron-LM's pipeline of 1F1B with one or two
    chunks and a tensor axis of neighbours.
    """
    if point.data_outside or point.role not in ("", "megatron", "megatron_sp"):
        return False
    if point.pipeline == 1 and point.tensor == 1:
        return True
    usual = point.schedule == "1f1b" or (point.chunks == 2 and point.schedule == "interleaved_1f1b")
    return point.zero <= 1 and usual


def is_expert_group(group: Point) -> bool:
    """Whether a point that differs from a group's in ZeRO only may be one that experts try."""
    return any(is_expert(replace(group, zero=zero)) for zero in (0, 1))


def answer(bounds: Bounds, question: Question) -> object:
    """What a second process answers; see `Question`."""
    kind, point, *rest = question
    if kind == "group":
        return bounds.group(point)
    name, weight = rest
    problem = bounds.problem
    return problem.table(point, problem.device_called(name), weight=weight)


def first_bounds(bounds: Bounds) -> dict[Point, float]:
    """A bound for every group of points, from the largest microbatch."""
    groups = list(bounds.problem.space.groups())
    bounds.know_largest(groups)
    problem, largest = bounds.problem, {bounds.largest(group): None for group in groups}
    if problem.second is not None:  # from the other end
        problem.second.ask(problem.questions(reversed(largest)))
    found = {group: bounds.scaled(group, lightest=True) for group in groups}
    if problem.second is not None:
        ordered = sorted((least, group) for group, least in found.items())
        problem.second.ask(problem.questions(group for _, group in ordered))
    return found


def starts(bounds: Bounds, first: dict[Point, float]) -> list[tuple[float, Point]]:
    """Bounds and points of some plans that are worth to be evaluated before all others.

    Of pipelines those with few samples in a microbatch, with any number of chunks; without one, any
    data parallelism. Meshes of few tables: each takes its time.

    Args:
        bounds: Bounds of the problem.
        first: A bound for every group of points.
    """
    space, problem = bounds.problem.space, bounds.problem
    sequence = "megatron_sp" in space.roles
    known: list[tuple[float, Point]] = []
    for group, least in first.items():
        if math.isinf(least) or (sequence and group.role == "megatron"):
            continue
        if group.pipeline > 1 and problem.samples(group) > FEW_SAMPLES:
            continue
        if not is_expert(replace(group, chunks=min(group.chunks, 2))):  # then no member is one
            continue
        for point in space.members(group):
            usual = is_expert(replace(point, chunks=min(point.chunks, 2)))
            if usual and (point.zero or point.data == 1):
                known.append((least, point))
    known.sort()
    near = sorted((bounds.cheap(point), point) for _, point in known[: 4 * TRIED])
    tight = sorted((bounds.cut(point), point) for bound, point in near[:TRIED] if bound < math.inf)
    return [item for item in tight if math.isfinite(item[0])][:STARTS]
