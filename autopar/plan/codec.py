"""From the text of a plan file to a plan, or to everything that is wrong with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import PlanError
from autopar.plan.advice import is_endless, mending, nearby
from autopar.plan.lint import check
from autopar.plan.migrate import migrate
from autopar.plan.plan import Plan
from autopar.plan.shapes import Fault, Twice, hints_of, read_fields, reader, shown

MOST_BYTES = 256 * 2**20
"""No plan file is larger."""
_DIGITS = 19
_WHOLE = "the JSON that `autopar plan MODEL -o PLAN` writes"
_AGAIN = "write it anew: `autopar plan MODEL -o PLAN`"


def read_text(path: str | Path) -> tuple[str, list[Fault]]:
    """The text of a file, or what is wrong with it.

    Raises:
        PlanError: If the file cannot be opened.
    """
    try:
        size = Path(path).stat().st_size
        if size > MOST_BYTES:
            expected = f"at most {MOST_BYTES:,} bytes"
            what = f"is a file of {size:,} bytes"
            return "", [Fault(path="1:1", what=what, expected=expected, fix=_AGAIN)]
        if is_endless(path):
            raise ValueError("it is a device or a pipe, not a file")
        data = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or str(error)
        raise PlanError(
            f"cannot read the plan file: {text}",
            expected="a plan file, as `autopar plan MODEL -o PLAN` writes it",
            fix=nearby(path, f"check the path, or {_AGAIN}"),
            where=str(path),
        ) from None
    try:
        return data.decode("utf-8"), []
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, start = before.count(b"\n") + 1, before.rfind(b"\n") + 1
        what = f"cannot read the plan file: byte 0x{data[error.start]:02x} is no UTF-8"
        expected = "text in UTF-8"
        place = f"{line}:{error.start - start + 1}"
        return "", [Fault(path=place, what=what, expected=expected, fix=_AGAIN)]


def read_plan(text: str) -> tuple[Plan | None, list[Fault]]:
    """The plan that JSON text stands for, and everything that is wrong with it.

    Args:
        text: The text.

    Returns:
        The plan, None if it has a fault that is no warning; and the faults.
    """
    data, faults = parse(text)
    if faults:
        return None, faults
    if not isinstance(data, dict):
        what, expected = f"is {shown(data)}", "an object with the fields of a plan"
        return None, [Fault(path="$", what=what, expected=expected, fix=_AGAIN)]
    migrated, faults = migrate(data)
    if faults:
        return None, faults
    if isinstance(data, Twice):
        migrated = Twice(migrated)
        migrated.keys_twice = data.keys_twice
    readers = {name: reader(hint) for name, hint in hints_of(Plan).items()}
    values = read_fields(readers, migrated, (), faults)
    faults += check(values, whole=not faults)
    if any(not fault.warning for fault in faults):
        return None, faults
    return Plan(**values), faults


def parse(text: str) -> tuple[Any, list[Fault]]:
    """Parsed JSON, with objects that have a key twice marked, or where it is none."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_whole), []
    except json.JSONDecodeError as error:
        place = f"{error.lineno}:{error.colno}"
        what = f"the plan is not JSON: {error.msg}"
        return None, [
            Fault(path=place, what=what, expected=_WHOLE, fix=mending(text, error.lineno, _AGAIN))
        ]
    except RecursionError:
        place, depth = _deepest(text)
        what = f"the plan is nested {depth:,} levels deep"
        return None, [Fault(path=place, what=what, expected="a handful of levels", fix=_AGAIN)]


def refuse(faults: Sequence[Fault], where: str) -> NoReturn:
    """Refuse a plan file for the first of its faults.

    Raises:
        PlanError: Always.
    """
    first = next(fault for fault in faults if not fault.warning)
    if not first.path.startswith("$"):
        what, place = first.what, f"{where}:{first.path}"
    else:
        what, place = f"plan field {first.path}: {first.what}", f"{where}: {first.path}"
    raise PlanError(what, expected=first.expected, fix=first.fix, where=place)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    twice = Twice(found)
    times = Counter(key for key, _ in pairs)
    twice.keys_twice = tuple(key for key in found if times[key] > 1)
    return twice


def _whole(text: str) -> int | float:
    """A whole number; one that no field can hold as a float, which every field refuses."""
    return int(text) if len(text) <= _DIGITS else float(text)


def _deepest(text: str) -> tuple[str, int]:
    """Line and column of the deepest bracket, and how deep it is; strings are not looked at."""
    depth = deepest = place = 0
    for index, char in enumerate(text):
        if char in "[{":
            depth += 1
            if depth > deepest:
                deepest, place = depth, index
        elif char in "]}":
            depth -= 1
    line, start = text.count("\n", 0, place) + 1, text.rfind("\n", 0, place) + 1
    return f"{line}:{place - start + 1}", deepest
