"""Runs a schedule in mind: what can happen after what, and where it hangs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autopar.errors import PlanError
from autopar.schedules.actions import RECEIVES, SENDS, Action, Schedule
from autopar.schedules.communicate import Edges
from autopar.schedules.text import grid


def fault(
    schedule: Schedule, what: str, marks: Mapping[int, int], *, expected: str | None = None
) -> PlanError:
    """The error that `what` is wrong with the actions at `marks` (rank to position)."""
    places = ", ".join(f"rank {rank} at action {index}" for rank, index in marks.items())
    rows = dict(enumerate(schedule.actions))
    return PlanError(
        f"schedule {schedule.name!r}: {what}",
        expected=expected,
        where=f"{places}\n{grid(rows, marks)}",
    )


def execution_order(schedule: Schedule, edges: Edges) -> Iterator[tuple[int, int]]:
    """Rank and position of every action, in an order in which they can happen.

    A send never waits. A receive waits until its message has been sent. In a schedule without
    messages a forward or backward waits for those of the stages it gets tensors from.

    Raises:
        PlanError: If all ranks wait; the message marks at what.
    """
    state = _State(schedule, edges)
    positions = [0] * schedule.num_ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            while positions[rank] < len(row) and state.ready(rank, row[positions[rank]]):
                state.do(rank, row[positions[rank]])
                yield rank, positions[rank]
                positions[rank] += 1
                moved = True
    stuck = {
        rank: index for rank, index in enumerate(positions) if index < len(schedule.actions[rank])
    }
    if stuck:
        waits = (
            f"{schedule.actions[rank][index]} on rank {rank} waits for"
            f" {state.waits_for(rank, schedule.actions[rank][index])}"
            for rank, index in stuck.items()
        )
        raise fault(schedule, "deadlock: " + "; ".join(waits), stuck)


class _State:
    """What has happened so far."""

    def __init__(self, schedule: Schedule, edges: Edges) -> None:
        self.ranks = schedule.stage_ranks
        self.messages = schedule.has_messages
        self.edges = edges
        self.done: set[Action] = set()
        self.waits: dict[tuple[str, int], tuple[int, ...]] = {}  # sources by kind and stage
        # Messages under way, by the ranks (from, to).
        self.sent: dict[tuple[int, int], int] = {}

    def ready(self, rank: int, action: Action) -> bool:
        if action.kind in RECEIVES:
            assert action.peer is not None
            return self.sent.get((self.ranks[action.peer], rank), 0) > 0
        return not self._missing(rank, action)

    def do(self, rank: int, action: Action) -> None:
        self.done.add(action)
        if action.kind in SENDS:
            assert action.peer is not None
            wire = (rank, self.ranks[action.peer])
            self.sent[wire] = self.sent.get(wire, 0) + 1
        elif action.kind in RECEIVES:
            assert action.peer is not None
            self.sent[self.ranks[action.peer], rank] -= 1

    def waits_for(self, rank: int, action: Action) -> str:
        if action.kind in RECEIVES:
            return str(action.counterpart)
        return " and ".join(map(str, self._missing(rank, action)))

    def _missing(self, rank: int, action: Action) -> list[Action]:
        """Forwards or backwards that `action` waits for."""
        key = action.kind, action.stage
        sources = self.waits.get(key)
        if sources is None:  # for those of other ranks, receives are waited for instead
            sources = tuple(
                source
                for source in self.edges.sources(action)
                if not self.messages or self.ranks[source] == rank
            )
            self.waits[key] = sources
        missing = []
        for source in sources:
            whole = Action("F" if action.kind == "F" else "B", source, action.microbatch)
            half = Action("I", source, action.microbatch)
            if whole not in self.done and (action.kind == "F" or half not in self.done):
                missing.append(whole)
        return missing
