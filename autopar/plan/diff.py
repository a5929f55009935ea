"""What differs between two plans, in the words of plans: not line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autopar.plan.fold import fold
from autopar.plan.forecast import Forecast, RankForecast
from autopar.plan.plan import ParameterPlan, Plan
from autopar.plan.shapes import shown
from autopar.sharding.mesh import Mesh
from autopar.units import format_bytes, format_seconds

NONE = "-"
"""What stands for something that one of the plans lacks."""
MOST_LINES = 12
"""Most differences of ops and cuts that are told one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something in which two plans differ.

    Attributes:
        part: ``model``, ``mesh``, ``splits``, ``pipeline``, ``zero``, ``recompute``, ``ops``,
            ``parameters`` or ``predicted``.
        name: What differs, such as an axis, a field, or parameters by pattern.
        before: What it is in the first.
        after: What it is in the second.
    """

    part: str
    name: str
    before: str
    after: str


def differences(first: Plan, second: Plan) -> list[Difference]:
    """Everything in which two plans differ, but for notes and how long a search took.

    Args:
        first: A plan.
        second: Another, of this model or another one.
    """
    return [
        *_model(first, second),
        *_mesh(first, second),
        *_pipeline(first, second),
        *_ops(first, second),
        *_parameters(first, second),
        *_predicted(first.forecast, second.forecast),
    ]


def _if_other(part: str, name: str, before: object, after: object) -> Iterator[Difference]:
    one, two = str(before), str(after)
    if one != two:
        yield Difference(part=part, name=name, before=one or NONE, after=two or NONE)


def _model(first: Plan, second: Plan) -> Iterator[Difference]:
    before, after = dict(first.inputs), dict(second.inputs)
    for name in dict.fromkeys((*before, *after)):
        yield from _if_other(
            "model", f"input {name}", before.get(name, NONE), after.get(name, NONE)
        )
    if first.structure != second.structure and first.structure and second.structure:
        yield from _if_other("model", "operators", first.structure, second.structure)
    elif first.graph != second.graph and before == after and first.graph[:2] == second.graph[:2]:
        yield from _if_other("model", "computation", first.graph, second.graph)


def _mesh(first: Plan, second: Plan) -> Iterator[Difference]:
    yield from _if_other("mesh", "axes", Mesh(first.mesh), Mesh(second.mesh))
    sizes = first.device_mesh.size, second.device_mesh.size
    yield from _if_other("mesh", "ranks", *sizes)
    yield from _if_other("mesh", "strategy", first.strategy, second.strategy)
    before, after = dict(first.order), dict(second.order)
    for axis in dict.fromkeys((*before, *after)):
        one, two = (
            NONE if axis not in order else ", ".join(order[axis]) or "nothing"
            for order in (before, after)
        )
        yield from _if_other("splits", axis, one, two)
    storage = (", ".join(plan.storage) for plan in (first, second))
    yield from _if_other("splits", "parameters stored over", *storage)
    explicit = ("an error" if plan.explicit else "skipped" for plan in (first, second))
    yield from _if_other("splits", "a factor that cannot be split is", *explicit)


def _pipeline(first: Plan, second: Plan) -> Iterator[Difference]:
    one, two = first.pipeline, second.pipeline
    yield from _if_other("pipeline", "stages", first.num_stages, second.num_stages)
    for name in ("axis", "schedule", "microbatches", "chunks", "update_every", "vertical_sync"):
        yield from _if_other("pipeline", name, getattr(one, name), getattr(two, name))
    if len(one.cuts) == len(two.cuts):
        moved = [
            Difference(part="pipeline", name=f"first op of stage {stage}", before=a, after=b)
            for stage, (a, b) in enumerate(zip(one.cuts, two.cuts, strict=True), 1)
            if a != b
        ]
        yield from _some(moved, "pipeline", "first ops of stages")
    elif one.cuts and two.cuts:
        yield from _if_other("pipeline", "cuts", len(one.cuts), len(two.cuts))
    yield from _if_other("zero", "stage", first.zero.stage, second.zero.stage)
    axes = (", ".join(plan.zero.axes) for plan in (first, second))
    yield from _if_other("zero", "over", *axes)
    yield from _patterns(first.recompute, second.recompute)


def _patterns(first: tuple[str, ...], second: tuple[str, ...]) -> Iterator[Difference]:
    if set(first) == set(second):
        yield from _if_other("recompute", "order", " ".join(first), " ".join(second))
        return
    for item in fold(pattern for pattern in first if pattern not in second):
        yield Difference(part="recompute", name=item.text, before="again", after=NONE)
    for item in fold(pattern for pattern in second if pattern not in first):
        yield Difference(part="recompute", name=item.text, before=NONE, after="again")


def _some(found: list[Difference], part: str, name: str) -> Iterator[Difference]:
    """All of a few differences, or how many there are."""
    yield from found[:MOST_LINES]
    rest = len(found) - MOST_LINES
    if rest > 0:
        yield Difference(part=part, name=f"{rest} more {name}", before="...", after="...")


def _ops(first: Plan, second: Plan) -> Iterator[Difference]:
    groups: dict[tuple[str, str], list[str]] = {}
    for key in dict.fromkeys((*first.overrides, *second.overrides)):
        one, two = (
            ", ".join(plan.overrides[key]) if key in plan.overrides else "as its axes imply"
            for plan in (first, second)
        )
        if one != two:
            groups.setdefault((one, two), []).append(key)
    found = [
        Difference(part="ops", name=item.text, before=one, after=two)
        for (one, two), keys in groups.items()
        for item in fold(keys)
    ]
    yield from _some(found, "ops", "ops")


def _parameters(first: Plan, second: Plan) -> Iterator[Difference]:
    """How parameters are stored, folded over layers."""
    tables = [{item.fqn: item for item in plan.parameters} for plan in (first, second)]
    groups: dict[tuple[str, str], list[str]] = {}
    for fqn in dict.fromkeys((*tables[0], *tables[1])):
        one, two = (table.get(fqn) for table in tables)
        words = tuple(
            NONE if item is None else _stored(plan, item, one, two)
            for plan, item in ((first, one), (second, two))
        )
        if words[0] != words[1]:
            groups.setdefault((words[0], words[1]), []).append(fqn)
    for (before, after), names in groups.items():
        for item in fold(names):
            yield Difference(part="parameters", name=item.text, before=before, after=after)


def _stored(
    plan: Plan, item: ParameterPlan, one: ParameterPlan | None, two: ParameterPlan | None
) -> str:
    """How a parameter is stored, with its shape where that differs."""
    text = plan.placed(item.placement)
    if one is None or two is None or (one.shape, one.dtype) != (two.shape, two.dtype):
        text = f"{item.dtype}{list(item.shape)} {text}"
    return text


def _predicted(first: Forecast | None, second: Forecast | None) -> Iterator[Difference]:
    if first is None or second is None:
        known = ("no" if item is None else "yes" for item in (first, second))
        yield from _if_other("predicted", "predicted at all", *known)
        return
    yield from _if_other("predicted", "cluster", first.cluster.text, second.cluster.text)
    if first.cluster.text == second.cluster.text:
        prints = (item.cluster.fingerprint for item in (first, second))
        yield from _if_other("predicted", "figures of the cluster", *prints)
    models = [item.cost_model for item in (first, second)]
    for name in ("version", "software", "optimizer", "precision"):
        values = (getattr(model, name) for model in models)
        yield from _if_other("predicted", f"cost model: {name}", *values)
    for name in ("global_batch_size", "sequence_length"):
        yield from _if_other(
            "predicted", name.replace("_", " "),
            *(getattr(item, name) or NONE for item in (first, second)),
        )  # fmt: skip
    yield from _seconds(first, second)
    yield from _bytes(first.fullest, second.fullest)


def _change(before: float, after: float) -> str:
    return f" ({after / before - 1:+.1%})" if before > 0 else ""


def _seconds(first: Forecast, second: Forecast) -> Iterator[Difference]:
    rows = [("step", first.step_s, second.step_s)]
    one, two = first.slowest, second.slowest
    for name, words in _SPLIT.items():
        rows.append((f"  {words}", getattr(one, name), getattr(two, name)))
    for name, before, after in rows:
        if abs(before - after) > 1e-9 * max(first.step_s, second.step_s):
            text = format_seconds(after) + _change(before, after)
            yield Difference(part="predicted", name=name, before=format_seconds(before), after=text)


_SPLIT = {
    "compute_s": "computation",
    "inline_s": "collectives in line",
    "exposed_s": "waiting for collectives beside",
    "idle_s": "waiting for other stages",
    "host_s": "host",
}
"""Parts of the slowest rank's step."""


def _bytes(first: RankForecast, second: RankForecast) -> Iterator[Difference]:
    """Memory of the rank with least room."""
    rows = [("memory of the fullest rank", first.device_bytes, second.device_bytes)]
    for kind in dict.fromkeys((*first.peak, *second.peak)):
        rows.append((f"  {kind}", first.peak.get(kind, 0), second.peak.get(kind, 0)))
    for name, before, after in rows:
        if before != after:
            text = format_bytes(after) + _change(before, after)
            yield Difference(part="predicted", name=name, before=format_bytes(before), after=text)
    fits = ("yes" if rank.over_bytes <= 0 else f"no, over by {format_bytes(rank.over_bytes)}"
            for rank in (first, second))  # fmt: skip
    yield from _if_other("predicted", "fits", *fits)


def lines(found: Iterable[Difference]) -> list[str]:
    """Differences as text: a heading for each part, and a line for each difference."""
    text: list[str] = []
    part = ""
    for item in found:
        if item.part != part:
            part = item.part
            text.append(part)
        indent = len(item.name) - len(item.name.lstrip())
        name = item.name.strip()
        clean = name if name.isprintable() else shown(name)
        text.append(f"  {' ' * indent}{clean}: {item.before} -> {item.after}")
    return text
