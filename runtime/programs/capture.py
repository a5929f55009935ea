"""From the local forward of a stage to one graph of its forward and backward.

The forward runs on fake tensors under a tracer, then `torch.autograd.grad` runs under it as well,
so what autograd would do becomes nodes and no autograd is needed afterwards. Effects other than
collectives are refused. AOTAutograd makes its joint graph in this way; it is done by hand here
because every node must know which node of the canonical graph it serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError, TraceError
from autopar.runtime.programs import compat, kinds
from autopar.runtime.programs.clean import clean, functional, plain_writes
from autopar.runtime.programs.program import Joint, Slot
from autopar.runtime.programs.simplify import simplify

Example = tuple[Slot, Tensor]


class _Labels:
    """Says of every node being traced which fx node of the forward it serves."""

    def __init__(self) -> None:
        self.last = compat.last_traced()
        self.phase, self.origin = "forward", ""
        self.seen: dict[Any, None] = {}

    def flush(self) -> None:
        """Label what was traced since the last call."""
        for node in compat.traced_since(self.last):
            node.meta["phase"] = self.phase
            if self.origin:
                node.meta["origin"] = self.origin
        self.last = compat.last_traced()

    def enter(self, origin: str) -> None:
        """What is traced from now on serves `origin`."""
        self.flush()
        self.origin = origin

    def follow(self, result: Any) -> None:
        """Label the backward of `result` with the current origin too."""
        origin = self.origin
        pending = [
            leaf.grad_fn
            for leaf in pytree.tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None
        ]
        while pending:
            function = pending.pop()
            if function in self.seen:
                continue
            self.seen[function] = None
            if function.name().endswith("AccumulateGrad"):
                continue
            function.register_prehook(lambda _: self.enter(origin))
            pending += [item for item, _ in function.next_functions if item is not None]


class _Runner(fx.Interpreter):
    """Runs the forward, labelling what each of its nodes becomes."""

    def __init__(self, module: fx.GraphModule, origins: Mapping[str, str]) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # errors say where in their own way
        self.origins = dict(origins)
        self.labels = _Labels()

    def run_node(self, n: fx.Node) -> Any:
        """Run one node of the forward."""
        origin = self.origins.get(n.name)
        if origin is None:  # such as a reshard: it belongs to the value it moves
            sources = (self.origins.get(source.name) for source in n.all_input_nodes)
            origin = self.origins[n.name] = next((name for name in sources if name), "")
        self.labels.enter(origin)
        try:
            result = super().run_node(n)
        except AutoparError:
            raise
        except Exception as error:
            raise _not_traceable(_called(self.module, n), origin, error) from error
        self.labels.follow(result)
        return result


def _called(module: Any, node: fx.Node) -> str:
    """What a node of the forward calls, for messages."""
    if node.op != "call_module":
        return str(node.target)
    function = getattr(module.get_submodule(str(node.target)), "function", None)
    custom = getattr(function, "function", None)
    if isinstance(custom, type) and issubclass(custom, torch.autograd.Function):
        return f"the autograd function {custom.__qualname__}"
    return str(node.target)


def _not_traceable(what: str, origin: str, error: Exception) -> TraceError:
    reason = next(iter(str(error).strip().splitlines()), "")
    return TraceError(
        f"{what} cannot be captured in a program: {type(error).__name__}: {reason}",
        expected="tensor operations whose shapes do not depend on values; no .item(), no numpy",
        fix="write it with torch operations on tensors",
        where=f"graph node {origin}" if origin else None,
    )


def _fakes(
    inputs: Sequence[Example], mode: torch._subclasses.FakeTensorMode, device: torch.device | None
) -> list[Tensor]:
    made = []
    with mode:
        for slot, example in inputs:
            place = example.device if device is None else device
            if device is None and place.type == "meta":
                place = torch.device("cpu")
            if place.type == "cuda" and not torch.cuda.is_available():
                # torch would end the process in backward, or ask for the device.
                raise TraceError(
                    f"a program for {place} is asked of a machine without a GPU",
                    fix="capture it for the cpu",
                    where=str(slot),
                )
            fake = torch.empty_strided(
                example.shape, example.stride(), dtype=example.dtype, device=place
            )
            made.append(fake.requires_grad_(example.requires_grad))
    return made


class _Tracing:
    """One capture: the function that is traced, and what it notes while it runs."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Example],
        outputs: Sequence[Slot],
        origins: Mapping[str, str],
        gradients: bool,
    ) -> None:
        self.module, self.origins, self.gradients = module, origins, gradients
        self.inputs, self.outputs = [slot for slot, _ in inputs], list(outputs)
        self.tangents: list[tuple[Slot, fx.Node]] = []
        self.wanted = [
            i
            for i, (slot, example) in enumerate(inputs)
            if gradients and slot.kind in ("parameter", "boundary") and example.requires_grad
        ]
        # Gradients of inputs first.
        self.wanted.sort(key=lambda i: self.inputs[i].kind == "parameter")
        self.found: list[Slot] = []
        self.absent: list[Slot] = []

    def gradient_slot(self, index: int) -> Slot:
        slot = self.inputs[index]
        return Slot("gradient" if slot.kind == "parameter" else "input_gradient", slot.name)

    def __call__(self, *args: Tensor) -> list[Tensor]:
        runner = _Runner(self.module, self.origins)
        with torch.set_grad_enabled(self.gradients):
            results = list(runner.run(*args))
        assert len(results) == len(self.outputs), (len(results), self.outputs)
        runner.labels.enter("")
        runner.labels.phase = "backward"
        results += self._backward(runner.labels, results, args)
        runner.labels.flush()
        return results

    def _backward(
        self, labels: _Labels, results: list[Tensor], args: tuple[Tensor, ...]
    ) -> list[Tensor]:
        ends, tangents = [], []
        for slot, result in zip(self.outputs, results, strict=True):
            if self.gradients and slot.kind in ("boundary", "loss") and result.requires_grad:
                # Becomes a placeholder: shapes of results are not known before.
                tangents.append(torch.empty(result.shape, dtype=result.dtype, device=result.device))
                made = compat.last_traced()
                assert made is not None
                self.tangents.append((Slot("tangent", slot.name), made))
                ends.append(result)
        found: Sequence[Tensor | None] = [None] * len(self.wanted)
        if ends and self.wanted:
            try:
                found = torch.autograd.grad(
                    ends, [args[i] for i in self.wanted], tangents, allow_unused=True
                )
            except AutoparError:
                raise
            except Exception as error:
                what = f"the backward of {labels.origin or 'the outputs'}"
                raise _not_traceable(what, labels.origin, error) from error
        gradients = []
        for index, gradient in zip(self.wanted, found, strict=True):
            if gradient is None:
                self.absent.append(self.gradient_slot(index))
            else:
                self.found.append(self.gradient_slot(index))
                gradients.append(gradient)
        return gradients


