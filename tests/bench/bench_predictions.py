"""Predicted against measured steps of plans of a GPT and a residual network on local CPU ranks.

python -m tests.bench.bench_predictions [--cluster FILE] [--quick] [--steps 7] [--only WORD ...]
    [--record FILE] [--replay FILE]

The machine is profiled first unless a file of `autopar profile` is given. Exit code 1 if they are
worse than `MIN_SPEARMAN`, `MAX_MEAN_ERROR` or, of live bytes, `MAX_PEAK_ERROR`. A recorded run
can be priced again, without running it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import autopar.api as api
from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator, Prediction
from tests.bench.prediction_plans import CASES, Case, traced_model
from tests.bench.prediction_runs import Measured, run_all

MIN_SPEARMAN, MAX_MEAN_ERROR, MAX_PEAK_ERROR = 0.9, 0.2, 0.02
RANKS = 4


def predict(cases: Sequence[Case], clusters: dict[int, ClusterSpec]) -> dict[str, Prediction]:
    """Price all cases; each on the cluster of the fewest ranks that has enough."""
    found, known = {}, {}
    for case in cases:
        size = min(count for count in clusters if count >= case.ranks)
        key = (case.model, size)
        if key not in known:
            traced = traced_model(case.model)
            known[key] = Evaluator(traced.graph, traced.loss, clusters[size])
        found[case.name] = known[key].evaluate(case.plan())
    return found


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks; ties are not expected."""
    places = [np.argsort(np.argsort(side)) for side in (left, right)]
    return float(np.corrcoef(*places)[0, 1])


def report(predicted: dict[str, Prediction], measured: dict[str, Measured]) -> bool:
    """Print the table; returns whether it is good enough."""
    errors, peaks = [], []
    print(f"{'plan':<58} predicted  measured   error  fastest CPU/2 | peak MB pred.  meas.   error")
    for name, have in measured.items():
        say = predicted[name]
        errors.append(say.step_s / have.step_s - 1)
        peaks.append(say.peak_bytes / have.peak_bytes - 1)
        print(
            f"{name:<58} {1e3 * say.step_s:6.0f} ms {1e3 * have.step_s:6.0f} ms {errors[-1]:+7.1%}"
            f"  {1e3 * min(have.steps_s):6.0f} {500 * have.cpu_s:5.0f} |"
            f" {say.peak_bytes / 1e6:11.1f} {have.peak_bytes / 1e6:7.1f} {peaks[-1]:+7.1%}"
        )
    rank = spearman(
        [predicted[name].step_s for name in measured], [have.step_s for have in measured.values()]
    )
    mean = statistics.mean(map(abs, errors))
    peak = max(map(abs, peaks))
    fine = rank >= MIN_SPEARMAN and mean <= MAX_MEAN_ERROR and peak <= MAX_PEAK_ERROR
    print(
        f"{len(errors)} plans: Spearman {rank:.3f} (at least {MIN_SPEARMAN}); mean error of a step"
        f" {mean:.1%} (at most {MAX_MEAN_ERROR:.0%}), bias {statistics.mean(errors):+.1%}; largest"
        f" error of peak live bytes {peak:.1%} (at most {MAX_PEAK_ERROR:.0%}): "
        + ("fine" if fine else "NOT GOOD ENOUGH")
    )
    return fine


def clusters_of(file: str | None, *, quick: bool) -> dict[int, ClusterSpec]:
    """The cluster in `file`, or those of two and of four ranks of this machine."""
    if file is not None:
        spec = ClusterSpec.load(file)
        return {spec.num_devices: spec}
    found = {}
    for count in (2, RANKS):
        begun = time.perf_counter()
        found[count] = api.measure(count, quick=quick).cluster
        print(f"profiled {count} ranks: {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def main() -> int:
    """Profile, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", metavar="FILE", help="of `autopar profile -n 4`")
    parser.add_argument("--quick", action="store_true", help="profile with fewer samples")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="words of a plan")
    parser.add_argument("--record", metavar="FILE", help="write what was measured")
    parser.add_argument("--replay", metavar="FILE", help="price what was recorded")
    options = parser.parse_args()
    begun = time.perf_counter()
    cases = [case for case in CASES if set(options.only) <= set(case.name.split())]
    clusters = clusters_of(options.cluster, quick=options.quick)
    if options.replay:
        rows = json.loads(Path(options.replay).read_text(encoding="utf-8"))
        measured = {name: Measured(**row) for name, row in rows.items()}
        cases = [case for case in cases if case.name in measured]
        measured = {case.name: measured[case.name] for case in cases}
    else:
        measured = run_all(cases, options.steps)
    if options.record:
        rows = {name: dataclasses.asdict(row) for name, row in measured.items()}
        Path(options.record).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    torch.set_num_threads(1)
    fine = report(predict(cases, clusters), measured)
    print(f"{time.perf_counter() - begun:.0f} s in all")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
