"""Memory of messages: who holds it, and what it adds to live bytes.

A message to another rank is held until it is known to have arrived, in a copy if it does not lie as
a message does. Stages of one rank hand memory itself to each other, so that what a stage keeps for
backward may be what the next one reads and keeps: it counts once and is freed by its last holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models.handover import Handed
from autopar.cost_models.live import Live
from autopar.cost_models.stages import StageModel
from autopar.cost_models.tape.liveness import kept_for_later
from autopar.cost_models.tape.tensors import Memory

_Key = tuple[int, Memory, int]  # stage that made it, memory, microbatch
_Place = tuple[int, str, str, int]  # stage, way, name of the value, microbatch
_GIVES = {"F": "F", "B": "B", "I": "B"}


@dataclass(slots=True)
class _Held:
    """Memory that several stages may hold."""

    size_bytes: int
    kind: str
    holders: int = 0


@dataclass(frozen=True, slots=True)
class _Sent:
    """What one message does: bytes of copies, bytes freed when it is sent, and when it arrives."""

    copied: int
    freed: int
    released: int


@dataclass(frozen=True, slots=True)
class _Taken:
    """Memory that a program takes and that others may hold too.

    Attributes:
        memory: The memory.
        kind: What it is for.
        way: Of what came to the stage ``F`` or ``B``; empty for what it gave itself.
        value: Of what came to it the name of the value.
        saves: Whether the program hands it on to a later one.
    """

    memory: Memory
    kind: str
    way: str
    value: str
    saves: bool


class Frames:
    """Memory of the messages of a rank.

    Args:
        models: The stages of the rank.
        live: Its live bytes.
    """

    def __init__(self, models: Mapping[int, StageModel], live: Live) -> None:
        self.models, self.live = models, live
        self.held: dict[_Key, _Held] = {}
        self.places: dict[_Place, _Key] = {}
        self.sent: dict[tuple[int, str, int], _Sent] = {}
        self.came: dict[tuple[int, str, int], list[int]] = {}
        # Values that several stages get, and places of gradients of which the first has come.
        self.many = {
            item.value
            for model in models.values()
            for item in model.passing.given["F"]
            if len(item.peers) > 1
        }
        self.there: set[_Place] = set()
        # Memory that is counted by holder, by stage and way.
        self.shared = {
            (stage, way): self._shared(model.passing.given[way], way)
            for stage, model in models.items()
            for way in ("F", "B")
        }
        self.taken: dict[tuple[int, str], tuple[_Taken, ...]] = {}
        self.local = {
            stage
            for (stage, way), shared in self.shared.items()
            if shared
            for stage in (stage, *self._peers(stage, way))
            if stage in models
        }

    def _peers(self, stage: int, way: str) -> list[int]:
        return [peer for item in self.models[stage].passing.given[way] for peer in item.peers]

    def _shared(self, given: tuple[Handed, ...], way: str) -> frozenset[Memory]:
        # A gradient that the stage keeps too may be wanted less long than the message.
        return frozenset(
            item.memory
            for item in given
            if item.missing
            or any(peer in self.models for peer in item.peers)
            or (way == "B" and item.kept)
        )

    # Programs

    def take(self, stage: int, kind: str, microbatch: int) -> tuple[frozenset[Memory], int]:
        """A program takes what came, and what the stage kept.

        Returns:
            Memory that others still hold, and bytes that are freed beyond those the program knows.
        """
        held: set[Memory] = set()
        rest = 0
        for item in self._takes(stage, kind):
            key: _Key | None = (stage, item.memory, microbatch)
            if item.way:
                key = self.places.get((stage, item.way, item.value, microbatch))
            found = self.held.get(key) if key is not None else None
            if found is None or key is None:
                continue
            if item.saves:
                if found.holders > 1:
                    held.add(item.memory)
                else:
                    self.live.move(found.kind, item.kind, item.memory.size_bytes)
                    found.kind = "saved"
                continue
            found.holders -= 1
            if item.way:
                del self.places[stage, item.way, item.value, microbatch]
            if found.holders:
                held.add(item.memory)
            else:
                self.live.move(found.kind, item.kind, item.memory.size_bytes)
                rest += found.size_bytes - item.memory.size_bytes
                del self.held[key]
        return frozenset(held), rest

    def _takes(self, stage: int, kind: str) -> tuple[_Taken, ...]:
        known = self.taken.get((stage, kind))
        if known is not None:
            return known
        model = self.models[stage]
        program = model.programs.parts[kind]
        stays = kept_for_later(model.programs)[kind]
        came = {
            memory: (way, value)
            for way, values in model.passing.taken.items()
            for value, memory in values.items()
        }
        mine = self.shared[stage, "F"] | self.shared[stage, "B"]
        found = []
        for memory, name in program.taken.items():
            if memory in stays or (memory not in came and memory not in mine):
                continue
            way, value = came.get(memory, ("", ""))
            saves = kind == "F" and program.given.get(memory) == "saved"
            found.append(_Taken(memory, name, way, value, saves))
        self.taken[stage, kind] = tuple(found)
        return self.taken[stage, kind]

    def give(self, stage: int, kind: str, microbatch: int) -> None:
        """A program has left what other stages get."""
        way = _GIVES.get(kind)
        shared = self.shared.get((stage, way or ""))
        if not shared or way is None:
            return
        for item in self.models[stage].passing.given[way]:
            if item.memory not in shared:
                continue
            key = (stage, item.memory, microbatch)
            if key not in self.held:
                name = "saved" if item.kept else "boundary"
                self.held[key] = _Held(item.memory.size_bytes, name, int(item.kept))
                if item.missing:
                    self.live.add("boundary", item.size_bytes)
            for peer in item.peers:
                if peer in self.models:
                    self._give(item, way, key, (peer, way, item.value, microbatch))
                else:
                    self.held[key].holders += 1
        for memory in shared:
            self._drop((stage, memory, microbatch), 0)

    def _give(self, item: Handed, way: str, key: _Key, place: _Place) -> None:
        if not item.contiguous:
            self.live.add("boundary", item.size_bytes)
        if way == "B" and item.value in self.many and self._is_there(place):
            self._sum(place, item.size_bytes)
            if not item.contiguous:
                self.live.add("boundary", -item.size_bytes)
        elif item.contiguous:
            self.held[key].holders += 1
            self.places[place] = key

    def _is_there(self, place: _Place) -> bool:
        """Whether a gradient has come to a place before."""
        if place in self.there:
            return True
        self.there.add(place)
        return False

    def _sum(self, place: _Place, size_bytes: int) -> None:
        """A gradient is added to the one that is there, into new memory."""
        self.live.add("boundary", size_bytes)
        key = self.places.pop(place, None)
        if key is None:
            self.live.add("boundary", -size_bytes)
        else:
            self._drop(key, 1)

    def _drop(self, key: _Key, count: int) -> None:
        found = self.held.get(key)
        if found is None:
            return
        found.holders -= count
        if not found.holders:
            self.live.add(found.kind, -found.size_bytes)
            del self.held[key]

    # Messages from and to other ranks

    def post(self, stage: int, way: str, peer: int) -> None:
        """Memory for a message appears."""
        self.live.add("boundary", sum(self._came(stage, way, peer)))

    def receive(self, stage: int, way: str, peer: int, microbatch: int) -> None:
        """A message is handed over; a gradient that is not the first is added to what is there."""
        if way == "F":
            return
        for item in self.models[stage].messages:
            if item.source != stage or not item.gradient or item.target != peer:
                continue
            place = (stage, "B", item.value, microbatch)
            if item.value in self.many and self._is_there(place):
                self._sum(place, item.size_bytes)
                self.live.add("boundary", -item.size_bytes)

    def _came(self, stage: int, way: str, peer: int) -> list[int]:
        key = (stage, way, peer)
        found = self.came.get(key)
        if found is None:
            ends = (peer, stage) if way == "F" else (stage, peer)
            found = self.came[key] = [
                item.size_bytes
                for item in self.models[stage].messages
                if (item.source, item.target) == ends and (way == "F" or item.gradient)
            ]
        return found

    def send(self, stage: int, way: str, peer: int, microbatch: int) -> None:
        """A message is on its way."""
        sent = self._sent(stage, way, peer)
        if sent.copied:
            self.live.add("boundary", sent.copied)
            self.live.add("boundary", -sent.freed)
        for item in self._shared_with(stage, way, peer):
            if not item.contiguous:
                self._drop((stage, item.memory, microbatch), 1)

    def release(self, stage: int, way: str, peer: int, microbatch: int) -> None:
        """A message is known to have arrived."""
        sent = self._sent(stage, way, peer)
        if sent.released:
            self.live.add("boundary", -sent.released)
        for item in self._shared_with(stage, way, peer):
            if item.contiguous:
                self._drop((stage, item.memory, microbatch), 1)

    def _shared_with(self, stage: int, way: str, peer: int) -> list[Handed]:
        shared = self.shared[stage, way]
        if not shared:
            return []
        given = self.models[stage].passing.given[way]
        return [item for item in given if item.memory in shared and peer in item.peers]

    def _sent(self, stage: int, way: str, peer: int) -> _Sent:
        key = (stage, way, peer)
        found = self.sent.get(key)
        if found is None:
            found = self.sent[key] = self._message(*key)
        return found

    def _message(self, stage: int, way: str, peer: int) -> _Sent:
        given = self.models[stage].passing.given[way]
        mine = [item for item in given if peer in item.peers]
        copied = sum(item.size_bytes for item in mine if not item.contiguous)
        freed = released = 0
        for memory in dict.fromkeys(item.memory for item in mine):
            if memory in self.shared[stage, way]:
                continue
            uses = [item for item in given if item.memory is memory]
            plain = [item for item in uses if item.contiguous]
            # The farthest stage is the last to be known to have it.
            last = max(peer for item in plain or uses for peer in item.peers)
            if last == peer and not uses[0].kept:
                if plain:
                    released += memory.size_bytes
                else:
                    freed += memory.size_bytes
        return _Sent(copied, freed, copied + released)
