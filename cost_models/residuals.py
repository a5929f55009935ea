"""A measured step beside its prediction, and what the cluster's figures say afterwards.

Actions are matched by pipeline rank and name. Their parts are told apart: a collective moves
only when the last rank of its group has come, so what it takes is what that rank sees; waiting for
each other is not charged to links. What is left of an action is computation.

Fed back are two ratios of measured to predicted seconds, of computation and of collectives: those
with which the mean of |predicted / measured - 1| over the actions is least, which is a weighted
median and never worse than the figures as they are.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.device import Device
from autopar.cost_models.hardware import SECTIONS, figure_at, plausible, value_of
from autopar.cost_models.replay import current, timeline_of, timing_of
from autopar.errors import InputError
from autopar.plan.fingerprint import choices_digest
from autopar.plan.plan import Plan
from autopar.schedules.actions import MESSAGES, Action
from autopar.schedules.chrome import Bar, RankStep, Recording

Sort = Literal["computation", "optimizer", "collectives"]
Pairs = Sequence[tuple[float, float]]
"""Predicted and measured seconds, each pair of one thing."""
_NOTHING_S = 1e-5
"""Waits that are no longer than this are calls of what had finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """An action, predicted and measured; measured seconds are means over the ranks at its place.

    Attributes:
        pipeline_rank: Its pipeline rank.
        action: The action.
        ranks: Ranks that were measured there.
        start_s: Its predicted start.
        predicted_s: Seconds that it was predicted to take; of a receive, to wait.
        measured_start_s: Its measured start.
        measured_s: Seconds that it took.
        compute_s: What of `predicted_s` is computation.
        measured_compute_s: What of `measured_s` is.
        inline_s: Predicted seconds of collectives of the action, beside it or not.
        measured_inline_s: Those that were measured, by the last rank of each group.
        known: Whether that is more than an upper bound: what was over long before somebody asked
            may have taken any time until then.
    """

    pipeline_rank: int
    action: Action
    ranks: int
    start_s: float
    predicted_s: float
    measured_start_s: float
    measured_s: float
    compute_s: float
    measured_compute_s: float
    inline_s: float
    measured_inline_s: float
    known: bool

    @property
    def difference_s(self) -> float:
        """Measured less predicted seconds."""
        return self.measured_s - self.predicted_s

    @property
    def is_work(self) -> bool:
        """Whether it computes: what others wait for is predicted by them."""
        return self.action.kind not in MESSAGES and self.action.kind != "REDUCE"


def check_of(plan: Plan, recording: Recording) -> None:
    """Refuse a recording of another plan.

    Raises:
        InputError: If another plan ran, or the ranks are not those of the plan.
    """
    if recording.choices != choices_digest(plan):
        raise InputError(
            "the trace is of another plan",
            expected="a step that ran the choices of this plan file",
            fix="run compiled.profile(...) with autopar.compile(..., plan=PLAN)",
        )
    size, places = plan.device_mesh.size, plan.pipeline.ranks(plan.mesh)
    if len(recording.ranks) != size or {r.pipeline_rank for r in recording.ranks} != set(
        range(places)
    ):
        raise InputError(
            f"the trace has {len(recording.ranks)} ranks",
            expected=f"the {size} of the plan, at {places} places of a pipeline",
        )


def residuals(plan: Plan, recording: Recording) -> tuple[Residual, ...]:
    """Every action of a step, predicted and measured, rank by rank in the order of the schedule.

    Raises:
        InputError: If the recording is of another plan, or lacks an action.
        PlanError: If the plan has no predictions.
    """
    check_of(plan, recording)
    timeline, timing = timeline_of(plan), timing_of(plan)
    shared = _collectives(recording)
    found: list[Residual] = []
    for place in range(timeline.schedule.num_ranks):
        events = timeline.events(place)
        steps = [step for step in recording.ranks if step.pipeline_rank == place]
        rows = [_rows(step, [str(event.action) for event in events]) for step in steps]
        seen: Counter[tuple[int, str]] = Counter()
        every = timeline.schedule.microbatches_per_update
        for number, event in enumerate(events):
            action = event.action
            key = action.stage, action.kind
            seen[key] += 1
            last = seen[key] % every == 0 and action.kind != "UPDATE"
            task = timing.tasks.get((*key, last))
            bars = [row[number] for row in rows]
            moved = [
                shared.get((step.rank, bar.name), _Moved())
                for step, bar in zip(steps, bars, strict=True)
            ]
            measured_s = _mean(bar.duration_s for bar in bars)
            found.append(
                Residual(
                    pipeline_rank=place,
                    action=action,
                    ranks=len(bars),
                    start_s=event.start_s,
                    predicted_s=event.duration_s,
                    measured_start_s=_mean(bar.start_s for bar in bars),
                    measured_s=measured_s,
                    compute_s=timing.factor * task.compute_s if task else 0.0,
                    measured_compute_s=max(0.0, measured_s - _mean(item.held_s for item in moved)),
                    inline_s=timing.factor * (task.inline_s + task.beside_s) if task else 0.0,
                    measured_inline_s=min(item.took_s for item in moved),
                    known=all(item.known for item in moved),
                )
            )
    return tuple(found)


