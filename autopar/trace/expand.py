"""Copies of repeated layers: the graph after `autopar.trace.repeat` left its markers in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from autopar.graph.dce import Numberer, Template, live_inputs, live_nodes
from autopar.graph.ir import Graph, Node, Output, Ref, Run, Value, map_refs
from autopar.graph.mutations import HIDDEN_WRITES, is_inplace
from autopar.graph.views import ALIASES
from autopar.trace.grouping import Group
from autopar.trace.repeat import InexactError, Record, RegroupError, Repeater


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The nodes between two markers."""

    path: str
    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    known: dict[frozenset[str], tuple[list[Template], list[str]]] = field(default_factory=dict)

    def templates(self, wanted: frozenset[str]) -> tuple[list[Template], list[str]]:
        """The calls that some of the outputs need, and the values that these need from outside."""
        found = self.known.get(wanted)
        if found is None:
            live = set(wanted)
            kept = live_nodes(reversed(self.nodes), live)
            made = {value.name for node in kept for value in node.outputs}
            templates = [Template(node) for node in reversed(kept)]
            found = self.known[wanted] = templates, sorted(live - made)
        return found

    @property
    def tidy(self) -> bool:
        """Whether all calls were made by modules inside the member."""
        return not any(_relative(n.module, self.path).startswith("!") for n in self.nodes)

    def modules(self, path: str) -> dict[str, str]:
        """Module paths of the body's calls to those of the member at `path`."""
        result = {}
        for module in {node.module for node in self.nodes}:
            tail = _relative(module, self.path)
            result[module] = module if tail.startswith("!") else path + tail
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """An opaque call that stands for a body.

    Attributes:
        body: The body.
        path: Path of the member that is called.
        mapping: Values outside that the body uses to those that the copy uses.
        results: Names of the call's results, one per output of the body.
    """

    body: _Body
    path: str
    mapping: dict[str, str]
    results: tuple[str, ...]


