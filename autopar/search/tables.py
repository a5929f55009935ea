"""What every unit of a model takes on one rank of a tensor mesh, for one microbatch.

The model is taped once as a single stage (`autopar.cost_models.tape`) and its kernels, collectives
and saved memory are booked on units, so that any stage is a sum over its units. These are the very
seconds and bytes from which `autopar.cost_models.evaluate` makes its prediction; what a stage adds
by itself (messages, the peak inside a program) is not in them, so that sums are lower bounds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.compute import (
    COLLECTIVE_LAUNCHES,
    Columns,
    Speeds,
    host_seconds,
    seconds_of,
)
from autopar.cost_models.device import Device
from autopar.cost_models.evaluate import Software
from autopar.cost_models.kernels import kernel_of_step, step_key
from autopar.cost_models.layout import Placement
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.pricing import Prices
from autopar.cost_models.stages import single_stage
from autopar.cost_models.tape.program import Programs, Run, split
from autopar.cost_models.tape.stage import Taped, tape_stage
from autopar.cost_models.tape.tape import Transfer
from autopar.cost_models.tape.tensors import Memory
from autopar.cost_models.work import Kernel, Move
from autopar.graph.ir import ITEM_BYTES
from autopar.plan.plan import Plan
from autopar.search.units import Units

Floats = NDArray[np.float64]
PHASES = ("forward", "input", "weight")
"""Programs' parts: F; I, what backward computes again included; W. A backward B is both."""
PARTS = ("compute", "inline", "beside", "pieces", "host")
"""Of each phase: seconds of kernels, of collectives for whose result kernels wait, of collectives
beside kernels, the number of these, and seconds of the host."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitTable:
    """Seconds and bytes by unit.

    Attributes:
        seconds: Shape (options, phases, parts, units), see `PHASES` and `PARTS`.
        saved_bytes: What forward leaves for backward; shape (options, units).
        late_bytes: What a backward of inputs leaves for that of weights, where these are two
            programs; shape (options, units).
        working_bytes: What backward itself holds at most in each unit; shape (options, units).
        numel: Local elements of every parameter, in the order of the graph.
        edge_bytes: Local bytes that a unit takes from the one before it, as far as their gradients
            go back, shape (units,).
    """

    seconds: Floats
    saved_bytes: Floats
    late_bytes: Floats
    working_bytes: Floats
    numel: Floats
    edge_bytes: Floats


def unit_table(
    units: Units,
    placement: Placement,
    plan: Plan,
    loss: str | None,
    options: Sequence[frozenset[str]],
    device: Device,
    prices: Prices,
    software: Software,
    *,
    weight: bool = False,
) -> UnitTable:
    """Tape a model and book what it does on units.

    Args:
        units: The units.
        placement: How `plan` places values.
        plan: A plan with one stage.
        loss: Name of the loss.
        options: For each option the names of the nodes that backward computes again.
        device: What it runs on.
        prices: Of collectives.
        software: How it is carried out.
        weight: Whether what only gradients of parameters wait for is a program of its own.
    """
    rank = Rank.of(placement.sharded.mesh)
    # One option may have layers that differ; of several, each has layers that are alike.
    again = options[0] if len(options) == 1 else None
    task, stand_in = single_stage(placement, plan, loss, software.implementation, again)
    taped = tape_stage(task, rank, software.implementation)
    book = _Book(units, stand_in, taped, device, prices, software, rank)
    seconds, saved, late, working = [], [], [], []
    for again in options:
        programs = split(taped, again, weight=weight)
        own = book.own(programs)
        seconds.append(book.seconds(own))
        wanted = book.wanted(programs, own)
        saved.append(book.saved(wanted))
        late.append(book.saved(book.late(programs, own)))
        working.append(book.working(programs, own, wanted))
    numel = _local_elements(units, placement, rank)
    return UnitTable(
        seconds=np.stack(seconds),
        saved_bytes=np.stack(saved),
        late_bytes=np.stack(late),
        working_bytes=np.stack(working),
        numel=numel,
        edge_bytes=_edge_bytes(units, placement, rank),
    )


def _local_elements(units: Units, placement: Placement, rank: Rank) -> Floats:
    """Local elements of every parameter."""
    known: dict[object, int] = {}
    found = []
    for item in units.graph.parameters():
        shape, pair = item.value.spec.shape, placement.pair(item.value.name)
        key = (shape, id(pair))
        if key not in known:
            known[key] = math.prod(rank.grid.local_shape(shape, pair.forward))
        found.append(known[key])
    return np.array(found, dtype=np.float64)


def _edge_bytes(units: Units, placement: Placement, rank: Rank) -> Floats:
    """Local bytes that units take from the one before, and whose gradients they give back."""
    found = np.zeros(units.count)
    known: dict[object, int] = {}
    for unit, names in enumerate(units.taken):
        for name in names:
            spec, pair = units.graph.spec(name), placement.pair(name)
            if not spec.requires_grad:
                continue
            key = (spec.shape, spec.dtype, id(pair))
            if key not in known:
                shape = rank.grid.local_shape(spec.shape, pair.forward)
                known[key] = math.prod(shape) * ITEM_BYTES[spec.dtype]
            found[unit] += known[key]
    return found


class _Book:
    """Books seconds and bytes on units.

    Args:
        units: The units.
        stand_in: For each node of the graph that is folded away, by index, the one that is taped.
        taped: The tape.
        device: See `unit_table`, as for the rest.
    """

    def __init__(
        self,
        units: Units,
        stand_in: Mapping[int, int],
        taped: Taped,
        device: Device,
        prices: Prices,
        software: Software,
        rank: Rank,
    ) -> None:
        self.units, self.taped, self.rank = units, taped, rank
        self.device, self.prices, self.speed = device, prices, software.speed
        position = {node.name: index for index, node in enumerate(units.graph.nodes)}
        at = [position[call.node.name] for call in taped.task.calls]
        place_of = {index: place for place, index in enumerate(at)}
        # Row of the booking matrix: place of a call; column: unit, weighted by copies.
        self.share = np.zeros((len(at) + 1, units.count))
        for index, unit in enumerate(units.unit_of):
            place = place_of.get(stand_in.get(index, index))
            if unit >= 0 and place is not None:
                self.share[place, unit] += 1
        self.share[len(at), units.count - 1] = 1  # what comes after all calls: the loss's end
        self.unit_of = self.share.argmax(axis=1).tolist()
        self.parameters = {item.value.name for item in units.graph.parameters()}
        self.call_s = 0.0 if device.kind == "cpu" else device.efficiency.launch_s

    def place(self, run: Run) -> int:
        calls, step = len(self.taped.task.calls), run.step
        # What no call asks for (a buffer's new value) belongs to the call that made it.
        found = step.origin if 0 <= step.origin < calls else step.maker
        return found if 0 <= found < calls else calls

    def seconds(self, own: Mapping[str, list[Run]]) -> Floats:
        """Shape (phases, parts, units)."""
        found = np.zeros((len(PHASES), len(PARTS), len(self.share)))
        runs = [run for part in own.values() for run in part]
        self._kernels([r for r in runs if not isinstance(r.step.detail, Transfer)], found)
        for run in runs:
            if isinstance(run.step.detail, Transfer):
                self._move(run, run.step.detail, found)
        return found @ self.share

    def own(self, programs: Programs) -> dict[str, list[Run]]:
        """What programs do whatever stage a unit is in.

        Gradients of different units that are added up may come as messages instead. What a unit
        computes again because another one wants it, that one may have got as a message.
        """
        found: dict[str, list[Run]] = {}
        wanted: set[tuple[Memory, int]] = set()
        for kind, program in reversed(programs.parts.items()):
            kept = []
            for run in reversed(program.runs):
                step, unit = run.step, self.unit_of[self.place(run)]
                if run.phase == "recompute":
                    mine = any((memory, unit) in wanted for memory in run.writes)
                elif step.op == "add" and not step.forward:
                    mine = self.unit_of[step.maker] == self.unit_of[step.origin]
                else:
                    mine = True
                if mine:
                    kept.append(run)
                    if kind != "F":
                        wanted.update((memory, unit) for memory in run.reads)
            found[kind] = kept[::-1]
        return found

    def _kernels(self, runs: Sequence[Run], found: Floats) -> None:
        numbers: dict[object, int] = {}
        kernels: list[Kernel] = []
        which, phases, places = [], [], []
        for run in runs:
            key = step_key(run)
            number = numbers.get(key)
            if number is None:
                number = numbers[key] = len(kernels)
                kernels.append(kernel_of_step(run))
            which.append(number)
            phases.append(_PHASE[run.phase])
            places.append(self.place(run))
        columns = Columns.of(kernels)
        speeds = Speeds.of(
            self.device, columns, formats=self.speed.formats, generation=self.speed.attention,
            element_factor=self.speed.element_factor,
        )  # fmt: skip
        device_s = seconds_of(columns, speeds) * self.speed.time_factor
        np.add.at(found, (phases, 0, places), device_s[which])
        np.add.at(found, (phases, 4, places), host_seconds(columns, speeds)[which])

    def _move(self, run: Run, detail: Transfer, found: Floats) -> None:
        names, calls = self.rank.names, self.taped.task.calls
        step, phase, place = run.step, _PHASE[run.phase], self.place(run)
        node = calls[step.origin].node.name if 0 <= step.origin < len(calls) else ""
        if 0 <= step.maker < len(calls):
            node = calls[step.maker].node.name
        move = Move(
            kind=detail.kind,
            size_bytes=detail.size_bytes,
            axes=tuple(names[axis] for axis in detail.axes),
            group=detail.group,
            phase=run.phase,
            node=node,
            dtype=detail.dtype,
        )
        free = run.phase == "weight_gradient" or node in self.parameters
        found[phase, 2 if free else 1, place] += self.prices.seconds(move)
        found[phase, 3, place] += free
        found[phase, 4, place] += COLLECTIVE_LAUNCHES * self.call_s

    def wanted(self, programs: Programs, own: Mapping[str, list[Run]]) -> dict[Memory, int]:
        """For all that is saved the first call that wants it in backward."""
        users = dict.fromkeys(programs.saved, len(self.share))
        for kind, runs in own.items():
            for run in runs if kind != "F" else ():
                for memory in run.reads:
                    if memory in users:
                        users[memory] = min(users[memory], self.place(run))
        return {m: at for m, at in users.items() if m.step is not None and at < len(self.share)}

    def late(self, programs: Programs, own: Mapping[str, list[Run]]) -> dict[Memory, int]:
        """For all that waits for the backward of weights the first call that wants it there."""
        users: dict[Memory, int] = {}
        taken = programs.parts["W"].taken if "W" in own else {}
        for run in own.get("W", ()):
            for memory in run.reads:
                if memory in taken and memory.step is not None:
                    users[memory] = min(users.get(memory, len(self.share)), self.place(run))
        return users

    def saved(self, wanted: Mapping[Memory, int]) -> Floats:
        """Shape (units,). Booked where backward wants it.

        A stage that ends before does not keep it, be it made there: it is sent, and kept by the
        stage that it comes to.
        """
        found = np.zeros(len(self.share))
        for memory, place in wanted.items():
            found[place] += memory.size_bytes
        return found @ self.share

    def working(
        self, programs: Programs, own: Mapping[str, list[Run]], wanted: Mapping[Memory, int]
    ) -> Floats:
        """Shape (units,); zero where backward is split.

        Counted are gradients, and values computed again in the unit itself: those of units behind
        it may be in another stage. What was saved and is not wanted any more makes room for them.
        """
        if "B" not in own:
            return np.zeros(self.units.count)
        runs, given = own["B"], programs.parts["B"].given
        last: dict[Memory, int] = {}
        for place, run in enumerate(runs):
            last.update(dict.fromkeys((*run.reads, *run.writes), place))
        # Bytes by unit of the call; those of gradients are under -1.
        where = {memory: self.unit_of[place] for memory, place in wanted.items()}
        alive: dict[int, int] = defaultdict(int)
        peak = np.zeros(len(self.share))
        for place, run in enumerate(runs):
            call = self.place(run)
            unit = self.unit_of[call]
            for memory in run.writes:
                if memory not in where:
                    where[memory] = unit if run.phase == "recompute" else -1
                    alive[where[memory]] += memory.size_bytes
            peak[call] = max(peak[call], alive[-1] + alive[unit])
            for memory in dict.fromkeys((*run.reads, *run.writes)):
                if memory in where and last[memory] == place and memory not in given:
                    alive[where[memory]] -= memory.size_bytes
        return np.where(self.share > 0, peak[:, None], 0.0).max(axis=0)


_PHASE = {"forward": 0, "recompute": 1, "input_gradient": 1, "weight_gradient": 2}
