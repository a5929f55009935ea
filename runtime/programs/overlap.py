"""Overlap: a collective starts as early and is waited for as late as memory allows.

A blocking collective becomes a start and a wait. The start moves up to where its operand is ready,
the wait down to the first use of its result. Collectives start in the order in which they stood, so
ranks that run the same program cannot wait for each other in a circle.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.runtime.programs import kinds, ops
from autopar.runtime.programs.edit import Editor, memory_roots, storages
from autopar.runtime.programs.program import Program

LIMIT_BYTES = 250 * 1024**2
"""Results under way at one time: chosen, ten of DistributedDataParallel's buckets of 25 MiB."""

SMALL_BYTES = 64 * 1024
"""Results too small to matter for memory."""

_STARTS: dict[Any, Callable[..., Any]] = {
    ops.ALL_REDUCE: ops.start_all_reduce,
    ops.ALL_GATHER: ops.start_all_gather,
    ops.REDUCE_SCATTER: ops.start_reduce_scatter,
    ops.ALL_TO_ALL: ops.start_all_to_all,
}


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A collective under way: starts right before position `start`, ends right before `wait`."""

    node: fx.Node
    start: int
    wait: int
    size_bytes: int


def overlap(
    program: Program,
    *,
    limit_bytes: int = LIMIT_BYTES,
    limit_count: int | None = None,
    lookahead: int | None = None,
    small_bytes: int = 0,
) -> Program:
    """Split blocking collectives into starts, moved up, and waits, moved down.

    Args:
        program: Not changed.
        limit_bytes: A start does not move above the wait of an earlier collective if the results
            under way would exceed this.
        limit_count: The same for their number; with 1, ZeRO-3 gathers one bucket ahead.
        lookahead: A start moves up by at most this many nodes; None for no such limit.
        small_bytes: Results up to this size count for none of the limits.

    Returns:
        The program with the same collectives in the same order. One whose result is needed at
        once and whose operand is not ready earlier is left blocking.
    """
    editor = Editor(program)
    nodes = list(editor.graph.nodes)
    sky = _Sky(limit_bytes, limit_count, small_bytes)
    flights = _plan(nodes, editor, sky, lookahead)
    for flight in flights:
        node = flight.node
        assert not node.kwargs, node
        start = editor.call(nodes[flight.start], _STARTS[node.target], *node.args, like=node)
        result = editor.call(nodes[flight.wait], ops.wait, start, like=node)
        start.meta["val"] = result.meta["val"] = node.meta["val"]
        editor.replace(node, result)
    for flight in flights:
        editor.graph.erase_node(flight.node)
    return editor.finish(program)


def advance_inputs(program: Program, *, limit_bytes: int = SMALL_BYTES) -> Program:
    """Move small collectives that inputs alone determine, and what they read, to the front.

    A count of the batch's tokens is wanted by the loss: where it stands there, ranks wait for each
    other in the middle of a step. From the front, `overlap` gives it all of forward.

    Args:
        program: Not changed.
        limit_bytes: Size of the largest result moved.
    """
    editor = Editor(program)
    nodes = list(editor.graph.nodes)
    free = {node for slot, node in editor.inputs.items() if slot.kind in ("input", "microbatch")}
    wanted: set[fx.Node] = set()
    for node in nodes:
        plain = node.op == "call_function" and not kinds.is_random(node)
        if not plain or kinds.written(node) or not free.issuperset(node.all_input_nodes):
            continue
        free.add(node)
        size_bytes = sum(size for _, size in storages(node.meta["val"]))
        if kinds.is_collective(node) and size_bytes <= limit_bytes:
            wanted.add(node)
    for node in reversed(nodes):
        if node in wanted:
            wanted.update(item for item in node.all_input_nodes if item.op == "call_function")
    roots = memory_roots(editor.graph)
    if any(roots[target] in free for node in nodes for target in kinds.written(node)):
        return program
    place = editor.begin
    for node in nodes:
        if node is place and node in wanted:
            place = place.next
        elif node in wanted:
            place.prepend(node)
    return editor.finish(program)


def _plan(
    nodes: list[fx.Node],
    editor: Editor,
    sky: _Sky,
    lookahead: int | None,
) -> list[_Flight]:
    """Positions in `nodes` for each collective worth splitting, in order."""
    order = {node: position for position, node in enumerate(nodes)}
    roots = memory_roots(editor.graph)
    writes = _writes(nodes, roots)
    first_body = order[editor.begin]
    last_place = len(nodes) - 1
    previous = first_body
    flights: list[_Flight] = []
    waits: dict[fx.Node, int] = {}
    for position, node in enumerate(nodes):
        if not kinds.is_collective(node):
            continue
        if node.target not in _STARTS:
            previous = position + 1
            continue
        operand = node.all_input_nodes[0]
        before, after = _around(writes.get(roots[operand], []), position, last_place)
        ready = waits.get(operand, order[operand] + 1)
        earliest = max(ready, before + 1, previous)
        if lookahead is not None:
            earliest = max(earliest, position - lookahead)
        flight = _Flight(
            wait=min([after, *(order[user] for user in node.users)]),
            start=position,
            node=node,
            size_bytes=sum(size for _, size in storages(node.meta["val"])),
        )
        flight.start = sky.place(flight.size_bytes, earliest, position)
        if flight.start == position and flight.wait == position + 1:
            previous = position + 1
            continue
        previous = flight.start
        waits[node] = flight.wait
        flights.append(flight)
        sky.add(flight)
    return flights


class _Sky:
    """What is under way, soonest to land first."""

    def __init__(self, limit_bytes: int, limit_count: int | None, small_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.limit_count = limit_count
        self.small_bytes = small_bytes
        self.flights: list[tuple[int, int]] = []
        self.size_bytes = 0

    def place(self, size_bytes: int, earliest: int, latest: int) -> int:
        """The first position from `earliest` on at which a result of this size has room."""
        if size_bytes > self.limit_bytes:
            return latest
        if size_bytes <= self.small_bytes:
            return earliest
        while self.flights and earliest < latest:
            wait = self.flights[0][0]
            full = self.size_bytes + size_bytes > self.limit_bytes or (
                self.limit_count is not None and len(self.flights) >= self.limit_count
            )
            if wait > earliest and not full:
                break
            earliest = min(max(earliest, wait), latest)
            if wait <= earliest:
                self.size_bytes -= heapq.heappop(self.flights)[1]
        return earliest

    def add(self, flight: _Flight) -> None:
        """Count a flight from its start to its wait."""
        if flight.size_bytes <= self.small_bytes:
            return
        heapq.heappush(self.flights, (flight.wait, flight.size_bytes))
        self.size_bytes += flight.size_bytes


def _writes(nodes: list[fx.Node], roots: dict[fx.Node, fx.Node]) -> dict[fx.Node, list[int]]:
    """Positions of the writes to each piece of memory, ascending."""
    found: dict[fx.Node, list[int]] = {}
    for position, node in enumerate(nodes):
        for target in kinds.written(node):
            found.setdefault(roots[target], []).append(position)
    return found


def _around(positions: list[int], position: int, end: int) -> tuple[int, int]:
    """The last of the positions before `position`, or -1, and the first after it, or `end`."""
    index = bisect_left(positions, position)
    before = positions[index - 1] if index else -1
    after = positions[index] if index < len(positions) else end
    return before, after
