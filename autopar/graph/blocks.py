"""Repeated blocks: subgraphs that are the same but for names.

The nodes of every module path with a number in it (``layers.3``) form a candidate block. A
block is hashed from its operators, arguments, specs and its wiring: inside values by position,
outside values by first use. Blocks whose hashes agree, and which agree node by node when
compared (`_Walk` writes the same canonical form for both), are copies. Outermost
candidates that repeat win; the nodes of one that does not repeat may still hold smaller ones.
The whole takes time linear in the number of nodes times the depth of module paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
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


def _prefixes(module: str) -> Iterable[str]:
    """Paths above and including `module` that end in a number, outermost first."""
    parts = module.split(".")
    for depth, part in enumerate(parts, 1):
        if part.isdigit():
            yield ".".join(parts[:depth])


class _Walk:
    """The canonical form of one candidate: equal forms are isomorphic subgraphs."""

    def __init__(
        self, graph: Graph, path: str, indexes: list[int], kinds: Mapping[str, str]
    ) -> None:
        self.path, self.indexes, self.kinds = path, tuple(indexes), kinds
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


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.kinds = {
            item.value.name: item.kind
            for item in graph.inputs
            if item.kind in ("parameter", "buffer")
        }
        self.members: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(graph.nodes):
            for prefix in _prefixes(node.module):
                self.members[prefix].append(index)
        self.users: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(graph.nodes):
            for name in node.operands:
                self.users[name].append(index)
        self.returned = {item.value for item in graph.outputs}

    def find(self, smallest: int) -> tuple[Block, ...]:
        by_depth: dict[int, list[str]] = defaultdict(list)
        for path in self.members:
            by_depth[sum(part.isdigit() for part in path.split("."))].append(path)
        taken: set[int] = set()
        blocks: list[Block] = []
        for depth in sorted(by_depth):
            groups: dict[object, list[_Walk]] = defaultdict(list)
            for path in by_depth[depth]:
                indexes = self.members[path]
                if len(indexes) < smallest or indexes[0] in taken:
                    continue
                walk = _Walk(self.graph, path, indexes, self.kinds)
                groups[tuple(walk.form)].append(walk)
            for walks in groups.values():
                if len(walks) > 1:
                    blocks.append(self._block(walks))
                    taken.update(index for walk in walks for index in walk.indexes)
        return tuple(sorted(blocks, key=lambda block: block.nodes[0][0]))

    def _block(self, walks: list[_Walk]) -> Block:
        places: set[tuple[int, int]] = set()
        for walk in walks:
            last = set(walk.indexes)
            for name, place in walk.inside.items():
                used = any(index not in last for index in self.users.get(name, ()))
                if used or name in self.returned:
                    places.add(place)
        ordered = sorted(places)
        nodes = self.graph.nodes
        return Block(
            paths=tuple(walk.path for walk in walks),
            nodes=tuple(walk.indexes for walk in walks),
            inputs=tuple(tuple(walk.outside) for walk in walks),
            outputs=tuple(
                tuple(nodes[walk.indexes[place]].outputs[slot].name for place, slot in ordered)
                for walk in walks
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
    return _Finder(graph).find(smallest)