class _Expander:
    """Resolves markers and opaque calls.

    In exact mode, calls outside of bodies become a `_Copy` each, written by `_write`; all other
    calls are replaced by copies of their body at once.
    """

    def __init__(
        self, graph: Graph, copies: set[str], repeater: Repeater, state: Any, exact: bool
    ) -> None:
        self.graph, self.copies, self.repeater = graph, copies, repeater
        self.state = state
        self.nodes: list[Node | _Copy] = []
        self.open_bodies: list[tuple[int, tuple[str, ...]]] = []
        self.rename: dict[str, str] = {}
        self.internal: dict[str, str] = {}
        self.leaking: set[str] = set()
        self.bodies: dict[int, _Body] = {}
        self.exact = exact
        self.grads: dict[str, bool] = {}
        self.counter = 0

    def run(self) -> Graph:
        for node in self.graph.nodes:
            if self.rename:
                node = _renamed(node, self.rename)
            if node.op == "autopar.enter.default":
                self._check(node.operands)
                self.open_bodies.append((len(self.nodes), node.operands))
            elif node.op == "autopar.leave.default":
                start, inputs = self.open_bodies.pop()
                self._close(node, start, inputs)
            elif node.op.startswith("autopar.repeat."):
                self._check(node.operands)
                self._repeat(node)
            else:
                self._check(node.operands)
                self.nodes.append(node)
        outputs = []
        for item in self.graph.outputs:
            if item.value is not None:
                name = self.rename.get(item.value, item.value)
                self._check((name,))
                item = replace(item, value=name)
            outputs.append(item)
        if self.leaking:
            raise RegroupError(frozenset(self.leaking), "values made inside are used outside")
        if self.exact:
            return self._write(tuple(outputs))
        nodes = tuple(node for node in self.nodes if isinstance(node, Node))
        return Graph(inputs=self.graph.inputs, nodes=nodes, outputs=tuple(outputs))

    def _write(self, outputs: tuple[Output, ...]) -> Graph:
        """The graph with every copy written out, without dead calls, its values numbered."""
        live = {item.value for item in outputs if item.value is not None}
        kept: list[tuple[Node | _Copy, list[Template], dict[str, str]]] = []
        for item in reversed(self.nodes):
            if isinstance(item, Node):
                kept += [(node, [Template(node)], {}) for node in live_nodes([item], live)]
                continue
            pairs = zip(item.results, item.body.outputs, strict=True)
            wanted = frozenset(inner for outer, inner in pairs if outer in live)
            templates, needed = item.body.templates(wanted)
            taken = {inner: item.mapping.get(inner, inner) for inner in needed}
            live.update(taken.values())
            kept.append((item, templates, taken))
        runs: list[Run] = []
        originals: dict[int, int] = {}
        writer = Numberer(live_inputs(self.graph.inputs, live))
        for item, templates, taken in reversed(kept):
            if isinstance(item, Node):
                writer.write(templates[0], writer.refs, item.module)
                continue
            refs = {inner: writer.refs[outer] for inner, outer in taken.items()}
            modules = item.body.modules(item.path)
            start = len(writer.nodes)
            for template in templates:
                writer.write(template, refs, modules[template.node.module])
            if item.body.tidy:
                original = originals.setdefault(id(templates), len(originals))
                stop = len(writer.nodes)
                runs.append(Run(start=start, stop=stop, original=original, path=item.path))
            for outer, inner in zip(item.results, item.body.outputs, strict=True):
                if inner in refs:
                    writer.refs[outer] = refs[inner]
        return writer.graph(outputs, tuple(runs))

    def _check(self, names: tuple[str, ...]) -> None:
        """No value made inside a closed body is used outside, other than its results."""
        internal = self.internal
        self.leaking.update(internal[name] for name in names if name in internal)

    def _record(self, node: Node) -> tuple[Record, int]:
        number, index = map(int, str(node.args[1]).split(":"))
        return self.repeater.numbered[number], index

    def _close(self, node: Node, start: int, inputs: tuple[str, ...]) -> None:
        record, index = self._record(node)
        group = record.group
        body = _Body(
            path=group.paths[index],
            index=index,
            inputs=inputs,
            outputs=node.operands,
            nodes=tuple(node for node in self.nodes[start:] if isinstance(node, Node)),
        )
        self._seal(body, group)
        known = self.bodies.get(record.number)
        if known is None:
            self.bodies[record.number] = body
        else:
            self._compare(known, body, group)
            if body.index == known.index + 1 or known.index == 0:
                self.bodies[record.number] = body

    def _seal(self, body: _Body, group: Group) -> None:
        """Note which values must not be used outside the body.

        A result that *is* an operand from outside (of an in-place call, of a cast that casts
        nothing) goes by that operand's name outside: torch.export continues with the result.
        """
        made = {value.name for item in body.nodes for value in item.outputs}
        results = set(body.outputs)
        for item in body.nodes:
            same = not self.exact and (is_inplace(item.op) or self._is_operand(item))
            target = item.operands[0] if same else None
            for value in item.outputs:
                if target is not None:
                    target = self.rename.get(target, target)
                    if target not in made:
                        self.rename[value.name] = target
                        continue
                if value.name not in results:
                    self.internal[value.name] = group.name

    def _is_operand(self, node: Node) -> bool:
        """Whether the result of a call is its operand."""
        return node.op in ALIASES and "detach" not in node.op and node.name not in self.copies

    def _parameters(self, group: Group, source: int, target: int) -> dict[str, str]:
        """Value names of the parameters of one member to those of another."""
        mapping: dict[str, str] = {}
        first, second = self.state(group.modules[source]), self.state(group.modules[target])
        for suffix, name in first.items():
            other = second.get(suffix)
            if other is None or mapping.setdefault(name, other) != other:
                raise RegroupError(group.name, "members share parameters in different ways")
        return mapping

    def _compare(self, first: _Body, second: _Body, group: Group) -> None:
        """Refuse bodies that differ in more than names."""
        mapping = self._parameters(group, first.index, second.index)
        mapping.update(zip(first.inputs, second.inputs, strict=True))
        if len(first.nodes) != len(second.nodes):
            raise self._doubt(group, "members run different operators")
        for a, b in zip(first.nodes, second.nodes, strict=True):
            mapped = _renamed(a, mapping)
            alike = (
                a.op == b.op
                and _key(mapped.args) == _key(b.args)
                and _key(mapped.kwargs) == _key(b.kwargs)
                and a.context == b.context
                and _relative(a.module, first.path) == _relative(b.module, second.path)
                and [(v.spec.shape, v.spec.dtype) for v in a.outputs]
                == [(v.spec.shape, v.spec.dtype) for v in b.outputs]
                and (a.name in self.copies) == (b.name in self.copies)
            )
            if not alike:
                raise self._doubt(group, f"members differ at {a.op} ({b.source})")
            mapping.update((x.name, y.name) for x, y in zip(a.outputs, b.outputs, strict=True))
        if tuple(mapping.get(name, name) for name in first.outputs) != second.outputs:
            raise self._doubt(group, "members return different values")

    def _doubt(self, group: Group, reason: str) -> Exception:
        return InexactError(reason) if self.exact else RegroupError(group.name, reason)

    def _check_grads(self, body: _Body, node: Node, mapping: dict[str, str], group: Group) -> None:
        """The body's requires_grad flags hold for the call too."""
        pairs = [*zip(body.inputs, node.operands, strict=True), *mapping.items()]
        pairs += zip(body.outputs, (value.name for value in node.outputs), strict=True)
        for name, other in pairs:
            if self._grad(name) != self._grad(other):
                raise InexactError("gradients flow differently")

    def _grad(self, name: str) -> bool:
        flag = self.grads.get(name)
        return self.graph.spec(name).requires_grad if flag is None else flag

    def _repeat(self, node: Node) -> None:
        record, index = self._record(node)
        body = self.bodies.get(record.number)
        if body is None:
            raise RegroupError(record.group.name, "was not traced")
        mapping = self._parameters(record.group, body.index, index)
        if self.exact:
            self._check_grads(body, node, mapping, record.group)
        mapping.update(zip(body.inputs, node.operands, strict=True))
        path = record.group.paths[index]
        if self.exact and not self.open_bodies:
            results = tuple(value.name for value in node.outputs)
            self.nodes.append(_Copy(body=body, path=path, mapping=mapping, results=results))
            return
        modules = body.modules(path)
        for item in body.nodes:
            outputs = []
            fresh = _renamed(item, mapping)
            for value in item.outputs:
                self.counter += 1
                name = mapping[value.name] = f"r{self.counter}"
                self.grads[name] = value.spec.requires_grad
                outputs.append(Value(name, value.spec))
            if item.name in self.copies:
                self.copies.add(mapping[item.name])
            self.nodes.append(
                Node(
                    name=outputs[0].name if outputs else f"r{item.name}",
                    op=item.op,
                    args=fresh.args,
                    kwargs=fresh.kwargs,
                    outputs=tuple(outputs),
                    module=modules[item.module],
                    source=item.source,
                    context=item.context,
                )
            )
        for value, name in zip(node.outputs, body.outputs, strict=True):
            self.rename[value.name] = mapping.get(name, name)


