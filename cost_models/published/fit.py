"""Fit the constants of devices and stacks to the published rows, and say how good they are.

``python -m autopar.cost_models.published.fit`` reruns everything: families are held out whole, in
three folds, for several hash salts; each source is left out once; toy rows get one launch constant
from those of the other width; then all rows are fitted. With ``--write`` constants of devices go
into the catalogue, those of stacks into ``fitted.json``. Every run appends its scores to
``fit_log.jsonl``: a score that was looked at is a score that was fitted to, a little.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.cost_models.hardware import FOLDER
from autopar.cost_models.published.features import work_of
from autopar.cost_models.published.folds import FOLDS, SALTS, counts, distinct, family, fold
from autopar.cost_models.published.jobs import Job, read_job
from autopar.cost_models.published.known import Unpriceable
from autopar.cost_models.published.log import LOG
from autopar.cost_models.published.predict import job_name
from autopar.cost_models.published.price import Batch
from autopar.cost_models.published.priors import Parameter, Target, expand, parameters
from autopar.cost_models.published.rows import Row, read_rows
from autopar.cost_models.published.solve import solve
from autopar.cost_models.published.stats import LARGE_SET, error_stats, ranking
from autopar.cost_models.software import FITTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Flags = NDArray[np.bool_]
    Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Rows that can be fitted.

    Attributes:
        jobs: Their jobs.
        measured: Seconds per step.
        families: Family of each.
        batch: The jobs with their kernels.
        found: What can be fitted on all of them.
        fixed: Constants that too few families depend on, which keep their priors.
    """

    jobs: tuple[Job, ...]
    measured: Floats
    families: tuple[str, ...]
    batch: Batch
    found: tuple[Parameter, ...]
    fixed: Mapping[Target, float]

    def predict(self, logs: Sequence[float]) -> Floats:
        """Seconds per step of every job."""
        return self.batch.price(self.values(logs)).step_s

    def values(self, logs: Sequence[float]) -> dict[Target, float]:
        """All constants, where those that are fitted have these logarithms."""
        return {**self.fixed, **expand(self.found, logs)}

    def fit(self, places: Sequence[int]) -> list[float]:
        """Logarithms of the parameters, fitted on the jobs at `places`."""
        chosen = np.array(places, dtype=np.int64)

        def residual(logs: Floats) -> Floats:
            return np.log(self.predict(list(logs)) / self.measured)[chosen]

        names = sorted(set(self.families))
        groups = [names.index(self.families[place]) for place in places]
        reach = [mask[chosen] for mask in self.reach]
        return list(solve(residual, self.found, reach=reach, groups=groups).logs)

    @cached_property
    def reach(self) -> tuple[Flags, ...]:
        """Which jobs each parameter concerns."""
        owners = [(job.hardware.device, job.stack.name) for job in self.jobs]
        found = []
        for item in self.found:
            names = {owner for owner, _ in item.targets}
            found.append(np.array([bool(names.intersection(pair)) for pair in owners]))
        return tuple(found)


def load(rows: Sequence[Row]) -> Problem:
    """The problem of those of `rows` that state plan, model and time, and count."""
    kept: list[tuple[Row, Job]] = []
    for row in rows:
        if row.step_time_s is None or not counts(row):
            continue
        try:
            job = read_job(row)
        except Unpriceable:
            continue
        kept.append((row, job))
    places = distinct([row for row, _ in kept], [job for _, job in kept])
    jobs = tuple(kept[place][1] for place in places)
    times = [kept[place][0].step_time_s for place in places]
    families = tuple(map(family, jobs))
    batch = Batch(jobs, [work_of(job) for job in jobs])
    found, fixed = _supported(batch, families, parameters(jobs, families))
    return Problem(
        jobs=jobs, measured=np.array(times, dtype=np.float64), families=families, batch=batch,
        found=found, fixed=fixed,
    )  # fmt: skip


EFFECT = 1e-3
"""Share by which a step must change for its family to be behind a constant that is a tenth more."""


def _supported(
    batch: Batch, families: Sequence[str], found: Sequence[Parameter]
) -> tuple[tuple[Parameter, ...], dict[Target, float]]:
    """Those of `found` with at least two families behind them, and the priors of the others."""
    priors = [math.log(item.constant.prior) for item in found]
    start = expand(found, priors)
    usual = batch.price(start).step_s
    kept, fixed = [], {}
    for item in found:
        more = dict.fromkeys(item.targets, 1.1 * item.constant.prior)
        moved = np.abs(batch.price({**start, **more}).step_s / usual - 1) > EFFECT
        behind = {families[place] for place in np.flatnonzero(moved).tolist()}
        if len(behind) >= 2:
            kept.append(dataclasses.replace(item, families=len(behind)))
        else:
            fixed.update(dict.fromkeys(item.targets, item.constant.prior))
    return tuple(kept), fixed


