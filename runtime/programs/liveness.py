"""Live bytes: a walk over the very programs that will run.

A program's own walk (`summarise`) follows storages, not tensors: views share one, and the result of
a wait is that of its start. A storage is freed when the last variable of the compiled function that
refers to it is dropped, which is right after its last use. A rank's peak is then a walk over its
actions (`RankWalk`) that needs only what each program holds when called, at its high-water mark and
on return; it equals the node-by-node walk over the same sequence.

Storages are told apart by the fakes in ``meta["val"]``, so a view must be the fake of a view.
Scratch memory inside an op is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import fx

from autopar.runtime.programs import kinds, ops
from autopar.runtime.programs.edit import storages
from autopar.runtime.programs.program import Program, Slot, SlotKind

MemoryKind = Literal[
    "parameters",
    "gradients",
    "optimizer",
    "buffers",
    "inputs",
    "saved",
    "boundary",
    "outputs",
    "collective",
    "temporary",
]
Bytes = Mapping[MemoryKind, int]

_KIND: dict[SlotKind, MemoryKind] = {
    "parameter": "parameters",
    "buffer": "buffers",
    "constant": "inputs",
    "input": "inputs",
    "seed": "inputs",
    "microbatch": "inputs",
    "prologue": "inputs",
    "boundary": "boundary",
    "tangent": "boundary",
    "input_gradient": "boundary",
    "saved": "saved",
    "gradient": "gradients",
    "bucket": "gradients",
    "shard": "parameters",
    "loss": "outputs",
    "output": "outputs",
    "handle": "collective",
}
# Inputs that the caller hands over; all others it keeps.
HANDED_OVER = frozenset({"boundary", "tangent", "saved"})
# A storage that is returned twice counts as the first of these.
RANKING: tuple[MemoryKind, ...] = (
    "gradients", "buffers", "saved", "boundary", "outputs", "collective"
)  # fmt: skip
# Their operand is in use until the wait; `start_all_reduce` works on a copy, its result.
_HOLDING = frozenset({ops.start_all_gather, ops.start_reduce_scatter, ops.start_all_to_all})
_STARTS = _HOLDING | {ops.start_all_reduce, ops.start_all_reduce_}


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What one call of a program does to live bytes.

    Attributes:
        name: The program.
        start: Bytes that the caller hands over, by kind.
        peak: Bytes at the high-water mark, by kind, what was handed over and still lives included.
        end: Bytes that the call leaves behind, by kind.
        high_water: The node at the high-water mark; empty if that is the start.
    """

    name: str
    start: Bytes
    peak: Bytes
    end: Bytes
    high_water: str

    @property
    def peak_above_start_bytes(self) -> int:
        """Most bytes live during the call, less those live when it started."""
        return sum(self.peak.values()) - sum(self.start.values())

    @property
    def net_bytes(self) -> int:
        """Bytes live after the call, less those live when it started."""
        return sum(self.end.values()) - sum(self.start.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """Memory that programs use and never free.

    Attributes:
        kinds: Kind of each storage, by its identity.
        sizes: Its size in bytes.
    """

    kinds: Mapping[int, MemoryKind]
    sizes: Mapping[int, int]

    def by_kind(self) -> Bytes:
        """Bytes of each kind."""
        found: Counter[MemoryKind] = Counter()
        for storage, kind in self.kinds.items():
            found[kind] += self.sizes[storage]
        return found


def resident(programs: Iterable[Program]) -> Resident:
    """Memory that the caller of these programs keeps: parameters, gradient buffers, inputs, ...

    Args:
        programs: The programs of a stage. A slot that several of them take counts once, also if
            their fakes differ.
    """
    found: dict[int, MemoryKind] = {}
    sizes: dict[int, int] = {}
    seen: dict[Slot, int] = {}
    for program in programs:
        for slot, node in program.input_nodes().items():
            if slot.kind in HANDED_OVER:
                continue
            for storage, size in storages(node.meta["val"]):
                # Another program's fake of the same slot is known, but adds nothing.
                sizes.setdefault(storage, size if seen.setdefault(slot, storage) == storage else 0)
                found.setdefault(storage, kind_of(slot, node))
    return Resident(kinds=found, sizes=sizes)


def summarise(
    program: Program, kept: Resident | None = None, held: Collection[Slot] = ()
) -> Summary:
    """Walk over a program.

    Args:
        program: What to walk over.
        kept: Memory of the stage that no program frees; by default that of this program. A saved
            view of a parameter is part of it, and only the stage's other programs know.
        held: Inputs that the caller keeps although it usually hands them over, such as saved
            tensors that a later program reads, too.
    """
    return _Walk(program, kept or resident([program]), frozenset(held)).run()


def summarise_stage(programs: Sequence[Program]) -> tuple[Resident, tuple[Summary, ...]]:
    """Walk over the programs that a stage runs for one microbatch.

    Args:
        programs: In the order in which they run. What several of them read is kept until the last.

    Returns:
        What the stage keeps, and a summary per program. A new version of a buffer stays when the
        program returns; whoever drops the old one releases its bytes.
    """
    kept = resident(programs)
    later: set[Slot] = set()
    found: list[Summary] = []
    for program in reversed(programs):
        mine = {slot for slot in program.inputs if slot.kind in HANDED_OVER}
        found.append(summarise(program, kept, mine & later))
        later |= mine
    return kept, tuple(reversed(found))


@dataclass(slots=True, kw_only=True)
class RankWalk:
    """Live bytes of a rank over its actions.

    Attributes:
        live: Bytes now, by kind; starts with what is resident.
        peak: Bytes at the high-water mark so far, by kind.
        where: The action and node of the high-water mark.
    """

    live: Counter[MemoryKind]
    peak: Bytes = field(default_factory=dict)
    where: str = ""

    def __post_init__(self) -> None:
        self._look(self.live, "")

    @property
    def peak_bytes(self) -> int:
        """Bytes at the high-water mark."""
        return sum(self.peak.values())

    def run(self, summary: Summary) -> None:
        """A program is called; what is handed over to it must be live."""
        self.live.subtract(summary.start)
        here = Counter(self.live)
        here.update(summary.peak)
        self._look(here, f"{summary.name}: {summary.high_water}")
        self.live.update(summary.end)

    def allocate(self, kind: MemoryKind, size_bytes: int, why: str = "") -> None:
        """Memory appears between programs, such as that of a tensor to be received."""
        self.live[kind] += size_bytes
        self._look(self.live, why)

    def release(self, kind: MemoryKind, size_bytes: int) -> None:
        """Memory is freed between programs, such as that of a tensor that has been sent."""
        self.live[kind] -= size_bytes

    def _look(self, live: Counter[MemoryKind], where: str) -> None:
        if live.total() > sum(self.peak.values()):
            self.peak, self.where = dict(live), where


class _Walk:
    """One walk over one program."""

    def __init__(self, program: Program, kept: Resident, held: frozenset[Slot]) -> None:
        self.program = program
        self.nodes = list(program.graph.nodes)
        self.order = {node: position for position, node in enumerate(self.nodes)}
        self.inputs = program.input_nodes()
        self.outside = set(kept.kinds)
        for slot in held:
            self.outside |= {storage for storage, _ in storages(self.inputs[slot].meta["val"])}
        self.sizes: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.dies: dict[int, int] = {}
        for node in self.nodes[:-1]:
            self._follow(node)

    def run(self) -> Summary:
        """The summary."""
        named = self._kinds()
        taken = {slot: node for slot, node in self.inputs.items() if slot.kind in HANDED_OVER}
        live: Counter[MemoryKind] = Counter()
        start: Counter[MemoryKind] = Counter()
        for storage, kind in self._slot_kinds(taken).items():
            start[kind] += self.sizes[storage]
            if self.dies[storage] >= self.order[self.body()]:
                live[named.get(storage, kind)] += self.sizes[storage]
        births: dict[int, list[int]] = {}
        deaths: dict[int, list[int]] = {}
        for storage, position in self.born.items():
            if self.nodes[position].op != "placeholder":
                births.setdefault(position, []).append(storage)
            deaths.setdefault(self.dies[storage], []).append(storage)
        peak, high_water = dict(start), ""
        for position in range(self.order[self.body()], len(self.nodes) - 1):
            for storage in births.get(position, ()):
                live[named.get(storage, "temporary")] += self.sizes[storage]
            if live.total() > sum(peak.values()):
                peak, high_water = dict(live), self.nodes[position].name
            for storage in deaths.get(position, ()):
                live[named.get(storage, "temporary")] -= self.sizes[storage]
        return Summary(
            name=self.program.name, start=start, peak=+Counter(peak), end=+live,
            high_water=high_water,
        )  # fmt: skip

    def body(self) -> fx.Node:
        """The first node after the placeholders."""
        return self.nodes[len(self.inputs)]

    def _follow(self, node: fx.Node) -> None:
        """Note where the storages of a node's value appear, and extend their lives."""
        position = self.order[node]
        last = max((self.order[user] for user in node.users), default=position)
        for storage, size in storages(node.meta["val"]):
            if storage not in self.outside:
                self.sizes.setdefault(storage, size)
                self.born.setdefault(storage, position)
                self.dies[storage] = max(self.dies.get(storage, -1), last)
        if node.target in _HOLDING:
            for storage, _ in storages(node.all_input_nodes[0].meta["val"]):
                if storage not in self.outside:
                    self.dies[storage] = max(self.dies[storage], last)

    def _slot_kinds(self, slots: Mapping[Slot, fx.Node]) -> dict[int, MemoryKind]:
        found: dict[int, MemoryKind] = {}
        for slot, node in slots.items():
            for storage, _ in storages(node.meta["val"]):
                if storage not in self.outside:
                    kind = kind_of(slot, node)
                    old = found.get(storage)
                    if old is None or RANKING.index(kind) < RANKING.index(old):
                        found[storage] = kind
        return found

    def _kinds(self) -> dict[int, MemoryKind]:
        """Kind of each storage inside the program that is no temporary."""
        found: dict[int, MemoryKind] = {}
        for node in self.program.calls():
            if kinds.is_collective(node):
                sides = [node, node.all_input_nodes[0]] if node.target in _STARTS else [node]
                for side in sides:
                    for storage, _ in storages(side.meta["val"]):
                        found[storage] = "collective"
        found |= self._slot_kinds(
            {slot: node for slot, node in self.inputs.items() if slot.kind in HANDED_OVER}
        )
        return found | self._slot_kinds(self.program.output_nodes())


def kind_of(slot: Slot, node: fx.Node) -> MemoryKind:
    """What the memory behind an input or output of a program is for."""
    if slot.kind == "shard" and any(node in kinds.written(user) for user in node.users):
        return "gradients"
    return _KIND[slot.kind]
