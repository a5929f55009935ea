"""Price published training runs under the plans they state, and print the errors.

Measured numbers are those of the rows' sources; predicted ones come from the traced graph of a
preset. Rows that lack a field that is needed are skipped and named, never guessed; what a source
leaves to a default is listed as assumed.
"""

from __future__ import annotations

import argparse
import json

from autopar.cli import options as shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--rows", metavar="FILE", help="rows of the same schema (default: those that ship)"
    )
    parser.add_argument("--by", choices=["group"], help="also print the errors of every source")
    parser.add_argument(
        "--assume-recompute", choices=["none", "full", "selective"], metavar="WHAT",
        help="what rows recompute that do not say (none, full or selective): skipped by default",
    )  # fmt: skip
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Read, predict, print."""
    from autopar.cost_models.published.predict import as_json, validate
    from autopar.cost_models.published.rows import read_rows

    rows = read_rows(options.rows)  # before torch is imported
    result = validate(rows, assume_recompute=options.assume_recompute)
    if options.json:
        print(json.dumps(as_json(result), indent=1))
        return 0
    from autopar.cli.validate_text import lines

    for line in lines(result, by_group=options.by == "group", shipped=options.rows is None):
        print(line)
    return 0
