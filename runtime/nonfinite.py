"""Where a NaN was born: the first op, over all ranks, that made one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph.ir import Graph
from autopar.runtime.comm import Communicator
from autopar.runtime.lower import Program


class _Watch(fx.Interpreter):
    """Runs a program and remembers the first node with a non-finite result."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.index, self.first, self.inputs = 0, -1, -1

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        bad = (
            isinstance(result, Tensor)
            and result.is_floating_point()
            and bool(torch.isnan(result.detach()).any())
        )
        if bad and n.op == "placeholder" and self.inputs < 0:
            self.inputs = self.index
        if bad and n.op != "placeholder" and self.first < 0:
            self.first = self.index
        self.index += 1
        return result


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
    watch = _Watch(program.module)
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
        parts.append(f"{item.kind if item else 'input'} {item.target if item else name} holds NaN")
    return "; ".join(parts) or "the loss itself"
