"""The exact search against trying everything, on small random problems of fresh seeds.

python -m tests.bench.bench_oracles --first 5000 --seeds 100 [--constraints]
"""

from __future__ import annotations

import argparse
import sys

from tests.unit.search.oracles import campaign


def main() -> int:
    """Print what must not happen, and how many answers are the best."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds")
    parser.add_argument("--constraints", action="store_true", help="fix random parts of the plans")
    chosen = parser.parse_args()
    tally = campaign(
        range(chosen.first, chosen.first + chosen.seeds),
        constraints=chosen.constraints,
        on_progress=lambda line: print(line, file=sys.stderr),
    )
    for line in tally.wrong:
        print("WRONG", line)
    print(tally.text())
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
