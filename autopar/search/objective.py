"""Fewest devices, or least cost per token: the search on parts of a cluster.

Parts are made of whole nodes; where devices are counted, a single node may be used in part. Each is
searched with what a step may take there to be of use, so that bounds rule out most of them: for the
fewest devices from small parts to large ones, for the least cost from large, fast ones to
small ones, so that those found on the way are the front of time and cost.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.forecast import sizes_of
from autopar.errors import InputError, PlanError
from autopar.plan.forecast import cost_words as priced
from autopar.search.asked import COST, DEVICES
from autopar.search.infeasible import explain_infeasible
from autopar.search.problem import Outcome, Problem
from autopar.search.result import SearchResult
from autopar.search.whatif import Change
from autopar.units import counted, format_seconds

FEW_NODES, MOST_PARTS = 8, 64
"""Up to so many nodes every number of them is a part; of more, those of factors 2 and 3. Of unequal
nodes every combination, if there are at most so many."""
SHARE = 0.5
"""Part of the time limit that the search of one part may take."""

Run = Callable[[Problem, float, float], SearchResult]
"""Search a problem for plans below so many seconds per step, for so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the cluster that was searched.

    Attributes:
        cluster: The part.
        best: The best plan found on it that takes no longer than it may; None without one.
        bound_s: No plan on it takes less; infinite if none fits.
        ruled_out: Whether that proves that no plan is of use there.
    """

    cluster: ClusterSpec
    best: Outcome | None
    bound_s: float
    ruled_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What was chosen of a cluster.

    Attributes:
        problem: The problem on that part.
        result: Its search.
        limit_s: Seconds that this search might take.
        parts: All parts that were searched, in their order.
        notes: What people should know of the choice.
    """

    problem: Problem
    result: SearchResult
    limit_s: float
    parts: tuple[Part, ...]
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Search:
    """The search of parts under way."""

    problem: Problem
    run: Run
    objective: str
    within_s: float
    limit_s: float
    gap: float
    deadline_s: float
    parts: list[Part] = field(default_factory=list)
    chosen: tuple[Problem, SearchResult, float] | None = None
    ended: bool = True

    def may_take_s(self, cluster: ClusterSpec) -> float:
        """What a step on a part may take to be better than the best."""
        most = math.nextafter(self.within_s, math.inf)
        if self.objective == COST and self.chosen is not None:
            problem, result, _ = self.chosen
            assert result.best is not None
            cost = result.best.step_s * price_of(problem.cluster)
            price = price_of(cluster)
            if cost == 0:  # nothing is cheaper
                most = 0.0
            elif price > 0:
                most = min(most, cost * (1 - self.gap) / price)
        return most

    def over(self, clusters: Iterable[ClusterSpec]) -> bool:
        """Search parts, up to the first that is good if devices are counted; whether one is."""
        for cluster in clusters:
            left = self.deadline_s - time.monotonic()
            if left <= 0 and self.parts:
                self.ended = False
                return False
            try:
                found = self.look(cluster, min(max(left, 0.0), SHARE * self.limit_s))
            except KeyboardInterrupt:
                if self.chosen is None:
                    raise
                found, self.ended = False, False
            if not self.ended:
                return False
            if found and self.objective == DEVICES:
                return True
        return False

    def look(self, cluster: ClusterSpec, limit_s: float) -> bool:
        """Search a part; whether it is better than the best so far."""
        below_s = self.may_take_s(cluster)
        problem = _on(self.problem, cluster)
        if problem is None:
            self.parts.append(Part(cluster=cluster, best=None, bound_s=math.inf, ruled_out=True))
            return False
        result = self.run(problem, below_s, limit_s)
        best = result.best
        if best is not None and best.step_s >= below_s:
            best = None
        proof = result.certificate
        self.parts.append(
            Part(
                cluster=cluster,
                best=best,
                bound_s=proof.bound_s,
                ruled_out=proof.bound_s >= below_s,
            )
        )
        if not proof.complete and result.seconds < limit_s:  # Ctrl-C
            self.ended = False
        if best is not None:
            self.chosen = problem, replace(result, best=best), limit_s
        return best is not None


