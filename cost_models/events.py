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
from autopar.schedules.communicate import add_communication
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


@lru_cache(maxsize=512)
def _with_messages(
    key: tuple[str, int, int, int, int, bool],
    edges: frozenset[Edge],
    gradient_edges: frozenset[Edge],
) -> Schedule:
    return add_communication(_schedule(*key), edges, gradient_edges)


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
    for event in _events(key, edges, gradient_edges, rank):
        kind = (event.kind, event.stage, event.what, event.peer, event.last)
        place = places.setdefault(kind, len(places))
        if place == len(examples):
            examples.append(event)
        numbers.append(place)
    return EventKinds(tuple(examples), np.array(numbers, dtype=np.int64))


def walk_actions(schedule: Schedule, rank: int) -> Iterator[Event]:
    """Events of a pipeline rank of a schedule with messages."""
    from autopar.schedules.deliveries import Deliveries  # numpy: not for those who only look

    actions = schedule.actions[rank]
    deliveries = Deliveries(schedule, rank)
    upcoming = deque(action for action in actions if action.kind in RECEIVES)
    posted: deque[Action] = deque()
    sent: list[Action] = []
    done: dict[tuple[str, int, int], int] = {}
    for position, action in enumerate(actions):
        text = str(action)
        for item in [item for item in sent if deliveries.arrived(item, position)]:
            sent.remove(item)
            yield _message("release", item, position, text)
        if action.kind == "F" or action.kind in BACKWARDS:
            while upcoming and len(posted) < AHEAD:
                posted.append(upcoming.popleft())
                yield _message("post", posted[-1], position, text)
            update = schedule.update_of(action.microbatch)
            key = (action.kind, action.stage, update)
            done[key] = done.get(key, 0) + 1
            last = done[key] == schedule.microbatches_per_update and action.kind != "F"
            yield Event(
                "run", action.stage, action.kind, action.microbatch, last=last, update=update,
                action=position, text=text,
            )  # fmt: skip
        elif action.kind in SENDS:
            sent.append(action)
            yield _message("send", action, position, text)
        elif action.kind in RECEIVES:
            if not posted:
                posted.append(upcoming.popleft())
                yield _message("post", posted[-1], position, text)
            yield _message("take", posted.popleft(), position, text)
        else:
            kind: EventKind = "reduce" if action.kind == "REDUCE" else "update"
            yield Event(kind, action.stage, action=position, text=text)
    for item in sent:
        yield _message("release", item, len(actions), "")


def _message(kind: EventKind, action: Action, position: int, text: str) -> Event:
    assert action.peer is not None
    return Event(
        kind, action.stage, action.kind[-1], action.microbatch, action.peer, action=position,
        text=text,
    )  # fmt: skip
