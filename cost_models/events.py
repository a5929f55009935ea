"""What a rank of a schedule does to memory and when: no bytes yet.

The executor posts receives ahead, hands messages over when the list comes to them, and keeps what
it has sent until it must have arrived (`autopar.runtime.execute`, `autopar.schedules.deliveries`).
That follows from the schedule alone, so it is worked out once and walked for many plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from autopar.plan.plan import Plan
from autopar.schedules.actions import (
    BACKWARDS,
    RECEIVES,
    SENDS,
    Action,
    Schedule,
)
from autopar.schedules.communicate import with_messages
from autopar.schedules.make import make_schedule

if TYPE_CHECKING:  # numpy: not for those who only look at a plan
    import numpy as np
    from numpy.typing import NDArray

AHEAD = 2
"""Receives that are posted before the list comes to them; as in `autopar.runtime.execute`."""

EventKind = Literal["post", "take", "run", "send", "release", "reduce", "update"]
Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changes live bytes.

    Attributes:
        kind: ``post``: memory for a message appears. ``take``: the message is handed over.
            ``run``: a program runs. ``send``: a message is on its way.
            ``release``: it is known to have arrived.
            ``reduce``, ``update``: of a stage.
        stage: The stage.
        what: Of a run the kind of action; of a message ``F`` or ``B``.
        microbatch: The microbatch, of a run or a message.
        peer: Stage at the other end of a message.
        last: Whether it is the last backward of its kind before an update.
        update: The update that the microbatch of a run belongs to.
        action: Number of the rank's action.
        text: The action as text; empty after the last.
    """

    kind: EventKind
    stage: int
    what: str = ""
    microbatch: int = -1
    peer: int = -1
    last: bool = False
    update: int = 0
    action: int = 0
    text: str = ""


def schedule_of(plan: Plan) -> Schedule:
    """The schedule of a plan, without messages; made once for equal plans."""
    part = plan.pipeline
    return _schedule(
        part.schedule, part.ranks(plan.mesh), part.microbatches, part.chunks, part.update_every,
        part.vertical_sync,
    )  # fmt: skip


@lru_cache(maxsize=512)
def _schedule(
    name: str, ranks: int, microbatches: int, chunks: int, every: int, sync: bool
) -> Schedule:
    return make_schedule(
        name, ranks, microbatches, chunks=chunks, update_every=every or None, vertical_sync=sync
    )


def schedule_with_messages(
    plan: Plan, edges: frozenset[Edge], gradient_edges: frozenset[Edge]
) -> Schedule:
    """The schedule of a plan with messages between stages; made once for equal plans.

    Args:
        plan: The plan.
        edges: Pairs (from, to) of stages with a boundary tensor.
        gradient_edges: Those whose tensors get a gradient.
    """
    part = plan.pipeline
    return _with_messages(
        (
            part.schedule, part.ranks(plan.mesh), part.microbatches, part.chunks,
            part.update_every, part.vertical_sync,
        ),
        edges,
        gradient_edges,
    )  # fmt: skip


def _with_messages(
    key: tuple[str, int, int, int, int, bool],
    edges: frozenset[Edge],
    gradient_edges: frozenset[Edge],
) -> Schedule:
    return with_messages(_schedule(*key), edges, gradient_edges)


def rank_events(
    plan: Plan, edges: frozenset[Edge], gradient_edges: frozenset[Edge], rank: int
) -> tuple[Event, ...]:
    """Events of a pipeline rank; see `schedule_with_messages`."""
    part = plan.pipeline
    key = (
        part.schedule, part.ranks(plan.mesh), part.microbatches, part.chunks, part.update_every,
        part.vertical_sync,
    )  # fmt: skip
    return _events(key, edges, gradient_edges, rank)


@lru_cache(maxsize=4096)
def _events(
    key: tuple[str, int, int, int, int, bool],
    edges: frozenset[Edge],
    gradient_edges: frozenset[Edge],
    rank: int,
) -> tuple[Event, ...]:
    return tuple(walk_actions(_with_messages(key, edges, gradient_edges), rank))