def choose(
    problem: Problem, run: Run, objective: str, *, within_s: float, limit_s: float, gap: float
) -> Chosen:
    """The part of a cluster with fewest devices, or least cost per token, and its best plan.

    Args:
        problem: The problem on the whole cluster.
        run: A strategy.
        objective: `DEVICES` or `COST`.
        within_s: Seconds that a step may take at most.
        limit_s: Seconds for all of it.
        gap: What costs less by a smaller fraction only is not worth a slower step.

    Raises:
        InputError: If the cost of unequal nodes is not known.
        PlanError: If no part has a plan that takes no longer; with a cause that says why.
    """
    cluster = problem.cluster
    if objective == COST and cluster.usd_per_hour is None and not cluster.is_uniform:
        raise InputError(
            f"what nodes of {cluster} cost is not known, and they are not alike",
            expected="the price of every node",
            fix="give node_usd_per_hour in each group of the cluster file",
            where="cluster",
        )
    deadline_s = time.monotonic() + limit_s
    state = _Search(problem, run, objective, within_s, limit_s, gap, deadline_s)
    parts = parts_of(cluster, in_nodes=objective == DEVICES)
    if objective == COST:  # fastest first
        state.over(reversed(parts))
    elif state.over(parts):
        state.over(_between(cluster, state.parts))
    if state.chosen is None:
        raise _nothing(state)
    found, result, allowed_s = state.chosen
    return Chosen(
        problem=found,
        result=result,
        limit_s=allowed_s,
        parts=tuple(state.parts),
        notes=tuple(_notes(state, found, result)),
    )


def parts_of(cluster: ClusterSpec, *, in_nodes: bool) -> list[ClusterSpec]:
    """Parts of a cluster, fewest devices first.

    Args:
        cluster: The cluster.
        in_nodes: Whether some devices of a node alone are a part, too.
    """
    counts = [(0, *_counts(group.nodes)) for group in cluster.groups]
    if math.prod(map(len, counts)) <= MOST_PARTS:
        chosen = [nodes for nodes in itertools.product(*counts) if any(nodes)]
    else:  # each alone, and all
        chosen = [
            tuple(nodes if place == number else 0 for place in range(len(counts)))
            for number, several in enumerate(counts)
            for nodes in several[1:]
        ]
        chosen.append(tuple(group.nodes for group in cluster.groups))
    found = [_part(cluster, nodes) for nodes in dict.fromkeys(chosen)]
    if in_nodes:
        for group in cluster.groups:
            found += [
                replace(
                    cluster, groups=(replace(group, nodes=1, devices_per_node=count),), tiers=()
                )
                for count in range(1, group.devices_per_node)
            ]
    return sorted(found, key=lambda item: (item.num_devices, price_of(item)))


def price_of(cluster: ClusterSpec) -> float:
    """US dollars per hour of a cluster, or its nodes where their price is not known."""
    usd = cluster.usd_per_hour
    return float(cluster.nodes) if usd is None else usd


def cost_words(problem: Problem, cluster: ClusterSpec, step_s: float) -> str:
    """What a step costs, such as ``1.23 USD per million tokens``."""
    unit = "node-hours" if cluster.usd_per_hour is None else "USD"
    return priced(price_of(cluster), step_s, *sizes_of(problem.layout), unit)


def _counts(nodes: int) -> tuple[int, ...]:
    """Numbers of nodes that are tried first."""
    if nodes <= FEW_NODES:
        return tuple(range(1, nodes + 1))
    smooth = {2**a * 3**b for a in range(nodes.bit_length()) for b in range(nodes.bit_length())}
    return tuple(sorted({*(count for count in smooth if count < nodes), nodes}))


def _part(cluster: ClusterSpec, nodes: tuple[int, ...]) -> ClusterSpec:
    """So many nodes of every group."""
    if nodes == tuple(group.nodes for group in cluster.groups):
        return cluster
    groups = tuple(
        replace(group, nodes=count)
        for group, count in zip(cluster.groups, nodes, strict=True)
        if count
    )
    return replace(cluster, groups=groups)


