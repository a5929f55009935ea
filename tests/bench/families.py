"""Worst relative error of each Hugging Face family under the standard plans, as a table.

Run from the root of the repository: ``python -m tests.bench.families [family ...]``.
"""

from __future__ import annotations

import sys
import time

import torch

from tests.models.check import compare
from tests.models.families import EAGER_PLANS, EXACT_PLANS, FAMILIES, family, has_dropout


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(FAMILIES)
    columns = [f"{mesh} {how}" for mesh, how in EXACT_PLANS]
    columns += [f"{mesh} {how} fp32" for mesh, how in EAGER_PLANS]
    print("worst relative error of loss, gradients, buffers and 3 AdamW steps")
    print(f"{'family':<14}{'ops':>6}{'unruled':>9}" + "".join(f"{c:>25}" for c in columns))
    start = time.perf_counter()
    for name in names:
        case = family(name)
        exact = [compare(case, mesh, how, dtype="float64") for mesh, how in EXACT_PLANS]
        if has_dropout(name):
            case = family(name, dropout=False)
        eager = [compare(case, mesh, how) for mesh, how in EAGER_PLANS]
        errors = "".join(
            f"{'' if report.equal else 'NOT EQUAL '}{report.worst.error:.1e}".rjust(25)
            for report in (*exact, *eager)
        )
        unruled = len(exact[0].plan.unruled)
        print(f"{name:<14}{len(case.traced.graph.nodes):>6}{unruled:>9}{errors}", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
