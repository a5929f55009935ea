"""Marks of single values of a parametrised test."""

from __future__ import annotations

from typing import Any

import pytest


def later(*values: Any) -> list[Any]:
    """Values that are tried in the long mode only."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]
