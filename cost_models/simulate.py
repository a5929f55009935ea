"""A step in time: the actions of a schedule over the streams of every rank.

The actions are those the runtime executes, in its order. A rank has one thread that computes and
issues, and beside it collectives and messages under way:

    compute     kernels, and collectives whose result the next kernel needs
    collective  collectives beside computation: gradients of full buckets, weights gathered ahead
    message     tensors between stages, one after the other between two ranks

What a collective beside computation takes from it (multiprocessors, memory bandwidth; on a CPU the
cores) is a share of the time that both overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from autopar.schedules.actions import MESSAGES, RECEIVES, SENDS, Action, Schedule
from autopar.schedules.communicate import Edge, make_edges, with_messages
from autopar.schedules.execute import execution_order

Stream = Literal["compute", "collective", "message"]
Edges = frozenset[Edge]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What an action asks of its rank.

    Attributes:
        compute_s: Kernels.
        inline_s: Collectives for whose result computation waits.
        beside_s: Collectives beside computation.
        parts: Into how many they are cut; they become ready evenly over the action.
        joins: Whether the action ends only when these are done. Otherwise ``REDUCE`` of the stage
            waits for them.
    """

    compute_s: float = 0.0
    inline_s: float = 0.0
    beside_s: float = 0.0
    parts: int = 1
    joins: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """An action, or collectives of an action, in seconds from the start of the step.

    Attributes:
        action: The action.
        stream: Where it happens.
        start_s: Its start.
        end_s: Its end. A receive lasts as long as the rank waits for it.
    """

    action: Action
    stream: Stream
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the step of a rank goes; the parts add up to the step.

    Attributes:
        compute_s: Kernels, what collectives beside them slow them down included.
        inline_s: Collectives for whose result computation waits.
        exposed_s: Waiting for collectives that were started earlier.
        idle_s: Waiting for other stages, and for the slowest rank at the end.
    """

    compute_s: float
    inline_s: float
    exposed_s: float
    idle_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.inline_s + self.exposed_s + self.idle_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step of all pipeline ranks.

    Attributes:
        schedule: The schedule, with messages: for each rank its actions as they are executed.
        spans: For each rank the start and end of each of its actions, in seconds.
        beside: For each rank the collectives beside them.
        splits: Where the step of each rank goes.
        step_s: Seconds until the last rank is done.
    """

    schedule: Schedule
    spans: tuple[tuple[tuple[float, float], ...], ...]
    beside: tuple[tuple[Event, ...], ...]
    splits: tuple[Split, ...]
    step_s: float

    def events(self, rank: int) -> tuple[Event, ...]:
        """The actions of a rank in order."""
        pairs = zip(self.schedule.actions[rank], self.spans[rank], strict=True)
        return tuple(
            Event(action, "message" if action.kind in MESSAGES else "compute", *span)
            for action, span in pairs
        )

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time that is spent waiting for other stages."""
        total = self.step_s * len(self.splits)
        return sum(split.idle_s for split in self.splits) / total if total else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """A schedule, ready to be timed again and again.

    Attributes:
        schedule: It, with messages.
        steps: Rank and action in an order that can happen, with the number of the message of a
            send or receive.
        messages: Rank that sends and number of the pair of ranks, by number of the message.
        wires: Pairs of ranks between which there are messages.
    """

    schedule: Schedule
    steps: tuple[tuple[int, Action, int], ...]
    messages: tuple[int, ...]
    wires: int


@lru_cache(maxsize=256)
def _ordered(schedule: Schedule, edges: Edges | None, gradient_edges: Edges | None) -> _Order:
    if not schedule.has_messages:
        schedule = with_messages(schedule, edges, gradient_edges)
    places = schedule.stage_ranks
    numbers: dict[Action, int] = {}
    wires: dict[tuple[int, int], int] = {}
    steps: list[tuple[int, Action, int]] = []
    messages: list[int] = []
    known = make_edges(schedule.num_stages, edges, gradient_edges)
    for rank, place in execution_order(schedule, known):
        action, number = schedule.actions[rank][place], -1
        if action.kind in SENDS:
            assert action.peer is not None
            number = numbers[action.counterpart] = len(messages)
            messages.append(wires.setdefault((rank, places[action.peer]), len(wires)))
        elif action.kind in RECEIVES:
            number = numbers[action]
        steps.append((rank, action, number))
    return _Order(schedule, tuple(steps), tuple(messages), len(wires))


@dataclass(slots=True)
class _Rank:
    """What is known of a rank up to now."""

    now: float = 0.0
    collective_free: float = 0.0
    pending: dict[int, float] = field(default_factory=dict)  # stage: end of its collectives
    compute: float = 0.0
    inline: float = 0.0
    exposed: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)
    beside: list[Event] = field(default_factory=list)

    def run(self, action: Action, task: Task, slowdown: float) -> None:
        """Compute, with collectives beside it."""
        start = self.now
        end = start + task.compute_s + task.inline_s
        done = start
        if task.beside_s:
            done = self._beside(action, task, start, end)
            hidden = min(done, end) - max(start, done - task.beside_s)
            slower = slowdown * max(0.0, min(hidden, task.compute_s))
            end, self.compute = end + slower, self.compute + slower
        self.compute += task.compute_s
        self.inline += task.inline_s
        if task.joins:
            end = self._wait(end, done)
        elif done > end:
            self.pending[action.stage] = max(done, self.pending.get(action.stage, 0.0))
        self.put(start, end)

    def _beside(self, action: Action, task: Task, start: float, end: float) -> float:
        """Part k of n is ready after k/n of the action, and runs when the one before is through."""
        each, gap = task.beside_s / task.parts, (end - start) / task.parts
        first = max(self.collective_free, start + gap)
        done = max(first + task.beside_s, end + each)
        self.beside.append(Event(action, "collective", first, done))
        self.collective_free = done
        return done

    def join(self, action: Action, task: Task) -> None:
        """Wait for the collectives of a stage."""
        start = self.now
        end = self._wait(start, self.pending.pop(action.stage, start))
        self.now = end
        self.run(action, task, 0.0)
        self.spans[-1] = (start, self.now)

    def _wait(self, ready: float, done: float) -> float:
        if done > ready:
            self.exposed += done - ready
            return done
        return ready

    def put(self, start: float, end: float) -> None:
        """Note when an action happens."""
        self.spans.append((start, end))
        self.now = end

    def split(self, step_s: float) -> Split:
        """Where the step of this rank has gone."""
        used = self.compute + self.inline + self.exposed
        return Split(
            compute_s=self.compute,
            inline_s=self.inline,
            exposed_s=self.exposed,
            idle_s=max(0.0, step_s - used),
        )


def simulate(
    schedule: Schedule,
    task_of: Callable[[Action], Task],
    transfer_s: Callable[[Action], float],
    *,
    edges: Collection[Edge] | None = None,
    gradient_edges: Collection[Edge] | None = None,
    slowdown: float = 0.0,
) -> Timeline:
    """When everything in a step happens.

    Args:
        schedule: A schedule that passes `autopar.schedules.verify.check`; messages are added where
            it has none.
        task_of: What an action that is no message asks of its rank.
        transfer_s: Seconds of the message of a send.
        edges: Pairs (from, to) of stages with a boundary tensor; every stage and the next by
            default.
        gradient_edges: Those whose tensors get a gradient; all by default.
        slowdown: Seconds that computation loses per second of a collective beside it.

    Raises:
        PlanError: If the schedule hangs.
    """
    order = _ordered(
        schedule,
        None if edges is None else frozenset(edges),
        None if gradient_edges is None else frozenset(gradient_edges),
    )
    ranks = [_Rank() for _ in range(schedule.num_ranks)]
    free = [0.0] * order.wires  # when the last message between two ranks is through
    arrival = [0.0] * len(order.messages)
    for number, action, message in order.steps:
        rank, kind = ranks[number], action.kind
        start = rank.now
        if message < 0:
            task = task_of(action)
            if kind == "REDUCE":
                rank.join(action, task)
            elif task.beside_s:
                rank.run(action, task, slowdown)
            else:  # as `run` does, which is called a thousand times for this
                rank.compute += task.compute_s
                rank.inline += task.inline_s
                rank.now = end = start + task.compute_s + task.inline_s
                rank.spans.append((start, end))
        elif kind in SENDS:
            wire = order.messages[message]
            begin = start if start > free[wire] else free[wire]
            free[wire] = arrival[message] = begin + transfer_s(action)
            rank.spans.append((start, start))
        else:
            if arrival[message] > start:
                rank.now = arrival[message]
            rank.spans.append((start, rank.now))
    step_s = max((max(rank.now, rank.collective_free) for rank in ranks), default=0.0)
    return Timeline(
        schedule=order.schedule,
        spans=tuple(tuple(rank.spans) for rank in ranks),
        beside=tuple(tuple(rank.beside) for rank in ranks),
        splits=tuple(rank.split(step_s) for rank in ranks),
        step_s=step_s,
    )
