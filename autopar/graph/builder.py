"""A writer of graphs: emits nodes with fresh names and keeps their specs."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.graph.ir import Arg, Graph, Input, Node, Ref, TensorSpec, Value, iter_refs

# Operators whose floating result carries no gradient. (sign, floor and their kin have a zero
# derivative in torch, so their results do require a gradient there and here.)
NOT_DIFFERENTIABLE = frozenset(
    f"aten.{name}"
    for name in (
        "detach.default", "heaviside.default", "histc.default", "multinomial.default",
        "full.default", "full_like.default", "zeros_like.default", "ones_like.default",
        "empty_like.default", "rand_like.default", "randn_like.default", "new_zeros.default",
        "new_ones.default", "new_full.default", "new_empty.default", "nextafter.default",
        "floor_divide.default", "floor_divide.Scalar",
    )
)  # fmt: skip


class GraphBuilder:
    """Emits nodes one after another.

    Names are ``<operator>_<n>`` with one counter per operator, so that two runs of the same
    pass, and the same model traced in two ways, give the same names.

    Args:
        inputs: Values that enter the graph; their names are kept.
    """

    def __init__(self, inputs: Iterable[Input]) -> None:
        self.nodes: list[Node] = []
        self.specs: dict[str, TensorSpec] = {}
        self._counts: dict[str, int] = {}
        self.module, self.source = "", ""
        self.context: tuple[str, ...] = ()
        for item in inputs:
            self.specs[item.value.name] = item.value.spec

    def at(self, node: Node) -> None:
        """Give what follows the place (module, source, context) of `node`."""
        self.module, self.source, self.context = node.module, node.source, node.context

    def fresh(self, op: str) -> str:
        """A name for a result of `op` that no value has."""
        stem = op.split(".", 2)[1] if op.count(".") >= 2 else op
        while True:
            count = self._counts.get(stem, 0)
            self._counts[stem] = count + 1
            name = f"{stem}_{count}"
            if name not in self.specs:
                return name

    def emit(
        self,
        op: str,
        args: tuple[Arg, ...],
        specs: Iterable[TensorSpec],
        kwargs: tuple[tuple[str, Arg], ...] = (),
        flags: tuple[bool, ...] | None = None,
    ) -> tuple[str, ...]:
        """Append a call and return the names of its results.

        Args:
            op: Operator.
            args: Positional arguments.
            specs: Specs of the results; `requires_grad` is worked out here.
            kwargs: Keyword arguments.
            flags: `requires_grad` of each result where the usual rule does not hold.
        """
        known = self.specs
        grad = op not in NOT_DIFFERENTIABLE and (
            any(known[ref.name].requires_grad for arg in args for ref in iter_refs(arg))
            or any(known[ref.name].requires_grad for _, arg in kwargs for ref in iter_refs(arg))
        )
        values = []
        for index, spec in enumerate(specs):
            wanted = (grad if flags is None else flags[index]) and spec.is_floating
            if spec.requires_grad != wanted:
                spec = TensorSpec(spec.shape, spec.dtype, wanted)
            name = self.fresh(op)
            known[name] = spec
            values.append(Value(name, spec))
        self.nodes.append(
            Node(
                name=values[0].name if values else self.fresh(op),
                op=op,
                args=args,
                kwargs=kwargs,
                outputs=tuple(values),
                module=self.module,
                source=self.source,
                context=self.context,
            )
        )
        return tuple(value.name for value in values)

    def one(
        self,
        op: str,
        args: tuple[Arg, ...],
        shape: Iterable[int],
        dtype: str,
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> str:
        """Append a call with one result of `shape` and `dtype`; returns its name."""
        return self.emit(op, args, (TensorSpec(tuple(shape), dtype),), kwargs)[0]

    def reshape(self, name: str, shape: Iterable[int]) -> str:
        """`name` reshaped to `shape`; nothing is emitted when it has that shape."""
        shape, spec = tuple(shape), self.specs[name]
        if spec.shape == shape:
            return name
        return self.one("aten.reshape.default", (Ref(name), shape), shape, spec.dtype)

    def expand(self, name: str, shape: Iterable[int]) -> str:
        """`name` expanded to `shape`; nothing is emitted when it has that shape."""
        shape, spec = tuple(shape), self.specs[name]
        if spec.shape == shape:
            return name
        return self.one("aten.expand.default", (Ref(name), shape), shape, spec.dtype)

    def graph(self, inputs: tuple[Input, ...], outputs: tuple) -> Graph:  # type: ignore[type-arg]
        """The graph of everything emitted so far."""
        return Graph(inputs=inputs, nodes=tuple(self.nodes), outputs=outputs)