def capture(
    module: fx.GraphModule,
    inputs: Sequence[Example],
    outputs: Sequence[Slot],
    origins: Mapping[str, str],
    *,
    gradients: bool = True,
    name: str = "stage",
    device: torch.device | None = None,
) -> Joint:
    """Trace a local forward and its backward.

    Args:
        module: The forward; its placeholders are `inputs` in order, it returns a tuple of tensors.
        inputs: What each placeholder is, and an example whose shape, strides, dtype, device and
            `requires_grad` count: real, fake or meta (a meta tensor stands for one on the cpu).
        outputs: What each result is. Those of kind ``boundary`` and ``loss`` that carry a gradient
            get a ``tangent`` input of the same name, contiguous.
        origins: Node of the canonical graph by node name of `module`. Nodes without one belong to
            that of their first operand.
        gradients: Whether to trace backward: gradients of parameters and boundary inputs that
            require them.
        name: Name of the result.
        device: Where the program will run, if not where the examples are.

    Returns:
        The joint graph: inputs are `inputs` and the tangents.

    Raises:
        TraceError: If something has no place in a program: data-dependent shapes or values, writes
            in place; names the graph node, and a custom function by its class.
    """
    mode = compat.fake_mode()
    tracing = _Tracing(module, inputs, outputs, origins, gradients)
    fakes = _fakes(inputs, mode, device)
    with mode, compat.one_thread():
        traced = compat.traced(tracing, fakes)
    slots = (*tracing.inputs, *(slot for slot, _ in tracing.tangents))
    results = (*tracing.outputs, *tracing.found)
    tangents = [node for _, node in tracing.tangents]
    graph = clean(traced, tangents, slots)
    plain_writes(graph, mode)
    if any(kinds.written(node) for node in graph.nodes):
        graph = clean(functional(graph, mode), (), slots)
    _refuse_writes(graph)
    simplify(graph)
    return Joint(
        name=name,
        graph=graph,
        inputs=slots,
        outputs=results,
        num_forward=len(tracing.outputs),
        absent=tuple(tracing.absent),
    )


def _refuse_writes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if kinds.written(node):
            raise TraceError(
                f"{node.target} writes a tensor in place, which a program may not",
                expected="operations that return new tensors",
                where=f"graph node {node.meta.get('origin', '')}",
            )
