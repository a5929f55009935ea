"""When everything in a schedule happens, given what each action costs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from autopar.schedules.actions import MESSAGES, RECEIVES, SENDS, Action, Schedule
from autopar.schedules.communicate import Edge, add_communication, make_edges
from autopar.schedules.execute import execution_order


@dataclass(frozen=True, slots=True)
class Event:
    """An action and its time in seconds from the start of the step."""

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule in time.

    Attributes:
        schedule: The schedule, with messages.
        events: For each rank its actions in order. A receive lasts as long as it waits.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]

    def work(self, rank: int) -> tuple[Event, ...]:
        """Events of `rank` that are not messages."""
        return tuple(e for e in self.events[rank] if e.action.kind not in MESSAGES)

    @property
    def makespan_s(self) -> float:
        """Seconds from start to the end of the last action of any rank."""
        return max((row[-1].end_s for row in self.events if row), default=0.0)

    def busy_s(self, rank: int) -> float:
        """Seconds that `rank` works."""
        return sum(event.duration_s for event in self.work(rank))

    def span_s(self, rank: int) -> float:
        """Seconds from the start of the first to the end of the last work of `rank`."""
        work = self.work(rank)
        return work[-1].end_s - work[0].start_s if work else 0.0

    def bubble_s(self, rank: int) -> float:
        """Seconds that `rank` does not work."""
        return self.makespan_s - self.busy_s(rank)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time without work."""
        ranks = range(len(self.events))
        total = len(self.events) * self.makespan_s
        return sum(map(self.bubble_s, ranks)) / total if total else 0.0


def durations(
    *,
    forward_s: float = 1.0,
    input_gradient_s: float = 1.0,
    weight_gradient_s: float = 1.0,
    reduce_s: float = 0.0,
    update_s: float = 0.0,
) -> Callable[[Action], float]:
    """The same costs for every stage and microbatch; ``B`` costs as much as ``I`` and ``W``."""
    costs = {
        "F": forward_s,
        "I": input_gradient_s,
        "W": weight_gradient_s,
        "B": input_gradient_s + weight_gradient_s,
        "REDUCE": reduce_s,
        "UPDATE": update_s,
    }
    return lambda action: costs[action.kind]


def simulate(
    schedule: Schedule,
    duration_s: Callable[[Action], float],
    transfer_s: Callable[[Action], float] | float = 0.0,
    *,
    edges: Collection[Edge] | None = None,
    gradient_edges: Collection[Edge] | None = None,
) -> Timeline:
    """When every action starts and ends.

    A rank does one thing at a time, in order. A send costs its rank nothing; messages from one
    rank to another travel one after the other.

    Args:
        schedule: A schedule that passes `check`; messages are added where it has none.
        duration_s: Seconds of an action that is not a message.
        transfer_s: Seconds of the message of a send.
        edges: Pairs (from, to) of stages with a boundary tensor; every stage and the next by
            default.
        gradient_edges: Those whose tensors get a gradient; all by default.

    Raises:
        PlanError: If the schedule hangs.
    """
    if not schedule.has_messages:
        schedule = add_communication(schedule, edges, gradient_edges)
    ranks = schedule.stage_ranks
    now = [0.0] * schedule.num_ranks
    free: dict[tuple[int, int], float] = {}  # when the last message between two ranks is through
    arrival: dict[Action, float] = {}
    events: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
    order = execution_order(schedule, make_edges(schedule.num_stages, edges, gradient_edges))
    for rank, index in order:
        action = schedule.actions[rank][index]
        start = end = now[rank]
        if action.kind in SENDS:
            assert action.peer is not None
            wire = (rank, ranks[action.peer])
            seconds = transfer_s if isinstance(transfer_s, float | int) else transfer_s(action)
            free[wire] = max(start, free.get(wire, 0.0)) + seconds
            arrival[action.counterpart] = free[wire]
        elif action.kind in RECEIVES:
            end = max(start, arrival[action])
        else:
            end = start + duration_s(action)
        now[rank] = end
        events[rank].append(Event(action, start, end))
    return Timeline(schedule=schedule, events=tuple(map(tuple, events)))
