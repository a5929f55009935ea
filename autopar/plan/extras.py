"""What constraints say beside factors: schedule, microbatches, ZeRO, recompute.

In a map these are reserved keys beside factor names; in text they follow the strategy's name:
``"megatron,zero=1,microbatches=4,schedule=1f1b,recompute=full"``; parts of a list are joined with
``+``, placements are pairs such as ``lm_head.weight:whole``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from autopar.errors import PlanError, meant
from autopar.plan.parts import (
    PipelinePlan,
    ZeroPlan,
    check_pipeline,
    check_zero,
    default_chunks,
)
from autopar.schedules.make import SCHEDULES
from autopar.sharding.mesh import Mesh

POLICIES = ("full", "selective", "none")
"""Names of recompute policies; anything else is a pattern."""

RESERVED: Mapping[str, str] = {
    "strategy": "the name of a strategy",
    "microbatches": "a whole number from 1",
    "schedule": "one of " + ", ".join(SCHEDULES),
    "chunks": "the number of stages per pipeline rank",
    "update_every": "microbatches between updates of pipedream_2bw",
    "vertical_sync": "true or false",
    "pipeline_axis": "a mesh axis",
    "cuts": "a list of op keys or module paths",
    "tensor": "what tensor axes split: megatron, megatron_sp, sequence or features",
    "placements": "a map from parameters to how each lies: whole, split or a factor",
    "zero": '0, 1, 2, 3 or {"stage": 2, "axes": ["dp"]}',
    "recompute": '"full", "selective", "none" or a list of patterns over op keys',
}
"""Keys of constraints that are no factors, and what they hold."""

_NUMBERS = ("microbatches", "chunks", "update_every", "zero")
_LISTS = ("cuts", "recompute", "placements")


def split_text(text: str) -> dict[str, Any]:
    """The map that a constraint text such as ``"megatron,zero=1"`` stands for.

    Raises:
        PlanError: If a part is no ``key=value`` with a reserved key.
    """
    found: dict[str, Any] = {}
    for position, part in enumerate(text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and position == 0:
            found["strategy"] = key
            continue
        if key == "mesh":
            rest = text.split(",")[position + 1 :]
            axes = takewhile(lambda pair: pair.partition("=")[0].strip() not in RESERVED, rest)
            raise mesh_inside(",".join((value, *map(str.strip, axes))))
        if not equals or key not in RESERVED or key in found:
            raise PlanError(
                f"constraint {part.strip()!r} is given twice"
                if key in found
                else f"cannot read {part.strip()!r} in constraints {text!r}",
                expected='a strategy and key=value pairs, such as "megatron,zero=1"; keys are '
                + ", ".join(RESERVED),
                fix=_mending(text, key, part.strip(), found),
                where="constraints",
            )
        found[key] = _read(key, value)
    return found


def _mending(text: str, key: str, part: str, found: dict[str, Any]) -> str | None:
    """What to do about a part that cannot be read."""
    if key in found:
        return None
    last = next(reversed(found), None)
    if "=" not in part and last in _LISTS:
        whole = f"{last}=" + text.partition(f"{last}=")[2].partition(f",{part}")[0]
        return f"join the parts of a list with +: {whole}+{part}"
    return meant(key, RESERVED)


def mesh_inside(value: object) -> PlanError:
    """That constraints hold a mesh, which is given beside them.

    Args:
        value: The mesh.
    """
    pairs = value.items() if isinstance(value, Mapping) else ()
    text = ",".join(f"{name}={size}" for name, size in pairs) or str(value)
    return PlanError(
        "constraints hold a mesh",
        expected="the mesh beside them",
        fix=f"say --mesh {text} (in Python mesh={text!r})",
        where="constraints['mesh']",
    )


def _read(key: str, value: str) -> object:
    if key in _NUMBERS and value.lstrip("+-").isdigit():
        return int(value)
    if key == "vertical_sync" and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if key == "cuts" or (key == "recompute" and value not in POLICIES):
        return value.split("+")
    if key == "placements":  # name:word of each
        pairs = (part.partition(":") for part in value.split("+"))
        return {name.strip(): word.strip() for name, _, word in pairs}
    return value


def _bad(key: str, value: object) -> PlanError:
    return PlanError(
        f"constraint {key!r} is {value!r}",
        expected=RESERVED.get(key, "a whole number from 1"),
        where=f"constraints[{key!r}]",
    )


def read_number(extras: Mapping[str, Any], key: str, default: int, least: int) -> int:
    """A whole number from `least` that constraints give; `default` if they do not.

    Raises:
        PlanError: If it is none.
    """
    value = extras.get(key, default)
    if type(value) is not int or value < least:
        raise _bad(key, value)
    return value


def read_texts(extras: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts that constraints give; empty if they do not.

    Raises:
        PlanError: If it is none.
    """
    value = extras.get(key, ())
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _bad(key, value)
    return tuple(value)


