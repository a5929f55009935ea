"""Repeated blocks: subgraphs that are the same but for names.

The nodes of every module path with a number in it (``layers.3``) form a candidate block. A
block is hashed from its operators, arguments, specs and its wiring: inside values by position,
outside values by first use. Blocks whose hashes agree, and which agree node by node when
compared (`_Walk` writes the same canonical form for both), are copies. Outermost
candidates that repeat win; the nodes of one that does not repeat may still hold smaller ones.
The whole takes time linear in the number of nodes times the depth of module paths.

Tracing copies calls (`Graph.runs`). A block that is a copied run has the form of another copy
when it takes values of the same specs and kinds, each in the same places: no need to look at its
calls one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.graph.ir import Arg, Graph, Node, Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Copies of one subgraph.

    Attributes:
        paths: Module path of each copy, in order of execution.
        nodes: Indexes into ``Graph.nodes`` of each copy; the i-th of one is the i-th of all.
        inputs: Values that each copy takes from outside, the i-th of one being the i-th of all.
        outputs: Values of each copy that are used outside, corresponding likewise.
    """

    paths: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    inputs: tuple[tuple[str, ...], ...]
    outputs: tuple[tuple[str, ...], ...]

    @property
    def count(self) -> int:
        """How many copies there are."""
        return len(self.paths)

    @property
    def size(self) -> int:
        """Nodes per copy."""
        return len(self.nodes[0])


def _prefixes(module: str) -> tuple[str, ...]:
    """Paths above and including `module` that end in a number, outermost first."""
    parts = module.split(".")
    return tuple(".".join(parts[:depth]) for depth, part in enumerate(parts, 1) if part.isdigit())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """The calls of one module path.

    Attributes:
        path: The path.
        indexes: The calls.
        form: Number of the canonical form; equal for isomorphic subgraphs.
        outside: Values taken from outside, by first use.
    """

    path: str
    indexes: tuple[int, ...]
    form: int
    outside: tuple[str, ...]


class _Walk:
    """The canonical form of one candidate: equal forms are isomorphic subgraphs."""

    def __init__(
        self, graph: Graph, path: str, indexes: list[int], kinds: Mapping[str, str]
    ) -> None:
        self.path, self.kinds = path, kinds
        self.inside: dict[str, tuple[int, int]] = {}
        self.outside: dict[str, int] = {}
        self.form: list[object] = []
        for place, index in enumerate(indexes):
            node = graph.nodes[index]
            self.form.append(self._node(graph, node))
            for slot, value in enumerate(node.outputs):
                self.inside[value.name] = (place, slot)

    def _node(self, graph: Graph, node: Node) -> object:
        for name in node.operands:
            if name not in self.inside and name not in self.outside:
                self.outside[name] = len(self.outside)
                self.form.append((graph.spec(name), self.kinds.get(name, "value")))
        return (
            node.op,
            tuple(self._arg(arg) for arg in node.args),
            tuple((key, self._arg(arg)) for key, arg in node.kwargs),
            tuple(value.spec for value in node.outputs),
            node.module[len(self.path) :],
            node.context,
        )

    def _arg(self, arg: Arg) -> object:
        if isinstance(arg, Ref):
            place = self.inside.get(arg.name)
            return ("in", place) if place is not None else ("out", self.outside[arg.name])
        if isinstance(arg, tuple):
            return tuple(self._arg(item) for item in arg)
        return (type(arg).__name__, repr(arg))


