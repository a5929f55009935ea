"""Sizes of the call that a plan was made for."""

from __future__ import annotations

import re

from autopar.plan.plan import Plan

_TOKENS = re.compile(r"int\d+\[(\d+), (\d+)\]")


def sizes_of(plan: Plan) -> tuple[int | None, int | None]:
    """Samples of a step, and tokens of a sample; None where a plan does not say.

    Without a forecast they are read from the first input that looks like tokens, else from the
    first dim of the first input.
    """
    if plan.forecast is not None:
        return plan.forecast.global_batch_size, plan.forecast.sequence_length
    for _, text in plan.inputs:
        found = _TOKENS.match(text)
        if found is not None:
            return int(found[1]), int(found[2])
    for _, text in plan.inputs[:1]:
        first = re.search(r"\[(\d+)", text)
        if first is not None:
            return int(first[1]), None
    return None, None
