"""Seconds and saved bytes of single ops under every choice: the unary costs of the op problem.

An op is taped alone (`autopar.cost_models.tape`), forward and backward, with operands that lie as
it wants them, and its kernels and the collectives of special lowerings are priced as those of any
plan. Choices that differ in the order of axes of equal size have equal local shapes and are taped
once; so are equal ops. All kernels are priced together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from autopar.cost_models.compute import (
    COLLECTIVE_LAUNCHES,
    Columns,
    Speeds,
    host_seconds,
    seconds_of,
)
from autopar.cost_models.device import Device
from autopar.cost_models.implementation import Implementation
from autopar.cost_models.kernels import kernels_of, moves_of
from autopar.cost_models.ops.call import Rank
from autopar.cost_models.pricing import Prices, Speed
from autopar.cost_models.tape.program import split
from autopar.cost_models.tape.stage import Call, StageTask, tape_stage
from autopar.cost_models.work import Kernel
from autopar.graph.ir import Arg, Node, Ref, TensorSpec, map_refs
from autopar.sharding.choices import (
    CallPlacement,
    Choice,
    Choices,
    options,
    place_call,
)
from autopar.sharding.factors import Unit
from autopar.sharding.placement import PARTIAL, Pair
from autopar.sharding.rule import OpRule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A call whose choices are to be priced.

    Attributes:
        node: The call.
        rule: Its rule.
        units: What it can split.
        kinds: Kind of each operand: that of a graph input, ``""`` for what other ops make.
        chosen: What the plan chooses.
        free: Which axes of the mesh are searched; along the others the plan's choice stays.
    """

    node: Node
    rule: OpRule | None
    units: tuple[Unit, ...]
    kinds: tuple[str, ...]
    chosen: Choices
    free: tuple[int, ...]

    def signature(self, spec: Callable[[str], TensorSpec]) -> object:
        """Equal for calls that cost the same under the same choices."""
        operands = self.node.operands
        places = {name: place for place, name in reversed(list(enumerate(operands)))}

        def slot(ref: Ref) -> Arg:
            return "operand", places[ref.name]

        return (
            self.node.op,
            map_refs(self.node.args, slot),
            tuple((key, map_refs(arg, slot)) for key, arg in self.node.kwargs),
            self.node.context,
            tuple(spec(name) for name in operands),
            tuple(value.spec for value in self.node.outputs),
            self.units,
            self.kinds,
            self.chosen,
            self.free,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpStates:
    """What an op can do, and what that takes.

    Attributes:
        options: Everything that it may do along one axis.
        sides: What each of these fixes along that axis.
        classes: Equal numbers for options that fix the same.
        rows: For every state one option per axis.
        device: Seconds of one call, forward and backward, of kernels and collectives.
        host: Seconds that the host takes to launch these.
        own_bytes: By-products that forward leaves for backward.
        kept: For every state and operand whether forward leaves it for backward.
        results: Outputs that forward leaves for backward where the plan's state is chosen.
        views: For every output the operand whose memory it shares, -1 for none.
        strided: For every output whether its elements do not lie in a row.
        plan: The state that the plan chooses.
    """

    options: tuple[Choice, ...]
    sides: tuple[CallPlacement, ...] = field(repr=False)
    classes: NDArray[np.intp] = field(repr=False)
    rows: NDArray[np.intp] = field(repr=False)
    device: Floats
    host: Floats
    own_bytes: Floats
    kept: NDArray[np.bool_]
    results: tuple[int, ...]
    views: tuple[int, ...]
    strided: tuple[bool, ...]
    plan: int

    def __len__(self) -> int:
        return len(self.rows)

    def choices(self, state: int) -> Choices:
        """What a state chooses along every axis."""
        return tuple([self.options[place] for place in self.rows[state]])

    def find(self, choices: Choices) -> int:
        """The state that does what `choices` do, -1 if there is none."""
        numbers = {choice: place for place, choice in enumerate(self.options)}
        places = [numbers.get(choice, -1) for choice in choices]
        if -1 in places:
            return -1
        alike = (self.classes[self.rows] == self.classes[places]).all(axis=1)
        found = np.flatnonzero(alike)
        return int(found[0]) if len(found) else -1

    def operands(self, slot: int) -> Pairs:
        """Pairs in which the states want an operand."""
        return self._pairs([side.operands[slot] for side in self.sides])

    def outputs(self, slot: int) -> Pairs:
        """Pairs in which the states make an output."""
        return self._pairs([side.outputs[slot] for side in self.sides])

    def _pairs(self, sides: Sequence[Pair]) -> Pairs:
        numbers: dict[Pair, int] = {}
        which = np.array([numbers.setdefault(side, len(numbers)) for side in sides])
        rows = which[self.rows]
        codes = rows @ (len(numbers) ** np.arange(rows.shape[1]))
        _, first, place = np.unique(codes, return_index=True, return_inverse=True)
        distinct = list(numbers)
        pairs = []
        for row in rows[first].tolist():
            parts = [distinct[number] for number in row]
            pairs.append(
                Pair(
                    tuple([part.forward[0] for part in parts]),
                    tuple([part.gradient[0] for part in parts]),
                )
            )
        return Pairs(tuple(pairs), place)

    def only(self, states: Sequence[int] | NDArray[np.intp]) -> OpStates:
        """Some of the states, ascending."""
        keep = np.asarray(states, dtype=np.intp)
        return replace(
            self,
            rows=self.rows[keep],
            device=self.device[keep],
            host=self.host[keep],
            own_bytes=self.own_bytes[keep],
            kept=self.kept[keep],
            plan=int(np.searchsorted(keep, self.plan)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Pairs of the states of an op.

    Attributes:
        distinct: The distinct ones.
        place: For every state which of these.
    """

    distinct: tuple[Pair, ...]
    place: NDArray[np.intp]


class OpPricer:
    """Prices ops on one rank of a mesh.

    Args:
        spec: Spec of every value of the graph.
        rank: The rank.
        implementation: How ops are carried out.
        device: What they run on.
        speed: What of the software decides seconds.
        prices: Of collectives.
    """

    def __init__(
        self,
        spec: Callable[[str], TensorSpec],
        rank: Rank,
        implementation: Implementation,
        device: Device,
        speed: Speed,
        prices: Prices,
    ) -> None:
        self.spec, self.rank, self.implementation = spec, rank, implementation
        self.device, self.speed, self.prices = device, speed, prices
        self.kernels: list[Kernel] = []
        self.owners: list[int] = []
        self.inline: list[float] = []
        self.calls: list[int] = []

    def states(self, ops: Sequence[Op]) -> list[OpStates]:
        """What each of `ops` can do; equal ones share their states.

        Args:
            ops: The calls.
        """
        known: dict[object, int] = {}
        which: list[int] = []
        begun: list[tuple[OpStates, NDArray[np.intp]]] = []
        for op in ops:
            key = op.signature(self.spec)
            if key not in known:
                known[key] = len(begun)
                begun.append(self._begin(op))
            which.append(known[key])
        device, host = self._price()
        done = [
            replace(item, device=device[numbers], host=host[numbers]) for item, numbers in begun
        ]
        return [done[number] for number in which]

    def _begin(self, op: Op) -> tuple[OpStates, NDArray[np.intp]]:
        """States of an op, and which number of what was taped each takes."""
        node, rule = op.node, op.rule
        free = [c for c in options(node, rule, op.units, self.spec) if _sensible(op, c)]
        every = tuple(dict.fromkeys((*free, *op.chosen)))
        sides = tuple(place_call(node, rule, (choice,)) for choice in every)
        keys: dict[object, int] = {}
        classes = np.array(
            [keys.setdefault(self._side_key(node, side), len(keys)) for side in sides]
        )
        chosen = [every.index(choice) for choice in op.chosen]
        rows = self._rows(op, every, len(free), classes, chosen)
        unlike, number = np.unique(self._alike(op, every, rows), axis=0, return_inverse=True)
        # What only looks at memory otherwise does so however it is split.
        first = self._tape(op, op.chosen)
        plain = first.free and rule is not None and not any(x.special for x in rule.letters)
        taped = [
            first if plain else self._tape(op, tuple([every[place] for place in row]))
            for row in unlike
        ]
        which = np.array([item.number for item in taped])[number]
        states = OpStates(
            options=every,
            sides=sides,
            classes=classes,
            rows=rows,
            device=np.zeros(len(rows)),
            host=np.zeros(len(rows)),
            own_bytes=np.array([item.own_bytes for item in taped])[number],
            kept=np.array([item.operands for item in taped]).reshape(len(taped), -1)[number],
            results=first.results,
            views=first.views,
            strided=first.strided,
            plan=0,
        )
        return states, which

    def _rows(
        self,
        op: Op,
        every: tuple[Choice, ...],
        free: int,
        classes: NDArray[np.intp],
        chosen: list[int],
    ) -> NDArray[np.intp]:
        """Tuples of options that split evenly, those that fix the same once; the plan's first.

        Args:
            op: The call.
            every: Its options.
            free: How many of them may be chosen along any axis that is searched.
            classes: Which of them fix the same.
            chosen: What the plan chooses.
        """
        columns = [
            np.unique([*range(free), own]) if axis in op.free else np.array([own])
            for axis, own in enumerate(chosen)
        ]
        grid = np.meshgrid(*columns, indexing="ij")
        rows = np.stack([column.ravel() for column in grid], axis=1)
        sizes = np.array(self.rank.grid.sizes)
        fine = np.ones(len(rows), dtype=bool)
        for unit in dict.fromkeys(c.unit for c in every if c.unit is not None):
            mine = np.array([choice.unit == unit for choice in every])
            parts = np.where(mine[rows], sizes, 1).prod(axis=1)
            fine &= unit.size % parts == 0
        rows = np.concatenate([np.array([chosen]), rows[fine]])
        codes = classes[rows] @ ((int(classes.max()) + 1) ** np.arange(rows.shape[1]))
        _, first = np.unique(codes, return_index=True)
        return rows[np.sort(first)]

    def _side_key(self, node: Node, side: CallPlacement) -> object:
        """What matters of a choice along an axis: no gradients of what has none."""
        trains = [self.spec(name).requires_grad for name in node.operands]
        trains += [value.spec.requires_grad for value in node.outputs]
        if not any(trains[len(node.operands) :]):
            trains = [False] * len(trains)  # then none comes back either
        return tuple(
            [
                (pair.forward, pair.gradient if flag else ())
                for pair, flag in zip((*side.operands, *side.outputs), trains, strict=True)
            ]
        )

    def _alike(self, op: Op, every: tuple[Choice, ...], rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Rows with the same local shapes, equal for all that have them.

        Where an op communicates itself it may matter which axis does what.
        """
        if op.rule is None or op.rule.special:
            return rows
        letters = {letter.name for letter in op.rule.letters if letter.special}
        special = np.array([c.unit is not None and c.unit.letter in letters for c in every])
        found = rows.copy()
        for size in sorted(set(self.rank.grid.sizes)):
            axes = [
                axis
                for axis, own in enumerate(self.rank.grid.sizes)
                if own == size and axis != self.rank.time
            ]
            found[:, axes] = np.sort(rows[:, axes], axis=1)
        own = np.asarray(special[rows].any(axis=1))
        return np.where(own[:, None], rows, found)

    def _tape(self, op: Op, state: Choices) -> _OpTape:
        """Tape one call."""
        node, kinds = op.node, op.kinds
        placement = place_call(node, op.rule, state)
        names = node.operands
        pairs = dict(zip(names, placement.operands, strict=True))
        results = tuple(value.name for value in node.outputs)
        pairs.update(zip(results, placement.outputs, strict=True))
        made = [name for name, kind in zip(names, kinds, strict=True) if not kind]
        task = StageTask(
            index=0,
            calls=[Call(node=node, rule=op.rule, choices=state, placement=placement)],
            spec=self.spec,
            pair=pairs.__getitem__,
            kinds=dict(zip(names, kinds, strict=True)),
            arriving=tuple(dict.fromkeys(made)),
            leaving=results,
        )
        taped = tape_stage(task, self.rank, self.implementation)
        programs = split(taped)
        number = len(self.inline)
        kernels = kernels_of(programs)
        self.kernels += kernels
        self.owners += [number] * len(kernels)
        moves = moves_of(programs, self.rank)
        self.inline.append(sum(self.prices.seconds(move) for move in moves))
        self.calls.append(sum(move.count for move in moves))
        given = [taped.inputs[name].memory for name in names]
        left = [taped.results[name].memory for name in results]
        own = [m for m in programs.saved if m not in given and m not in left]
        return _OpTape(
            number=number,
            free=not kernels and not moves and all(memory in given for memory in left),
            own_bytes=float(sum(memory.size_bytes for memory in own)),
            operands=[
                memory in programs.saved and not kind
                for memory, kind in zip(given, kinds, strict=True)
            ],
            results=tuple(
                slot
                for slot, memory in enumerate(left)
                if memory in programs.saved and memory not in given
            ),
            views=tuple(given.index(m) if m in given else -1 for m in left),
            strided=tuple(taped.results[name].strides is not None for name in results),
        )

    def _price(self) -> tuple[Floats, Floats]:
        """Seconds of device and host of everything taped, by number."""
        device, calls = (
            np.array(self.inline, dtype=np.float64),
            np.array(self.calls, dtype=np.float64),
        )
        host = calls * launch_of(self.device) * COLLECTIVE_LAUNCHES
        if self.kernels:
            columns = Columns.of(self.kernels)
            speeds = Speeds.of(
                self.device, columns, formats=self.speed.formats,
                generation=self.speed.attention, element_factor=self.speed.element_factor,
            )  # fmt: skip
            seconds = seconds_of(columns, speeds) * self.speed.time_factor
            device += np.bincount(self.owners, weights=seconds, minlength=len(device))
            launches = host_seconds(columns, speeds)
            host += np.bincount(self.owners, weights=launches, minlength=len(host))
        return device, host


def launch_of(device: Device) -> float:
    """Seconds that the host takes per launch, beside a device that computes by itself."""
    return 0.0 if device.kind == "cpu" else device.efficiency.launch_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _OpTape:
    """A call on its own: the number of its kernels; the rest as in `OpStates`.

    Attributes:
        free: Whether it takes no time at all.
    """

    number: int
    free: bool
    own_bytes: float
    operands: list[bool]
    results: tuple[int, ...]
    views: tuple[int, ...]
    strided: tuple[bool, ...]


def _sensible(op: Op, choice: Choice) -> bool:
    """Whether a choice is worth looking at: nobody sums up parts of what a rank holds whole."""
    if choice.kind != "linear" or op.rule is None:
        return True
    return not any(
        op.kinds[slot] and slot not in op.rule.additive for slot in op.rule.linear[choice.index]
    )


def local_bytes(spec: TensorSpec, pair: Pair, rank: Rank) -> int:
    """Bytes of a rank's part of a value.

    Args:
        spec: The value.
        pair: How it lies.
        rank: The rank.
    """
    shape = rank.grid.local_shape(spec.shape, pair.forward)
    return math.prod(shape) * (spec.size_bytes // max(spec.numel, 1))


def partial_axes(pair: Pair) -> tuple[int, ...]:
    """Axes along which a gradient is a sum."""
    return tuple(axis for axis, placed in enumerate(pair.gradient) if placed == PARTIAL)
