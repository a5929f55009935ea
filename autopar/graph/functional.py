"""Functionalisation: in-place operators and writes through views become plain values.

Values that share memory are *views* of one *root*. Each view knows its parent and the steps
from it (`autopar.graph.views`); each root counts its versions. An in-place call computes the
new value of the view it names, writes it back step by step to the root (``slice_scatter``,
inverse ``permute``, ``reshape``), and raises the version; other views of the root are taken
again from it when they are next read. Values whose root is never written pass unchanged, so
the pass is linear in the number of nodes.

A written buffer becomes a buffer output. A written parameter or constant is refused. A written
input stays local to the graph: the caller's tensor is not touched.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import TraceError
from autopar.graph.builder import GraphBuilder
from autopar.graph.ir import (
    Arg,
    Graph,
    Input,
    Node,
    Output,
    Ref,
    map_refs,
)
from autopar.graph.mutations import HIDDEN_WRITES, functional_call, hidden_call, is_inplace, place
from autopar.graph.views import Step, apply_step, view_steps, write_step


class _View:
    """A value that shares memory with a written root."""

    __slots__ = ("current", "origin", "parent", "steps", "version")

    def __init__(
        self,
        current: str,
        parent: _View | None = None,
        steps: tuple[Step, ...] = (),
        origin: Input | None = None,
    ) -> None:
        self.current = current
        self.origin = origin
        self.parent = parent
        self.steps = steps
        self.version = 0

    @property
    def root(self) -> _View:
        view = self
        while view.parent is not None:
            view = view.parent
        return view


def functionalise(graph: Graph, copies: frozenset[str] = frozenset()) -> Graph:
    """The same graph without mutation.

    Args:
        graph: Graph that may hold in-place operators (``aten.add_.Tensor``), whose result is
            their first operand.
        copies: Results of operators that may or may not alias (``reshape``, ``contiguous``,
            ``to``) which were found not to.

    Returns:
        A graph in which nothing mutates. Its outputs hold one ``buffer`` output per written
        buffer after the user's.

    Raises:
        TraceError: A parameter or constant is written, or a write cannot be expressed.
    """
    _, written = memory(graph, copies)
    if not written:
        return graph
    return _Pass(graph, copies, written).run()


def memory(graph: Graph, copies: frozenset[str] | set[str]) -> tuple[dict[str, str], set[str]]:
    """Which values share memory, and which memory is written.

    Args:
        graph: Graph that may hold in-place operators.
        copies: As in `functionalise`.

    Returns:
        The root of every value that is not its own, and the roots that are written. Both are
        empty when nothing is written.
    """
    roots: dict[str, str] = {}
    written: set[str] = set()
    if not any(is_inplace(node.op) or node.op in HIDDEN_WRITES for node in graph.nodes):
        return roots, written
    for node in graph.nodes:
        targets: tuple[str, ...] = ()
        aliased = inplace = is_inplace(node.op)
        if inplace:
            targets = (node.operands[0],)
        elif node.op in HIDDEN_WRITES:
            targets = HIDDEN_WRITES[node.op](node)
        elif node.outputs and node.name not in copies:
            aliased = view_steps(node, graph.spec) is not None
        if aliased:
            operand = node.operands[0]
            root = roots.get(operand, operand)
            roots.update((value.name, root) for value in node.outputs)
        written.update(roots.get(target, target) for target in targets)
    return roots, written


class _Pass:
    def __init__(self, graph: Graph, copies: frozenset[str], written: set[str]) -> None:
        self.graph, self.copies = graph, copies
        self.builder = GraphBuilder(graph.inputs)
        self.names: dict[str, str] = {}
        self.views: dict[str, _View] = {}
        self.inputs = {item.value.name: item for item in graph.inputs}
        self.written = written
        for name in written:
            if name in self.inputs:
                self.views[name] = _View(name, origin=self.inputs[name])

    def run(self) -> Graph:
        for node in self.graph.nodes:
            self.builder.at(node)
            if is_inplace(node.op):
                self._inplace(node)
            elif node.op in HIDDEN_WRITES and HIDDEN_WRITES[node.op](node):
                self._hidden(node)
            else:
                self._plain(node)
        outputs = [
            item if item.value is None else replace(item, value=self._read(item.value))
            for item in self.graph.outputs
        ]
        assigned = {item.target for item in outputs if item.kind == "buffer"}
        for item in self.graph.inputs:
            view = self.views.get(item.value.name)
            new = item.kind == "buffer" and item.target not in assigned
            if view is not None and view.version and new:
                outputs.append(Output(kind="buffer", value=view.current, target=item.target))
        return self.builder.graph(self.graph.inputs, tuple(outputs))

    def _read(self, name: str) -> str:
        """Name of the value that `name` has now."""
        view = self.views.get(name)
        if view is None:
            return self.names.get(name, name)
        return self._value(view)

    def _value(self, view: _View) -> str:
        if view.parent is None or view.version == view.root.version:
            return view.current
        name = self._value(view.parent)
        for step in view.steps:
            name = apply_step(self.builder, step, name)
        view.current, view.version = name, view.root.version
        return name

    def _now(self, arg: Arg) -> Arg:
        return map_refs(arg, lambda ref: Ref(self._read(ref.name)))

    def _plain(self, node: Node) -> None:
        """Copy a call; results that share memory with a written root become views."""
        parent = self.views.get(node.operands[0]) if node.operands else None
        chains = None
        if parent is not None and node.name not in self.copies:
            chains = view_steps(node, self.graph.spec)
        if chains is not None and parent is not None:
            for value, steps in zip(node.outputs, chains, strict=True):
                view = _View("", parent, steps)
                view.version = -1
                self.views[value.name] = view
            return
        names = self.builder.emit(
            node.op,
            tuple(self._now(arg) for arg in node.args),
            tuple(value.spec for value in node.outputs),
            tuple((key, self._now(arg)) for key, arg in node.kwargs),
        )
        self._define(node, names)

    def _define(self, node: Node, names: tuple[str, ...]) -> None:
        for value, name in zip(node.outputs, names, strict=True):
            self.names[value.name] = name
            if value.name in self.written:
                self.views[value.name] = _View(name)

    def _inplace(self, node: Node) -> None:
        target = node.operands[0]
        view = self.views[target]
        self._check(view, node)
        spec = self.builder.specs[self._value(view)]
        args = tuple(self._now(arg) for arg in node.args)
        kwargs = tuple((key, self._now(arg)) for key, arg in node.kwargs)
        name = functional_call(self.builder, replace(node, args=args, kwargs=kwargs), spec)
        self._write(view, name, node)
        for value in node.outputs:
            self.views[value.name] = view

    def _hidden(self, node: Node) -> None:
        """A call that writes some operands although its schema does not say so."""
        targets = HIDDEN_WRITES[node.op](node)
        args = tuple(self._now(arg) for arg in node.args)
        names, written = hidden_call(self.builder, replace(node, args=args))
        self._define(node, names)
        for target, name in zip(targets, written, strict=True):
            view = self.views[target]
            self._check(view, node)
            self._write(view, name, node)

    def _write(self, view: _View, name: str, node: Node) -> None:
        """Make `name` the value of `view` and carry it to the root."""
        chain = []
        at: _View | None = view
        while at is not None:
            chain.append(at)
            at = at.parent
        version = chain[-1].version + 1
        values = [(view, name)]
        for link in chain[:-1]:
            parent = link.parent
            assert parent is not None
            name = self._write_steps(link, self._value(parent), name, node)
            values.append((parent, name))
        for link, value in values:
            link.current, link.version = value, version

    def _write_steps(self, view: _View, base: str, name: str, node: Node) -> str:
        bases = [base]
        for step in view.steps[:-1]:
            bases.append(apply_step(self.builder, step, bases[-1]))
        for step, under in zip(reversed(view.steps), reversed(bases), strict=False):
            result = write_step(self.builder, step, under, name)
            if result is None:
                raise TraceError(
                    f"{node.op} writes in place through a {step.kind} of a tensor",
                    where=place(node),
                    expected="writes through slices, transposes and reshapes, with gradients on",
                    fix="use the out-of-place operator, or write to a clone",
                )
            name = result
        return name

    def _check(self, view: _View, node: Node) -> None:
        """Refuse writes to what training owns: parameters and lifted constants."""
        item = view.root.origin
        if item is not None and item.kind in ("parameter", "constant"):
            raise refused_write(item, node)


def refused_write(item: Input, node: Node) -> TraceError:
    """The error for a forward that changes a parameter or a constant."""
    name = node.op.split(".")[1]
    if item.kind == "parameter":
        fix = "update parameters in the optimizer, not in forward"
        if name.startswith("embedding_renorm"):
            fix = "build the Embedding without max_norm, or normalise the rows it returns"
        return TraceError(
            f"forward changes the parameter '{item.target}' in place ({name})",
            where=place(node),
            expected="parameters that only the optimizer changes",
            fix=fix,
        )
    return TraceError(
        f"forward changes the tensor attribute '{item.target}' in place ({name})",
        where=place(node),
        expected="state kept in buffers",
        fix="register the tensor with register_buffer",
    )
