"""From what a search found to a plan that people read and the runtime carries out."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

from autopar.plan.build import constraints_of, describe, place_graph, unruled_ops
from autopar.plan.keys import op_keys
from autopar.plan.plan import Plan
from autopar.plan.recompute import node_patterns, resolve_recompute
from autopar.search.asked import SEARCH
from autopar.search.problem import Candidate, Problem
from autopar.search.result import SearchResult
from autopar.sharding.factors import Factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph


def finish(
    problem: Problem,
    candidate: Candidate,
    factors: Factors,
    notes: tuple[str, ...] = (),
) -> tuple[Plan, ShardedGraph]:
    """The plan of a candidate, complete.

    Args:
        problem: The problem.
        candidate: The candidate.
        factors: Factors of the whole graph.
        notes: What people should know.

    Returns:
        The plan and the placements that it stands for.
    """
    light = replace(problem.plan(candidate), strategy=SEARCH)
    mesh = Mesh(light.mesh)
    constraints = replace(constraints_of(light), recompute=recompute_of(problem, candidate))
    sharded = place_graph(problem.graph, mesh, constraints, factors, light)
    unruled = unruled_ops(problem.graph, factors)
    plan = describe(sharded, mesh, constraints, notes, unruled)
    return replace(plan, searched=True), sharded


def recompute_of(problem: Problem, candidate: Candidate) -> tuple[str, ...]:
    """Patterns for what a candidate computes again: of most layers, then of those that differ.

    Args:
        problem: The problem.
        candidate: The candidate.
    """
    if problem.asked.recompute:
        return problem.asked.recompute
    again = problem.again(candidate)
    if not again:
        return ()
    graph, units = problem.graph, problem.units
    chosen = {
        unit: frozenset(name for name in names if name in again)
        for unit in range(units.count)
        if units.block[unit] >= 0
        for names in [[graph.nodes[index].name for index in units.nodes[unit]]]
    }
    options = problem.options_of(candidate)
    usual = Counter(options[unit] for unit in chosen).most_common(1)
    policy = problem.policies[usual[0][0]] if usual else frozenset()
    rest = again.difference(*chosen.values())
    layers = frozenset(graph.nodes[index].name for unit in chosen for index in units.nodes[unit])
    found = list(node_patterns(graph, (policy & layers) | rest))
    for unit, names in chosen.items():
        if options[unit] == usual[0][0]:
            continue
        found += _in_copy(problem, unit, names, dropped=bool(policy))
    made = tuple(found)
    assert resolve_recompute(graph, made) == again, "patterns stand for what was chosen"
    return made


def _in_copy(problem: Problem, unit: int, names: frozenset[str], *, dropped: bool) -> list[str]:
    """Patterns for exactly the nodes `names` of a copy of a block, whatever others say.

    Args:
        problem: The problem.
        unit: The copy.
        names: Its nodes that are computed again.
        dropped: Whether patterns before these match some of its nodes.
    """
    nodes, keys = problem.graph.nodes, op_keys(problem.graph)
    mine, path = problem.units.nodes[unit], problem.path_of(unit)
    inner = any(nodes[index].module != path for index in mine)
    outer = any(nodes[index].module == path for index in mine)
    whole = [f"{path}/*"] * outer + [f"{path}.*/*"] * inner
    if 2 * len(names) > len(mine):
        kept = [keys[index] for index in mine if nodes[index].name not in names]
        return whole + ["!" + re.sub(r"([*?[])", r"[\1]", key) for key in kept]
    drops = [f"!{pattern}" for pattern in whole] if dropped else []
    return drops + list(node_patterns(problem.graph, names))


def shortfall_notes(result: SearchResult, goal: float, limit_s: float) -> list[str]:
    """That less is proven than was aimed at, why, and what to do; nothing if it is not so.

    Args:
        result: A search; of one that proves nothing `certificate_note` says so.
        goal: The gap that it aimed at, as a fraction.
        limit_s: Its time limit in seconds.
    """
    proof = result.certificate
    if not 0 < proof.bound_s < math.inf or result.gap <= goal * (1 + 1e-9):
        return []
    if proof.complete:
        why = "no tighter bound is known; of fewer plans (--mesh, --schedule) more may be proven"
    elif result.seconds < limit_s:
        why = "the search was interrupted"
    else:
        more = f"--time-limit {max(3 * limit_s, 10):g} allows more"
        why = f"the limit of {limit_s:g} s was reached; {more}"
    return [f"proven to be within {100 * result.gap:.3g} % of the best, not within"
            f" {100 * goal:g} % as was aimed at: {why}"]  # fmt: skip


def certificate_note(result: SearchResult) -> str:
    """What a search has proven, in a line."""
    assert result.best is not None
    proof = result.certificate
    ended = "" if proof.complete else ", stopped early"
    if not proof.bound_s:
        return (
            f"predicted {result.best.step_s:.4g} s per step; {result.strategy} proves nothing of"
            f" other plans ({proof.evaluated} plans priced in {result.seconds:.1f} s{ended})"
        )
    return (
        f"predicted {result.best.step_s:.4g} s per step; no plan of the searched space is faster"
        f" by more than {result.gap:.2%} ({proof.points:,} points, {proof.evaluated} plans priced"
        f" in {result.seconds:.1f} s{ended})"
    )
