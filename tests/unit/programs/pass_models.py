"""Small stages for tests of passes, captured as programs, with real values for their slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.handles import Done
from autopar.runtime.programs import ops
from autopar.runtime.programs.capture import capture
from autopar.runtime.programs.check import check
from autopar.runtime.programs.compat import fake_mode
from autopar.runtime.programs.program import Joint, Program, Slot


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A captured function and values for its inputs."""

    joint: Joint
    values: dict[Slot, Tensor]
    function: Callable[..., Any]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {slot.name: v for slot, v in self.values.items() if slot.kind == "parameter"}

    def gradients(self) -> dict[str, Tensor]:
        """What autograd says."""
        leaves = {
            slot: value.detach().clone().requires_grad_(slot.kind == "parameter")
            for slot, value in self.values.items()
            if slot.kind != "tangent"
        }
        (loss,) = self.function(*leaves.values())
        tangent = self.values[Slot("tangent", "loss")]
        used = [slot for slot in leaves if slot.kind == "parameter"]
        found = torch.autograd.grad(
            loss, [leaves[slot] for slot in used], tangent, allow_unused=True
        )
        return {slot.name: grad for slot, grad in zip(used, found, strict=True) if grad is not None}


def make_stage(
    function: Callable[..., Any], parameters: Mapping[str, Tensor], inputs: Mapping[str, Tensor]
) -> Stage:
    """Capture ``function(*parameters, *inputs) -> (loss,)``."""
    module = fx.symbolic_trace(function)
    values = {Slot("parameter", name): value for name, value in parameters.items()}
    values |= {Slot("input", name): value for name, value in inputs.items()}
    examples = [
        (slot, value.detach().clone().requires_grad_(slot.kind == "parameter"))
        for slot, value in values.items()
    ]
    origins = {node.name: node.name for node in module.graph.nodes}
    joint = capture(module, examples, [Slot("loss", "loss")], origins)
    dtype = next(iter(parameters.values())).dtype
    values[Slot("tangent", "loss")] = torch.ones((), dtype=dtype)
    return Stage(joint=joint, values=values, function=function)


def run(
    program: Program,
    values: Mapping[Slot, Any],
    comm: Communicator | None = None,
) -> dict[Slot, Any]:
    """Compile and call a program; `values` may hold more than it takes."""
    boxed = [values[slot] for slot in program.inputs]
    results = program.compile(comm or SoloCommunicator())(boxed)
    assert not boxed
    return dict(zip(program.outputs, results, strict=True))


def text_of(program: Program) -> str:
    """The text of a program; tracers differ in whether they name a node after the overload."""
    return program.print_readable().replace("_default", "")


def whole(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Small whole numbers: sums of products of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)


def mlp(w1: Tensor, b1: Tensor, w2: Tensor, x: Tensor) -> tuple[Tensor]:
    """Two layers and a loss that is linear in the output."""
    hidden = F.relu(F.linear(x, w1, b1))
    return (F.linear(hidden, w2).sum(),)


def mlp_stage(dtype: torch.dtype = torch.float64) -> Stage:
    """`mlp` with weights of whole numbers."""
    return make_stage(
        mlp,
        {"w1": whole((6, 4), 1, dtype), "b1": whole((6,), 2, dtype), "w2": whole((3, 6), 3, dtype)},
        {"x": whole((5, 4), 4, dtype)},
    )


HEADS, WIDTH, LENGTH, BATCH, VOCABULARY, LAYERS = 2, 8, 6, 2, 11, 2
_PER_LAYER = ("norm", "qkv", "out", "up", "down")


def gpt(ids: Tensor, tokens: Tensor, positions: Tensor, *layers: Tensor) -> tuple[Tensor]:
    """A GPT whose head is tied to its embedding."""
    x = F.embedding(ids, tokens) + positions
    for index in range(LAYERS):
        norm, qkv, out, up, down = layers[5 * index : 5 * index + 5]
        y = F.linear(F.layer_norm(x, (WIDTH,), norm), qkv)
        parts = y.split(WIDTH, 2)
        q, k, v = (
            parts[i].view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for i in range(3)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(attended.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH), out)
        x = x + F.linear(F.gelu(F.linear(x, up)), down)
    logits = F.linear(x, tokens)
    return (F.cross_entropy(logits.view(-1, VOCABULARY), ids.view(-1)),)


def gpt_stage(dtype: torch.dtype = torch.float32) -> Stage:
    """A small tied GPT."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"tokens": (VOCABULARY, WIDTH), "positions": (LENGTH, WIDTH)}
    sizes = {
        "norm": (WIDTH,),
        "qkv": (3 * WIDTH, WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (4 * WIDTH, WIDTH),
        "down": (WIDTH, 4 * WIDTH),
    }
    for index in range(LAYERS):
        shapes |= {f"{index}.{name}": sizes[name] for name in _PER_LAYER}
    parameters = {
        name: 0.3 * torch.randn(shape, generator=generator, dtype=dtype)
        for name, shape in shapes.items()
    }
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)

    names = ", ".join(f"p{number}" for number in range(len(parameters)))
    scope: dict[str, Any] = {"gpt": gpt}
    # A function of fixed arguments, as the tracer wants it.
    exec(f"def flat({names}, ids): return gpt(ids, {names})", scope)
    return make_stage(scope["flat"], parameters, {"ids": ids})


class Maker:
    """Writes a program by hand, with fakes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.mode = fake_mode()
        self.inputs: list[Slot] = []

    def input(self, slot: Slot, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """Add an input; inputs come first."""
        node = self.graph.placeholder(f"{slot.kind}_{slot.name}".replace(".", "_"))
        with self.mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype)
        self.inputs.append(slot)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call."""
        node = self.graph.call_function(target, args, kwargs)
        fakes = fx.node.map_arg((args, kwargs), lambda item: item.meta["val"])
        if target is ops.wait:
            node.meta["val"] = fakes[0][0]
            return node
        with self.mode, torch.no_grad():
            value = target(*fakes[0], **fakes[1])
        node.meta["val"] = value.wait() if isinstance(value, Done) else value
        return node

    def program(self, outputs: Mapping[Slot, fx.Node], name: str = "hand-made") -> Program:
        """The finished program, checked."""
        self.graph.output(tuple(outputs.values()))
        return check(
            Program(
                name=name,
                graph=self.graph,
                inputs=tuple(self.inputs),
                outputs=tuple(outputs),
            )
        )


def chain_stage(layers: int, width: int, batch: int, dtype: torch.dtype = torch.float64) -> Stage:
    """Square layers, one after the other."""
    names = ", ".join(f"w{number}" for number in range(layers))
    scope: dict[str, Any] = {"chain": chain}
    exec(f"def flat({names}, x): return chain(x, {names})", scope)
    parameters = {f"w{number}": whole((width, width), number, dtype) for number in range(layers)}
    return make_stage(scope["flat"], parameters, {"x": whole((batch, width), 99, dtype)})


def chain(x: Tensor, *weights: Tensor) -> tuple[Tensor]:
    """Layers without biases."""
    for weight in weights:
        x = F.relu(F.linear(x, weight))
    return (x.sum(),)
