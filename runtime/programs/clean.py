"""From a raw trace to a clean graph: inputs in front, no-ops gone, constants inline, no writes."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import TraceError
from autopar.runtime.programs import compat, kinds
from autopar.runtime.programs.dce import eliminate_dead
from autopar.runtime.programs.program import Slot, output_node
from autopar.runtime.programs.tracer import Recording

aten = torch.ops.aten

_SAME = frozenset((aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default))
_MAX_CONSTANT = 4096
_KEPT = ("val", "origin", "phase")


def clean(traced: Recording, holders: Sequence[fx.Node], slots: Sequence[Slot]) -> fx.Graph:
    """Copy a traced graph.

    Args:
        traced: What the tracer wrote.
        holders: Calls in it that become inputs, after its own.
        slots: What the inputs are; they name the placeholders.

    Returns:
        A graph of placeholders, calls and the output, with the labels of `traced`.

    Raises:
        TraceError: If a large tensor was made of Python numbers.
    """
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = [*traced.graph.find_nodes(op="placeholder"), *holders]
    for slot, holder in zip(slots, inputs, strict=True):
        made = env[holder] = graph.placeholder(re.sub(r"\W", "_", str(slot)))
        made.meta = {"val": holder.meta["val"]}
    for node in traced.graph.nodes:
        if node in env:
            continue
        if node.op == "get_attr":
            env[node] = _constant(traced, node, graph)
        elif node.op == "call_function" and node.target in _SAME:
            env[node] = env[node.args[0]]
        elif node.op == "call_function":
            made = env[node] = graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, env.__getitem__),
                fx.map_arg(node.kwargs, env.__getitem__),
                name=_name(node.target),
            )
            made.meta = {key: node.meta[key] for key in _KEPT if key in node.meta}
    results: Any = output_node(traced.graph).args[0]
    graph.output(tuple(env[node] for node in results))
    eliminate_dead(graph)
    return graph


def _name(target: Any) -> str:
    """What a node is called, apart from its number: ``mm``, ``all_reduce``, ``getitem``."""
    if isinstance(target, compat.OpOverload):
        return target._schema.name.rpartition("::")[2]
    return str(getattr(target, "__name__", "call"))


def _constant(traced: Recording, node: fx.Node, graph: fx.Graph) -> fx.Node:
    """A tensor that was made of Python numbers while tracing."""
    found = traced.constants[str(node.target)]
    value = compat.real_value(found)
    if value.numel() > _MAX_CONSTANT:
        raise TraceError(
            f"a tensor of {value.numel()} numbers is made of Python values",
            expected=f"at most {_MAX_CONSTANT}",
            fix="keep it in a buffer of the model",
            where=f"graph node {node.meta.get('origin', '')}",
        )
    reader = next(iter(node.users))  # lifts it; its result says where the tensor lives
    kwargs = {"dtype": value.dtype, "device": reader.meta["val"].device}
    if value.ndim:
        made = graph.call_function(torch.tensor, (value.tolist(),), kwargs)
    else:
        made = graph.call_function(aten.full.default, ([], value.item()), kwargs)
    made.meta = {key: reader.meta[key] for key in _KEPT if key in reader.meta}
    return made


def plain_writes(graph: fx.Graph, mode: torch._subclasses.FakeTensorMode) -> None:
    """Let writes to a tensor that nothing else looks at make a new tensor instead.

    These are most writes there are (``torch.rms_norm`` adds its epsilon so), and seeing it is much
    faster than tracing everything anew, as `functional` does for the others.
    """
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        plain = _plain(node)
        if plain is None:
            continue
        source = node.args[0]
        fakes = fx.map_arg((node.args, node.kwargs), lambda read: read.meta["val"])
        with mode, torch.no_grad():
            value = plain(*fakes[0], **fakes[1])
        old = source.meta["val"]
        if (value.shape, value.dtype) != (old.shape, old.dtype):
            continue
        later = [user for user in source.users if order[user] > order[node]]
        node.target, node.meta["val"] = plain, value
        for user in later:
            user.replace_input_with(source, node)


def _plain(node: fx.Node) -> Any | None:
    """The operator that does what `node` does without writing, if nobody could tell."""
    name = str(node.target)
    if node.op != "call_function" or not name.startswith("aten.") or not kinds.written(node):
        return None
    packet, _, overload = name.removeprefix("aten.").partition(".")
    source = node.args[0]
    alone = (
        packet.endswith("_")
        and kinds.written(node) == [source]
        and isinstance(source, fx.Node)
        and source.op == "call_function"
        and source.target is not operator.getitem
        and not kinds.is_view_node(source)
        and not any(kinds.is_view_node(user) for user in source.users)
    )
    found = getattr(aten, packet.rstrip("_"), None) if alone else None
    return getattr(found, overload, None)


class _Relabel(fx.Interpreter):
    """Runs a graph under a tracer; what a node becomes inherits its labels."""

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        before = compat.last_traced()
        result = super().run_node(n)
        labels: dict[str, Any] = {key: n.meta[key] for key in ("origin", "phase") if key in n.meta}
        for node in compat.traced_since(before):
            node.meta.update(labels)
        return result


def functional(graph: fx.Graph, mode: torch._subclasses.FakeTensorMode) -> Recording:
    """`graph` without writes to tensors it made itself, as a raw trace with the same inputs.

    Done on a finished graph, since autograd cannot run under functionalisation.
    """
    module = fx.GraphModule({}, graph)

    def run(*args: Tensor) -> Any:
        with torch.no_grad():
            return _Relabel(module).run(*args)

    fakes = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    with mode:
        return compat.traced(torch.func.functionalize(run), fakes)