def pipeline_axis(extras: Mapping[str, Any], mesh: Mesh) -> str:
    """The mesh axis that holds stages: ``pp`` unless another is named.

    Raises:
        PlanError: If the mesh lacks the axis that is named.
    """
    axis = extras.get("pipeline_axis", "pp")
    if not isinstance(axis, str) or ("pipeline_axis" in extras and axis not in mesh.names):
        raise PlanError(
            f"the pipeline is put on mesh axis {axis!r}, which mesh {mesh} lacks",
            expected="one of " + ", ".join(mesh.names),
            fix=meant(axis, mesh.names),
            where="constraints['pipeline_axis']",
        )
    return axis


def read_pipeline(extras: Mapping[str, Any], mesh: Mesh) -> PipelinePlan:
    """The pipeline that constraints ask for; cuts are as the user wrote them.

    Raises:
        PlanError: Names the constraint.
    """
    schedule = extras.get("schedule", "1f1b")
    if not isinstance(schedule, str):
        raise _bad("schedule", schedule)
    if not isinstance(extras.get("vertical_sync", False), bool):
        raise _bad("vertical_sync", extras["vertical_sync"])
    pipeline = PipelinePlan(
        axis=pipeline_axis(extras, mesh),
        schedule=schedule,
        microbatches=read_number(extras, "microbatches", 1, 1),
        chunks=read_number(extras, "chunks", default_chunks(schedule), 1),
        update_every=read_number(extras, "update_every", 0, 0),
        vertical_sync=extras.get("vertical_sync", False),
        cuts=read_texts(extras, "cuts"),
    )
    try:
        check_pipeline(pipeline, mesh.axes, "")
    except PlanError as error:
        where = "mesh" if error.where == "mesh" else f"constraints[{error.where!r}]"
        raise PlanError(error.what, expected=error.expected, fix=error.fix, where=where) from None
    return pipeline


def read_zero(
    extras: Mapping[str, Any],
    pipeline: PipelinePlan,
    data_axes: tuple[str, ...],
    storage: tuple[str, ...],
) -> ZeroPlan:
    """The ZeRO that constraints ask for, over all data axes unless some are named.

    Raises:
        PlanError: Names the constraint.
    """
    value = extras.get("zero", 0)
    axes: tuple[str, ...] | None = None
    if isinstance(value, Mapping):
        if not set(value) <= {"stage", "axes"} or "stage" not in value:
            raise _bad("zero", dict(value))
        named = value.get("axes")
        if isinstance(named, str):
            axes = (named,)
        elif named is not None:
            if not isinstance(named, list | tuple) or not all(isinstance(a, str) for a in named):
                raise _bad("zero", dict(value))
            axes = tuple(named)
        value = value["stage"]
    if type(value) is not int:
        raise _bad("zero", value)
    if axes is None:
        axes = data_axes if value > 0 else ()
    zero = ZeroPlan(stage=value, axes=axes)
    check_zero(zero, pipeline, data_axes, storage, "constraints['zero']")
    return zero


def read_recompute(extras: Mapping[str, Any]) -> tuple[str, ...]:
    """Recompute patterns and policy names.

    Raises:
        PlanError: If the value is neither.
    """
    value = extras.get("recompute", ())
    if isinstance(value, str):
        if value not in POLICIES:
            raise PlanError(
                f"unknown recompute policy {value!r}",
                expected=RESERVED["recompute"],
                fix=meant(value, POLICIES) or "write patterns as a list",
                where="constraints['recompute']",
            )
        return (value,)
    return read_texts(extras, "recompute")