def held_out(problem: Problem, fold_of: Callable[[int], int], folds: int) -> Floats:
    """Predictions for every job by constants that were fitted without its fold."""
    predicted = np.zeros(len(problem.jobs))
    numbers = np.array([fold_of(place) for place in range(len(problem.jobs))])
    for number in range(folds):
        logs = problem.fit(np.flatnonzero(numbers != number).tolist())
        predicted = np.where(numbers == number, problem.predict(logs), predicted)
    return predicted


def score(problem: Problem, predicted: Floats) -> dict[str, Any]:
    """Statistics over all jobs and by source and device."""
    groups: dict[str, list[int]] = defaultdict(list)
    for place, job in enumerate(problem.jobs):
        groups[f"{job.group} {job.hardware.device.split('-')[0]}"].append(place)
    everything = {"all": list(range(len(problem.jobs))), **dict(sorted(groups.items()))}
    return {
        name: error_stats(predicted[places].tolist(), problem.measured[places].tolist()).as_dict()
        for name, places in everything.items()
    }


def sources_left_out(problem: Problem) -> dict[str, Any]:
    """For every source: errors when it was never seen, raw and after one common factor."""
    names = sorted({job.group for job in problem.jobs})
    predicted = held_out(problem, lambda place: names.index(problem.jobs[place].group), len(names))
    found = {}
    for name in names:
        places = [place for place, job in enumerate(problem.jobs) if job.group == name]
        guess, truth = predicted[places], problem.measured[places]
        factor = math.exp(float(np.median(np.log(guess / truth))))
        raw = error_stats(guess.tolist(), truth.tolist())
        scaled = error_stats((guess / factor).tolist(), truth.tolist())
        found[name] = {"raw": raw.as_dict(), "one_factor": scaled.as_dict()}
    return found


TOYS = "vtrain-single"
"""The source of small models whose steps the host's launches decide, as one device traced them."""


def toys(rows: Sequence[Row], values: Mapping[Target, float]) -> dict[str, Any]:
    """Errors and order of small models, with one constant fitted on those of the other width.

    Args:
        rows: All rows.
        values: All constants; the launch is replaced.

    Returns:
        By width of the models that were predicted: ``launch_us`` as fitted on the others, the
        statistics, and of sets of at least `LARGE_SET` plans how often the measured best is in the
        predicted top three, and the mean regret.
    """
    kept = [
        (row, read_job(row)) for row in rows if row.group == TOYS and row.step_time_s is not None
    ]
    if not kept:
        return {}
    batch = Batch([job for _, job in kept], [work_of(job) for _, job in kept])
    measured = np.array([row.step_time_s for row, _ in kept], dtype=np.float64)
    widths = np.array([job.config.hidden for _, job in kept])
    stacks = sorted({job.stack.name for _, job in kept})
    launches = np.geomspace(10e-6, 100e-6, 40).tolist()
    guesses = [
        batch.price({**values, **{(name, "launch_s"): launch for name in stacks}}).step_s
        for launch in launches
    ]
    found = {}
    for width in sorted(set(widths.tolist())):
        own = widths == width
        if own.all():
            continue
        errors = [float(np.abs(np.log(guess / measured))[~own].mean()) for guess in guesses]
        best = int(np.argmin(errors))
        places = np.flatnonzero(own).tolist()
        sets: dict[str, list[int]] = defaultdict(list)
        for place in places:
            sets[job_name(kept[place][0])].append(place)
        orders = [
            ranking(guesses[best][members].tolist(), measured[members].tolist())
            for members in sets.values()
            if len(members) >= LARGE_SET
        ]
        stats = error_stats(guesses[best][places].tolist(), measured[places].tolist())
        found[str(width)] = {
            "launch_us": launches[best] * 1e6,
            **stats.as_dict(),
            "sets": len(orders),
            "best_in_top_3": float(np.mean([item.best_in_top_3 for item in orders])),
            "regret": float(np.mean([item.regret for item in orders])),
        }
    return found


