"""Routed experts without a sort in the graph: every token's result depends on that token alone.

Mixtures of experts sort their tokens by expert, multiply the sorted rows by one matrix per group
and undo the sort. Written so, the sort needs all tokens at once, though only its implementation
does. `route` rewrites such a region as what it means,

    y[i] = x[i // k] @ weight[ids[i]]          (`GROUPED`, k rows per token)

on rows in the order of the tokens. Lowering sorts again, where the rows are: each rank, and each
microbatch, its own (`autopar.runtime.special.routing`). So no placement has to know of it.

Definition. *ids* are integers, one per row. A permutation *order* is what sorts them; it and
what inverts it are known by how they are made, as are counts of the ids and the ends of groups,
sums of counts. A value whose rows were gathered by *order* is *sorted*; so is the result of a call
that treats rows alike, of sorted operands and of operands that are the same for all rows, and
that of a grouped product whose ends are those of the same ids. Every sorted value has a twin, the
same rows in the order of the ids. Where a sorted value is gathered by the inverse, or added to
rows by *order*, the twin stands in.

Why this is exact. Calls that treat rows alike commute with permutations of rows; in rows sorted by
ids with ends that count those ids, row i lies in group ids[i]. By induction a sorted value is its
twin gathered by *order*, and the inverse gives the twin back, whatever the order within a group.
Only the order of summation of weight gradients may change, as it does between unstable sorts.

Limits. The original calls stay for every other use: counts that make a loss that balances experts
remain sums over all tokens, and capacities that drop tokens depend on all tokens. A region is left
as it was if a grouped product of it would have to be computed a second time for such a use, if a
row meets another row, or if a random number is drawn per sorted row. Ids outside of the groups
have no meaning, nor had they before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from autopar.graph.ir import Arg, Graph, Node, Ref, TensorSpec, Value, map_refs
from autopar.graph.routing_facts import Fact, Facts, argument, base_name

GROUPED = "autopar_routing.grouped_mm.default"
"""``(rows, weight, ids, k, product, arrives, stays)``: `rows` (T, K), `weight` (E, K, N), `ids`
(T * k,) to (T * k, N); `product` is the operator of the model, and the flags say that the rows come
from such products, and go to such, through calls that treat rows alike."""

PRODUCTS = frozenset({"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"})
# fmt: off
_POINTWISE = frozenset((
    "abs", "add", "sub", "rsub", "mul", "div", "neg", "exp", "log", "sqrt", "rsqrt", "reciprocal",
    "square", "pow", "sin", "cos", "tanh", "sigmoid", "silu", "gelu", "relu", "relu6",
    "leaky_relu", "elu", "selu", "celu", "mish", "hardswish", "hardsigmoid", "hardtanh",
    "softplus", "log_sigmoid", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where",
    "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not",
    "isfinite", "nan_to_num", "to", "detach",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class _Twin:
    """The rows of a sorted value in the order of the ids: each row of `name` `repeat` times."""

    key: str
    name: str
    repeat: int = 1


def _is_marker(node: Node) -> bool:
    return not node.outputs or node.op.startswith("autopar.")


def route(graph: Graph) -> Graph:
    """`graph` with regions of routed experts rewritten; the same object if there are none.

    Args:
        graph: A canonical graph, possibly with markers of repeated layers.
    """
    if not any(node.op in PRODUCTS for node in graph.nodes):
        return graph
    excluded: frozenset[str] = frozenset()
    while True:
        router = _Router(graph, excluded)
        nodes = router.run()
        twice = router.computed_twice(nodes)
        if not twice:
            break
        excluded |= twice
    if not router.products:
        return graph
    outputs = tuple(
        item if item.value is None else replace(item, value=router.now(item.value))
        for item in graph.outputs
    )
    return Graph(inputs=graph.inputs, nodes=tuple(router.flagged(nodes)), outputs=outputs)


class _Router:
    """Writes the graph with twins beside sorted values, and twins in place of what undoes sorts.

    Args:
        graph: The graph.
        excluded: Orders whose regions stay as they are.
    """

    def __init__(self, graph: Graph, excluded: frozenset[str]) -> None:
        self.graph, self.excluded = graph, excluded
        self.facts = Facts(graph)
        self.twins: dict[str, _Twin] = {}
        self.renamed: dict[str, str] = {}
        self.products: dict[str, str] = {}  # product of sorted rows: its order
        self.chain: set[str] = set()  # twins that come from grouped products row by row
        self.nodes: list[Node] = []
        self.count = 0

    def now(self, name: str) -> str:
        """The name of a value in the new graph."""
        return self.renamed.get(name, name)

    def run(self) -> list[Node]:
        """All calls, those that nothing needs any more included."""
        for node in self.graph.nodes:
            if self.renamed:
                node = _refer(node, self.now)
            twin = self._restored(node)
            if twin is not None:
                self.renamed[node.outputs[0].name] = twin
                continue
            self.nodes.append(node)
            self.facts.learn(node)
            if not _is_marker(node):
                self._sort(node)
                self._enter(node)
                self._product(node)
                self._alike(node)
        return self._live()

    def _live(self) -> list[Node]:
        live = {self.now(item.value) for item in self.graph.outputs if item.value is not None}
        kept = []
        for node in reversed(self.nodes):
            if _is_marker(node) or any(value.name in live for value in node.outputs):
                kept.append(node)
                live.update(node.operands)
        return kept[::-1]

    def computed_twice(self, nodes: Iterable[Node]) -> frozenset[str]:
        """Orders of products of which both the original and the twin are needed."""
        found = (self.products.get(node.name) for node in nodes)
        return frozenset(order for order in found if order is not None)

    def flagged(self, nodes: list[Node]) -> list[Node]:
        """`nodes` with the flags of `GROUPED` set."""
        leaves: set[str] = set()
        for node in nodes:
            inside = all(value.name in self.chain for value in node.outputs)
            if node.op == GROUPED:
                leaves.update(node.operands[1:])
            elif not inside or _is_marker(node):
                leaves.update(node.operands)
        leaves.update(self.now(item.value) for item in self.graph.outputs if item.value is not None)

        def flags(node: Node) -> Node:
            if node.op != GROUPED:
                return node
            return replace(
                node, args=(*node.args, node.operands[0] in self.chain, node.name not in leaves)
            )

        return [flags(node) for node in nodes]

    # Writing

    def _emit(self, like: Node, op: str, args: tuple[Arg, ...], *specs: TensorSpec) -> str:
        """Append a call at the place of `like`."""
        values = []
        for spec in specs:
            values.append(Value(f"routed.{self.count}", spec))
            self.count += 1
        node = replace(
            like, name=values[0].name, op=op, args=args, kwargs=(), outputs=tuple(values)
        )
        self._append(node)
        return node.name

    def _append(self, node: Node) -> None:
        self.nodes.append(node)
        self.facts.specs.update((value.name, value.spec) for value in node.outputs)
        self.facts.makers.update((value.name, node) for value in node.outputs)

    def _rows(self, twin: _Twin, like: Node) -> str:
        """A twin as a tensor of its own."""
        if twin.repeat == 1:
            return twin.name
        spec = self.facts.specs[twin.name]
        count, *rest = spec.shape
        name = twin.name
        for op, shape in (
            ("reshape", (count, 1, *rest)),
            ("expand", (count, twin.repeat, *rest)),
            ("reshape", (count * twin.repeat, *rest)),
        ):
            name = self._emit(
                like, f"aten.{op}.default", (Ref(name), shape), replace(spec, shape=shape)
            )
        return name

    # Recognising

    def _sort(self, node: Node) -> None:
        """Ids sorted together with their order."""
        ids = self.facts.ids.get(node.outputs[-1].name)
        if ids is not None and len(node.outputs) == 2 and node.outputs[1].name not in self.excluded:
            self.twins[node.outputs[0].name] = _Twin(node.outputs[1].name, ids[0])

    def _enter(self, node: Node) -> None:
        """Rows gathered by an order."""
        found = self.facts.looked_up(node) if len(node.outputs) == 1 else None
        if found is None:
            return
        (table, index), have = found, self.facts.fact(found[1])
        repeat = int(have.number) if have.kind == "rows" else 1
        shape = self.facts.shape(table)
        if have.kind not in ("order", "rows") or have.key in self.excluded or table in self.twins:
            return
        if shape[0] * repeat != self.facts.shape(index)[0]:
            return
        again = self.facts.fact(table)
        if again.kind == "repeated" and repeat == 1:
            table, repeat = again.key, int(again.number)
        self.twins[node.outputs[0].name] = _Twin(have.key, table, repeat)

    def _product(self, node: Node) -> None:
        """A grouped product of sorted rows whose groups end where those of the ids do."""
        if node.op not in PRODUCTS or len(node.operands) != 3:
            return
        rows, weight, ends = node.operands
        twin, have = self.twins.get(rows), self.facts.fact(ends)
        if twin is None or weight in self.twins or len(self.facts.shape(weight)) != 3:
            return
        ids, source = self.facts.ids[twin.key]
        groups = self.facts.shape(weight)[0]
        (out,) = node.outputs
        same = out.spec.dtype == self.facts.specs[rows].dtype
        if have != Fact("ends", source, groups) or not same:
            return
        args = (Ref(twin.name), Ref(weight), Ref(ids), twin.repeat, node.op)
        name = self._emit(node, GROUPED, args, out.spec)
        self.twins[out.name] = _Twin(twin.key, name)
        self.products[node.name] = twin.key
        self.chain.add(name)

    def _alike(self, node: Node) -> None:
        """A call that does to every sorted row the same."""
        operands = node.operands
        twins = [self.twins.get(name) for name in operands]
        given = [twin for twin in twins if twin is not None]
        if not given or len({twin.key for twin in given}) > 1 or node.outputs[0].name in self.twins:
            return
        count = self.facts.shape(self.facts.ids[given[0].key][0])[0]
        if count < 2 or any(value.spec.shape[:1] != (count,) for value in node.outputs):
            return
        treats = _ALIKE.get(base_name(node))
        pointwise = base_name(node) in _POINTWISE and self._aligned(node, twins)
        if not pointwise and (treats is None or not treats(self.facts, node, twins)):
            return
        inside = all(twin.name in self.chain for twin in given)
        named = {
            name: self._rows(twin, node)
            for name, twin in zip(operands, twins, strict=True)
            if twin is not None
        }
        values = []
        for value in node.outputs:
            name = f"routed.{self.count}"
            self.count += 1
            values.append(Value(name, value.spec))
            self.twins[value.name] = _Twin(given[0].key, name)
            if inside:
                self.chain.add(name)
        copy = _refer(node, lambda name: named.get(name, name))
        self._append(replace(copy, name=values[0].name, outputs=tuple(values)))

    def _aligned(self, node: Node, twins: list[_Twin | None]) -> bool:
        """Whether sorted operands have their rows in the result's, others the same for each."""
        ndim = node.outputs[0].spec.ndim
        for name, twin in zip(node.operands, twins, strict=True):
            shape = self.facts.shape(name)
            whole = len(shape) == ndim and shape[0] > 1
            if (twin is not None) != whole and self.facts.fact(name).kind != "fill":
                return False
        return True

    def _restored(self, node: Node) -> str | None:
        """The value in the order of the ids that a call makes of a sorted one, if it does."""
        found = self.facts.looked_up(node) if len(node.outputs) == 1 else None
        if found is not None:
            twin, have = self.twins.get(found[0]), self.facts.fact(found[1])
            fits = twin is not None and have == Fact("inverse", twin.key)
            return self._rows(twin, node) if twin is not None and fits else None
        return self._added(node)

    def _added(self, node: Node) -> str | None:
        """Sorted rows that are added, or written, to the rows that they came from."""
        call = _written_rows(self.facts, node)
        if call is None:
            return None
        base, index, rows, adds = call
        twin, have = self.twins.get(rows), self.facts.fact(index)
        if twin is None or have.key != twin.key or have.kind not in ("order", "rows"):
            return None
        repeat = int(have.number) if have.kind == "rows" else 1
        spec, out = self.facts.specs[rows], node.outputs[0].spec
        shape = (out.shape[0], repeat, *out.shape[1:])
        alike = spec.shape == (out.shape[0] * repeat, *out.shape[1:]) and spec.dtype == out.dtype
        if not alike or (repeat > 1 and not adds):
            return None
        name = self._rows(twin, node)
        if repeat > 1:
            wide = replace(spec, shape=shape)
            name = self._emit(node, "aten.reshape.default", (Ref(name), shape), wide)
            total = replace(spec, shape=out.shape)
            name = self._emit(node, "aten.sum.dim_IntList", (Ref(name), (1,), False), total)
        if adds and not self.facts.fill(base, 0):
            name = self._emit(node, "aten.add.Tensor", (Ref(base), Ref(name)), out)
        return name


