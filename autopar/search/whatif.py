"""What another cluster, or less memory, would change: the search once more for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import ClusterError, PlanError
from autopar.search.exact import search
from autopar.search.problem import Problem
from autopar.search.result import SearchResult
from autopar.units import GB, GIB

GAP, LIMIT_S = 0.02, 15.0
"""Where each of these searches stops."""
SOURCE = "supposed"
MORE_GIB = 16
SHARES = (0.8, 0.6, 0.45, 0.3, 0.2)
"""Shares of the devices' memory at which the best plan is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Something that could be different.

    Attributes:
        text: What.
        step_s: Seconds of the best plan's step, predicted; None if nothing fits.
        plan: That plan in a few words.
        peak_bytes: Most bytes of live tensors on any of its ranks.
        gap: How much faster another plan could be at most, as a fraction.
    """

    text: str
    step_s: float | None
    plan: str
    peak_bytes: int
    gap: float


def sensitivity(problem: Problem) -> list[Change]:
    """What one node more or half of them, faster links, and more memory would change.

    Args:
        problem: The problem as it is; what it fixes but a mesh stays fixed.
    """
    found = []
    kept = problem.asked.without("mesh")
    for text, cluster in _clusters(problem.cluster):
        try:
            other = problem.like(asked=kept, cluster=cluster)
            result = search(other, gap=GAP, time_limit_s=LIMIT_S)
        except (PlanError, ClusterError):
            found.append(Change(text=text, step_s=None, plan="", peak_bytes=0, gap=0.0))
            continue
        found.append(_change(text, result))
    return found


def front(problem: Problem) -> list[Change]:
    """The best plans with less and less memory: time against bytes."""
    device = problem.device
    found = []
    for share in SHARES:
        size = int(share * problem.capacity_bytes(device))
        result = search(problem.like(memory_bytes=size), gap=GAP, time_limit_s=LIMIT_S)
        found.append(_change(f"{share:.0%} of the memory", result))
        if result.best is None:
            break
    return found


def _change(text: str, result: SearchResult) -> Change:
    best = result.best
    return Change(
        text=text,
        step_s=None if best is None else best.step_s,
        plan="" if best is None else best.candidate.point.text(),
        peak_bytes=0 if best is None else best.peak_bytes,
        gap=result.gap,
    )


def _clusters(cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    last = cluster.groups[-1]
    more = replace(last, nodes=last.nodes + 1)
    yield "one more node", replace(cluster, groups=(*cluster.groups[:-1], more))
    if all(group.nodes % 2 == 0 for group in cluster.groups):
        half = tuple(replace(group, nodes=group.nodes // 2) for group in cluster.groups)
        yield "half of the nodes", replace(cluster, groups=half)
    if not cluster.is_uniform:
        return
    device = cluster.hardware(0)
    if cluster.groups[0].nodes > 1:
        figures = {"node.nic_gbit_per_s": 2 * 8 * device.node.nic_bytes_per_s / GB}
        yield "twice the bandwidth between nodes", cluster.with_figures(figures, source=SOURCE)
    figures = {"link.gb_per_s_per_direction": 2 * device.link.bytes_per_s / GB}
    yield "twice the bandwidth inside of nodes", cluster.with_figures(figures, source=SOURCE)
    figures = {"memory.memory_gib": device.memory_bytes / GIB + MORE_GIB}
    yield f"{MORE_GIB} GiB more per device", cluster.with_figures(figures, source=SOURCE)
