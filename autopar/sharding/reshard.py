"""Steps that carry a tensor from one placement to another: data, planned once, run everywhere.

The steps are what the cost model prices and the runtime executes. `plan_steps` is pure. The order
follows three laws: a factor split over several axes is gathered from the innermost axis out and
sliced from the outermost in; overlapping splits of one dim never exist together; bytes are moved
as late and as few as possible (slice, then reduce, then exchange, then gather).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from autopar.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placements,
    Replicate,
    Shard,
)

StepKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective or local step of a reshard.

    Attributes:
        kind: ``all_reduce`` (Partial to Replicate), ``reduce_scatter`` (Partial to Shard),
            ``all_gather`` (Shard to Replicate), ``all_to_all`` (Shard to another Shard),
            ``slice`` (Replicate to Shard, no bytes), ``mask`` (Replicate to Partial: the first
            rank keeps the value, the others hold zeros).
        axes: Indices of the mesh axes it acts on, outer first.
        source: The factor that is gathered or exchanged.
        target: The factor that is split afterwards.
        before: Placements before the step.
        after: Placements after the step.
    """

    kind: StepKind
    axes: tuple[int, ...]
    source: Shard | None = None
    target: Shard | None = None
    before: Placements
    after: Placements

    def __str__(self) -> str:
        return self.text()

    def text(self, names: tuple[str, ...] = ()) -> str:
        """The step in words such as ``all_reduce@tp``; axes by number without their `names`."""
        parts = [str(item) for item in (self.source, self.target) if item]
        axes = ",".join(names[axis] if names else str(axis) for axis in self.axes)
        return f"{self.kind}@{axes} {'->'.join(parts)}".rstrip()


def _put(state: Placements, axis: int, value: Replicate | Partial | Shard) -> Placements:
    return (*state[:axis], value, *state[axis + 1 :])


def _can_split(state: Placements, target: Placements, axis: int) -> bool:
    """Whether `axis` may take its target factor now.

    Nothing inside the factor or across it may be split, what is split outside it must stay so
    (it could not be gathered afterwards), and outer axes that want the same factor go first.
    """
    shard = target[axis]
    if not isinstance(shard, Shard):
        return False
    if any(want == shard != state[outer] for outer, want in enumerate(target[:axis])):
        return False
    for other_axis, other in enumerate(state):
        if other_axis == axis or not isinstance(other, Shard) or not other.overlaps(shard):
            continue
        if other != shard or other_axis > axis or target[other_axis] != shard:
            return False
    return True


def _can_gather(state: Placements, axis: int) -> bool:
    """Whether `axis` is the innermost one that splits its factor."""
    return all(other != state[axis] for other in state[axis + 1 :])


def _allowed(kind: StepKind, state: Placements, target: Placements, axis: int) -> bool:
    """Whether a step of `kind` may take `axis` (towards) its target now."""
    have, want = state[axis], target[axis]
    if kind == "slice":
        return have == REPLICATE and _can_split(state, target, axis)
    if kind == "reduce_scatter":
        return have == PARTIAL and _can_split(state, target, axis)
    if kind == "all_reduce":
        return have == PARTIAL and not isinstance(want, Shard)
    if kind == "mask":
        return have == REPLICATE and want == PARTIAL
    if not isinstance(have, Shard) or not _can_gather(state, axis):
        return False
    if kind == "all_gather":
        return True
    return isinstance(want, Shard) and not have.overlaps(want) and _can_split(state, target, axis)


_PREFERENCE: tuple[StepKind, ...] = (
    "slice",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_gather",
    "mask",
)


def _next_step(state: Placements, target: Placements) -> Step | None:
    """The best step that is allowed now, or None when only a detour is left."""
    axes = [axis for axis in range(len(state)) if state[axis] != target[axis]]
    for kind in _PREFERENCE:
        for axis in reversed(axes) if kind == "all_gather" else axes:
            if _allowed(kind, state, target, axis):
                want = REPLICATE if kind == "all_gather" else target[axis]
                return _step(kind, axis, state, want)
    return None


def _step(kind: StepKind, axis: int, state: Placements, want: Replicate | Partial | Shard) -> Step:
    have = state[axis]
    return Step(
        kind=kind,
        axes=(axis,),
        source=have if isinstance(have, Shard) else None,
        target=want if isinstance(want, Shard) else None,
        before=state,
        after=_put(state, axis, want),
    )


def _detour(state: Placements, target: Placements) -> Step:
    """Clear the way when no direct step is allowed: undo one split or one partial sum."""
    for axis in reversed(range(len(state))):
        have = state[axis]
        if isinstance(have, Shard) and _can_gather(state, axis):
            blocks = (
                any(
                    isinstance(want, Shard) and want.overlaps(have) and state[other] != want
                    for other, want in enumerate(target)
                )
                or have != target[axis]
            )
            inside = any(
                isinstance(other, Shard) and other == have and state[index] != target[index]
                for index, other in enumerate(state)
            )
            if blocks or inside:
                return _step("all_gather", axis, state, REPLICATE)
    for axis, have in enumerate(state):
        if have == PARTIAL and target[axis] != PARTIAL:
            return _step("all_reduce", axis, state, REPLICATE)
    raise AssertionError(f"no way from {state} to {target}")


def _merge(steps: list[Step]) -> tuple[Step, ...]:
    """Join neighbouring steps of one kind on one factor into one over several axes."""
    merged: list[Step] = []
    for step in steps:
        last = merged[-1] if merged else None
        if last and last.kind == step.kind:
            if step.kind in ("all_reduce", "mask"):
                axes = tuple(sorted((*last.axes, *step.axes)))
                merged[-1] = replace(last, axes=axes, after=step.after)
                continue
            same = last.source == step.source and last.target == step.target
            if same and step.kind == "all_gather" and step.axes[0] < last.axes[0]:
                merged[-1] = replace(last, axes=(*step.axes, *last.axes), after=step.after)
                continue
            if same and step.kind in ("slice", "reduce_scatter") and step.axes[0] > last.axes[-1]:
                merged[-1] = replace(last, axes=(*last.axes, *step.axes), after=step.after)
                continue
        merged.append(step)
    return tuple(merged)


@lru_cache(maxsize=65536)
def plan_steps(source: Placements, target: Placements) -> tuple[Step, ...]:
    """Steps that turn a tensor placed as `source` into one placed as `target`.

    Args:
        source: Placement per mesh axis now.
        target: Placement per mesh axis wanted.

    Returns:
        The steps in order; empty when nothing changes.
    """
    state, steps = source, []
    while state != target:
        step = _next_step(state, target) or _detour(state, target)
        steps.append(step)
        state = step.after
        assert len(steps) <= 6 * len(source) + 6, f"reshard does not end: {source} -> {target}"
    return _merge(steps)


def split_time(step: Step, time: int | None) -> tuple[Step, ...]:
    """`step` with its part along the microbatch axis as a step of its own, in legal order."""
    if time is None or time not in step.axes or len(step.axes) == 1:
        return (step,)
    rest = tuple(axis for axis in step.axes if axis != time)
    # The microbatch axis is the outermost: it is sliced first and gathered last.
    first, last = (rest, (time,)) if step.kind == "all_gather" else ((time,), rest)
    middle = list(step.before)
    for axis in first:
        middle[axis] = step.after[axis]
    return (
        replace(step, axes=first, after=tuple(middle)),
        replace(step, axes=last, before=tuple(middle)),
    )
