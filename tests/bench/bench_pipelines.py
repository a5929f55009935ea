"""Verify every schedule beside everything else, on five models, and print the table.

    python -m tests.bench.bench_pipelines            # all combinations: most of an hour
    python -m tests.bench.bench_pipelines zbv pp=4   # those whose name has these words

Each line: schedule, pipeline ranks, what is beside it, model, the largest relative error of loss,
gradients, buffers and parameters after 5 optimizer steps in float64, its tensor, and the reference.
"""

from __future__ import annotations

import sys
import time

from autopar.errors import AutoparError
from tests.distributed.pipeline_matrix import cells


def main(words: list[str]) -> int:
    """Print the table; returns the number of combinations that are not equal."""
    wrong, worst, count = 0, 0.0, 0
    for cell in cells():
        if not set(words) <= set(str(cell).split()):
            continue
        begun = time.perf_counter()
        count += 1
        try:
            report = cell.run()
        except AutoparError as error:
            wrong += 1
            print(f"{cell!s:<36} FAILED {error}", flush=True)
            continue
        row = report.worst
        wrong += not report.equal
        worst = max(worst, row.error)
        print(
            f"{cell!s:<36} {'equal' if report.equal else 'NOT EQUAL':<9} {row.error:8.1e} "
            f"{row.kind} {row.name}; {report.reference}; {time.perf_counter() - begun:.1f} s",
            flush=True,
        )
    print(f"{count} combinations, {wrong} not equal, largest relative error {worst:.1e}")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
