"""Hashes by which a plan knows its model and its own choices again.

That of a graph is made of what it computes: operators, wiring, sizes and literals. Names of values,
parameters, buffers and modules do not count, nor the order in which parameters are declared: inputs
are numbered in the order of their first use.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from autopar.graph.ir import Arg, Graph, Input, Ref, map_refs

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

_VERSION = "2:"
_DIGITS = 32
CHOICES = (
    "mesh", "order", "storage", "explicit", "overrides", "pipeline", "zero", "recompute", "graph",
    "inputs",
)  # fmt: skip
"""Fields that decide what a plan takes."""


def hash_of(data: object) -> str:
    """Hash of JSON data."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def choices_digest(plan: Plan) -> str:
    """Hash of a plan's choices."""
    data = asdict(plan.pipeline) | {"zero": asdict(plan.zero)}
    for name in CHOICES:
        if name not in ("pipeline", "zero"):
            value = getattr(plan, name)
            data[f"plan.{name}"] = dict(value) if name == "overrides" else value
    return hash_of(data)


def fingerprint(graph: Graph) -> str:
    """Hash of the graph's structure and sizes, the same for whatever names."""
    return _VERSION + _hash(graph, sizes=True)


def structure(graph: Graph) -> str:
    """Hash of the graph's structure without sizes: the same for any batch and sequence length."""
    return _VERSION + _hash(graph, sizes=False)


def is_of(text: str, graph: Graph) -> bool:
    """Whether a fingerprint, also one of an earlier version, is that of a graph."""
    return text == (fingerprint(graph) if text.startswith(_VERSION) else first_version(graph))


def _hash(graph: Graph, *, sizes: bool) -> str:
    number: dict[str, int] = {}
    digest = hashlib.sha256()
    inputs = {item.value.name: item for item in graph.inputs}

    def add(text: str) -> None:
        digest.update(text.encode())
        digest.update(b"\n")

    def spec(value: object) -> str:
        text = str(value)
        return text if sizes else text.partition("[")[0]

    def meet(name: str) -> None:
        if name in inputs and name not in number:
            number[name] = len(number)
            add(_given(inputs[name], spec(inputs[name].value.spec)))

    for node in graph.nodes:
        for name in node.operands:
            meet(name)

        def rename(ref: Ref) -> Arg:
            return f"%{number[ref.name]}"

        args = map_refs(node.args, rename)
        kwargs = [(key, map_refs(arg, rename)) for key, arg in node.kwargs]
        for value in node.outputs:
            number[value.name] = len(number)
        shown = f"{args} {kwargs}" if sizes else _without_sizes((args, tuple(kwargs)))
        made = [spec(value.spec) for value in node.outputs]
        add(f"{node.op} {shown} {made} {' '.join(node.context)}".rstrip())
    unused = [item for name, item in inputs.items() if name not in number]
    for text in sorted(_given(item, spec(item.value.spec)) for item in unused):
        add(text)
    owner = {item.target: item.value.name for item in graph.inputs}
    for output in graph.outputs:
        target: object = output.target
        if output.kind == "buffer":  # the buffer that it replaces
            target = number.get(owner.get(output.target, ""), -1)
        add(f"{output.kind} {number.get(output.value or '', -1)} {target}")
    return digest.hexdigest()[:_DIGITS]


def _given(item: Input, spec: str) -> str:
    """An input; what the caller passes is known by its name."""
    return f"{item.kind} {item.target if item.kind == 'input' else ''} {spec}"


def _without_sizes(arg: object) -> str:
    """Arguments without numbers: references, words, and how they are nested."""
    if isinstance(arg, tuple | list):
        return "(" + ",".join(map(_without_sizes, arg)) + ")"
    if isinstance(arg, bool) or arg is None:
        return str(arg)
    return "#" if isinstance(arg, int | float | complex) else str(arg)


def first_version(graph: Graph) -> str:
    """What plan files of version 1 hold: parameters count by name and in order."""
    number: dict[str, int] = {}
    digest = hashlib.sha256()

    def add(text: str) -> None:
        digest.update(text.encode())
        digest.update(b"\n")

    for item in graph.inputs:
        number[item.value.name] = len(number)
        add(f"{item.kind} {item.target} {item.value.spec}")
    for node in graph.nodes:

        def rename(ref: Ref) -> Arg:
            return f"%{number[ref.name]}"

        args = map_refs(node.args, rename)
        kwargs = [(key, map_refs(arg, rename)) for key, arg in node.kwargs]
        for value in node.outputs:
            number[value.name] = len(number)
        add(f"{node.op} {args} {kwargs} {[str(value.spec) for value in node.outputs]}")
    for output in graph.outputs:
        add(f"{output.kind} {number.get(output.value or '', -1)} {output.target}")
    return digest.hexdigest()[:_DIGITS]
