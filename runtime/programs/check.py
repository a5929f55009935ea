"""The checker that runs after every pass: what must hold of any program.

A broken rule is a bug of a pass, never of a user; `ProgramError` names the program and the node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch import fx

from autopar.runtime.programs import kinds, ops
from autopar.runtime.programs.program import Program, target_name, type_text

# Inputs that whoever runs the program owns and lends for writing.
WRITABLE = frozenset(("gradient", "bucket", "shard"))


class ProgramError(AssertionError):
    """A program breaks a rule."""


def check(program: Program) -> Program:
    """Check a program; linear in its length.

    Every value is computed once, before it is read; slots match; only owned memory is written; a
    collective that was started is waited for once, what it works on is left alone meanwhile, and
    what it reduces in place is not written afterwards either.

    Returns:
        `program`, for use at the end of a pass.

    Raises:
        ProgramError: Names the node that breaks a rule.
    """
    try:
        program.validate()
    except AssertionError as error:
        raise ProgramError(str(error)) from error
    _Checker(program).run()
    return program


class _Checker:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.slots = {node: slot for slot, node in program.input_nodes().items()}
        self.roots: dict[fx.Node, fx.Node] = {}
        # Memory in use by collectives under way: the start, and whether it writes.
        self.busy: dict[fx.Node, tuple[fx.Node, bool]] = {}
        self.reduced: dict[fx.Node, fx.Node] = {}
        self.waited: dict[fx.Node, fx.Node] = {}

    def fail(self, node: fx.Node, what: str) -> None:
        raise ProgramError(f"{self.program.name}: {node.format_node()}: {what}")

    def run(self) -> None:
        seen: set[fx.Node] = set()
        body = False
        for node in self.program.graph.nodes:
            for source in node.all_input_nodes:
                if source not in seen:
                    self.fail(node, f"reads {source} before it is computed")
            seen.add(node)
            if node.op == "placeholder":
                if body:
                    self.fail(node, "is an input after the first call")
                self.roots[node] = node
            elif node.op == "call_function":
                body = True
                self.call(node)
            elif node.op != "output":
                self.fail(node, f"is of kind {node.op}")
        self.handles()

    def call(self, node: fx.Node) -> None:
        if "val" not in node.meta:
            self.fail(node, "has no fake value")
        sources = node.all_input_nodes
        if node.target is ops.wait:
            self.wait(node)
        else:
            for source in sources:
                self.access(node, source)
        targets = kinds.written(node)
        for target in targets:
            self.write(node, target)
        self.roots[node] = self.root(node, targets)
        if _is_start(node):
            # All tensors are operands of an in-place start; of the others the first is the only.
            in_place = node.target is ops.start_all_reduce_
            for source in sources:
                self.busy[self.roots[source]] = (node, in_place)
                if in_place:
                    self.reduced[self.roots[source]] = node

    def root(self, node: fx.Node, targets: list[fx.Node]) -> fx.Node:
        if node.target is ops.wait:
            start = node.all_input_nodes[0]
            in_place = start.target is ops.start_all_reduce_
            return self.roots[start.all_input_nodes[0]] if in_place else node
        if targets and not _is_start(node):
            return self.roots[targets[0]]
        if kinds.is_view_node(node):
            return self.roots[node.all_input_nodes[0]]
        return node

    def access(self, node: fx.Node, source: fx.Node) -> None:
        start, in_place = self.busy.get(self.roots[source], (node, False))
        if in_place:
            self.fail(node, f"reads {source} between {start} and its wait")

    def write(self, node: fx.Node, target: fx.Node) -> None:
        root = self.roots[target]
        slot = self.slots.get(root)
        owned = slot.kind in WRITABLE if slot is not None else kinds.is_creation(root)
        if not owned:
            self.fail(node, f"writes {target}, which lies in the memory of {slot or root}")
        if root in self.busy:
            self.fail(node, f"writes {target} between {self.busy[root][0]} and its wait")
        if root in self.reduced:
            self.fail(node, f"writes {target} after {self.reduced[root]} has reduced it")

    def wait(self, node: fx.Node) -> None:
        start = node.all_input_nodes[0]
        if not _is_start(start) and self.slot_kind(start) != "handle":
            self.fail(node, f"waits for {start}, which starts nothing")
        if start in self.waited:
            self.fail(node, f"waits for {start} a second time")
        self.waited[start] = node
        if not _is_start(start):
            return
        for source in start.all_input_nodes:
            if self.busy.get(self.roots[source], (None, False))[0] is start:
                del self.busy[self.roots[source]]

    def slot_kind(self, node: fx.Node) -> str:
        slot = self.slots.get(node)
        return slot.kind if slot is not None else ""

    def handles(self) -> None:
        """Every start is waited for, or handed out."""
        handed = {
            node for slot, node in self.program.output_nodes().items() if slot.kind == "handle"
        }
        results = set(self.program.results())
        for node in self.program.graph.nodes:
            if not _is_start(node) and self.slot_kind(node) != "handle":
                continue
            uses = (node in self.waited) + (node in handed)
            if uses != 1:
                self.fail(node, "is waited for and handed out" if uses else "is never waited for")
            others = [user for user in node.users if user.target is not ops.wait]
            if any(user.op != "output" for user in others) or (
                node in results and node not in handed
            ):
                self.fail(node, "is a handle and no tensor")


def _is_start(node: fx.Node) -> bool:
    return kinds.is_collective(node) and target_name(node.target).startswith("start_")


def collectives(program: Program) -> dict[tuple[int, ...], list[str]]:
    """What every group of ranks does together, in order, as text that is equal on its ranks.

    A start and the plain form read the same, since ranks may differ in that.
    """
    found: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for node in program.calls():
        if not kinds.is_collective(node):
            continue
        name = target_name(node.target).removeprefix("autopar.").removeprefix("start_")
        name = name.removesuffix("_")
        ranks = _ranks(node)
        source = node.all_input_nodes[0].meta["val"]
        # Parts of an exchange may differ in size between ranks.
        kind = str(source.dtype) if name == "all_to_all" else type_text(source)
        found[ranks].append(f"{name} {kind}")
    return dict(found)


def _ranks(node: fx.Node) -> tuple[int, ...]:
    place = 3 if "all_to_all" in target_name(node.target) else 1
    ranks: Any = node.args[place] if place < len(node.args) else node.kwargs["ranks"]
    return tuple(ranks)


def check_order(before: Iterable[Program], after: Iterable[Program]) -> None:
    """Check that a pass kept the collectives of every group of ranks and their order.

    Args:
        before: The programs in the order in which they run.
        after: The same after the pass.

    Raises:
        ProgramError: Names the group and the first difference.
    """
    old, new = _sequence(before), _sequence(after)
    for ranks in old.keys() | new.keys():
        first, second = old.get(ranks, []), new.get(ranks, [])
        if first == second:
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
            min(len(first), len(second)),
        )
        raise ProgramError(
            f"collectives of ranks {ranks} differ from the {place}th on: "
            f"{first[place : place + 1]} before, {second[place : place + 1]} after"
        )


def _sequence(programs: Iterable[Program]) -> dict[tuple[int, ...], list[str]]:
    found: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for program in programs:
        for ranks, names in collectives(program).items():
            found[ranks] += names
    return found
