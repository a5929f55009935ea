"""What a plan says of its mesh and its parameters, in short."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from autopar.plan.fold import fold, siblings
from autopar.plan.forecast import ClusterForecast, Forecast
from autopar.plan.forecast_lint import is_stale
from autopar.plan.plan import ParameterPlan, Plan
from autopar.plan.strategies import prime_factors

_BLOCK = re.compile(r"^(?P<block>(?:.*?\.)?)(?P<number>0|[1-9]\d{0,8})(?P<rest>\..*|$)")
_MOST = 2**63 - 1
"""Most elements of a tensor, whatever shapes a file claims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisView:
    """An axis of the mesh.

    Attributes:
        name: Its name.
        size: Ranks along it.
        splits: What it splits, best first; ``stages`` for the pipeline's.
        per_node: Ranks along it that share a node; None if the cluster is not known.
        also: What else is divided over it.
    """

    name: str
    size: int
    splits: tuple[str, ...]
    per_node: int | None
    also: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterView:
    """Parameters of one kind, held alike.

    Attributes:
        block: The repeated block that they are in, such as ``layers.{0..95}``; empty outside.
        name: Their names in it, such as ``mlp.up.{weight,bias}``.
        count: Number of parameters.
        elements: Their elements.
        dtype: Dtype.
        shape: Global shape with divisors where it is split, such as ``36864/8 x 12288``.
        stored: How it is held in words, such as ``heads over tp``.
    """

    block: str
    name: str
    count: int
    elements: int
    dtype: str
    shape: str
    stored: str


def current_forecast(plan: Plan) -> Forecast | None:
    """The predictions of a plan; None if it has none that are about it as it is now."""
    return None if is_stale(plan) else plan.forecast


# Axes


def axes(plan: Plan) -> tuple[AxisView, ...]:
    """The axes of a plan's mesh, outermost first."""
    splits, inner, found = dict(plan.order), plan.device_mesh.size, []
    for name, size in plan.mesh:
        inner //= size
        pipeline = name == plan.pipeline.axis
        also = []
        if name in plan.storage:
            also.append("parameters stored split")
        if plan.zero.stage and name in plan.zero.axes:
            also.append(f"ZeRO-{plan.zero.stage}")
        found.append(
            AxisView(
                name=name,
                size=size,
                splits=("stages",) if pipeline else splits.get(name, ()),
                per_node=_per_node(plan.forecast, size, inner),
                also=tuple(also),
            )
        )
    return tuple(found)


def _per_node(forecast: Forecast | None, size: int, stride: int) -> int | None:
    """Ranks along an axis that share a node, the fewest if nodes differ."""
    if forecast is None or not forecast.cluster.groups:
        return None
    return min(
        size if group.devices_per_node % (stride * size) == 0
        else min(size, max(1, group.devices_per_node // stride))
        for group in forecast.cluster.groups
    )  # fmt: skip


def num_devices(cluster: ClusterForecast) -> int:
    """Devices of a cluster."""
    return sum(group.nodes * group.devices_per_node for group in cluster.groups)


# Parameters


def stored(plan: Plan, item: ParameterPlan) -> tuple[str, str]:
    """How a parameter is held: in words, and its shape with divisors."""
    owners = [
        (name, prime)
        for name, size in plan.tensor_axes
        for prime in prime_factors(size) or (1,)
    ]  # fmt: skip
    split: dict[str, list[str]] = {}
    divisors: dict[str, int] = {}
    for (axis, prime), word in zip(owners, item.placement, strict=False):
        if word != "whole":
            factor, _, where = word.partition("@")
            split.setdefault(factor, []).append(axis)
            dim = where.partition(":")[0]
            divisors[dim] = divisors.get(dim, 1) * prime
    words = ", ".join(
        f"{factor} over {' and '.join(dict.fromkeys(names))}" for factor, names in split.items()
    )
    shape = " x ".join(
        f"{size}/{divisors[str(dim)]}" if str(dim) in divisors else str(size)
        for dim, size in enumerate(item.shape)
    )
    return words or "whole", shape or "scalar"


def parameters(plan: Plan) -> tuple[ParameterView, ...]:
    """The parameters of a plan, repeats folded, in the order of the model."""
    known: dict[tuple[tuple[int, ...], tuple[str, ...]], tuple[str, str]] = {}
    groups: dict[tuple[str, str], list[ParameterPlan]] = {}
    shapes: dict[str, str] = {}
    for item in plan.parameters:
        key = (item.shape, item.placement)
        if key not in known:
            known[key] = stored(plan, item)
        words, shapes[item.fqn] = known[key]
        groups.setdefault((words, item.dtype), []).append(item)
    order = {item.fqn: place for place, item in enumerate(plan.parameters)}
    rows = []
    for (words, dtype), items in groups.items():
        held = {item.fqn: item for item in items}
        for folded in fold(held):
            members = [held[name] for name in folded.names]
            block, name = _in_block(folded.text, folded.names[0])
            view = ParameterView(
                block=block,
                name=name,
                count=len(members),
                elements=sum(min(math.prod(member.shape), _MOST) for member in members),
                dtype=dtype,
                shape=_one_of([shapes[member.fqn] for member in members]),
                stored=words,
            )
            rows.append((order[folded.names[0]], view))
    rows.sort(key=lambda row: row[0])
    return _joined([view for _, view in rows])


def _one_of(shapes: list[str]) -> str:
    found = list(dict.fromkeys(shapes))
    return found[0] if len(found) == 1 else f"{len(found)} shapes"


def _in_block(text: str, name: str) -> tuple[str, str]:
    """The first repeated block of a folded name, and the rest; no block if nothing repeats."""
    if text == name:
        match = _BLOCK.match(name)
        if match is None or not match["rest"]:
            return "", name
        return match["block"] + match["number"], match["rest"][1:]
    head, _, rest = text.partition("}")
    return (head + "}", rest[1:]) if rest.startswith(".") else ("", text)


def _joined(rows: list[ParameterView]) -> tuple[ParameterView, ...]:
    """Rows by block, siblings that are held alike in one row."""
    blocks: dict[str, list[ParameterView]] = {}
    for row in rows:
        blocks.setdefault(row.block, []).append(row)
    found = []
    for block, members in blocks.items():
        alike: dict[tuple[str, str, int], list[ParameterView]] = {}
        for row in members:
            each = row.count if block else 1
            alike.setdefault((row.stored, row.dtype, each), []).append(row)
        made = []
        for group in alike.values():
            for name, places in siblings(row.name for row in group):
                joined = [group[place] for place in places]
                largest = max(joined, key=lambda row: row.elements)
                made.append(
                    (
                        members.index(joined[0]),
                        ParameterView(
                            block=block,
                            name=name,
                            count=sum(row.count for row in joined),
                            elements=sum(row.elements for row in joined),
                            dtype=largest.dtype,
                            shape=largest.shape,
                            stored=largest.stored,
                        ),
                    )
                )
        found += [row for _, row in sorted(made, key=lambda pair: pair[0])]
    return tuple(found)
