"""What is known of integers that route rows: orders, inverses, counts, ends of groups.

Facts come from how values are made, call by call, see `autopar.graph.routing`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.graph.ir import Arg, Graph, Node, Ref, TensorSpec

_SORTS = frozenset(
    {"aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable"}
)
_EXACT = frozenset({"int32", "int64", "float32", "float64"})


@dataclass(frozen=True, slots=True)
class Fact:
    """What a value is known to be.

    Kinds: ``order`` that sorts ids, its ``inverse``, ``rows`` (order // number), ``sorted`` ids,
    ``counts`` and ``ends`` of `number` groups, ``line`` (0, 1, 2 ...), ``spread`` (each of a line
    `number` times), ``repeated`` (every row of `key` `number` times), ``fill`` (all `number`).
    The `key` of what permutes is the name of the order, that of ids and counts where ids come from.
    """

    kind: str
    key: str = ""
    number: float = 0


def argument(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    """The argument at `position` of the schema, or given by keyword `name`."""
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def base_name(node: Node) -> str:
    """Name of the op without namespace and overload."""
    return node.op.split(".")[1]


class Facts:
    """Learns what values are, call by call in order.

    Attributes:
        specs: Spec of every value so far.
        makers: The call that made it.
        known: What is known of it.
        ids: For every order the ids that it sorts, as a vector, and where these come from.
    """

    def __init__(self, graph: Graph) -> None:
        self.specs: dict[str, TensorSpec] = {i.value.name: i.value.spec for i in graph.inputs}
        self.makers: dict[str, Node] = {}
        self.known: dict[str, Fact] = {}
        self.ids: dict[str, tuple[str, str]] = {}

    def fact(self, name: str) -> Fact:
        """What `name` is known to be; kind "" if nothing is."""
        return self.known.get(name, Fact(""))

    def learn(self, node: Node) -> None:
        """Take in a call, after those that made its operands."""
        for value in node.outputs:
            self.specs[value.name] = value.spec
            self.makers[value.name] = node
        rule = _LEARN.get(base_name(node)) if node.outputs else None
        if rule is None:
            return
        found = rule(self, node)
        if found is not None:
            self.known[node.outputs[-1].name] = found

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return self.specs[name].shape

    def source(self, name: str) -> str:
        """Where numbers come from that were only reshaped, or cast without loss."""
        while (node := self.makers.get(name)) is not None and name not in self.known:
            cast = node.op == "aten.to.dtype" and node.outputs[0].spec.dtype in _EXACT
            if node.op != "aten.reshape.default" and not cast:
                break
            name = node.operands[0]
        return name

    def ids_of(self, name: str) -> str | None:
        """Where ids come from of which `name` holds each once, in whatever order."""
        name = self.source(name)
        if self.fact(name).kind == "sorted":
            return self.fact(name).key
        return name if "int" in self.specs[name].dtype else None

    def vector(self, name: str) -> str:
        """The vector that an index was made of by repeating it along inner dims."""
        node = self.makers.get(name)
        while node is not None and node.op in ("aten.expand.default", "aten.reshape.default"):
            inner = node.operands[0]
            rows = self.shape(name)[:1]
            if self.shape(inner)[:1] != rows or self.shape(inner)[1:2] not in ((), (1,)):
                break
            name, node = inner, self.makers.get(inner)
        return name

    def looked_up(self, node: Node) -> tuple[str, str] | None:
        """The table and the vector of positions of a gather of whole rows."""
        if node.op == "aten.index.Tensor":
            indices = node.args[1]
            assert isinstance(indices, tuple)
            first = indices[0]
            if isinstance(first, Ref) and all(item is None for item in indices[1:]):
                return node.operands[0], first.name
        if node.op == "aten.index_select.default" and node.args[1] == 0:
            return node.operands[0], node.operands[1]
        if node.op == "aten.gather.default" and node.args[1] == 0:
            table, index = node.operands
            if self.shape(index)[1:] == self.shape(table)[1:]:
                return table, self.vector(index)
        return None

    def fill(self, name: str, value: float) -> bool:
        """Whether every element of `name` is `value`."""
        return self.known.get(name) == Fact("fill", "", value)


Learner = Callable[[Facts, Node], Fact | None]


def _sorts(facts: Facts, node: Node) -> Fact | None:
    name = node.operands[0]
    spec = facts.specs[name]
    position = 1 if node.op.endswith(".default") else 9
    ascending = argument(node, position + 1, "descending", False) is False
    if node.op not in _SORTS or spec.ndim != 1 or not ascending:
        return None
    have, order = facts.fact(name), node.outputs[-1].name
    if have.kind in ("order", "inverse"):
        other = "inverse" if have.kind == "order" else "order"
        return Fact(other, have.key)
    source = facts.ids_of(name)
    if source is None or "int" not in spec.dtype or have.kind:
        return None
    facts.ids[order] = name, source
    if len(node.outputs) == 2:
        facts.known[node.outputs[0].name] = Fact("sorted", source)
    return Fact("order", order)


def _divides(facts: Facts, node: Node) -> Fact | None:
    have = facts.fact(node.operands[0])
    by = argument(node, 1, "other")
    rounded = base_name(node) == "floor_divide" or argument(node, 2, "rounding_mode") in (
        "floor",
        "trunc",
    )
    if not rounded or not isinstance(by, int) or by < 1:
        return None
    if have.kind == "order":
        return Fact("rows", have.key, by)
    return Fact("spread", "", by) if have.kind == "line" else None


def _writes(facts: Facts, node: Node) -> Fact | None:
    """A line written to the places that an order names is its inverse."""
    if node.op == "aten.index_put.default":
        indices, values = node.args[1], argument(node, 2, "values")
        plain = (
            isinstance(indices, tuple)
            and len(indices) == 1
            and argument(node, 3, "acc") is not True
        )
        index = indices[0] if isinstance(indices, tuple) and plain else None
    elif node.op == "aten.scatter.src":
        index, values = node.args[2], node.args[3]
    else:
        return None
    if not isinstance(index, Ref) or not isinstance(values, Ref):
        return None
    have = facts.fact(index.name)
    if have.kind != "order" or facts.fact(values.name).kind != "line":
        return None
    same = facts.shape(index.name) == node.outputs[0].spec.shape == facts.shape(values.name)
    return Fact("inverse", have.key) if same else None


def _line(facts: Facts, node: Node) -> Fact | None:
    start = node.args[0] if "start" in node.op else 0
    step = node.args[2] if node.op.endswith("start_step") and len(node.args) > 2 else 1
    whole = all(isinstance(arg, int) for arg in node.args)
    return Fact("line") if whole and start == 0 and step == 1 else None


def _looks_up(facts: Facts, node: Node) -> Fact | None:
    found = facts.looked_up(node)
    if found is None:
        return None
    table, index = found
    by, have = facts.fact(index), facts.fact(table)
    if by.kind == "spread" and facts.shape(table)[0] * by.number == facts.shape(index)[0]:
        return Fact("repeated", table, by.number)
    if by.kind != "order" or facts.shape(table) != facts.shape(index):
        return None
    if have.kind == "spread":
        return Fact("rows", by.key, have.number)
    if have.kind == "line":
        return by
    _, source = facts.ids[by.key]
    return Fact("sorted", source) if facts.source(table) == source else None


def _repeats(facts: Facts, node: Node) -> Fact | None:
    count, inner = argument(node, 1, "repeats"), node.operands[0]
    flat = facts.specs[inner].ndim == 1
    if node.op != "aten.repeat_interleave.self_int" or not isinstance(count, int):
        return None
    if argument(node, 2, "dim") != 0 and not flat:
        return None
    if facts.fact(inner).kind == "line":
        return Fact("spread", "", count)
    return Fact("repeated", inner, count)


def _reshapes(facts: Facts, node: Node) -> Fact | None:
    """Rows repeated by expansion; what a vector is stays true of it as a vector."""
    name, shape = node.operands[0], node.outputs[0].spec.shape
    have, maker = facts.fact(name), facts.makers.get(name)
    if have.kind and len(shape) == 1 and facts.specs[name].ndim <= 1:
        return have
    if maker is None or maker.op != "aten.expand.default":
        return None
    wide, narrow = facts.shape(name), facts.shape(maker.operands[0])
    inner = facts.makers.get(maker.operands[0])
    if inner is None or inner.op != "aten.reshape.default" or len(wide) < 2:
        return None
    rows = inner.operands[0]
    repeated = narrow == (wide[0], 1, *wide[2:]) and shape == (wide[0] * wide[1], *wide[2:])
    if not repeated or facts.shape(rows) != (wide[0], *wide[2:]):
        return None
    if facts.fact(rows).kind == "line":
        return Fact("spread", "", wide[1])
    return Fact("repeated", rows, wide[1])


def _casts(facts: Facts, node: Node) -> Fact | None:
    have, dtype = facts.fact(node.operands[0]), node.outputs[0].spec.dtype
    if have.kind in ("sorted", "counts", "ends"):
        return have if dtype in _EXACT else None
    places = have.kind in ("order", "inverse", "rows", "line", "spread")
    return have if places and dtype in ("int32", "int64") else None


def _fills(facts: Facts, node: Node) -> Fact | None:
    value = node.args[1]
    return Fact("fill", "", value) if isinstance(value, (int, float)) else None


def _histogram(facts: Facts, node: Node) -> Fact | None:
    groups, low, high = (argument(node, i, n) for i, n in ((1, "bins"), (2, "min"), (3, "max")))
    source = facts.ids_of(node.operands[0])
    if source is None or not isinstance(groups, int) or (low, high) != (0, groups - 1):
        return None
    return Fact("counts", source, groups)


def _sums(facts: Facts, node: Node) -> Fact | None:
    """Sums over all ids of what tells whether an id is that of a group."""
    name = node.operands[0]
    maker = facts.makers.get(name)
    while maker is not None and maker.op == "aten.to.dtype" and facts.specs[name].dtype in _EXACT:
        name = maker.operands[0]
        maker = facts.makers.get(name)
    dims, shape = argument(node, 1, "dim"), facts.shape(name)
    if maker is None or not isinstance(dims, tuple) or argument(node, 2, "keepdim", False):
        return None
    gone = {dim % len(shape) for dim in dims if isinstance(dim, int)}
    if maker.op == "aten.one_hot.default" and gone == set(range(len(shape) - 1)):
        source = facts.ids_of(maker.operands[0])
        return None if source is None else Fact("counts", source, shape[-1])
    if maker.op != "aten.eq.Tensor" or len(shape) != 2 or len(gone) != 1:
        return None
    (summed,) = gone
    for ids, line in (maker.operands, maker.operands[::-1]):
        vectors = facts.source(ids), facts.source(line)
        wide = (*(1,) * (2 - facts.specs[ids].ndim), *facts.shape(ids))
        across = (*(1,) * (2 - facts.specs[line].ndim), *facts.shape(line))
        apart = wide[1 - summed] == 1 and across[summed] == 1
        if facts.fact(vectors[1]).kind == "line" and apart and facts.ids_of(ids) is not None:
            return Fact("counts", facts.ids_of(ids) or "", shape[1 - summed])
    return None


def _accumulates(facts: Facts, node: Node) -> Fact | None:
    """Ones added to the group of every id."""
    base, ids, ones = node.operands
    if not facts.fill(base, 0) or not facts.fill(ones, 1) or facts.specs[base].ndim != 1:
        return None
    source = facts.ids_of(ids)
    exact = node.outputs[0].spec.dtype in _EXACT and facts.shape(ids) == facts.shape(ones)
    return Fact("counts", source, facts.shape(base)[0]) if source is not None and exact else None


def _adds_up(facts: Facts, node: Node) -> Fact | None:
    have = facts.fact(node.operands[0])
    exact = node.outputs[0].spec.dtype in _EXACT
    return Fact("ends", have.key, have.number) if have.kind == "counts" and exact else None


def _searches(facts: Facts, node: Node) -> Fact | None:
    """Where the next id would stand among sorted ids is where its group ends."""
    edges, values = (facts.fact(facts.source(name)) for name in node.operands[:2])
    right = (
        dict(node.kwargs).get("right", False) is True or dict(node.kwargs).get("side") == "right"
    )
    if len(node.operands) != 2 or edges.kind != "sorted" or values.kind != "line" or not right:
        return None
    return Fact("ends", edges.key, node.outputs[0].spec.numel)


_LEARN: dict[str, Learner] = {
    "sort": _sorts, "argsort": _sorts, "floor_divide": _divides, "div": _divides,
    "index_put": _writes, "scatter": _writes, "arange": _line, "index": _looks_up,
    "index_select": _looks_up, "gather": _looks_up, "repeat_interleave": _repeats,
    "reshape": _reshapes, "to": _casts, "full": _fills, "histc": _histogram, "sum": _sums,
    "scatter_add": _accumulates, "index_add": _accumulates, "cumsum": _adds_up,
    "searchsorted": _searches,
}  # fmt: skip
