"""What every tensor dim *is*: factors, found once for the whole graph.

Each dim of each value and each letter of each op's rule is a variable that holds a chain of
*cuts*: strides ``1 = c0 | c1 | ... | ck = size``. Consecutive cuts bound a factor. A letter that
spans a whole dim is the same variable as that dim (union-find); one that sits inside a dim, as
the heads in a fused projection do, exchanges cuts with it at its stride. Cuts spread to a
fixpoint; a cut that would break the divisibility chain of a variable stops there, and the
resharder bridges such places.

The unit that can be split is (letter of one op, factor of that letter). The global classes only
refine and name: a residual stream joins both dims of a square weight, so a class is never itself
a unit of sharding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from autopar.graph.blocks import Block, find_blocks
from autopar.graph.ir import Graph, Node, Ref, map_refs
from autopar.graph.routing import GROUPED
from autopar.sharding.rule import Letter, OpRule, rule_for


@dataclass(frozen=True, slots=True)
class Unit:
    """One way to split one op: a factor of one letter of its rule.

    Attributes:
        letter: Name of the letter.
        stride: Stride of the factor inside the letter.
        size: Size of the factor.
        name: Readable name, e.g. ``heads`` or ``heads.1``.
    """

    letter: str
    stride: int
    size: int
    name: str

    @property
    def base(self) -> str:
        """Name without the ordinal of a refined factor."""
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """Rules and units of every node of one graph.

    Attributes:
        rules: Rule of each node, None where the op has none.
        units: Units of each node.
        dim_names: For ``(value, dim)`` the names of its factors, outermost first, with
            their ``(stride, size)``.
        positions: Index of every node by name.
        alias: Value of a repeated block to the value of its sample copy, which stands for it in
            `dim_names`.
    """

    rules: tuple[OpRule | None, ...]
    units: tuple[tuple[Unit, ...], ...]
    dim_names: dict[tuple[str, int], tuple[tuple[str, int, int], ...]]
    positions: dict[str, int]
    alias: dict[str, str]

    def dims(self, value: str, dim: int) -> tuple[tuple[str, int, int], ...]:
        """Names, strides and sizes of the factors of a dim, outermost first; () if unknown."""
        return self.dim_names.get((self.alias.get(value, value), dim), ())

    def names(self) -> tuple[str, ...]:
        """All names of factors that some op can split, without ordinals, sorted."""
        return tuple(sorted({unit.base for units in self.units for unit in units}))


class _Classes:
    """Union-find over variables with a chain of cuts each, and relations between them."""

    def __init__(self) -> None:
        self.parent: list[int] = []
        self.size: list[int] = []
        self.cuts: list[set[int]] = []
        self.links: list[set[tuple[int, int, bool]]] = []  # (other, stride, other is the dim)
        self.work: set[int] = set()

    def new(self, size: int) -> int:
        self.parent.append(len(self.parent))
        self.size.append(size)
        self.cuts.append({1, size})
        self.links.append(set())
        return len(self.parent) - 1

    def find(self, item: int) -> int:
        root = item
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[item] != root:
            self.parent[item], item = root, self.parent[item]
        return root

    def union(self, first: int, second: int) -> None:
        a, b = self.find(first), self.find(second)
        if a == b:
            return
        assert self.size[a] == self.size[b], "a letter spans dims of unequal size"
        if len(self.links[a]) < len(self.links[b]):
            a, b = b, a
        self.parent[b] = a
        self.links[a] |= self.links[b]
        self.links[b] = set()
        extra, self.cuts[b] = self.cuts[b] - self.cuts[a], set()
        for cut in sorted(extra):
            self.add(a, cut)

    def link(self, letter: int, dim: int, stride: int) -> None:
        a, b = self.find(letter), self.find(dim)
        self.links[a].add((b, stride, True))
        self.links[b].add((a, stride, False))
        self.add(b, stride)
        self.add(b, stride * self.size[a])
        self.work |= {a, b}

    def add(self, item: int, cut: int) -> None:
        root = self.find(item)
        cuts = self.cuts[root]
        if cut in cuts or any(cut % c and c % cut for c in cuts):
            return
        cuts.add(cut)
        self.work.add(root)

    def spread(self) -> None:
        """Exchange cuts along the relations until nothing changes, in a fixed order."""
        for root, links in enumerate(self.links):
            self.links[root] = {(self.find(other), stride, side) for other, stride, side in links}
        queue = sorted({self.find(item) for item in self.work})
        self.work = set(queue)
        ordered = {root: sorted(self.links[root]) for root in queue}
        for root in queue:
            self.work.discard(root)
            before = set(self.work)
            for target, stride, other_is_dim in ordered.setdefault(root, sorted(self.links[root])):
                self._pass_on(root, target, stride, other_is_dim)
            queue.extend(sorted(self.work - before))

    def _pass_on(self, root: int, target: int, stride: int, target_is_dim: bool) -> None:
        if target_is_dim:
            for cut in tuple(self.cuts[root]):
                self.add(target, cut * stride)
            return
        size = self.size[target]
        for cut in tuple(self.cuts[root]):
            inside, odd = divmod(cut, stride)
            if not odd and 1 < inside < size and size % inside == 0:
                self.add(target, inside)

    def atoms(self, item: int) -> list[tuple[int, int]]:
        """The factors of a variable as ``(stride, size)``, innermost first."""
        cuts = sorted(self.cuts[self.find(item)])
        return [(low, high // low) for low, high in pairwise(cuts)]


class _Samples:
    """Copies of repeated blocks stood for by the second one.

    The first, second and last copy take part in the inference; what lies between repeats the
    second. So the cost depends on distinct blocks, not on depth.
    """

    def __init__(self, graph: Graph, blocks: tuple[Block, ...]) -> None:
        self.node: dict[int, int] = {}
        self.value: dict[str, str] = {}
        given = {item.value.name for item in graph.inputs}
        for block in blocks:
            samples = [
                (sample, slot, value.name)
                for sample in block.nodes[1]
                for slot, value in enumerate(graph.nodes[sample].outputs)
            ]
            for copy in range(2, block.count - 1):
                own = dict(zip(block.nodes[1], block.nodes[copy], strict=True))
                self.node.update((index, sample) for sample, index in own.items())
                for sample, slot, theirs in samples:
                    self.value[graph.nodes[own[sample]].outputs[slot].name] = theirs
                for name, sample_name in zip(block.inputs[copy], block.inputs[1], strict=True):
                    if name in given and name != sample_name:
                        self.value[name] = sample_name


def _rules(graph: Graph, samples: _Samples) -> tuple[OpRule | None, ...]:
    """The rule of every node; equal calls on equal specs share one."""
    known: dict[object, OpRule | None] = {}
    found: list[OpRule | None] = []
    for index, node in enumerate(graph.nodes):
        if index in samples.node:
            found.append(found[samples.node[index]])
            continue
        key = (
            node.op,
            map_refs(node.args, lambda _: Ref("")),  # where tensors stand, whatever their names
            tuple((name, map_refs(arg, lambda _: Ref(""))) for name, arg in node.kwargs),
            tuple(graph.spec(name) for name in node.operands),
            tuple(value.spec for value in node.outputs),
            tuple(type(arg) for arg in node.args),
        )
        if key not in known:
            known[key] = rule_for(node, graph.spec)
        found.append(known[key])
    return tuple(found)


class _Builder:
    """Collects variables and relations of one graph, then names the factors."""

    def __init__(self, graph: Graph, blocks: tuple[Block, ...]) -> None:
        self.graph = graph
        self.samples = _Samples(graph, blocks)
        self.classes = _Classes()
        self.dims: dict[tuple[str, int], int] = {}
        self.letters: dict[tuple[int, str], int] = {}
        self.rules = _rules(graph, self.samples)

    def dim(self, value: str, dim: int) -> int:
        key = (self.samples.value.get(value, value), dim)
        if key not in self.dims:
            self.dims[key] = self.classes.new(self.graph.spec(value).shape[dim])
        return self.dims[key]

    def collect(self) -> None:
        for index, (node, rule) in enumerate(zip(self.graph.nodes, self.rules, strict=True)):
            if rule is None or index in self.samples.node:
                continue
            operands = node.operands
            for letter in rule.letters:
                self._letter(index, node, letter, operands)
        self.classes.spread()

    def _letter(self, index: int, node: Node, letter: Letter, operands: tuple[str, ...]) -> None:
        variable = self.classes.new(letter.size)
        self.letters[index, letter.name] = variable
        places = [(operands[p.slot], p) for p in letter.operands]
        places += [(node.outputs[p.slot].name, p) for p in letter.outputs]
        for value, place in places:
            dim = self.dim(value, place.dim)
            if place.size == self.classes.size[self.classes.find(dim)]:
                self.classes.union(variable, dim)
            else:
                self.classes.link(variable, dim, place.stride)


Atom = tuple[int, int]


class _Names:
    """Votes for the names of factors and settles them."""

    def __init__(self, builder: _Builder) -> None:
        self.builder, self.classes = builder, builder.classes
        self.parent: dict[Atom, Atom] = {}
        self.known: dict[int, tuple[tuple[str, int, int], ...]] = {}
        self.votes: dict[Atom, Counter[str]] = {}
        self.strength: dict[tuple[Atom, str], int] = {}
        self.ordinal: dict[tuple[Atom, str], tuple[int, int]] = {}
        for root in {self.classes.find(item) for item in range(len(self.classes.parent))}:
            self._join(root)

    def find(self, atom: Atom) -> Atom:
        root = atom
        while (up := self.parent.get(root, root)) != root:
            root = up
        while atom != root:
            self.parent[atom], atom = root, self.parent.get(atom, root)
        return root

    def _join(self, root: int) -> None:
        own = set(self.classes.atoms(root))
        for other, stride, other_is_dim in self.classes.links[root]:
            if not other_is_dim:
                continue
            target = self.classes.find(other)
            theirs = set(self.classes.atoms(target))
            for low, size in own:
                if (low * stride, size) in theirs:
                    a, b = self.find((root, low)), self.find((target, low * stride))
                    if a != b:
                        self.parent[a] = b

    def vote(self, variable: int, hint: str, strength: int) -> None:
        """Suggest `hint` for all factors of a variable."""
        root = self.classes.find(variable)
        atoms = self.classes.atoms(root)
        for position, (low, _) in enumerate(reversed(atoms)):
            atom = self.find((root, low))
            self.votes.setdefault(atom, Counter())[hint] += 1
            key = (atom, hint)
            self.strength[key] = max(self.strength.get(key, 0), strength)
            seen = self.ordinal.get(key, (0, 0))
            self.ordinal[key] = max(seen, (len(atoms), position))

    def hinted(self, variable: int) -> bool:
        """Whether any factor of the variable has a suggestion."""
        root = self.classes.find(variable)
        return any(self.find((root, low)) in self.votes for low, _ in self.classes.atoms(root))

    def named_factors(self, variable: int) -> tuple[tuple[str, int, int], ...]:
        """Names, strides and sizes of the factors of a variable, outermost first."""
        root = self.classes.find(variable)
        if root not in self.known:
            self.known[root] = tuple(
                (self._name(root, low, size), low, size)
                for low, size in reversed(self.classes.atoms(root))
            )
        return self.known[root]

    def _name(self, root: int, low: int, size: int) -> str:
        atom = self.find((root, low))
        votes = self.votes.get(atom)
        if not votes:
            return f"dim{size}"
        best = max(votes, key=lambda hint: (self.strength[atom, hint], votes[hint], hint))
        count, position = self.ordinal[atom, best]
        return best if count == 1 else f"{best}.{position}"


_EMBEDDING = "aten.embedding.default"
_LINEAR = ("aten.linear.default", "aten.addmm.default", "aten.mm.default", GROUPED)


def _from_inputs(graph: Graph) -> set[str]:
    """Names of the values that depend on a user input, as far as there are embeddings."""
    found = {item.value.name for item in graph.inputs if item.kind == "input"}
    last = max((i for i, node in enumerate(graph.nodes) if node.op == _EMBEDDING), default=0)
    for node in graph.nodes[:last]:
        if not found.isdisjoint(node.operands):
            found.update(value.name for value in node.outputs)
    return found


def _vote_from_rules(builder: _Builder, names: _Names) -> None:
    """Hints of the rules; a table looked up by constants holds positions, not a vocabulary."""
    given = _from_inputs(builder.graph)
    for (index, name), variable in builder.letters.items():
        rule = builder.rules[index]
        assert rule is not None
        letter = next(item for item in rule.letters if item.name == name)
        hint, node = letter.hint, builder.graph.nodes[index]
        if hint == "vocab" and node.op == _EMBEDDING and node.operands[1] not in given:
            hint = "positions"
        if hint:
            names.vote(variable, hint, letter.hint_strength + 1)


def _vote_from_inputs(builder: _Builder, names: _Names) -> None:
    """The first dim that most user inputs share is the batch; the next of integers the seq."""
    inputs = [item for item in builder.graph.inputs if item.kind == "input"]
    first = [
        (builder.classes.find(builder.dim(item.value.name, 0)), item.value.spec.shape[0])
        for item in inputs
        if item.value.spec.ndim and (item.value.name, 0) in builder.dims
    ]
    if first:
        counts = Counter(first)
        (root, size), _ = max(counts.items(), key=lambda pair: (pair[1], pair[0][1] > 1))
        for other, other_size in counts:
            if other == root or (other_size == size and not names.hinted(other)):
                names.vote(other, "batch", 2)
    for item in inputs:
        key = (item.value.name, 1)
        if item.value.spec.ndim == 2 and not item.value.spec.is_floating and key in builder.dims:
            names.vote(builder.dims[key], "seq", 1)


def _vote_from_structure(builder: _Builder, names: _Names) -> None:
    """Name widths made by one linear and contracted by another, and nothing else.

    A width that a user input has too is that of the residual stream.
    """
    given = {
        builder.classes.find(builder.dims[item.value.name, dim])
        for item in builder.graph.inputs
        if item.kind == "input"
        for dim in range(item.value.spec.ndim)
        if (item.value.name, dim) in builder.dims
    }
    made: set[int] = set()
    used: set[int] = set()
    for (index, name), variable in builder.letters.items():
        if builder.graph.nodes[index].op in _LINEAR:
            (made if name == "n" else used if name == "k" else set()).add(
                builder.classes.find(variable)
            )
    for root in made & used:
        if not names.hinted(root):
            names.vote(root, "hidden" if root in given else "ffn", 0)
    # A fused gate makes twice the width that is used, side by side.
    parts = {
        names.find((root, low)) for root in made - used for low, _ in builder.classes.atoms(root)
    }
    for root in used - made - given:
        atoms = builder.classes.atoms(root)
        if len(atoms) == 1 and not names.hinted(root) and names.find((root, atoms[0][0])) in parts:
            names.vote(root, "ffn", 0)


def infer_factors(graph: Graph, blocks: tuple[Block, ...] | None = None) -> Factors:
    """Find the factors of every dim of `graph`.

    Args:
        graph: A canonical graph.
        blocks: Its repeated blocks, if already found.

    Returns:
        Rules, splittable units with readable names, and the names of all dims.
    """
    builder = _Builder(graph, find_blocks(graph) if blocks is None else blocks)
    builder.collect()
    names = _Names(builder)
    _vote_from_rules(builder, names)
    _vote_from_inputs(builder, names)
    _vote_from_structure(builder, names)
    units: list[tuple[Unit, ...]] = []
    for index, rule in enumerate(builder.rules):
        if index in builder.samples.node:
            units.append(units[builder.samples.node[index]])
            continue
        found: list[Unit] = []
        for letter in rule.letters if rule else ():
            if letter.split:
                variable = builder.letters[index, letter.name]
                found += [
                    Unit(letter.name, low, size, name)
                    for name, low, size in names.named_factors(variable)
                ]
        units.append(tuple(found))
    return Factors(
        rules=builder.rules,
        units=tuple(units),
        dim_names={key: names.named_factors(variable) for key, variable in builder.dims.items()},
        positions={node.name: index for index, node in enumerate(graph.nodes)},
        alias=builder.samples.value,
    )


def describe_dims(factors: Factors, value: str, shape: Iterable[int]) -> str:
    """Text such as ``(qkv, heads, head_dim) x hidden`` for the dims of a value."""
    parts = []
    for dim, size in enumerate(shape):
        found = factors.dims(value, dim) or ((str(size), 1, size),)
        names = [name for name, _, _ in found]
        parts.append(names[0] if len(names) == 1 else f"({', '.join(names)})")
    return " x ".join(parts) or "scalar"
