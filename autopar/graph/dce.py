"""Removal of calls and inputs that nothing needs, and the final names of values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autopar.graph.ir import Graph, Input, Node, Output, Ref, Run, Value, iter_refs, map_refs


def live_nodes(nodes: Iterable[Node], live: set[str]) -> list[Node]:
    """The nodes whose results reach a value in `live`, to which their operands are added.

    Args:
        nodes: Calls in the reverse of their order of execution.
        live: Names of the values that are needed after the calls.

    Returns:
        Calls in the order of `nodes`.
    """
    kept = []
    for node in nodes:
        if any(value.name in live for value in node.outputs):
            kept.append(node)
            live.update(node.operands)
    return kept


def live_inputs(inputs: tuple[Input, ...], live: set[str]) -> tuple[Input, ...]:
    """`inputs` without unused constants; all else belongs to training or to the caller."""
    return tuple(item for item in inputs if item.kind != "constant" or item.value.name in live)


def remove_dead(graph: Graph) -> Graph:
    """`graph` without calls whose results reach no output.

    Parameters, buffers and user inputs stay even when unused, since training and the caller
    own them; unused constants go.
    """
    live = {item.value for item in graph.outputs if item.value is not None}
    kept = live_nodes(reversed(graph.nodes), live)
    inputs = live_inputs(graph.inputs, live)
    if len(kept) == len(graph.nodes) and len(inputs) == len(graph.inputs):
        return graph
    kept.reverse()
    return replace(graph, inputs=inputs, nodes=tuple(kept), _specs={})


def number(graph: Graph) -> Graph:
    """`graph` with values named ``<operator>_<n>``, n counting the operator's results.

    Equal graphs get equal names, however they came to be. Names of inputs stay.
    """
    writer = Numberer(graph.inputs)
    for node in graph.nodes:
        writer.write(Template(node), writer.refs, node.module)
    return writer.graph(graph.outputs)


class Template:
    """A call that is written many times, each time on other values."""

    __slots__ = ("keyed", "nested", "node", "plain", "stem")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stem = node.op.split(".", 2)[1]
        self.plain = [(i, arg.name) for i, arg in enumerate(node.args) if isinstance(arg, Ref)]
        self.nested = [
            index
            for index, arg in enumerate(node.args)
            if isinstance(arg, tuple) and any(iter_refs(arg))
        ]
        self.keyed = any(True for _, arg in node.kwargs for _ in iter_refs(arg))


class Numberer:
    """Writes calls, naming their results ``<operator>_<n>``.

    Args:
        inputs: Values that enter the graph; their names are kept.
    """

    def __init__(self, inputs: tuple[Input, ...]) -> None:
        self.inputs = inputs
        self.nodes: list[Node] = []
        self.refs = {item.value.name: Ref(item.value.name) for item in inputs}
        self._taken = frozenset(self.refs)
        self._counts: dict[str, int] = {}

    def write(self, template: Template, refs: dict[str, Ref], module: str) -> None:
        """Append a call.

        Args:
            template: The call on values by their old names.
            refs: Old names to values written; the call's results are added.
            module: Module path of the call.
        """
        node, stem = template.node, template.stem
        args, kwargs = node.args, node.kwargs
        if template.plain or template.nested:
            changed = list(args)
            for index, name in template.plain:
                changed[index] = refs[name]
            for index in template.nested:
                changed[index] = map_refs(args[index], lambda ref: refs[ref.name])
            args = tuple(changed)
        if template.keyed:
            kwargs = tuple((k, map_refs(arg, lambda ref: refs[ref.name])) for k, arg in kwargs)
        values = []
        for value in node.outputs:
            count = self._counts.get(stem, 0)
            while (name := f"{stem}_{count}") in self._taken:
                count += 1
            self._counts[stem] = count + 1
            refs[value.name] = Ref(name)
            values.append(Value(name, value.spec))
        self.nodes.append(
            Node(
                name=values[0].name if values else node.name,
                op=node.op,
                args=args,
                kwargs=kwargs,
                outputs=tuple(values),
                module=module,
                source=node.source,
                context=node.context,
            )
        )

    def graph(self, outputs: tuple[Output, ...], runs: tuple[Run, ...] = ()) -> Graph:
        """The graph of all calls written, with `outputs` by their old names."""
        named = tuple(
            item if item.value is None else replace(item, value=self.refs[item.value].name)
            for item in outputs
        )
        nodes = tuple(self.nodes)
        return Graph(inputs=self.inputs, nodes=nodes, outputs=named, copied=(nodes, runs))
