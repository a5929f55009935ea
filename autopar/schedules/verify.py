"""Checks that a schedule trains: any list of actions that passes can be run."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autopar.schedules.actions import (
    BACKWARDS,
    INPUT_GRADIENTS,
    MESSAGES,
    SENDS,
    WEIGHT_GRADIENTS,
    Action,
    Kind,
    Schedule,
)
from autopar.schedules.communicate import Edge, Edges, make_edges
from autopar.schedules.execute import execution_order, fault

Places = dict[Action, tuple[int, int]]
"""Rank and position of every action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a schedule holds at most, in microbatches; all follows from the order alone.

    Attributes:
        in_flight: For each stage microbatches between forward and the end of backward, ``B`` or
            ``W``.
        before_input_gradient: For each stage those between forward and ``B`` or ``I``.
        before_weight_gradient: For each stage those between ``I`` and ``W``.
        rank_in_flight: For each rank the most at one time over all its stages, each microbatch
            counted once per stage.
        weight_versions: For each stage the versions of its weights that must be held.
    """

    in_flight: tuple[int, ...]
    before_input_gradient: tuple[int, ...]
    before_weight_gradient: tuple[int, ...]
    rank_in_flight: tuple[int, ...]
    weight_versions: tuple[int, ...]


def check(
    schedule: Schedule,
    edges: Collection[Edge] | None = None,
    gradient_edges: Collection[Edge] | None = None,
) -> Report:
    """Checks `schedule`, with or without messages, and says what it holds.

    Every stage has one forward for every microbatch and one backward, whole or in two halves,
    after it; it reduces once per update, after all backwards of it, and updates after that, in
    order; the weights that a forward uses are there. Messages, if there are any, are those that
    the edges need, and any two ranks agree on their order. It does not hang.

    Args:
        schedule: The schedule.
        edges: Pairs (from, to) of stages with a boundary tensor; every stage and the next by
            default.
        gradient_edges: Those whose tensors get a gradient; all by default.

    Raises:
        PlanError: If something is wrong; the message shows where.
    """
    checked = make_edges(schedule.num_stages, edges, gradient_edges)
    places = _places(schedule)
    _check_complete(schedule, places)
    _check_order(schedule, places)
    _check_weights(schedule, places)
    if schedule.has_messages:
        _check_messages(schedule, checked, places)
        _check_wires(schedule)
    deque(execution_order(schedule, checked), maxlen=0)
    return _report(schedule)


def _places(schedule: Schedule) -> Places:
    places: Places = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if not 0 <= action.stage < schedule.num_stages:
                what = f"{action} is of a stage that is not there"
                raise fault(schedule, what, {rank: index}, expected=_range(schedule.num_stages))
            owner = schedule.stage_ranks[action.stage]
            if owner != rank:
                what = f"{action} is on rank {rank}"
                raise fault(schedule, what, {rank: index}, expected=f"it on rank {owner}")
            by_update = action.kind in ("REDUCE", "UPDATE")
            count = schedule.updates if by_update else schedule.num_microbatches
            if not 0 <= action.microbatch < count:
                noun = "an update" if by_update else "a microbatch"
                what = f"{action} is of {noun} that is not there"
                raise fault(schedule, what, {rank: index}, expected=_range(count))
            if action in places:
                raise fault(schedule, f"{action} comes twice", {rank: index})
            places[action] = (rank, index)
    return places


def _range(count: int) -> str:
    return f"0 to {count - 1}" if count else "none: this schedule has forwards only"


def _check_complete(schedule: Schedule, places: Places) -> None:
    for stage, rank in enumerate(schedule.stage_ranks):
        end = {rank: len(schedule.actions[rank])}
        for microbatch in range(schedule.num_microbatches):
            there = {
                kind for kind in ("F", *BACKWARDS) if Action(kind, stage, microbatch) in places
            }
            allowed = ({"F", "B"}, {"F", "I", "W"}) if schedule.updates else ({"F"},)
            if there not in allowed:
                raise fault(
                    schedule,
                    f"stage {stage} has {' '.join(sorted(there)) or 'nothing'} for microbatch"
                    f" {microbatch}",
                    {rank: places[Action("B", stage, microbatch)][1]} if "B" in there else end,
                    expected=" or ".join(" ".join(sorted(kinds)) for kinds in allowed),
                )
        for update in range(schedule.updates):
            for kind in _ENDS:
                if Action(kind, stage, update) not in places:
                    raise fault(schedule, f"{Action(kind, stage, update)} is missing", end)


_ENDS: tuple[Kind, ...] = ("REDUCE", "UPDATE")


def _check_order(schedule: Schedule, places: Places) -> None:
    for first, then in _orders(schedule):
        if first in places and then in places and places[first][1] > places[then][1]:
            rank, index = places[then]
            raise fault(schedule, f"{then} comes before {first}", {rank: index})


def _orders(schedule: Schedule) -> Iterator[tuple[Action, Action]]:
    """Pairs of actions of one stage that must come in this order, where both are there."""
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_microbatches):
            forward, half = Action("F", stage, k), Action("I", stage, k)
            yield forward, Action("B", stage, k)
            yield forward, half
            yield half, Action("W", stage, k)
            if schedule.updates:
                reduce = Action("REDUCE", stage, schedule.update_of(k))
                yield Action("B", stage, k), reduce
                yield Action("W", stage, k), reduce
        for update in range(schedule.updates):
            yield Action("REDUCE", stage, update), Action("UPDATE", stage, update)
            yield Action("UPDATE", stage, update - 1), Action("UPDATE", stage, update)


def _check_weights(schedule: Schedule, places: Places) -> None:
    """Forwards that use weights of this step come after the update that makes them."""
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_microbatches):
            made_by = Action("UPDATE", stage, schedule.version(stage, k) - 1)
            if made_by not in places:
                continue  # weights of earlier steps
            rank, index = places[Action("F", stage, k)]
            if places[made_by][1] > index:
                raise fault(
                    schedule,
                    f"{Action('F', stage, k)} uses weights that {made_by} makes after it",
                    {rank: index},
                    expected=f"weights {schedule.delay(stage)} updates old",
                )


def _check_messages(schedule: Schedule, edges: Edges, places: Places) -> None:
    """Messages are those that the edges need, sends after and receives before their use."""
    ranks, needed = schedule.stage_ranks, set()
    pairs: list[tuple[Kind, Edge]] = [("SEND_F", edge) for edge in sorted(edges.forward)]
    if schedule.updates:
        pairs += [("SEND_B", (end, start)) for start, end in sorted(edges.backward)]
    for kind, (source, target) in pairs:
        if ranks[source] != ranks[target]:
            for microbatch in range(schedule.num_microbatches):
                send = Action(kind, source, microbatch, target)
                needed |= {send, send.counterpart}
    for action, (rank, index) in places.items():
        if action.kind in MESSAGES and action not in needed:
            raise fault(schedule, f"{action} is a message that no edge needs", {rank: index})
    for action in sorted(needed):
        rank, (user, used_at) = ranks[action.stage], _user(action, places)
        if action not in places:
            side = "after" if action.kind in SENDS else "before"
            raise fault(schedule, f"{action} is missing {side} {user}", {rank: used_at})
        index = places[action][1]
        if (used_at > index) == (action.kind in SENDS):
            sides = (action, user) if action.kind in SENDS else (user, action)
            raise fault(schedule, f"{sides[0]} comes before {sides[1]}", {rank: index})


def _user(message: Action, places: Places) -> tuple[Action, int]:
    """The action that makes what `message` sends, or needs what it receives."""
    forward: tuple[Kind, ...] = ("F",)
    for kind in forward if message.kind in ("SEND_F", "RECV_F") else sorted(INPUT_GRADIENTS):
        action = Action(kind, message.stage, message.microbatch)
        if action in places:
            return action, places[action][1]
    raise AssertionError(f"{message} has no forward or backward")


def _check_wires(schedule: Schedule) -> None:
    """Any two ranks agree on the order of their messages."""
    wires: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            if action.kind in MESSAGES:
                assert action.peer is not None
                other = schedule.stage_ranks[action.peer]
                side = 0 if action.kind in SENDS else 1
                wire = (other, rank) if side else (rank, other)
                wires.setdefault(wire, ([], []))[side].append(index)
    for (source, target), (sends, receives) in wires.items():
        for sent_at, received_at in zip(sends, receives, strict=True):
            send = schedule.actions[source][sent_at]
            receive = schedule.actions[target][received_at]
            if send.counterpart != receive:
                raise fault(
                    schedule,
                    f"rank {source} sends {send} where rank {target} takes {receive}",
                    {source: sent_at, target: received_at},
                    expected="messages between two ranks received in the order they are sent",
                )


def _report(schedule: Schedule) -> Report:
    stages = schedule.num_stages
    whole, before, after, versions = ([0] * stages for _ in range(4))
    ranks = [0] * schedule.num_ranks
    for rank, row in enumerate(schedule.actions):
        own = {stage: _Held(schedule, stage) for stage in schedule.stages_of(rank)}
        for stage, held in own.items():
            versions[stage] = held.versions
        for action in row:
            held = own[action.stage]
            held.do(action)
            stage = action.stage
            before[stage] = max(before[stage], len(held.before))
            after[stage] = max(after[stage], len(held.after))
            whole[stage] = max(whole[stage], len(held.before) + len(held.after))
            versions[stage] = max(versions[stage], held.versions)
            everything = sum(len(h.before) + len(h.after) for h in own.values())
            ranks[rank] = max(ranks[rank], everything)
    return Report(
        in_flight=tuple(whole),
        before_input_gradient=tuple(before),
        before_weight_gradient=tuple(after),
        rank_in_flight=tuple(ranks),
        weight_versions=tuple(versions),
    )


class _Held:
    """Microbatches and versions of weights that a stage holds."""

    def __init__(self, schedule: Schedule, stage: int) -> None:
        self.schedule, self.stage = schedule, stage
        self.before: set[int] = set()  # done F, neither B nor I
        self.after: set[int] = set()  # done I, not W
        self.finished = [False] * schedule.num_microbatches
        self.oldest = 0  # microbatch that is not finished
        self.updates = 0

    def do(self, action: Action) -> None:
        k = action.microbatch
        if action.kind == "F":
            self.before.add(k)
        if action.kind in INPUT_GRADIENTS:
            self.before.discard(k)
        if action.kind == "I":
            self.after.add(k)
        if action.kind in WEIGHT_GRADIENTS:
            self.after.discard(k)
            self.finished[k] = True
            while self.oldest < len(self.finished) and self.finished[self.oldest]:
                self.oldest += 1
        if action.kind == "UPDATE":
            self.updates += 1

    @property
    def versions(self) -> int:
        """From the oldest that a microbatch, also of the next step, will use to the newest."""
        if not self.schedule.updates:
            return 1
        oldest = self.schedule.update_of(self.oldest) - self.schedule.delay(self.stage)
        return max(1, self.updates - oldest + 1)
