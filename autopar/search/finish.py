"""From what a search found to a plan that people read and the runtime carries out."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan.build import describe, place_graph
from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.plan import Plan
from autopar.plan.recompute import node_patterns
from autopar.plan.strategies import Constraints
from autopar.search.problem import Candidate, Problem
from autopar.search.result import SearchResult
from autopar.sharding.factors import Factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph

STRATEGY = "search"
"""What a plan that was searched for says where others name a strategy."""


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
    light = problem.plan(candidate)
    mesh = Mesh(light.mesh)
    constraints = Constraints(
        strategy=STRATEGY,
        order=light.order,
        pipeline=PipelinePlan(
            schedule=light.pipeline.schedule,
            microbatches=light.pipeline.microbatches,
            chunks=light.pipeline.chunks,
            cuts=light.pipeline.cuts,
        ),
        zero=ZeroPlan(stage=light.zero.stage, axes=light.zero.axes),
        recompute=node_patterns(problem.graph, problem.again(candidate)),
    )
    sharded = place_graph(problem.graph, mesh, constraints, factors, light)
    plan = describe(sharded, mesh, constraints, notes)
    return replace(plan, searched=True), sharded


def certificate_note(result: SearchResult) -> str:
    """What a search has proven, in a line."""
    assert result.best is not None
    proof = result.certificate
    ended = "" if proof.complete else ", stopped early"
    return (
        f"predicted {result.best.step_s:.4g} s per step; no plan of the searched space is faster"
        f" by more than {result.gap:.2%} ({proof.points:,} points, {proof.evaluated} plans priced"
        f" in {result.seconds:.1f} s{ended})"
    )
