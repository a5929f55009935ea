"""Stored plans, and what `autopar show` and `autopar explain` say of them.

    python -m tests.unit.report.golden

writes the texts anew; look at what changed before it is committed. Plans are in
``tests/golden/*.json.gz``, as `autopar plan` wrote them; texts beside them.
"""

from __future__ import annotations

import functools
import gzip
from pathlib import Path

from autopar.plan.plan import Plan
from autopar.report.explain import explain
from autopar.report.show import show

FOLDER = Path(__file__).parents[2] / "golden"
NAMES = ("gpt3", "gpt3_pipeline", "trillion", "llama3_8b", "interleaved", "ddp", "t5")
WIDTHS = (60, 100, 200)


@functools.cache
def plan_text(name: str) -> str:
    """A stored plan file."""
    return gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()).decode()


@functools.cache
def stored(name: str) -> Plan:
    """A stored plan."""
    return Plan.from_json(plan_text(name))


def texts(name: str) -> dict[str, str]:
    """What is said of a plan at every width, by name of the golden file."""
    plan = stored(name)
    found = {f"{name}.show.{width}.txt": show(plan, width) for width in WIDTHS}
    found |= {f"{name}.explain.{width}.txt": explain(plan, width) for width in WIDTHS}
    return found


def main() -> None:
    """Write the texts."""
    for name in NAMES:
        for file, text in texts(name).items():
            (FOLDER / file).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