def _rows(step: RankStep, wanted: Sequence[str]) -> tuple[Bar, ...]:
    actions = step.actions
    names = [bar.name for bar in actions]
    if names == list(wanted):
        return actions
    place = next(
        (n for n, (a, b) in enumerate(zip(names, wanted, strict=False)) if a != b),
        min(len(names), len(wanted)),
    )
    have = names[place] if place < len(names) else "nothing"
    asked = wanted[place] if place < len(wanted) else "nothing"
    raise InputError(
        f"action {place} of rank {step.rank} in the trace is {have}",
        expected=f"{asked}, as the plan's schedule has it",
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


@dataclass(slots=True)
class _Moved:
    """Collectives of an action on a rank.

    Attributes:
        held_s: Seconds that computation was held up.
        inline_s: Seconds of those that hold it up, as the last rank of their group saw them.
        beside: When the others began, and when they were known to be over.
        waited: Whether one of the others was still under way when it was waited for.
    """

    held_s: float = 0.0
    inline_s: float = 0.0
    beside: list[tuple[float, float]] = field(default_factory=list)
    waited: bool = False

    @property
    def took_s(self) -> float:
        """Seconds of all; an upper bound unless `known`."""
        total, end = self.inline_s, -math.inf
        for start, stop in sorted(self.beside):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return total

    @property
    def known(self) -> bool:
        """Whether `took_s` is more than a bound."""
        return self.waited or not self.beside


def _collectives(recording: Recording) -> dict[tuple[int, str], _Moved]:
    """Collectives by rank and action."""
    groups: dict[tuple[str, str, int], list[tuple[int, Bar]]] = {}
    found: defaultdict[tuple[int, str], _Moved] = defaultdict(_Moved)
    for step in recording.ranks:
        counts: Counter[tuple[str, str]] = Counter()
        for bar in step.bars:
            if bar.stream != "collective":
                continue
            action = str(bar.details.get("action", ""))
            mine = found[step.rank, action]
            if bar.details.get("beside"):
                mine.beside.append((bar.start_s, bar.end_s))
                mine.waited |= float(bar.details.get("waited_s", 0.0)) > _NOTHING_S
                continue
            mine.held_s += bar.duration_s
            key = action, str(bar.details.get("ranks", ""))
            counts[key] += 1
            groups.setdefault((*key, counts[key]), []).append((step.rank, bar))
    for (action, _, _), members in groups.items():
        took = min(bar.duration_s for _, bar in members)
        for rank, _ in members:
            found[rank, action].inline_s += took
    return dict(found)


def mean_error(found: Iterable[Residual]) -> float:
    """Mean of |predicted / measured - 1| over the actions that compute."""
    errors = [
        abs(item.predicted_s / item.measured_s - 1)
        for item in found
        if item.is_work and item.measured_s > 0
    ]
    return _mean(errors)


# Feeding back


@dataclass(frozen=True, slots=True, kw_only=True)
class Mended:
    """Something that is fed back.

    Attributes:
        what: What it is.
        samples: Actions that tell of it.
        ratio: Measured over predicted seconds.
        before: Mean of |predicted / measured - 1| with the figures as they were.
        after: The same with all predictions times `ratio`.
        figures: What changes, by path, in the unit of the key: before and after.
        at_edge: Whether a figure would have had to leave its plausible range.
    """

    what: Sort
    samples: int
    ratio: float
    before: float
    after: float
    figures: Mapping[str, tuple[float, float]]
    at_edge: bool


def best_ratio(pairs: Pairs) -> float:
    """The x with the least sum of |x predicted / measured - 1|; 1 without any pair.

    A median of measured over predicted, each with the weight of its inverse.
    """
    rows = sorted((m / p, p / m) for p, m in pairs if p > 0 and m > 0)
    half, done = sum(weight for _, weight in rows) / 2, 0.0
    for ratio, weight in rows:
        done += weight
        if done >= half:
            return ratio
    return 1.0


def error_of(pairs: Pairs, ratio: float) -> float:
    """Mean of |ratio predicted / measured - 1|."""
    return _mean(abs(ratio * p / m - 1) for p, m in pairs if p > 0 and m > 0)


def feed_back(plan: Plan, found: Sequence[Residual], *, source: str) -> tuple[
    ClusterSpec, tuple[Mended, ...]
]:  # fmt: skip
    """The cluster of a plan's predictions, with figures that a measured step has mended.

    Args:
        plan: The plan.
        found: Its residuals.
        source: Where the figures come from.

    Raises:
        InputError: If the cluster has unequal devices: which of them to mend is not known.
    """
    from autopar.cost_models.forecast import cluster_of  # a report does not need the cost model

    cluster = cluster_of(current(plan).cluster)
    if not cluster.is_uniform:
        raise InputError(
            f"the step ran on unequal devices: {cluster}", expected="a cluster of equal nodes"
        )
    device = cluster.hardware(0)
    mended = []
    changes: dict[str, float] = {}
    for what, pairs in _samples(found).items():
        used = [(p, m) for p, m in pairs if p > 0 and m > 0]
        if not used:
            continue
        ratio = best_ratio(used)
        figures, edge = _figures(what, device, cluster.nodes, ratio)
        changes |= figures
        mended.append(
            Mended(
                what=what,
                samples=len(used),
                ratio=ratio,
                before=error_of(used, 1.0),
                after=error_of(used, ratio),
                figures={path: (value_of(device, path), new) for path, new in figures.items()},
                at_edge=edge,
            )
        )
    if changes:
        cluster = cluster.with_figures(changes, source=source)
    return cluster, tuple(mended)


def _samples(found: Iterable[Residual]) -> dict[Sort, Pairs]:
    work = [item for item in found if item.is_work]
    update = [item for item in work if item.action.kind == "UPDATE"]
    programs = [item for item in work if item.action.kind != "UPDATE"]
    return {
        "computation": [(item.compute_s, item.measured_compute_s) for item in programs],
        "optimizer": [(item.compute_s, item.measured_compute_s) for item in update],
        "collectives": [(item.inline_s, item.measured_inline_s) for item in work if item.known],
    }


_SHARES = ("efficiency.matmul_share", "efficiency.attention_share", "efficiency.convolution_share")
_PEAKS = tuple(f"peak_dense.{figure.key}" for figure in SECTIONS["peak_dense"])


def _figures(what: Sort, device: Device, nodes: int, ratio: float) -> tuple[dict[str, float], bool]:
    """Figures with which a part of the step takes `ratio` times as long, and if one is at an edge.

    Shares move as far as they may; the rest is left to the rates they are shares of.
    """
    if what == "optimizer":
        if device.kind != "cpu":  # there it is streams, which computation has mended
            return {}, False
        streamed = device.memory_bytes_per_s * device.efficiency.memory_share
        rate = (device.cache_bytes_per_s or streamed) / ratio
        path = "memory.cache_tb_per_s"
        return _bounded(path, figure_at(path).from_si(rate), device)
    if what == "computation":
        memory = ("efficiency.memory_share",), ("memory.bandwidth_tb_per_s",)
        parts: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(_SHARES, _PEAKS), memory]
        times: tuple[str, ...] = ("efficiency.launch_us",)
    else:
        links = "link.gb_per_s_per_direction", "link.peer_gb_per_s_per_direction"
        parts = [(("efficiency.link_share",), links)]
        times = ("link.latency_us", "link.start_us", "link.all_to_all_start_us")
        if nodes > 1:  # which of both is slower than thought is not known
            parts.append((("efficiency.network_share",), ("node.nic_gbit_per_s",)))
            times = (*times, "node.network_latency_us")
    found: dict[str, float] = {}
    edge = False
    for shares, rates in parts:
        low = max(plausible(device, path)[0] / value_of(device, path) for path in shares)
        high = min(plausible(device, path)[1] / value_of(device, path) for path in shares)
        moved = min(max(1 / ratio, low), high)
        found |= {path: _rounded(value_of(device, path) * moved) for path in shares}
        if not math.isclose(moved * ratio, 1.0):
            for path in rates:
                if value := value_of(device, path):
                    new, at_edge = _bounded(path, value / ratio / moved, device)
                    found, edge = found | new, edge or at_edge
    for path in times:
        new, at_edge = _bounded(path, value_of(device, path) * ratio, device)
        found, edge = found | new, edge or at_edge
    return found, edge


def _bounded(path: str, value: float, device: Device) -> tuple[dict[str, float], bool]:
    low, high = plausible(device, path)
    inside = min(max(value, low), high)
    return {path: _rounded(inside)}, inside != value


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
