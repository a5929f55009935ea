"""A graph with equal layers folded: what planning many times should not look at twice.

Of a block that is repeated more than three times in a row, the first two copies and the last one
stay. As choices follow the flow of a graph, the copies left out are placed like the second one. A
block is folded only if each of its copies takes from the one before it what that takes from its
own, and nobody else looks at what copies hand on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar.graph.blocks import Block, find_blocks
from autopar.graph.ir import Arg, Graph, Node, Ref, map_refs
from autopar.plan.build import constraints_of, place_graph
from autopar.plan.keys import op_keys
from autopar.plan.plan import Plan
from autopar.plan.recompute import resolve_recompute
from autopar.plan.stages import Stages, assign_stages
from autopar.sharding.factors import Factors, infer_factors
from autopar.sharding.placement import Pair
from autopar.sharding.sharded import ShardedGraph

KEPT = 3
"""Copies of a folded block that stay: the first, the second for all in between, the last."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a node stands in a folded block.

    Attributes:
        block: Number of the block.
        copy: Number of the copy.
        place: Place in the copy.
    """

    block: int
    copy: int
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A graph and its folded form.

    Attributes:
        graph: The whole graph.
        folded: The graph without the copies left out.
        factors: Factors of `folded`.
        blocks: The folded blocks.
        members: Where the nodes of folded blocks stand, by index into ``graph.nodes``.
        indexes: For each node of `graph` the index of the one in `folded` that stands for it.
        names: Value of `graph` to the one of `folded` that stands for it, where they differ.
        kinds: Kind of every input of `graph`, by value name.
        positions: Index of every node of `graph`, by name.
        uses: Place of every parameter in the order of first uses.
        replaced: Buffers that forward gives a new value.
    """

    graph: Graph
    folded: Graph
    factors: Factors
    blocks: tuple[Block, ...]
    members: Mapping[int, Member]
    indexes: tuple[int, ...]
    names: Mapping[str, str]
    kinds: Mapping[str, str]
    positions: Mapping[str, int]
    uses: Mapping[str, int]
    replaced: frozenset[str]
    _stages: dict[object, Stages] = field(default_factory=dict, repr=False, compare=False)
    _whole: list[Factors] = field(default_factory=list, repr=False, compare=False)
    _recompute: dict[tuple[str, ...], frozenset[str]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def of(cls, graph: Graph, *, fold: bool = True) -> Layout:
        """The layout of a canonical graph.

        Args:
            graph: The graph.
            fold: Whether to fold at all.
        """
        blocks = tuple(block for block in find_blocks(graph) if fold and _foldable(graph, block))
        return _fold(graph, blocks)

    def stages(self, count: int, cuts: Sequence[str] = ()) -> Stages:
        """The stages of the whole graph; see `assign_stages`."""
        key = (count, tuple(cuts))
        if key not in self._stages:
            if not self._whole:
                self._whole.append(infer_factors(self.graph))
            self._stages[key] = assign_stages(self.graph, self._whole[0], count, cuts or None)
        return self._stages[key]

    def recompute(self, patterns: tuple[str, ...]) -> frozenset[str]:
        """Names of the nodes that backward computes again; see `resolve_recompute`."""
        if patterns not in self._recompute:
            self._recompute[patterns] = resolve_recompute(self.graph, patterns)
        return self._recompute[patterns]

    def place(self, plan: Plan) -> Placement:
        """How a plan places every value.

        Raises:
            PlanError: If the plan does not fit the graph.
        """
        constraints = constraints_of(plan)
        layout = self
        if plan.overrides:
            kept = self._kept_overrides(plan.overrides)
            if kept is None:
                layout = Layout.of(self.graph, fold=False)
            else:
                plan = replace(plan, overrides=kept)
        sharded = place_graph(layout.folded, plan.device_mesh, constraints, layout.factors, plan)
        if not layout._settled(sharded):
            layout = Layout.of(self.graph, fold=False)
            sharded = place_graph(
                layout.folded, plan.device_mesh, constraints, layout.factors, plan
            )
        return Placement.of(layout, sharded)

    def _kept_overrides(
        self, overrides: Mapping[str, tuple[str, ...]]
    ) -> dict[str, tuple[str, ...]] | None:
        """Overrides of the ops that stay, None if copies left out have others."""
        keys = op_keys(self.graph)
        own = op_keys(self.folded)
        for index, key in enumerate(keys):
            if overrides.get(key) != overrides.get(own[self.indexes[index]]):
                return None
        known = set(own)
        return {key: words for key, words in overrides.items() if key in known}

    def _settled(self, sharded: ShardedGraph) -> bool:
        """Whether the second copy hands on what it takes, placed alike."""
        pairs = sharded.pairs()
        for block in self.blocks:
            second, last = block.inputs[1], block.inputs[-1]
            for old, new in zip(second, last, strict=True):
                if pairs[self.names.get(old, old)] != pairs[self.names.get(new, new)]:
                    return False
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How every value of a layout's graph lies on a mesh.

    Attributes:
        layout: The layout.
        sharded: The folded graph, placed.
        pairs: Pair of every value of the folded graph.
    """

    layout: Layout
    sharded: ShardedGraph
    pairs: Mapping[str, Pair]

    @classmethod
    def of(cls, layout: Layout, sharded: ShardedGraph) -> Placement:
        """A placement of the folded graph of `layout`."""
        return cls(layout=layout, sharded=sharded, pairs=sharded.pairs())

    @classmethod
    def whole(cls, sharded: ShardedGraph) -> Placement:
        """A placement of a graph that is not folded."""
        graph = sharded.graph
        layout = Layout(
            graph=graph,
            folded=graph,
            factors=sharded.factors,
            blocks=(),
            members={},
            indexes=tuple(range(len(graph.nodes))),
            names={},
            kinds=_kinds(graph),
            positions=_positions(graph),
            uses=_uses(graph),
            replaced=_replaced(graph),
        )
        layout._whole.append(sharded.factors)
        return cls.of(layout, sharded)

    def pair(self, name: str) -> Pair:
        """Pair of a value of the whole graph where it is made."""
        return self.pairs[self.layout.names.get(name, name)]


def _foldable(graph: Graph, block: Block) -> bool:
    """Whether copies hang together like beads on a string."""
    if block.count <= KEPT:
        return False
    maker = {
        name: (copy, place)
        for copy, names in enumerate(block.outputs)
        for place, name in enumerate(names)
    }
    outside = {item.value.name for item in graph.inputs}
    users: dict[str, set[int]] = {}
    for copy, names in enumerate(block.inputs):
        for name in names:
            users.setdefault(name, set()).add(copy)
    for column in zip(*block.inputs, strict=True):
        later = column[1:]
        if len(set(column)) == 1:
            continue
        if all(name in outside for name in column):
            if any(len(users[name]) > 1 for name in column):
                return False
            continue
        made = [maker.get(name) for name in later]
        if any(item is None for item in made):
            return False
        places = {item[1] for item in made if item is not None}
        if len(places) != 1 or [x[0] for x in made if x] != list(range(block.count - 1)):
            return False
    return _handed_on_only(graph, block, maker)


def _handed_on_only(graph: Graph, block: Block, maker: Mapping[str, tuple[int, int]]) -> bool:
    """Whether nobody but the next copy looks at what copies from the third on make."""
    middle = range(1, block.count - 1)
    inside = {index: copy for copy, nodes in enumerate(block.nodes) for index in nodes}
    for index, node in enumerate(graph.nodes):
        for name in node.operands:
            found = maker.get(name)
            if found is not None and found[0] in middle:
                user = inside.get(index)
                if user not in (found[0], found[0] + 1):
                    return False
    ends = {out.value for out in graph.outputs}
    return not any(name in ends for copy in middle for name in block.outputs[copy])


def _fold(graph: Graph, blocks: tuple[Block, ...]) -> Layout:
    members: dict[int, Member] = {}
    stand_in: dict[int, int] = {}
    names: dict[str, str] = {}
    rewired: dict[str, str] = {}
    for number, block in enumerate(blocks):
        second = block.nodes[1]
        for copy, nodes in enumerate(block.nodes):
            for place, index in enumerate(nodes):
                members[index] = Member(number, copy, place)
        for copy in range(2, block.count - 1):
            for index, like in zip(block.nodes[copy], second, strict=True):
                stand_in[index] = like
                made, same = graph.nodes[index].outputs, graph.nodes[like].outputs
                names.update((x.name, y.name) for x, y in zip(made, same, strict=True))
            for name, other in zip(block.inputs[copy], block.inputs[1], strict=True):
                if name != other:
                    names.setdefault(name, other)
        rewired.update(zip(block.outputs[-2], block.outputs[1], strict=True))
    kept: list[Node] = []
    position: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        if index not in stand_in:
            position[index] = len(kept)
            kept.append(_rewire(node, rewired))
    folded = Graph(
        inputs=tuple(item for item in graph.inputs if item.value.name not in names),
        nodes=tuple(kept),
        outputs=graph.outputs,
    )
    return Layout(
        graph=graph,
        folded=folded,
        factors=infer_factors(folded),
        blocks=blocks,
        members=members,
        indexes=tuple(position[stand_in.get(index, index)] for index in range(len(graph.nodes))),
        names=names,
        kinds=_kinds(graph),
        positions=_positions(graph),
        uses=_uses(graph),
        replaced=_replaced(graph),
    )


def _kinds(graph: Graph) -> dict[str, str]:
    return {item.value.name: item.kind for item in graph.inputs}


def _positions(graph: Graph) -> dict[str, int]:
    return {node.name: index for index, node in enumerate(graph.nodes)}


def _replaced(graph: Graph) -> frozenset[str]:
    names = {item.target: item.value.name for item in graph.inputs if item.kind == "buffer"}
    new = (out.target for out in graph.outputs if out.kind == "buffer")
    return frozenset(names[target] for target in new if target in names)


def _uses(graph: Graph) -> dict[str, int]:
    parameters = {item.value.name for item in graph.parameters()}
    names = (name for node in graph.nodes for name in node.operands if name in parameters)
    return {name: place for place, name in enumerate(dict.fromkeys(names))}


def _rewire(node: Node, names: Mapping[str, str]) -> Node:
    if not any(name in names for name in node.operands):
        return node

    def change(ref: Ref) -> Arg:
        return Ref(names.get(ref.name, ref.name))

    args = tuple(map_refs(arg, change) for arg in node.args)
    kwargs = tuple((key, map_refs(arg, change)) for key, arg in node.kwargs)
    return replace(node, args=args, kwargs=kwargs)
