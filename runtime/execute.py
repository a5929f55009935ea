"""Executes a rank's list of schedule actions: any valid list, over any stages the rank holds.

What a microbatch needs between two programs of a stage lives in a *frame*. A frame's tensor is
handed to the last program that reads it and to nobody after, so a program frees it right after its
own last use; peak memory is then what the liveness walk over programs and actions says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.runtime.comm import Communicator, Handle
from autopar.runtime.programs.program import Boxed, Slot
from autopar.schedules.actions import Action

FrameKey = tuple[int, int]  # stage, microbatch
Observer = Callable[[Action, Callable[[], None]], None]
"""Carries out an action, given with what does so, and watches it."""

AHEAD = 2
"""Receives that are posted before the list comes to them, so that messages arrive during
computation: one per direction of a pipeline in its steady state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """A tensor that one stage makes and others read, as this rank holds it.

    Attributes:
        name: Name of the value.
        source: Stage that makes it.
        targets: Stages that read it.
        shape: Local shape.
        dtype: Dtype.
        differentiable: Whether a gradient comes back.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A program ready to run.

    Attributes:
        run: The boxed function.
        inputs: What it takes.
        outputs: What it gives.
        later: Slots that a later program of the same microbatch reads too.
    """

    run: Boxed
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    later: frozenset[Slot] = frozenset()


class Unit(Protocol):
    """One stage on this rank, as the executor sees it."""

    index: int
    arriving: tuple[Boundary, ...]
    leaving: tuple[Boundary, ...]

    def program(self, kind: str, microbatch: int) -> Compiled:
        """The program of an action: kind F, B, I or W; which variant may depend on the number."""
        ...

    def begin(self, microbatch: int) -> None:
        """Choose the version of the weights that the microbatch's forward reads."""
        ...

    def tensor(self, slot: Slot) -> Any:
        """What a slot that belongs to no microbatch stands for now."""
        ...

    def keep(self, slot: Slot, value: Any) -> None:
        """Take a result that belongs to no microbatch: a buffer's new value, a handle."""
        ...

    def reduce(self, update: int) -> None:
        """Finish the reduction of gradients of an update."""
        ...

    def update(self, update: int) -> None:
        """Take the optimizer step of an update."""
        ...