class _Forms:
    """Numbers the forms of candidates.

    Args:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds = {
            item.value.name: item.kind
            for item in graph.inputs
            if item.kind in ("parameter", "buffer")
        }
        self.runs = {run.start: run for run in graph.runs}
        self.numbers: dict[object, int] = {}
        self.originals: dict[object, _Original] = {}

    def candidate(self, path: str, indexes: list[int]) -> _Candidate:
        """The candidate that the calls `indexes` of `path` are."""
        run = self.runs.get(indexes[0])
        if run is None or run.stop != indexes[-1] + 1 or run.stop - run.start != len(indexes):
            return self._walked(path, indexes)
        tails = run.path[len(path) :], path[len(run.path) :]
        key = (run.original, tails)
        original = self.originals.get(key)
        if original is not None:
            outside = tuple(
                self.graph.nodes[run.start + place].operands[slot]
                for place, slot in original.places
            )
            if len(set(outside)) == len(outside) and self._taken(outside) == original.taken:
                return _Candidate(
                    path=path, indexes=tuple(indexes), form=original.form, outside=outside
                )
        found = self._walked(path, indexes)
        self.originals.setdefault(key, self._original(found))
        return found

    def _walked(self, path: str, indexes: list[int]) -> _Candidate:
        walk = _Walk(self.graph, path, indexes, self.kinds)
        number = self.numbers.setdefault(tuple(walk.form), len(self.numbers))
        return _Candidate(
            path=path, indexes=tuple(indexes), form=number, outside=tuple(walk.outside)
        )

    def _taken(self, outside: tuple[str, ...]) -> list[object]:
        return [(self.graph.spec(name), self.kinds.get(name)) for name in outside]

    def _original(self, candidate: _Candidate) -> _Original:
        places: dict[str, tuple[int, int]] = {}
        for place, index in enumerate(candidate.indexes):
            for slot, name in enumerate(self.graph.nodes[index].operands):
                places.setdefault(name, (place, slot))
        return _Original(
            form=candidate.form,
            places=[places[name] for name in candidate.outside],
            taken=self._taken(candidate.outside),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Original:
    """A copied run whose form is known.

    Attributes:
        form: Number of its form.
        places: First use of each value from outside, as (call, operand).
        taken: Spec and kind of each.
    """

    form: int
    places: list[tuple[int, int]]
    taken: list[object]


def _candidates(graph: Graph, smallest: int) -> list[list[_Candidate]]:
    """Groups of candidates with equal forms; no call is in two."""
    members: dict[str, list[int]] = defaultdict(list)
    prefixes: dict[str, list[list[int]]] = {}
    for index, node in enumerate(graph.nodes):
        lists = prefixes.get(node.module)
        if lists is None:
            lists = prefixes[node.module] = [members[path] for path in _prefixes(node.module)]
        for found in lists:
            found.append(index)
    by_depth: dict[int, list[str]] = defaultdict(list)
    for path in members:
        by_depth[sum(part.isdigit() for part in path.split("."))].append(path)
    forms = _Forms(graph)
    taken: set[int] = set()
    chosen: list[list[_Candidate]] = []
    for depth in sorted(by_depth):
        groups: dict[int, list[_Candidate]] = defaultdict(list)
        for path in by_depth[depth]:
            indexes = members[path]
            if len(indexes) >= smallest and indexes[0] not in taken:
                candidate = forms.candidate(path, indexes)
                groups[candidate.form].append(candidate)
        for group in groups.values():
            if len(group) > 1:
                chosen.append(group)
                taken.update(index for candidate in group for index in candidate.indexes)
    return chosen


def _block(graph: Graph, group: list[_Candidate], crossing: set[str | None]) -> Block:
    """The block of candidates that are alike.

    Args:
        graph: The graph.
        group: The candidates.
        crossing: Values that are used outside the candidate that makes them, if one does.
    """
    nodes = graph.nodes
    places = {
        (place, slot)
        for candidate in group
        for place, index in enumerate(candidate.indexes)
        for slot, value in enumerate(nodes[index].outputs)
        if value.name in crossing
    }
    ordered = sorted(places)
    return Block(
        paths=tuple(candidate.path for candidate in group),
        nodes=tuple(candidate.indexes for candidate in group),
        inputs=tuple(candidate.outside for candidate in group),
        outputs=tuple(
            tuple(nodes[candidate.indexes[place]].outputs[slot].name for place, slot in ordered)
            for candidate in group
        ),
    )


def find_blocks(graph: Graph, *, smallest: int = 2) -> tuple[Block, ...]:
    """The repeated blocks of `graph`, in order of execution.

    Args:
        graph: A graph with module paths on its nodes.
        smallest: Fewest nodes of a block.

    Returns:
        Blocks with at least two copies; no node is in two of them.
    """
    chosen = _candidates(graph, smallest)
    crossing: set[str | None] = {item.value for item in graph.outputs}
    inside: set[int] = set()
    for group in chosen:
        for candidate in group:
            crossing.update(candidate.outside)
            inside.update(candidate.indexes)
    for index, node in enumerate(graph.nodes):
        if index not in inside:
            crossing.update(node.operands)
    blocks = [_block(graph, group, crossing) for group in chosen]
    return tuple(sorted(blocks, key=lambda block: block.nodes[0][0]))
