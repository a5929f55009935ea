"""The plan that a search chooses against the best that experts would try, measured in one run.

python -m tests.bench.bench_chosen [--ranks 2 4] [--only MODEL ...] [--plans 5] [--rounds 5]

For each model and number of local ranks: the plan chosen for the measured machine, and the expert
grid's best plans of different kinds, run in turns. Printed is the chosen plan's median step over
the fastest of the others.
"""

from __future__ import annotations

import argparse
import statistics
import time

import autopar.api as api
from autopar.cost_models.cluster import ClusterSpec
from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.launch import LocalRanks
from autopar.search import exact, expert
from autopar.search.finish import finish
from autopar.search.problem import Outcome, Problem
from autopar.sharding.factors import infer_factors
from tests.bench.chosen_models import MODELS, build, traced_model

AIM = 1.05
"""The chosen plan takes at most this many times the fastest expert's step."""


def candidates(name: str, cluster: ClusterSpec, plans: int) -> list[tuple[str, str, float]]:
    """Name, JSON and predicted seconds of the chosen plan and of experts' of different kinds."""
    traced = traced_model(name)
    problem = Problem(traced.graph, traced.loss, cluster)
    found = exact.search(problem, gap=0.005, op_level=True)
    assert found.best is not None
    experts = expert.search(Problem(traced.graph, traced.loss, cluster))
    assert experts.best is not None
    kinds: dict[object, Outcome] = {}
    for item in (experts.best, *experts.alternatives):
        point = item.candidate.point
        kind = (point.pipeline, point.data, point.tensor, point.role, point.zero > 1)
        kinds.setdefault(kind, item)
    chosen = [("chosen " + found.best.candidate.point.text(), found.best)]
    chosen += [(item.candidate.point.text(), item) for item in list(kinds.values())[:plans]]
    factors = infer_factors(traced.graph)
    plans_of: dict[str, tuple[str, str, float]] = {}
    for text, item in chosen:  # an expert's plan that is the chosen one is measured once
        plan = finish(problem, item.candidate, factors)[0].to_json()
        if plan in plans_of:
            text, plan, took = plans_of[plan]
            plans_of[plan] = f"{text} (an expert's)", plan, took
        else:
            plans_of[plan] = text, plan, item.step_s
    return list(plans_of.values())


def run_plans(comm: Communicator, name: str, plans: list[str], rounds: int) -> list[list[float]]:
    """Seconds of steps of all plans, in turns, on one rank."""
    traced = traced_model(name)
    made = []
    for plan in plans:
        model, inputs = build(name)
        options = CompileOptions(plan=Plan.from_json(plan), optimizer="adamw")
        made.append((CompiledModel(model, comm, options, traced), inputs))
    seconds: list[list[float]] = [[] for _ in plans]
    for number in range(rounds + 1):
        for place in range(len(plans)):
            turn = (number + place) % len(plans)  # nobody is always first
            (compiled, inputs), mine = made[turn], seconds[turn]
            for _ in range(2):
                comm.barrier()
                begun = time.perf_counter()
                compiled.step(*inputs)
                took = time.perf_counter() - begun
                if number:
                    mine.append(took)
    return seconds


def compare(name: str, cluster: ClusterSpec, pool: LocalRanks, plans: int, rounds: int) -> float:
    """Print one comparison; returns the ratio."""
    found = candidates(name, cluster, plans)
    ranks = pool.run(run_plans, name, [plan for _, plan, _ in found], rounds)
    steps = [
        statistics.median(map(max, zip(*(rank[k] for rank in ranks), strict=True)))
        for k in range(len(found))
    ]
    for (text, _, predicted), step in zip(found, steps, strict=True):
        print(f"  {text:<60} predicted {1e3 * predicted:6.0f} ms, measured {1e3 * step:6.0f} ms")
    experts = steps if found[0][0].endswith("(an expert's)") else steps[1:]
    ratio = steps[0] / min(experts)
    print(f"{name} on {cluster.num_devices} ranks: {ratio:.3f} of the best expert", flush=True)
    return ratio


def main() -> None:
    """Profile, search, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--only", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--plans", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    ratios = []
    for count in options.ranks:
        cluster = api.measure(count).cluster
        with LocalRanks(count, threads=1) as pool:
            for name in options.only:
                ratios.append(compare(name, cluster, pool, options.plans, options.rounds))
    within = sum(ratio <= AIM for ratio in ratios)
    print(f"{within} of {len(ratios)} within {AIM} of the best expert")


if __name__ == "__main__":
    main()