def _refer(node: Node, now: Callable[[str], str]) -> Node:
    """`node` on other values."""

    def change(ref: Ref) -> Ref:
        name = now(ref.name)
        return ref if name == ref.name else Ref(name)

    return replace(
        node,
        args=tuple(map_refs(arg, change) for arg in node.args),
        kwargs=tuple((key, map_refs(arg, change)) for key, arg in node.kwargs),
    )


def _written_rows(facts: Facts, node: Node) -> tuple[str, str, str, bool] | None:
    """Target, places and rows of a write of whole rows, and whether it adds."""
    base = base_name(node) if node.outputs else ""
    if base not in ("index_add", "index_put", "scatter_add", "scatter") or len(node.operands) != 3:
        return None
    target, index, rows = node.operands
    if base == "index_put":
        if not isinstance(node.args[1], tuple) or len(node.args[1]) != 1:
            return None
        return target, index, rows, argument(node, 3, "accumulate", False) is True
    if node.args[1] != 0 or dict(node.kwargs).get("alpha", 1) != 1 or node.op.endswith("reduce"):
        return None
    if base == "index_add":
        return target, index, rows, True
    if facts.shape(index) != facts.shape(rows):
        return None
    return target, facts.vector(index), rows, base == "scatter_add"


Alike = Callable[[Facts, Node, list[_Twin | None]], bool]


