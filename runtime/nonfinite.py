"""Where a NaN or an infinity was born: the first op, over all ranks, that made one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph.ir import Graph
from autopar.runtime.comm import Communicator
from autopar.runtime.lower import Program


class _Watch(fx.Interpreter):
    """Runs a program and remembers the first input and the first op that hold a bad number.

    Bad are NaN and plus infinity; minus infinity is how masks are written. An infinity that the
    model wrote as a number is not bad, nor is what follows from it.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.origins = program.origins
        self.index, self.first, self.inputs = 0, -1, -1
        self.meant: set[fx.Node] = set()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if self._bad(n, result):
            if n.op == "placeholder" and self.inputs < 0:
                self.inputs = self.index
            # Reshards only move numbers; they have no origin.
            if n.op != "placeholder" and self.first < 0 and n.name in self.origins:
                self.first = self.index
        self.index += 1
        return result

    def _bad(self, n: fx.Node, result: Any) -> bool:
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return False
        value = result.detach()
        if torch.isnan(value).any():
            return True
        if not torch.isposinf(value).any():
            return False
        literals = [arg for arg in (*n.args, *n.kwargs.values()) if isinstance(arg, float)]
        if any(map(math.isinf, literals)) or self.meant.intersection(n.all_input_nodes):
            self.meant.add(n)
            return False
        return True


def first_non_finite(
    program: Program, arguments: Sequence[Tensor], graph: Graph, comm: Communicator
) -> str:
    """Name the place where a non-finite value first appears; every rank must call.

    Args:
        program: The program that gave a non-finite loss.
        arguments: Its arguments.
        graph: The graph it was lowered from.
        comm: All ranks.

    Returns:
        Text such as ``module layers.3.mlp, aten.linear.default model.py:41, rank 2``.
    """
    watch = _Watch(program)
    with torch.no_grad():
        watch.run(*arguments)
    nodes = list(program.module.graph.nodes)
    made = comm.gather_objects((watch.first, watch.inputs))
    found = [(first, rank) for rank, (first, _) in enumerate(made) if first >= 0]
    given = [(index, rank) for rank, (_, index) in enumerate(made) if index >= 0]
    parts = []
    if found:
        index, rank = min(found)
        origin = program.origins.get(nodes[index].name)
        node = next((item for item in graph.nodes if item.name == origin), None)
        text = f"module {node.module or '(root)'}, {node.op} {node.source}" if node else str(origin)
        parts.append(f"{text.rstrip()}, rank {rank}")
    if given:
        name = program.origins[nodes[given[0][0]].name]
        item = next((i for i in graph.inputs if i.value.name == name), None)
        text = f"{item.kind} {item.target}" if item else name
        parts.append(f"{text} holds a number that is not finite")
    return "; ".join(parts) or "the loss itself"
