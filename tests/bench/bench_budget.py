"""The plan that a search chooses for a memory budget that rules the fastest one out, run.

python -m tests.bench.bench_budget [--ranks 2 4] [--only MODEL ...] [--shares 0.9 0.7]

For each model, number of local ranks and budget (a share of what the fastest plan needs): the
chosen plan's predicted and measured peak of live bytes beside the budget. Prints whether all
plans stay inside; of a budget that no plan keeps, what the search answers.
"""

from __future__ import annotations

import argparse

import autopar.api as api
from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.runtime.launch import LocalRanks
from autopar.search import exact
from autopar.search.finish import finish
from autopar.search.infeasible import explain_infeasible
from autopar.search.problem import Problem
from autopar.sharding.factors import infer_factors
from tests.bench.chosen_models import MODELS, traced_model
from tests.bench.prediction_runs import over_ranks, run_steps


def within(name: str, cluster: ClusterSpec, pool: LocalRanks, share: float) -> bool:
    """Search under a budget, run, and print; returns whether measured bytes stay inside."""
    traced = traced_model(name)
    free = exact.search(Problem(traced.graph, traced.loss, cluster), gap=0.01)
    assert free.best is not None
    budget = int(share * free.best.peak_bytes)
    problem = Problem(traced.graph, traced.loss, cluster, memory_bytes=budget)
    found = exact.search(problem, gap=0.01)
    needed = f"{free.best.peak_bytes / 1e6:.1f} MB"
    title = f"{name} on {cluster.num_devices} ranks, {share:.0%} of {needed}"
    if found.best is None:
        refused: PlanError = explain_infeasible(problem, found)
        print(f"{title}: nothing fits; {refused.what}", flush=True)
        return True
    plan = finish(problem, found.best.candidate, infer_factors(traced.graph))[0]
    rows = pool.run(run_steps, [(name, plan.to_json())], 3, MODELS)
    have = over_ranks([row[0] for row in rows])
    inside = have.peak_bytes <= budget
    print(
        f"{title}: {found.best.candidate.point.text()}: predicted"
        f" {found.best.peak_bytes / 1e6:.1f}, measured {have.peak_bytes / 1e6:.1f} of"
        f" {budget / 1e6:.1f} MB, {'inside' if inside else 'OVER'}; step predicted"
        f" {1e3 * found.best.step_s:.0f} ms, measured {1e3 * have.step_s:.0f} ms",
        flush=True,
    )
    return inside


def main() -> None:
    """Profile, search, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.9, 0.7, 0.5])
    options = parser.parse_args()
    good = []
    for count in options.ranks:
        cluster = api.measure(count).cluster
        with LocalRanks(count, threads=1) as pool:
            for name in options.only:
                good += [within(name, cluster, pool, share) for share in options.shares]
    print(f"{sum(good)} of {len(good)} inside their budget, or rightly refused")


if __name__ == "__main__":
    main()
