"""Report everything that is wrong with a plan file.

Each fault is told with its JSON path (line and column in what is no JSON), what it is and what
would be right. Warnings are about files that can be used all the same. Exits 0 without faults, 1
with some, 2 if there is no such file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import asdict

from autopar.cli import options as shared
from autopar.plan.codec import read_plan, read_text
from autopar.plan.shapes import Fault

MOST_ALIKE = 3
"""Faults of one kind that are told one by one."""
_VALUE = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("plan", metavar="PLAN", help="plan file (JSON)")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Read the file, and print what is wrong with it."""
    text, faults = read_text(options.plan)
    if not faults:
        plan, faults = read_plan(text)
        if plan is not None:
            from autopar.report.lacking import lacking

            faults += lacking(plan)
    wrong = sum(not fault.warning for fault in faults)
    if options.json:
        rows = [asdict(fault) for fault in faults]
        print(json.dumps({"plan": options.plan, "ok": not wrong, "faults": rows}, indent=2))
        return 1 if wrong else 0
    for group in alike(faults):
        for fault in group[:MOST_ALIKE]:
            print("\n".join(_lines(fault)))
        if rest := group[MOST_ALIKE:]:
            last = f", the last at {rest[-1].path}" if len(rest) > 1 else f" at {rest[0].path}"
            print(f"  and {len(rest):,} more like these{last} (--json lists all)")
    print(f"{options.plan}: " + (_count(wrong, len(faults) - wrong) or "nothing is wrong"))
    return 1 if wrong else 0


def alike(faults: Iterable[Fault]) -> list[list[Fault]]:
    """Faults of one kind together, in the order of the first of each: they differ in values."""
    groups: dict[tuple[bool, str, str], list[Fault]] = {}
    for fault in faults:
        kind = (fault.warning, _VALUE.sub("*", fault.path), _VALUE.sub("*", fault.what))
        groups.setdefault(kind, []).append(fault)
    return list(groups.values())


def _lines(fault: Fault) -> list[str]:
    found = [f"{'warning' if fault.warning else 'fault'} at {fault.path}: {fault.what}"]
    if fault.expected:
        found.append(f"  expected: {fault.expected}")
    if fault.fix:
        found.append(f"  fix:      {fault.fix}")
    return found


def _count(faults: int, warnings: int) -> str:
    parts = [(faults, "fault"), (warnings, "warning")]
    return ", ".join(f"{n:,} {word}{'s' if n > 1 else ''}" for n, word in parts if n)
