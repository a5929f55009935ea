"""Plan files of earlier versions, brought up to the present one step by step.

A new version is one function here: it gets the parsed JSON of a file of the version before, and
returns that of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopar.plan.shapes import Fault, shown


def _one_to_two(data: dict[str, Any]) -> dict[str, Any]:
    """Version 2 has predictions, and tells the model at any batch size by `structure`."""
    return {**data, "structure": "", "forecast": None}


MIGRATIONS: tuple[Callable[[dict[str, Any]], dict[str, Any]], ...] = (_one_to_two,)
"""From version 1 to 2, and so on."""


def migrate(data: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """The JSON of a plan file in the present version, or why there is none.

    Args:
        data: The parsed file.
    """
    newest = len(MIGRATIONS) + 1
    path, version = "$.schema_version", data.get("schema_version")
    if "schema_version" not in data:
        words = f"is this a plan file? those of this version of autopar say {newest}"
        expected = f"a version from 1 to {newest}"
        return data, [Fault(path=path, what="is missing", expected=expected, fix=words)]
    if type(version) is not int or not 1 <= version <= newest:
        newer = type(version) is int and version > newest
        fix = (
            "it was written by a newer autopar: install that"
            if newer
            else f"files of this version of autopar say {newest}"
        )
        expected = f"a version from 1 to {newest}"
        return data, [Fault(path=path, what=f"is {shown(version)}", expected=expected, fix=fix)]
    for step in MIGRATIONS[version - 1 :]:
        data = {**step(data), "schema_version": newest}
    return data, []
