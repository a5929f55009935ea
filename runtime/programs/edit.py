"""What graph passes share: an editable copy of a program, and which memory a node touches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autopar.runtime.handles import Done
from autopar.runtime.programs import fakes, kinds, ops
from autopar.runtime.programs.check import check
from autopar.runtime.programs.program import Program, Slot

P = TypeVar("P", bound=Program)


class Editor:
    """A copy of a program that a pass may change; the original stays as it is.

    Args:
        program: What to copy.

    Attributes:
        graph: The copy's graph.
        inputs: Placeholder of each input slot, in order.
        outputs: Node behind each output slot, in order; passes change it and call `sync`.
        copies: Node of the copy for each node of the original.
        mode: The fake mode of all values.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        results = self.graph.graph_copy(program.graph, self.copies)
        assert isinstance(results, tuple | list), program.name
        self.graph.output(tuple(results))
        self.inputs = {slot: self.copies[node] for slot, node in program.input_nodes().items()}
        self.outputs = {slot: self.copies[node] for slot, node in program.output_nodes().items()}
        self.mode = _fake_mode(program)
        self._replaced: dict[fx.Node, fx.Node] = {}

    @property
    def end(self) -> fx.Node:
        """The output node."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def begin(self) -> fx.Node:
        """The first node that is no placeholder."""
        if not self.inputs:
            return next(iter(self.graph.nodes))
        return next(reversed(self.inputs.values())).next

    def sync(self) -> None:
        """Make the output node return what `outputs` says."""
        for slot, node in self.outputs.items():
            self.outputs[slot] = self._replaced.get(node, node)
        self.end.args = (tuple(self.outputs.values()),)

    def add_input(self, slot: Slot, value: Tensor) -> fx.Node:
        """Add a placeholder after the others; `value` is its fake."""
        assert slot not in self.inputs, slot
        with self.graph.inserting_before(self.begin):
            node = self.graph.placeholder(_identifier(f"{slot.kind}_{slot.name}"))
        node.meta["val"] = value
        self.inputs[slot] = node
        return node

    def substitute(self, slot: Slot, new: fx.Node) -> None:
        """Let a node take the place of a placeholder, which is removed."""
        old = self.inputs.pop(slot)
        self.replace(old, new)
        self.graph.erase_node(old)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let `new`, a tensor of the same type, take the place of `old` in all calls.

        Values that shared the memory of `old` are computed anew, so that they share that of `new`.
        """
        before = storage_of(old)
        if before == storage_of(new):
            before = -1  # nothing changes for those who share it
        old.replace_all_uses_with(new)
        self._replaced[old] = new
        pending = [new]
        while pending:
            for user in pending.pop().users:
                if user.op == "call_function" and any(
                    storage == before for storage, _ in storages(user.meta["val"])
                ):
                    user.meta["val"] = self.evaluate(user.target, *user.args, **user.kwargs)
                    pending.append(user)

    def call(
        self, before: fx.Node, target: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """Insert a call and compute its fake value.

        Args:
            before: Where to insert.
            target: What to call.
            args: Its arguments; nodes stand for their values.
            like: A node whose origin and phase the call takes over.
            kwargs: Its keyword arguments.
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = self.evaluate(target, *args, **kwargs)
        for key in ("origin", "phase"):
            if like is not None and key in like.meta:
                node.meta[key] = like.meta[key]
        return node

    def evaluate(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """The fake result of a call; of the start of a collective, what `ops.wait` will return."""
        if target is ops.wait:  # the value of a handle is the result that it will have
            return args[0].meta["val"]
        memo = fakes.Memo(self.mode)

        def value_of(node: fx.Node) -> Any:
            value = node.meta["val"]
            memo.note(value)
            return value

        args = fx.node.map_arg(args, value_of)
        kwargs = fx.node.map_arg(kwargs, value_of)
        call = memo.key(target, args, kwargs)
        found = None if call is None else memo.recall(*call)
        if found is not None:
            return found
        # The fakes of parameters may say that they require gradients.
        with self.mode, torch.no_grad():
            value = target(*args, **kwargs)
        if call is not None:
            memo.learn(*call, value)
        return value.wait() if isinstance(value, Done) else value

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A new contiguous fake tensor."""
        with self.mode:
            return torch.empty(shape, dtype=dtype, device=device)

    def finish(self, original: P, **changes: Any) -> P:
        """The edited program, checked.

        Args:
            original: The program that the editor copied, for its type.
            changes: Other fields to change.
        """
        self.sync()
        edited = replace(
            original,
            graph=self.graph,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            **changes,
        )
        check(edited)
        return edited


def storages(value: Any) -> Iterator[tuple[int, int]]:
    """Identity and size in bytes of the storage of each tensor of a fake value."""
    if isinstance(value, Tensor):
        storage = value.untyped_storage()
        yield storage._cdata, storage.nbytes()
    elif isinstance(value, tuple | list):
        for item in value:
            yield from storages(item)


def storage_of(node: fx.Node) -> int:
    """Identity of the storage of a node that is one tensor."""
    value = node.meta["val"]
    assert isinstance(value, Tensor), node
    return value.untyped_storage()._cdata


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node the one that made the memory it lies in, itself if it is new.

    Found from what the calls do and not from the fakes, which share memory only if whoever rewrote
    the graph took care of it.
    """
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source: fx.Node | None = None
        if node.op == "call_function":
            if node.target is ops.wait:
                source = node.all_input_nodes[0]
            elif targets := kinds.written(node):
                source = targets[0]
            elif kinds.is_view_node(node):
                source = node.all_input_nodes[0]
        roots[node] = node if source is None else roots[source]
    return roots


def last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """For each node that made memory the last call that touches it, through whatever view."""
    roots = memory_roots(graph)
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "output":
            for touched in (node, *node.all_input_nodes):
                last[roots[touched]] = node
    return last


def _fake_mode(program: Program) -> FakeTensorMode:
    for node in program.graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    # Nothing computed on tensors: passes have nothing to evaluate, and any mode will do.
    return FakeTensorMode()


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)
