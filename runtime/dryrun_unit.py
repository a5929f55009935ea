"""A stage whose programs are summarised instead of run.

What a program does to live bytes is known from its graph (`autopar.runtime.programs.liveness`), so
a call only hands over memory: what it consumed is freed, its high-water mark is noted, and values
of the right size appear for its results. Stages, frames and messages are those of a real run.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.runtime.dryrun_ledger import Block, Ledger
from autopar.runtime.handles import Done, Handle, Lazy
from autopar.runtime.programs import ops
from autopar.runtime.programs.edit import storages
from autopar.runtime.programs.liveness import (
    HANDED_OVER,
    RANKING,
    MemoryKind,
    Summary,
    kind_of,
    resident,
    summarise,
)
from autopar.runtime.programs.program import Boxed, Program, Slot
from autopar.runtime.unit import StageUnit

Rewrite = Callable[[Program], Program]


@dataclass(kw_only=True)
class Walker:
    """How programs are walked.

    Attributes:
        ledger: Where live bytes are counted.
        rewrite: Adds what the communicator needs besides operands and results.
        device: Of all fake tensors.
        by_node: Run the programs node by node on fake tensors instead of summarising them.
    """

    ledger: Ledger
    rewrite: Rewrite
    device: torch.device
    by_node: bool = False


class DryUnit(StageUnit):
    """A stage of a dry run.

    Args:
        args: See `StageUnit`.
        walker: How its programs are walked.
        kwargs: See `StageUnit`.
    """

    def __init__(self, *args: Any, walker: Walker, **kwargs: Any) -> None:
        self.walker = walker
        super().__init__(*args, **kwargs)

    def variant(self, kind: str, *, first: bool, last: bool) -> Program:
        """See `StageUnit.variant`."""
        with self.walker.ledger.paused():
            return super().variant(kind, first=first, last=last)

    def compile(self, program: Program) -> Boxed:
        """See `StageUnit.compile`."""
        with self.walker.ledger.paused():
            return self._compile(program)

    def _compile(self, program: Program) -> Boxed:
        if program is self.programs.prologue:  # small, and its results are read
            return program.compile(self.comm)
        if self.walker.by_node:
            return _Labelled(program, program.compile(self.comm), self.walker.ledger)
        parts = tuple(self.programs.parts.values())
        rewritten = self.walker.rewrite(program)
        return _Summarised(rewritten, (rewritten, *parts), self.walker)

    def reduce(self, update: int) -> None:
        """See `Unit.reduce`."""
        super().reduce(update)
        self.label()

    def update(self, update: int) -> None:
        """See `Unit.update`."""
        super().update(update)
        self.label()

    def label(self) -> None:
        """Say what the memory of this stage is for."""
        ledger, held = self.walker.ledger, self.parameters.held.values()
        ledger.label([list(version.values()) for version in self.versions.values()], "parameters")
        ledger.label(list(self.parameters.values.values()), "parameters")
        ledger.label([item.parameters for item in held], "parameters")
        ledger.label(list(self.parameters.gradients.values()), "gradients")
        ledger.label([[item.gradients, item.reduced] for item in held], "gradients")
        ledger.label([list(self.prologue.values()), self._scale], "inputs")


class _Results:
    """The memory behind a program's results: one entry per storage.

    Attributes:
        kinds: What each is for; what several slots return counts as the first in rank.
        sizes: Bytes.
        inputs: Position of the input whose memory it is, if it is no new one.
        storages: The storage of each result.
    """

    def __init__(self, program: Program) -> None:
        self.kinds: dict[int, MemoryKind] = {}
        self.sizes: dict[int, int] = {}
        inputs: dict[int, int] = {}
        for position, node in enumerate(program.placeholders()):
            for storage, _ in storages(node.meta["val"]):
                inputs.setdefault(storage, position)
        self.inputs: dict[int, int] = {}
        self.storages: list[int] = []
        for slot, node in program.output_nodes().items():
            kind = kind_of(slot, node)
            for storage, size_bytes in storages(node.meta["val"]):
                old = self.kinds.get(storage)
                if old is None or RANKING.index(kind) < RANKING.index(old):
                    self.kinds[storage] = kind
                self.sizes[storage] = size_bytes
                if storage in inputs:
                    self.inputs[storage] = inputs[storage]
                self.storages.append(storage)


class _Labelled:
    """A program run node by node, its results labelled as a summary would."""

    def __init__(self, program: Program, function: Boxed, ledger: Ledger) -> None:
        self.function, self.ledger = function, ledger
        self.results = _Results(program)

    def __call__(self, values: list[Any]) -> list[Any]:
        results = self.function(values)
        for value, storage in zip(results, self.results.storages, strict=True):
            if isinstance(value, Tensor) and self.ledger.is_temporary(value):
                self.ledger.label([value], self.results.kinds[storage])
        return results


class _Summarised:
    """A program that is called but not run."""

    def __init__(self, program: Program, stage: tuple[Program, ...], walker: Walker) -> None:
        self.program, self.ledger, self.device = program, walker.ledger, walker.device
        self.kept = resident(stage)
        self.results = _Results(program)
        self.nodes = program.results()
        self.handed = [
            (slot, position)
            for position, slot in enumerate(program.inputs)
            if slot.kind in HANDED_OVER
        ]
        self.summaries: dict[frozenset[Slot], Summary] = {}

    def __call__(self, values: list[Any]) -> list[Any]:
        """Take the inputs, empty the list, give results of the right size."""
        ledger = self.ledger
        keys = [(slot, ledger.key(values[position])) for slot, position in self.handed]
        sizes = {key: ledger.size_of(key) for _, key in keys}
        # An input that is returned lives on only if somebody else has it.
        passed = {
            storage: weakref.ref(values[position])
            for storage, position in self.results.inputs.items()
        }
        values.clear()
        held = frozenset(slot for slot, key in keys if ledger.holds(key))
        freed = sum(size for key, size in sizes.items() if not ledger.holds(key))
        summary = self._summary(held)
        # A message may lie in more memory than the program knows of.
        peak = Counter(summary.peak)
        peak["boundary"] += freed - sum(summary.start.values())
        ledger.pass_over(peak, f"{self.program.name}: {summary.high_water}")
        return self._make(summary, passed)

    def _summary(self, held: frozenset[Slot]) -> Summary:
        if held not in self.summaries:
            self.summaries[held] = summarise(self.program, self.kept, held)
        return self.summaries[held]

    def _make(self, summary: Summary, passed: dict[int, weakref.ref[Any]]) -> list[Any]:
        made: dict[int, Any] = {
            storage: found for storage, ref in passed.items() if (found := ref()) is not None
        }
        left = sum(summary.end.values())
        results: list[Any] = []
        handle: list[Any] | None = None
        for slot, node, storage in zip(
            self.program.outputs, self.nodes, self.results.storages, strict=True
        ):
            if storage not in made:
                made[storage] = self._memory(slot, storage)
                left -= self.results.sizes[storage]
            if slot.kind == "handle":
                handle = [made[storage]]
                results.append(self._handle(node, handle))
            else:
                results.append(self._value(slot, node, made[storage]))
        if left:  # what a collective under way still reads
            assert handle is not None, (self.program.name, left)
            block = Block(left)
            self.ledger.watch(block, "collective")
            handle.append(block)
        return results

    def _memory(self, slot: Slot, storage: int) -> Tensor | Block:
        size_bytes = self.results.sizes[storage]
        kind = self.results.kinds[storage]
        if slot.kind == "saved":
            block = Block(size_bytes)
            self.ledger.watch(block, kind)
            return block
        memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        self.ledger.label(memory, kind)
        return memory

    def _value(self, slot: Slot, node: fx.Node, memory: Tensor | Block) -> Any:
        """A tensor in this memory; what is only saved needs none."""
        like = node.meta["val"]
        if slot.kind == "saved" or not isinstance(memory, Tensor):
            return memory
        if memory.dtype == like.dtype and memory.shape == like.shape:
            return memory
        flat = memory.view(like.dtype)
        return flat.as_strided(like.shape, like.stride(), like.storage_offset())

    def _handle(self, node: fx.Node, kept: list[Any]) -> Handle:
        """The handle of a collective under way; waiting drops what it keeps."""
        shape, dtype = node.meta["val"].shape, node.meta["val"].dtype
        memory = kept[0]
        if node.target is ops.start_all_reduce_:
            return Done(memory)
        if node.target is ops.start_reduce_scatter:
            shape = node.all_input_nodes[0].meta["val"].shape[1:]
            if math.prod(shape) * dtype.itemsize != memory.nbytes:  # rows that will be summed
                return Lazy(lambda: kept[0].view(dtype).new_empty(shape))
        return Lazy(lambda: kept[0].view(dtype).view(shape))