@dataclass(slots=True)
class Outcome:
    """What a run of actions gave.

    Attributes:
        losses: This rank's part of the loss, by microbatch.
        outputs: Values of kind ``output``, by name and microbatch.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)


class Executor:
    """Runs actions.

    Args:
        comm: Communicator of all ranks.
        rank_of: Global rank that holds a stage for this rank's coordinates.

    Attributes:
        observe: Who watches every action; None if nobody does.
    """

    def __init__(
        self,
        comm: Communicator,
        rank_of: Callable[[int], int],
    ) -> None:
        self.comm, self.rank_of = comm, rank_of
        self.observe: Observer | None = None
        self.units: Mapping[int, Unit] = {}
        self.frames: dict[FrameKey, dict[Slot, Any]] = {}
        self.outgoing: dict[tuple[str, int, int, int], list[Tensor]] = {}
        self.sends: list[Handle] = []
        self.upcoming: deque[Action] = deque()  # receives not posted yet
        self.posted: deque[list[tuple[Boundary, Handle]]] = deque()
        self.outcome = Outcome()
        self.step_values: dict[Slot, Any] = {}
        self.numbers: list[Tensor] = []

    def prepare(self, num_microbatches: int) -> list[Tensor]:
        """Numbers of microbatches as tensors on this rank's device."""
        if len(self.numbers) < num_microbatches:
            device = self.comm.device
            self.numbers = [torch.tensor(m, device=device) for m in range(num_microbatches)]
        return self.numbers[:num_microbatches]

    def run(
        self,
        units: Mapping[int, Unit],
        actions: Sequence[Action],
        values: Mapping[Slot, Any],
        num_microbatches: int,
        *,
        updates: bool = True,
    ) -> Outcome:
        """Carry out `actions`.

        Args:
            units: The stages of this rank, by number.
            actions: Those of this rank, in order.
            values: What the slots of kind input and seed stand for in this step.
            num_microbatches: Number of microbatches.
            updates: Whether optimizer steps are taken where the list has them.

        Returns:
            Losses and outputs.
        """
        self.prepare(num_microbatches)
        self.units = units
        self.step_values = dict(values)
        self.outcome = Outcome()
        self.upcoming.extend(a for a in actions if a.kind in ("RECV_F", "RECV_B"))
        try:
            for action in actions:
                if updates or action.kind != "UPDATE":
                    self.watch(action, partial(self._act, action, updates))
                else:  # it comes after the whole list, see `Engine.update`
                    self._act(action, updates)
            for handle in self.sends:
                handle.wait()
        finally:
            self.sends.clear()
            self.upcoming.clear()
            self.posted.clear()
            self.frames.clear()
            self.outgoing.clear()
            self.step_values.clear()
        return self.outcome

    def watch(self, action: Action, act: Callable[[], None]) -> None:
        """Carry out an action by `act`, under the eyes of `observe`."""
        if self.observe is None:
            act()
        else:
            self.observe(action, act)

    def _act(self, action: Action, updates: bool) -> None:
        self.sends = [handle for handle in self.sends if not handle.done()]
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind in ("F", "B", "I", "W"):
            while self.upcoming and len(self.posted) < AHEAD:
                self._post()
            self._compute(kind, self.units[stage], microbatch)
        elif kind in ("SEND_F", "SEND_B"):
            assert action.peer is not None
            key = (kind[-1], stage, action.peer, microbatch)
            for tensor in self.outgoing.pop(key):
                self.sends.append(self.comm.send_start(tensor, self.rank_of(action.peer)))
            del tensor
        elif kind in ("RECV_F", "RECV_B"):
            if not self.posted:
                self._post()
            for item, handle in self.posted.popleft():
                self._give(kind[-1], stage, microbatch, item.name, handle.wait())
        elif kind == "REDUCE":
            self.units[stage].reduce(microbatch)
        elif kind == "UPDATE":
            if updates:
                self.units[stage].update(microbatch)
        else:
            raise AssertionError(f"no action {action}")

    def _post(self) -> None:
        """Start the next receive of the list; they are finished in the same order."""
        action = self.upcoming.popleft()
        unit, peer = self.units[action.stage], action.peer
        assert peer is not None
        if action.kind == "RECV_F":
            expected = [item for item in unit.arriving if item.source == peer]
        else:
            expected = [i for i in unit.leaving if peer in i.targets and i.differentiable]
        source = self.rank_of(peer)
        self.posted.append(
            [(i, self.comm.receive_start(i.shape, i.dtype, source)) for i in expected]
        )

    def _give(self, way: str, stage: int, microbatch: int, name: str, tensor: Tensor) -> None:
        """Hand a boundary value, or a gradient of one, to a stage of this rank."""
        frame = self.frames.setdefault((stage, microbatch), {})
        if way == "F":
            frame[Slot("boundary", name)] = tensor
            return
        slot = Slot("tangent", name)
        # Not in place: the gradient may be the same tensor as another one.
        frame[slot] = frame[slot] + tensor if slot in frame else tensor

    def _arguments(self, kind: str, program: Compiled, unit: Unit, microbatch: int) -> list[Any]:
        """What a program takes; the frame keeps only what a later program reads too."""
        frame = self.frames[unit.index, microbatch]
        arguments: list[Any] = []
        for slot in program.inputs:
            if slot in frame:
                value = frame[slot] if slot in program.later else frame.pop(slot)
            elif slot.kind == "microbatch":
                value = self.numbers[microbatch]
            elif slot in self.step_values:
                value = self.step_values[slot]
            else:
                value = unit.tensor(slot)
                if slot.kind in ("buffer", "parameter") and slot in program.later and kind == "F":
                    frame[slot] = value  # the version that backward must see too
            arguments.append(value)
            del value  # nothing but the program holds what is handed to it
        return arguments

    def _compute(self, kind: str, unit: Unit, microbatch: int) -> None:
        program = unit.program(kind, microbatch)
        if kind == "F":
            unit.begin(microbatch)
        frame = self.frames.setdefault((unit.index, microbatch), {})
        results = program.run(self._arguments(kind, program, unit, microbatch))
        sent: dict[str, Tensor] = {}
        for slot, value in zip(program.outputs, results, strict=True):
            if slot.kind == "saved":
                frame[slot] = value
            elif slot.kind == "loss":
                self.outcome.losses[microbatch] = value
            elif slot.kind == "output":
                self.outcome.outputs.setdefault(slot.name, {})[microbatch] = value
            elif slot.kind in ("boundary", "input_gradient"):
                sent[slot.name] = value
            else:
                unit.keep(slot, value)
        del results
        if kind == "F":
            self._leave("F", unit, microbatch, sent)
        elif kind in ("B", "I"):
            self._leave("B", unit, microbatch, sent)
        if not program.later:
            self.frames.pop((unit.index, microbatch), None)

    def _leave(self, way: str, unit: Unit, microbatch: int, sent: Mapping[str, Tensor]) -> None:
        """Pass results on: to stages of this rank at once, to others when the list says so."""
        if way == "F":
            routes = [(item, target) for item in unit.leaving for target in item.targets]
        else:
            routes = [(item, item.source) for item in unit.arriving if item.differentiable]
        for item, other in routes:
            tensor = sent.get(item.name)
            if tensor is None:  # a gradient that does not exist
                tensor = torch.zeros(item.shape, dtype=item.dtype, device=self.comm.device)
            if other in self.units:
                # A message would lay it out so; programs are made for that.
                self._give(way, other, microbatch, item.name, tensor.contiguous())
            else:
                key = (way, unit.index, other, microbatch)
                self.outgoing.setdefault(key, []).append(tensor)
