"""Where a NaN or an infinity was born: the first op, over all ranks, that made one."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.graph.ir import Graph
from autopar.runtime.comm import Communicator
from autopar.runtime.execute import Compiled
from autopar.runtime.programs import ops
from autopar.runtime.programs.program import Program
from autopar.runtime.unit import StageUnit


class Watch:
    """Runs the forward programs of a rank and remembers where bad numbers first appear.

    Bad are NaN and plus infinity; minus infinity is how masks are written. An infinity that the
    model wrote as a number is not bad, nor is what follows from it.

    Attributes:
        first: ``(stage, place, graph node)`` of the first op that made a bad number.
        given: Name of a graph input that holds one.
    """

    def __init__(self, comm: Communicator, graph: Graph) -> None:
        self.comm, self.graph = comm, graph
        self._known = {node.name for node in graph.nodes}
        self.first: tuple[int, int, str] | None = None
        self.given: str | None = None
        self._meant: set[fx.Node] = set()

    def unit(self, unit: StageUnit) -> StageUnit:
        """`unit` with a forward that is watched."""
        watched = copy.copy(unit)
        program = unit.variant("F", first=False, last=False)
        compiled = replace(unit.program("F", 0), run=self._runner(program, unit.index))

        def choose(kind: str, microbatch: int) -> Compiled:
            return compiled

        watched.program = choose  # type: ignore[method-assign]
        return watched

    def _runner(self, program: Program, stage: int) -> Callable[[list[Any]], list[Any]]:
        def run(arguments: list[Any]) -> list[Any]:
            env: dict[fx.Node, Any] = {}
            for slot, node, value in zip(
                program.inputs, program.placeholders(), arguments, strict=True
            ):
                env[node] = value
                graph_input = slot.kind in ("input", "parameter", "buffer", "constant")
                if graph_input and self._bad(node, value):
                    self.given = self.given or slot.name
            arguments.clear()
            for index, node in enumerate(program.calls()):
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                moved = ops.is_collective(node.target) or node.target is ops.wait
                target = ops.bind(node.target, self.comm) if moved else node.target
                env[node] = target(*args, **kwargs)  # type: ignore[operator]
                # Collectives only move numbers.
                origin = str(node.meta.get("origin"))
                if not moved and origin in self._known and self._bad(node, env[node]):
                    place = (stage, index, origin)
                    self.first = min(self.first or place, place)
            return [env[node] for node in program.results()]

        return run

    def _bad(self, node: fx.Node, value: Any) -> bool:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return False
        if torch.isnan(value).any():
            return True
        if not torch.isposinf(value).any():
            return False
        literals = [arg for arg in (*node.args, *node.kwargs.values()) if isinstance(arg, float)]
        if any(map(math.isinf, literals)) or self._meant.intersection(node.all_input_nodes):
            self._meant.add(node)
            return False
        return True

    def where(self) -> str:
        """Text such as ``module layers.3.mlp, aten.linear.default model.py:41, rank 2``.

        Every rank must call.
        """
        made = self.comm.gather_objects((self.first, self.given))
        found = [(first, rank) for rank, (first, _) in enumerate(made) if first is not None]
        parts = []
        if found:
            (_, _, origin), rank = min(found)
            node = next((item for item in self.graph.nodes if item.name == origin), None)
            text = origin
            if node is not None:
                text = f"module {node.module or '(root)'}, {node.op} {node.source}"
            parts.append(f"{text.rstrip()}, rank {rank}")
        name = next((given for _, given in made if given is not None), None)
        if name is not None:
            item = next((i for i in self.graph.inputs if i.value.name == name), None)
            text = f"{item.kind} {item.target}" if item else name
            parts.append(f"{text} holds a number that is not finite")
        return "; ".join(parts) or "the loss itself"