def _key(arg: Any) -> Any:
    """Arguments in a form whose equality tells 1 from True and 1.0."""
    if isinstance(arg, tuple):
        return tuple(_key(item) for item in arg)
    return arg if isinstance(arg, Ref) else (type(arg), repr(arg))


def _relative(module: str, path: str) -> str:
    if module == path or module.startswith(path + "."):
        return module[len(path) :]
    return "!" + module


def _renamed(node: Node, names: dict[str, str]) -> Node:
    if not any(name in names for name in node.operands):
        return node

    def now(ref: Ref) -> Ref:
        name = names.get(ref.name)
        return ref if name is None else Ref(name)

    return replace(
        node,
        args=tuple(map_refs(arg, now) for arg in node.args),
        kwargs=tuple((key, map_refs(arg, now)) for key, arg in node.kwargs),
    )


def expand(
    graph: Graph,
    copies: set[str],
    repeater: Repeater,
    state: Callable[[nn.Module], dict[str, str]],
    *,
    exact: bool,
) -> Graph:
    """`graph` with markers gone and opaque calls replaced by the bodies they stand for.

    In exact mode the result is free of dead code and numbered as well.

    Args:
        graph: Graph with markers and opaque calls.
        copies: Results that do not alias; names of copied nodes are added.
        repeater: What was recorded while tracing.
        state: Value name of each parameter and buffer of a module, by path inside it.
        exact: Copied bodies must be right as they are, with their requires_grad flags.

    Raises:
        RegroupError: Members of a group turn out to differ.
        InexactError: With `exact`, copies of the bodies would not be right as they are.
    """
    return _Expander(graph, copies, repeater, state, exact).run()


class GradientFlags:
    """Tells which results of an opaque call carry a gradient: those of the body it stands for."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[bool, ...]] = {}

    def __call__(self, node: Node, operands: tuple[bool, ...]) -> tuple[bool, ...] | None:
        """Flags of the results of `node`, or None when it is no opaque call.

        Args:
            node: Any call, in execution order.
            operands: Whether each operand carries a gradient.
        """
        if not node.op.startswith(("autopar.leave.", "autopar.repeat.")):
            return None
        number = str(node.args[1]).split(":")[0]
        if node.op.startswith("autopar.leave."):
            self.known[number] = operands
            return ()
        return self.known[number]


def bodies_are_pure(graph: Graph, roots: dict[str, str], written: set[str]) -> bool:
    """Whether no write crosses the border of a body.

    Args:
        graph: Raw graph with markers.
        roots: Root of every value that shares memory with another.
        written: Roots that are written.

    Returns:
        True when bodies may be rewritten to plain values before they are copied: everything
        written inside a body is made and stays inside it, and nothing else that is written
        enters or leaves one.
    """
    made_in: dict[str, int] = {}
    depth = 0
    for node in graph.nodes:
        if node.op == "autopar.enter.default":
            depth += 1
        if node.op.startswith("autopar.") and not node.op.startswith("autopar.custom"):
            crossing = (*node.operands, *(value.name for value in node.outputs))
            if any(roots.get(name, name) in written for name in crossing):
                return False
        if node.op == "autopar.leave.default":
            depth -= 1
        for value in node.outputs:
            made_in[value.name] = depth
        if depth and (is_inplace(node.op) or node.op in HIDDEN_WRITES):
            targets = node.operands[:1]
            if node.op in HIDDEN_WRITES:
                targets = HIDDEN_WRITES[node.op](node)
            if any(made_in.get(roots.get(name, name), 0) != depth for name in targets):
                return False
    return True
