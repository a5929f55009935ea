r"""Text form of a graph, one line per input, call and output, and its parser.

    parameter %fc.weight: float32[2, 4]* = "fc.weight"
    input %x: float32[8, 4] = "args[0]"
    %linear_0: float32[8, 2]* = aten.linear.default(%x, %fc.weight, None) @ "fc" "model.py:12"
    return user %linear_0 "[0]"

A call may end in ``{key=value}`` before ``@``, and in ``[context]`` at the end. Dtypes and
other tokens print as ``dtype:float32``.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from autopar.graph.ir import Arg, Graph, Input, Node, Output, Ref, TensorSpec, Token, Value

_TOKENS = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<ref>%[\w.]+)|(?P<token>[a-z_]+:[\w:.]+)"""
    r"""|(?P<number>-?(?:inf|nan|\d+(?:\.\d+)?(?:e[+-]?\d+)?))(?![\w.])|(?P<word>[\w.]+)"""
    r"""|(?P<mark>[()\[\]{},=:@*]))"""
)


def to_text(graph: Graph) -> str:
    """`graph` as text; `parse` gives it back."""
    lines = [_input_text(item) for item in graph.inputs]
    lines += [_node_text(node) for node in graph.nodes]
    lines += [_output_text(item) for item in graph.outputs]
    return "\n".join(lines) + "\n"


def _string(text: str) -> str:
    return json.dumps(text)


def _value_text(value: Value) -> str:
    return f"%{value.name}: {value.spec}"


def _arg_text(arg: Arg) -> str:
    if isinstance(arg, Ref):
        return f"%{arg.name}"
    if isinstance(arg, Token):
        return f"{arg.kind}:{arg.text}"
    if isinstance(arg, tuple):
        return "(" + ", ".join(map(_arg_text, arg)) + ")"
    if isinstance(arg, str):
        return _string(arg)
    return repr(arg)


def _input_text(item: Input) -> str:
    mark = "" if item.persistent else " transient"
    return f"{item.kind} {_value_text(item.value)} = {_string(item.target)}{mark}"


def _node_text(node: Node) -> str:
    left = ", ".join(map(_value_text, node.outputs)) if node.outputs else f"%{node.name}"
    text = f"{left} = {node.op}({', '.join(map(_arg_text, node.args))})"
    if node.kwargs:
        pairs = (f"{key}={_arg_text(arg)}" for key, arg in node.kwargs)
        text += " {" + ", ".join(pairs) + "}"
    text += f" @ {_string(node.module)} {_string(node.source)}"
    if node.context:
        text += f" [{', '.join(map(_string, node.context))}]"
    return text


def _output_text(item: Output) -> str:
    value = f"%{item.value}" if item.value is not None else _arg_text(item.literal)
    return f"return {item.kind} {value} {_string(item.target)}"


class _Reader:
    """Tokens of one line."""

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line, number, 0

    def error(self, wanted: str) -> ValueError:
        rest = self.line[self.at : self.at + 30]
        return ValueError(f"line {self.number}: expected {wanted}, got {rest!r}")

    def peek(self) -> tuple[str, str] | None:
        match = _TOKENS.match(self.line, self.at)
        if match is None or match.lastgroup is None:
            return None
        return match.lastgroup, match[match.lastgroup]

    def next(self) -> tuple[str, str]:
        match = _TOKENS.match(self.line, self.at)
        if match is None or match.lastgroup is None:
            raise self.error("more")
        self.at = match.end()
        return match.lastgroup, match[match.lastgroup]

    def kind(self, kind: str) -> str:
        found = self.peek()
        if found is None or found[0] != kind:
            raise self.error(kind)
        return self.next()[1]

    def mark(self, text: str) -> None:
        if self.peek() != ("mark", text):
            raise self.error(repr(text))
        self.next()

    def try_mark(self, text: str) -> bool:
        if self.peek() == ("mark", text):
            self.next()
            return True
        return False

    def string(self) -> str:
        return str(json.loads(self.kind("string")))

    def items(self, close: str, read: Any) -> tuple[Any, ...]:
        """Comma-separated items up to the mark `close`."""
        result: list[Any] = []
        while not self.try_mark(close):
            if result:
                self.mark(",")
            result.append(read())
        return tuple(result)

    def arg(self) -> Arg:
        kind, text = self.next()
        if kind == "string":
            return str(json.loads(text))
        if kind == "ref":
            return Ref(text[1:])
        if kind == "token":
            return Token(*text.split(":", 1))
        if kind == "number":
            if text == "nan":
                return math.nan
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if (kind, text) == ("mark", "("):
            return self.items(")", self.arg)
        words: dict[str, Arg] = {"None": None, "True": True, "False": False}
        if text not in words:
            raise self.error("an argument")
        return words[text]

    def value(self) -> Value:
        name = self.kind("ref")[1:]
        self.mark(":")
        dtype = self.kind("word")
        self.mark("[")
        shape = self.items("]", lambda: int(self.kind("number")))
        return Value(name, TensorSpec(shape, dtype, self.try_mark("*")))

    def pair(self) -> tuple[str, Arg]:
        key = self.kind("word")
        self.mark("=")
        return key, self.arg()


def _op(reader: _Reader) -> str:
    match = re.compile(r"\s*([^\s(]+)").match(reader.line, reader.at)
    if match is None:
        raise reader.error("an operator")
    reader.at = match.end()
    return match[1]


def _parse_node(reader: _Reader) -> Node:
    found = re.match(r"%([\w.]+) = ", reader.line)
    outputs: list[Value] = []
    if found:
        name, reader.at = found[1], found.end()
    else:
        outputs.append(reader.value())
        while reader.try_mark(","):
            outputs.append(reader.value())
        reader.mark("=")
        name = outputs[0].name
    op = _op(reader)
    reader.mark("(")
    args = reader.items(")", reader.arg)
    kwargs = reader.items("}", reader.pair) if reader.try_mark("{") else ()
    reader.mark("@")
    module, source = reader.string(), reader.string()
    context = reader.items("]", reader.string) if reader.try_mark("[") else ()
    return Node(
        name=name, op=op, args=args, kwargs=kwargs, outputs=tuple(outputs),
        module=module, source=source, context=context,
    )  # fmt: skip


def parse(text: str) -> Graph:
    """The graph that `to_text` printed.

    Raises:
        ValueError: The text is malformed, with line number and what was expected.
    """
    inputs: list[Input] = []
    nodes: list[Node] = []
    outputs: list[Output] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        reader = _Reader(line, number)
        if line.startswith("%"):
            nodes.append(_parse_node(reader))
            continue
        word = reader.kind("word")
        if word == "return":
            kind = reader.kind("word")
            value = reader.arg()
            name = value.name if isinstance(value, Ref) else None
            literal = None if isinstance(value, Ref) else value
            outputs.append(
                Output(kind=kind, value=name, target=reader.string(), literal=literal)  # type: ignore[arg-type]
            )
        elif word in ("parameter", "buffer", "constant", "input"):
            made = reader.value()
            reader.mark("=")
            target = reader.string()
            persistent = reader.peek() != ("word", "transient")
            inputs.append(
                Input(kind=word, value=made, target=target, persistent=persistent)  # type: ignore[arg-type]
            )
        else:
            raise ValueError(f"line {number}: unknown line kind {word!r}")
    return Graph(inputs=tuple(inputs), nodes=tuple(nodes), outputs=tuple(outputs))