def _between(cluster: ClusterSpec, parts: list[Part]) -> list[ClusterSpec]:
    """Parts of equal nodes smaller than the last one that nobody has looked at."""
    if len(cluster.groups) > 1:
        return []
    seen = {part.cluster.groups[0].nodes for part in parts}
    nodes = range(1, parts[-1].cluster.groups[0].nodes)
    return [_part(cluster, (count,)) for count in nodes if count not in seen]


def _on(problem: Problem, cluster: ClusterSpec) -> Problem | None:
    """The problem on a part; None if it has no plan there."""
    try:
        found = problem.like(cluster=cluster, memory_bytes=problem.memory_bytes)
    except PlanError:
        return None
    return found if any(True for _ in found.space.points()) else None


def _nothing(state: _Search) -> PlanError:
    """Why no part is good enough."""
    problem = state.problem
    late = PlanError(
        f"no plan was found on {counted(len(state.parts), 'part')} of {problem.cluster} within"
        f" {format_seconds(state.limit_s)}",
        fix="give the search more time (--time-limit)",
        where="search",
    )
    if not state.ended:
        return late
    result = state.run(problem, math.inf, state.limit_s)
    if result.best is None:
        return explain_infeasible(problem, result)
    if math.isinf(state.within_s):  # more time was enough
        return late
    least = min((part.bound_s for part in state.parts), default=0.0)
    return PlanError(
        f"no plan on {problem.cluster}, or on a part of it that was searched, takes at most"
        f" {format_seconds(state.within_s)} per step (predicted)",
        expected=f"at least {format_seconds(least)}: no plan searched is faster"
        if 0 < least < math.inf
        else None,
        fix=f"allow a step more time (--step-within): all devices take"
        f" {format_seconds(result.best.step_s)} (predicted, {result.best.candidate.point.text()});"
        " or take more or faster devices",
        where="search",
    )


def _notes(state: _Search, problem: Problem, result: SearchResult) -> list[str]:
    """What was chosen of the cluster, why, and how sure that is."""
    assert result.best is not None
    step_s, whole = result.best.step_s, state.problem.cluster
    within = state.within_s
    limit = f" within {format_seconds(within)} per step" if math.isfinite(within) else ""
    chosen = f"{problem.cluster} of {whole}: {counted(problem.cluster.num_devices, 'device')}"
    if state.objective == DEVICES:
        others = [part for part in state.parts if part.cluster != problem.cluster]
        left = sum(not part.ruled_out for part in others)
        if not state.ended:
            proof = "not proven: it was stopped before all smaller parts were ruled out"
        elif left:
            proof = f"not proven: {left} of {counted(len(others), 'smaller part')} not ruled out"
        elif not others:
            proof = "the smallest part"
        else:
            proof = f"proven: of {counted(len(others), 'smaller part')} none has a plan{limit}"
        return [f"fewest devices with a plan{limit}, {chosen} ({proof})"]
    words = cost_words(problem, problem.cluster, step_s)
    note = f"least cost{limit}, {chosen}, {words} (predicted"
    if whole.usd_per_hour is None:
        note += "; node-hours, as the cluster file gives no node_usd_per_hour"
    mine = step_s * price_of(problem.cluster)
    costs = [part.bound_s * price_of(part.cluster)
             for part in state.parts if part.bound_s <= within]  # fmt: skip
    gap = max(0.0, 1 - min(costs) / mine) if costs and mine > 0 else 0.0
    tried = f"{counted(len(state.parts), 'part')} searched"
    if gap >= 1:
        proof = f"nothing is proven of other plans on the {tried}"
    elif state.ended:
        proof = f"on none of {tried} can it be less by more than {gap:.2%}"
    else:
        proof = f"stopped after {tried}: on none of them is it less by more than {gap:.2%}"
    return [f"{note}; {proof})"]


def changes(chosen: Chosen) -> list[Change]:
    """What the best plans on other parts take."""
    return [
        Change(
            text=f"on {part.cluster}: {cost_words(chosen.problem, part.cluster, part.best.step_s)}",
            step_s=part.best.step_s,
            plan=part.best.candidate.point.text(),
            peak_bytes=part.best.peak_bytes,
            gap=max(0.0, 1 - part.bound_s / part.best.step_s),
        )
        for part in chosen.parts
        if part.best is not None and part.cluster != chosen.problem.cluster
    ]
