"""The log of all fits and scores: what was looked at was fitted to, a little."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LOG = Path(__file__).parent / "fit_log.jsonl"


def last_fit() -> dict[str, Any]:
    """The record of the fit from which the constants come that ship.

    A later record of constants stated for one stack alone holds no folds, and is no fit.
    """
    records = map(json.loads, LOG.read_text(encoding="utf-8").splitlines())
    found: dict[str, Any] = [item for item in records if item.get("written") and "rows" in item][-1]
    return found
