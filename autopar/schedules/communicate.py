"""Puts the messages between stages into a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from autopar.errors import PlanError
from autopar.schedules.actions import MESSAGES, Action, Kind, Schedule

Edge = tuple[int, int]
_Stages = dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Edges:
    """Which stages hand tensors to which.

    Attributes:
        forward: Pairs (from, to) of stages with a boundary tensor between them, from < to;
            skipping stages is fine.
        backward: Those of `forward` whose tensors get a gradient.
    """

    forward: frozenset[Edge]
    backward: frozenset[Edge]
    _lower: dict[str, _Stages] = field(init=False, repr=False, compare=False)
    _higher: dict[str, _Stages] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        forward, backward = _neighbours(self.forward), _neighbours(self.backward)
        lower, higher = ({"F": forward[k], "B": backward[k], "I": backward[k]} for k in (0, 1))
        object.__setattr__(self, "_lower", lower)
        object.__setattr__(self, "_higher", higher)

    def sources(self, action: Action) -> tuple[int, ...]:
        """Stages whose tensors `action` needs, lowest first."""
        side = self._lower if action.kind == "F" else self._higher
        return side.get(action.kind, _NONE).get(action.stage, ())

    def targets(self, action: Action) -> tuple[int, ...]:
        """Stages that need the tensors of `action`, lowest first."""
        side = self._higher if action.kind == "F" else self._lower
        return side.get(action.kind, _NONE).get(action.stage, ())


_NONE: _Stages = {}


def _neighbours(edges: Collection[Edge]) -> tuple[_Stages, _Stages]:
    """For every stage those that edges come from, and those that they lead to, lowest first."""
    lower: dict[int, list[int]] = {}
    higher: dict[int, list[int]] = {}
    for start, end in sorted(edges):
        higher.setdefault(start, []).append(end)
        lower.setdefault(end, []).append(start)
    return ({k: tuple(v) for k, v in lower.items()}, {k: tuple(v) for k, v in higher.items()})


def make_edges(
    num_stages: int,
    forward: Collection[Edge] | None = None,
    backward: Collection[Edge] | None = None,
) -> Edges:
    """Checked edges between `num_stages` stages.

    Args:
        num_stages: Number of stages.
        forward: Pairs of stages with a boundary tensor; every stage and the next by default.
        backward: Those whose tensors get a gradient; all by default.

    Raises:
        PlanError: If an edge leads backward or to a stage that is not there.
    """
    pairs = ((stage, stage + 1) for stage in range(num_stages - 1))
    there = frozenset(pairs if forward is None else forward)
    for start, end in sorted(there):
        if not 0 <= start < end < num_stages:
            raise PlanError(
                f"a boundary tensor from stage {start} to stage {end} of {num_stages}",
                expected="a tensor from a lower stage to a higher one",
            )
    back = there if backward is None else frozenset(backward)
    if extra := sorted(back - there):
        raise PlanError(f"gradients between the stages {extra}, which pass no tensor on")
    return Edges(there, back)


def add_communication(
    schedule: Schedule,
    edges: Collection[Edge] | None = None,
    gradient_edges: Collection[Edge] | None = None,
) -> Schedule:
    """`schedule` with a message for every boundary tensor between stages of different ranks.

    A send comes right after the action that makes its tensor, lowest target first. A receive
    comes right before the action that needs it, but after those of all messages that the same
    rank has sent before: between two ranks messages have no names, so both must agree on their
    order. Nobody waits longer for it: what was sent before a message is there when that is.

    Args:
        schedule: A schedule; messages in it are replaced.
        edges: Pairs (from, to) of stages with a boundary tensor; every stage and the next by
            default.
        gradient_edges: Those whose tensors get a gradient; all by default.
    """
    checked = make_edges(schedule.num_stages, edges, gradient_edges)
    rows = [[a for a in row if a.kind not in MESSAGES] for row in schedule.actions]
    ranks = schedule.stage_ranks
    # For each pair of ranks (from, to) the messages on their way, in the order sent.
    wires: dict[tuple[int, int], deque[Action]] = {}
    for row in rows:
        for action in row:
            for send in _sends(action, checked, ranks):
                assert send.peer is not None
                wire = (ranks[send.stage], ranks[send.peer])
                wires.setdefault(wire, deque()).append(send)
    return replace(
        schedule,
        actions=tuple(
            tuple(_with_messages(rank, row, checked, ranks, wires)) for rank, row in enumerate(rows)
        ),
    )


def _with_messages(
    rank: int,
    row: list[Action],
    edges: Edges,
    ranks: tuple[int, ...],
    wires: dict[tuple[int, int], deque[Action]],
) -> Iterator[Action]:
    received: set[Action] = set()
    for action in row:
        kind: Kind = "RECV_F" if action.kind == "F" else "RECV_B"
        for source in edges.sources(action):
            if ranks[source] == rank:
                continue
            needed = Action(kind, action.stage, action.microbatch, source)
            wire = wires.get((ranks[source], rank), deque())
            while needed not in received and wire:
                receive = wire.popleft().counterpart
                received.add(receive)
                yield receive
        yield action
        yield from _sends(action, edges, ranks)


def _sends(action: Action, edges: Edges, ranks: tuple[int, ...]) -> Iterator[Action]:
    kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
    for target in edges.targets(action):
        if ranks[target] != ranks[action.stage]:
            yield Action(kind, action.stage, action.microbatch, target)
