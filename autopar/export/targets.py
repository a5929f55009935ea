"""All targets: importing this module enters them into `autopar.export.result.TARGETS`."""

from __future__ import annotations

from autopar.errors import InputError
from autopar.export import accelerate, deepspeed, fsdp2, megatron, torchtitan
from autopar.export.result import TARGETS, Exported
from autopar.plan.plan import Plan

ALL = (accelerate, deepspeed, fsdp2, megatron, torchtitan)


def export(plan: Plan, target: str) -> Exported:
    """`plan` in the words of `target`.

    Args:
        plan: The plan.
        target: A name of `TARGETS`.

    Raises:
        InputError: For an unknown target.
    """
    if not plan.parameters:
        raise InputError("the plan lists no parameters", expected="a plan that autopar made")
    return TARGETS[target].export(plan)
