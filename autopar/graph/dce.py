"""Removal of calls and inputs that nothing needs, and the final names of values."""

from __future__ import annotations

from dataclasses import replace

from autopar.graph.ir import Graph, Node, Ref, Value, map_refs


def remove_dead(graph: Graph) -> Graph:
    """`graph` without calls whose results reach no output.

    Parameters, buffers and user inputs stay even when unused, since training and the caller
    own them; unused constants go.
    """
    live = {item.value for item in graph.outputs if item.value is not None}
    kept = []
    for node in reversed(graph.nodes):
        if any(value.name in live for value in node.outputs):
            kept.append(node)
            live.update(node.operands)
    inputs = tuple(
        item for item in graph.inputs if item.kind != "constant" or item.value.name in live
    )
    if len(kept) == len(graph.nodes) and len(inputs) == len(graph.inputs):
        return graph
    kept.reverse()
    return replace(graph, inputs=inputs, nodes=tuple(kept), _specs={})


def number(graph: Graph) -> Graph:
    """`graph` with values named ``<operator>_<n>``, n counting the operator's results.

    Equal graphs get equal names, however they came to be. Names of inputs stay.
    """
    names = {item.value.name: item.value.name for item in graph.inputs}
    refs = {name: Ref(name) for name in names}
    taken = set(names)
    counts: dict[str, int] = {}

    def now(ref: Ref) -> Ref:
        return refs[ref.name]

    nodes = []
    for node in graph.nodes:
        stem = node.op.split(".", 2)[1]
        args = tuple(map_refs(arg, now) for arg in node.args)
        kwargs = tuple((key, map_refs(arg, now)) for key, arg in node.kwargs)
        values = []
        for value in node.outputs:
            count = counts.get(stem, 0)
            while (name := f"{stem}_{count}") in taken:
                count += 1
            counts[stem] = count + 1
            refs[value.name] = Ref(name)
            values.append(Value(name, value.spec))
        nodes.append(
            Node(
                name=values[0].name if values else node.name,
                op=node.op,
                args=args,
                kwargs=kwargs,
                outputs=tuple(values),
                module=node.module,
                source=node.source,
                context=node.context,
            )
        )
    outputs = tuple(
        item if item.value is None else replace(item, value=refs[item.value].name)
        for item in graph.outputs
    )
    return Graph(inputs=graph.inputs, nodes=tuple(nodes), outputs=outputs)
