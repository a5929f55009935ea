"""Puts the messages between stages into a schedule."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

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
    known: dict[tuple[Kind, int], tuple[int, ...]] = {}  # targets on other ranks
    sends: list[list[tuple[Action, ...]]] = []
    # For each pair of ranks (from, to) the messages on their way, in the order sent.
    wires: dict[tuple[int, int], deque[Action]] = {}
    for rank, row in enumerate(rows):
        sends.append([])
        for action in row:
            key = action.kind, action.stage
            targets = known.get(key)
            if targets is None:
                targets = tuple(t for t in checked.targets(action) if ranks[t] != rank)
                known[key] = targets
            kind: Kind = "SEND_F" if action.kind == "F" else "SEND_B"
            made = tuple(Action(kind, action.stage, action.microbatch, t) for t in targets)
            sends[-1].append(made)
            for send, target in zip(made, targets, strict=True):
                wires.setdefault((rank, ranks[target]), deque()).append(send)
    return replace(
        schedule,
        actions=tuple(
            tuple(_with_messages(rank, row, sends[rank], checked, ranks, wires))
            for rank, row in enumerate(rows)
        ),
    )


@lru_cache(maxsize=512)
def with_messages(
    schedule: Schedule, edges: frozenset[Edge] | None, gradient_edges: frozenset[Edge] | None
) -> Schedule:
    """`add_communication`, once for equal schedules and edges."""
    return add_communication(schedule, edges, gradient_edges)


def _with_messages(
    rank: int,
    row: list[Action],
    sends: list[tuple[Action, ...]],
    edges: Edges,
    ranks: tuple[int, ...],
    wires: dict[tuple[int, int], deque[Action]],
) -> Iterator[Action]:
    received: set[Action] = set()
    known: dict[tuple[Kind, int], tuple[int, ...]] = {}  # sources on other ranks
    for action, own in zip(row, sends, strict=True):
        key = action.kind, action.stage
        sources = known.get(key)
        if sources is None:
            sources = tuple(s for s in edges.sources(action) if ranks[s] != rank)
            known[key] = sources
        for source in sources:
            kind: Kind = "RECV_F" if action.kind == "F" else "RECV_B"
            needed = Action(kind, action.stage, action.microbatch, source)
            wire = wires.get((ranks[source], rank), deque())
            while needed not in received and wire:
                receive = wire.popleft().counterpart
                received.add(receive)
                yield receive
        yield action
        yield from own