def write_constants(
    values: Mapping[Target, float], fixed: Collection[Target], stacks: Sequence[str], note: str
) -> None:
    """Put constants where predictions read them: the catalogue and ``fitted.json``.

    Args:
        values: All constants.
        fixed: Those of them that keep their priors.
        stacks: Names that are stacks; the others are devices.
        note: What was fitted on.
    """
    found: dict[str, dict[str, float]] = {}
    for (owner, name), value in sorted(values.items()):
        if owner in stacks:
            found.setdefault(owner, {})[name] = float(f"{value:.4g}")
        else:
            kept = (owner, name) in fixed
            source = "prior: no two families of rows depend on it" if kept else f"fitted on {note}"
            _write_device(FOLDER / f"{owner}.yaml", name, value, source)
    text = json.dumps({"fitted_on": note, "stacks": found}, indent=2)
    FITTED.write_text(text + "\n", encoding="utf-8")


def _write_device(path: Path, name: str, value: float, source: str) -> None:
    if name == "launch_s":
        name, value = "launch_us", value * 1e6
    pattern = re.compile(
        rf"^(  {name}: {{value: )[^,]+(, range: \[[^\]]+\], source: )[^}}]*}}", re.MULTILINE
    )
    text = path.read_text(encoding="utf-8")
    new, count = pattern.subn(rf'\g<1>{value:.4g}\g<2>"{source}"}}', text)
    assert count == 1, (path, name)
    path.write_text(new, encoding="utf-8")


def run(arguments: Sequence[str] | None = None, *, out: Callable[[str], Any] | None = None) -> None:
    """Cross-validate, fit, report; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", metavar="FILE", help="rows of the schema of those that ship")
    parser.add_argument("--write", action="store_true", help="store the constants")
    parser.add_argument("--note", default="", help="what this run is for, for the log")
    options = parser.parse_args(arguments)
    say = out or sys.stdout.write
    problem = load(read_rows(options.rows))
    say(f"{len(problem.jobs)} rows, {len(set(problem.families))} families, "
        f"{len(problem.found)} parameters\n")  # fmt: skip
    scores: dict[str, Any] = {}
    for salt in SALTS:

        def of(place: int, salt: str = salt) -> int:
            return fold(problem.families[place], salt)

        scores[f"family folds, salt {salt}"] = score(problem, held_out(problem, of, FOLDS))
    left_out = sources_left_out(problem)
    logs = problem.fit(range(len(problem.jobs)))
    scores["all rows"] = score(problem, problem.predict(logs))
    for title, found in scores.items():
        say(f"\n{title}\n{_lines(found)}")
    say("\nsource never seen: mean error raw, after one factor\n")
    for name, found in left_out.items():
        raw, scaled = found["raw"]["mean_abs_error"], found["one_factor"]["mean_abs_error"]
        say(f"  {name:28} {raw:6.1%} {scaled:6.1%}\n")
    values = problem.values(logs)
    small = toys(read_rows(options.rows), values)
    for width, found in small.items():
        say(
            f"\n{TOYS} of width {width}, launch of {found['launch_us']:.1f} us from the others: "
            f"mean {found['mean_abs_error']:.1%}; {found['sets']} sets of {LARGE_SET} plans or "
            f"more: best in top 3 {found['best_in_top_3']:.0%}, regret {found['regret']:.1%}\n"
        )
    say("\nconstants\n")
    for owner, name in sorted(problem.fixed):
        say(f"  {owner + '.' + name:40} {problem.fixed[owner, name]:10.4g}  kept\n")
    for item, value in zip(problem.found, logs, strict=True):
        say(f"  {item.name:40} {math.exp(value):10.4g}  prior {item.constant.prior:8.3g}\n")
    if options.write:
        stacks = sorted({job.stack.name for job in problem.jobs})
        write_constants(values, problem.fixed, stacks, f"{len(problem.jobs)} published rows")
    entry = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"), "note": options.note,
        "rows": len(problem.jobs), "written": options.write,
        "mean_abs_error": {
            title: found["all"]["mean_abs_error"] for title, found in scores.items()
        },
        "source_left_out": {k: v["raw"]["mean_abs_error"] for k, v in left_out.items()},
        "launch_alone": {k: v["mean_abs_error"] for k, v in small.items()},
    }  # fmt: skip
    with LOG.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def _lines(found: Mapping[str, Mapping[str, float]]) -> str:
    return "".join(
        f"  {name:28} n {stats['n']:4.0f}  mean {stats['mean_abs_error']:6.1%}  "
        f"median {stats['median_abs_error']:6.1%}  p90 {stats['p90_abs_error']:6.1%}  "
        f"max {stats['max_abs_error']:6.1%}  bias {stats['bias']:+6.1%}\n"
        for name, stats in found.items()
    )


if __name__ == "__main__":
    run()