@dataclass(frozen=True, slots=True, eq=False)
class EventKinds:
    """Events of a rank without microbatches: few differ.

    Attributes:
        examples: An event of every kind.
        numbers: The kind of each event, as a place among `examples`.
    """

    examples: tuple[Event, ...]
    numbers: NDArray[np.int64]


def event_kinds(
    plan: Plan, edges: frozenset[Edge], gradient_edges: frozenset[Edge], rank: int
) -> EventKinds:
    """Kinds of the events that `rank_events` gives."""
    part = plan.pipeline
    key = (
        part.schedule, part.ranks(plan.mesh), part.microbatches, part.chunks, part.update_every,
        part.vertical_sync,
    )  # fmt: skip
    return _event_kinds(key, edges, gradient_edges, rank)


@lru_cache(maxsize=4096)
def _event_kinds(
    key: tuple[str, int, int, int, int, bool],
    edges: frozenset[Edge],
    gradient_edges: frozenset[Edge],
    rank: int,
) -> EventKinds:
    import numpy as np

    places: dict[tuple[object, ...], int] = {}
    examples: list[Event] = []
    numbers: list[int] = []
    schedule = _with_messages(key, edges, gradient_edges)
    for kind, action, position, last in _walk(schedule, rank):
        place = places.setdefault((kind, action.kind, action.stage, action.peer, last), len(places))
        if place == len(examples):
            examples.append(_event(schedule, rank, kind, action, position, last))
        numbers.append(place)
    return EventKinds(tuple(examples), np.array(numbers, dtype=np.int64))


def walk_actions(schedule: Schedule, rank: int) -> Iterator[Event]:
    """Events of a pipeline rank of a schedule with messages."""
    for kind, action, position, last in _walk(schedule, rank):
        yield _event(schedule, rank, kind, action, position, last)


def _walk(schedule: Schedule, rank: int) -> Iterator[tuple[EventKind, Action, int, bool]]:
    """The same with few objects: kind, run or message, number of the rank's action, `last`."""
    from autopar.schedules.deliveries import Deliveries  # numpy: not for those who only look

    actions = schedule.actions[rank]
    deliveries = Deliveries(schedule, rank)
    upcoming = deque(action for action in actions if action.kind in RECEIVES)
    posted: deque[Action] = deque()
    arrived: dict[int, list[Action]] = {}  # by the action before which that is known
    done: dict[tuple[str, int, int], int] = {}
    for position, action in enumerate(actions):
        for item in arrived.pop(position, ()):
            yield "release", item, position, False
        if action.kind == "F" or action.kind in BACKWARDS:
            while upcoming and len(posted) < AHEAD:
                posted.append(upcoming.popleft())
                yield "post", posted[-1], position, False
            key = (action.kind, action.stage, schedule.update_of(action.microbatch))
            done[key] = done.get(key, 0) + 1
            last = done[key] == schedule.microbatches_per_update and action.kind != "F"
            yield "run", action, position, last
        elif action.kind in SENDS:
            since = min(max(deliveries.since(action), position + 1), len(actions))
            arrived.setdefault(since, []).append(action)
            yield "send", action, position, False
        elif action.kind in RECEIVES:
            if not posted:
                posted.append(upcoming.popleft())
                yield "post", posted[-1], position, False
            yield "take", posted.popleft(), position, False
        else:
            yield "reduce" if action.kind == "REDUCE" else "update", action, position, False
    for item in arrived.pop(len(actions), ()):
        yield "release", item, len(actions), False


def _event(
    schedule: Schedule, rank: int, kind: EventKind, action: Action, position: int, last: bool
) -> Event:
    actions = schedule.actions[rank]
    text = str(actions[position]) if position < len(actions) else ""
    if kind in ("reduce", "update"):
        return Event(kind, action.stage, action=position, text=text)
    if kind == "run":
        return Event(
            kind, action.stage, action.kind, action.microbatch, last=last,
            update=schedule.update_of(action.microbatch), action=position, text=text,
        )  # fmt: skip
    assert action.peer is not None
    return Event(
        kind, action.stage, action.kind[-1], action.microbatch, action.peer, action=position,
        text=text,
    )  # fmt: skip