def _beside(position: int, name: str) -> Alike:
    """Works along dims other than the first of its only sorted operands."""

    def treats(facts: Facts, node: Node, twins: list[_Twin | None]) -> bool:
        ndim = facts.specs[node.operands[0]].ndim
        dims = argument(node, position, name)
        given = dims if isinstance(dims, tuple) else (dims,)
        inner = all(isinstance(dim, int) and dim % ndim for dim in given)
        return bool(given) and inner and all(twin is not None for twin in twins)

    return treats


def _keeps_rows(facts: Facts, node: Node, twins: list[_Twin | None]) -> bool:
    return facts.shape(node.operands[0])[:1] == node.outputs[0].spec.shape[:1]


def _permutes(facts: Facts, node: Node, twins: list[_Twin | None]) -> bool:
    dims = node.args[1]
    return isinstance(dims, tuple) and dims[0] == 0


def _normalises(facts: Facts, node: Node, twins: list[_Twin | None]) -> bool:
    dims = node.args[1]
    wide = isinstance(dims, tuple) and len(dims) < facts.specs[node.operands[0]].ndim
    return wide and twins[0] is not None and not any(twins[1:])


def _multiplies(facts: Facts, node: Node, twins: list[_Twin | None]) -> bool:
    return facts.specs[node.operands[0]].ndim > 1 and twins[0] is not None and not any(twins[1:])


def _looks_up(facts: Facts, node: Node, twins: list[_Twin | None]) -> bool:
    """A row of a table for every sorted row, such as the bias of its expert."""
    found = facts.looked_up(node)
    return found is not None and twins[0] is None and node.op != "aten.gather.default"


_ALIKE: dict[str, Alike] = {
    "split_with_sizes": _beside(2, "dim"), "slice": _beside(1, "dim"), "cat": _beside(1, "dim"),
    "sum": _beside(1, "dim"), "mean": _beside(1, "dim"), "softmax": _beside(1, "dim"),
    "glu": _beside(1, "dim"), "reshape": _keeps_rows, "expand": _keeps_rows,
    "permute": _permutes, "layer_norm": _normalises, "rms_norm": _normalises,
    "linear": _multiplies, "index": _looks_up, "index_select": _looks_up,
}  # fmt: skip
