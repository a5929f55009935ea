"""Oracle: live bytes of a rank, node by node over a sequence of calls, by counting references."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autopar.runtime.programs.program import Program, Slot

Storage = tuple[Any, int]
HANDED_OVER = ("saved", "boundary", "tangent")


@dataclass
class NodeWalk:
    """A machine that holds references to storages instead of tensors."""

    resident: set[int]
    references: Counter[Storage] = field(default_factory=Counter)
    live_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, owner: Any, value: Any) -> None:
        for tensor in tensors(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.resident:
                key = (owner, storage._cdata)
                self.live_bytes += 0 if self.references[key] else storage.nbytes()
                self.references[key] += 1
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, owner: Any, value: Any) -> None:
        for tensor in tensors(value):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.resident:
                key = (owner, storage._cdata)
                self.references[key] -= 1
                assert self.references[key] >= 0
                self.live_bytes -= 0 if self.references[key] else storage.nbytes()

    def call(self, program: Program, owner: Any) -> None:
        """One call whose inputs are already held once each; its results are held afterwards."""
        remaining = {node: len(node.users) for node in program.graph.nodes}
        inputs = program.input_nodes()
        for slot, node in inputs.items():
            if slot.kind in HANDED_OVER and not remaining[node]:
                self.drop(owner, node.meta["val"])
        handed = {node for slot, node in inputs.items() if slot.kind in HANDED_OVER}
        for node in program.calls():
            self.hold(owner, node.meta["val"])
            for source in node.all_input_nodes:
                remaining[source] -= 1
                if not remaining[source] and (source.op != "placeholder" or source in handed):
                    self.drop(owner, source.meta["val"])
            if not node.users:
                self.drop(owner, node.meta["val"])
        # A node behind several results is held once by the function and then once per result.
        results = program.results()
        for node in results:
            self.hold(owner, node.meta["val"])
        for node in dict.fromkeys(results):
            if node.op != "placeholder" or node in handed:
                self.drop(owner, node.meta["val"])


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def walk(calls: Sequence[tuple[Program, Any]], resident: set[int]) -> NodeWalk:
    """Run calls ``(program, microbatch)``; what none of them makes is received right before."""
    walker = NodeWalk(resident)
    # Calls that still need each value of a microbatch.
    needed: Counter[tuple[Any, Slot]] = Counter()
    for program, owner in calls:
        needed.update((owner, slot) for slot in program.inputs if slot.kind in HANDED_OVER)
    held: dict[tuple[Any, Slot], Any] = {}
    for program, owner in calls:
        inputs = program.input_nodes()
        for slot, node in inputs.items():
            if slot.kind in HANDED_OVER and (owner, slot) not in held:
                walker.hold(owner, node.meta["val"])
                held[owner, slot] = node.meta["val"]
        for slot in inputs:
            if slot.kind in HANDED_OVER:
                needed[owner, slot] -= 1
                if needed[owner, slot]:
                    walker.hold(owner, held[owner, slot])  # the caller keeps its own reference
                else:
                    del held[owner, slot]
        walker.call(program, owner)
        for slot, node in program.output_nodes().items():
            if needed[owner, slot]:
                held[owner, slot] = node.meta["val"]
            else:
                walker.drop(owner, node.meta["val"])  # sent, or of no further use
    return walker
