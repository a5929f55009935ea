"""From a program to the Python function that runs it.

The function is boxed: it takes its inputs in a list, which it empties, and drops every tensor after
its last use, so that memory is freed as early as in eager execution.
"""

from __future__ import annotations

import keyword
import linecache
import operator
from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from types import CodeType
from typing import Any

import torch
from torch import fx

from autopar.runtime.comm import Communicator
from autopar.runtime.programs import compat, ops
from autopar.runtime.programs.direct import direct
from autopar.runtime.programs.program import Boxed, Program, output_node, target_name

_NUMBERS = count()
_PLAIN = (int, float, bool, str, type(None))


def generate(program: Program, comm: Communicator) -> Boxed:
    """Compile a program.

    Args:
        program: What to run.
        comm: Where its collectives run.

    Returns:
        A function from the list of input values, in the order of ``program.inputs``, which it
        empties, to the list of output values. It records nothing for autograd. Its attribute
        ``source`` is its Python text.
    """
    writer = _Writer(program, comm)
    source = writer.text()
    scope = writer.scope
    exec(_code(source, program.name), scope)
    body: Boxed = scope["program"]

    def run(values: list[Any]) -> list[Any]:
        with torch.no_grad(), compat.without_autocast():
            return body(values)

    run.source = source  # type: ignore[attr-defined]
    run.__name__ = program.name
    return run


@lru_cache(maxsize=128)
def _code(source: str, name: str) -> CodeType:
    """Python's code for a text; ranks that are threads mostly have the same."""
    file = f"<autopar program {next(_NUMBERS)}: {name}>"
    # For tracebacks and debuggers.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    return compile(source, file, "exec")


class _Writer:
    """Writes the source and collects the globals that it names."""

    def __init__(self, program: Program, comm: Communicator) -> None:
        self.program, self.comm = program, comm
        self.scope: dict[str, Any] = {}
        self.bound: dict[Any, str] = {}
        self.names: dict[fx.Node, str] = {}
        self.collectives: dict[Any, Callable[..., Any]] = {}

    def text(self) -> str:
        graph = self.program.graph
        self._name_nodes()
        last = self._last_uses()
        lines = ["def program(values):"]
        holders = self.program.placeholders()
        if holders:
            lines.append(f"    {', '.join(self.names[node] for node in holders)}, = values")
            lines.append("    values.clear()")
        unused = [self.names[node] for node in holders if not node.users]
        if unused:
            lines.append(f"    del {', '.join(unused)}")
        for node in graph.nodes:
            if node.op == "call_function":
                lines.append(f"    {self._statement(node)}")
                gone = [self.names[item] for item in last[node]]
                if not node.users:
                    gone.append(self.names[node])
                if gone:
                    lines.append(f"    del {', '.join(gone)}")
        results = ", ".join(self.names[node] for node in self.program.results())
        lines.append(f"    return [{results}]")
        return "\n".join(lines) + "\n"

    def _name_nodes(self) -> None:
        for node in self.program.graph.nodes:
            name = node.name
            self.names[node] = f"{name}_" if keyword.iskeyword(name) else name

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node the values that nothing reads after it."""
        last: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        seen = set(output_node(self.program.graph).all_input_nodes)
        for node in reversed(self.program.graph.nodes):
            if node.op == "call_function":
                for source in node.all_input_nodes:
                    if source not in seen:
                        seen.add(source)
                        last[node].append(source)
        return last

    def _statement(self, node: fx.Node) -> str:
        left = self.names[node]
        if node.target is operator.getitem:
            source, index = node.args
            return f"{left} = {self._arg(source)}[{self._arg(index)}]"
        args = [self._arg(arg) for arg in node.args]
        args += [f"{key}={self._arg(arg)}" for key, arg in node.kwargs.items()]
        call = self._callable(node)
        name = self._bind(call, target_name(node.target).replace(".", "_"), call)
        return f"{left} = {name}({', '.join(args)})"

    def _callable(self, node: fx.Node) -> Callable[..., Any]:
        if node.target not in self.collectives:
            try:
                self.collectives[node.target] = ops.bind(node.target, self.comm)
            except KeyError:
                return direct(node)
        return self.collectives[node.target]

    def _bind(self, key: Any, name: str, value: Any) -> str:
        """The global name of a value."""
        if key not in self.bound:
            free = f"_{name}"
            while free in self.scope:
                free += "_"
            self.bound[key], self.scope[free] = free, value
        return self.bound[key]

    def _arg(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.names[arg]
        if isinstance(arg, tuple):
            inner = "".join(f"{self._arg(item)}, " for item in arg)
            return f"({inner.rstrip()})" if inner else "()"
        if isinstance(arg, list):
            return f"[{', '.join(map(self._arg, arg))}]"
        if isinstance(arg, slice):
            return f"slice({self._arg(arg.start)}, {self._arg(arg.stop)}, {self._arg(arg.step)})"
        if isinstance(arg, float) and not abs(arg) < float("inf"):
            return f"float({str(arg)!r})"
        if type(arg) in _PLAIN:
            return repr(arg)
        return self._bind((type(arg), arg), str(arg).replace(".", "_").replace(":", "_"), arg)
