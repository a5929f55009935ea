"""Concrete calls of every op with a rule, and what builds them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.graph.ir import Arg, Node, Ref, TensorSpec, Token, Value
from autopar.runtime.operators import constant, resolve

# Floating results that torch cannot differentiate.
NO_DERIVATIVE = frozenset(
    {
        "aten.copy.default",
        "aten.floor_divide.default",
        "aten.floor_divide.Scalar",
        "aten.heaviside.default",
        "aten.lift_fresh.default",
        "aten.nextafter.default",
        "aten.remainder.Scalar_Tensor",
        "aten.scatter.reduce",
        "aten.scatter.value_reduce",
        "prims.convert_element_type.default",
    }
)

# Operand slots that torch does not differentiate although they are floating; -1 is the last.
NOT_TRAINED = {
    "aten.batch_norm.default": {3, 4},
    "aten._native_batch_norm_legit_functional.default": {-2, -1},
    "aten.cross_entropy_loss.default": {2},
    "aten.nll_loss.default": {2},
    "aten.nll_loss_nd.default": {2},
    "aten.nll_loss2d.default": {2},
    "aten.soft_margin_loss.default": {1},
    "aten.binary_cross_entropy.default": {2},
    "aten.binary_cross_entropy_with_logits.default": {2, 3},
    "aten.multi_margin_loss.default": {2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A call with its operands and the results one device gives."""

    node: Node
    operands: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    reference: Callable[..., Any] | None

    def trains(self, slot: int) -> bool:
        """Whether an operand takes a gradient."""
        count = len(self.operands)
        fixed = {at % count for at in NOT_TRAINED.get(self.node.op, ()) if at < count}
        floating = self.operands[slot].is_floating_point()
        return floating and self.node.op not in NO_DERIVATIVE and slot not in fixed

    def spec(self, name: str) -> TensorSpec:
        return spec_of(self.operands[int(name[1:])])

    def __str__(self) -> str:
        shapes = ",".join("x".join(map(str, t.shape)) or "0d" for t in self.operands)
        rest = [a for a in (*self.node.args, *(v for _, v in self.node.kwargs)) if _literal(a)]
        return f"{self.node.op}({shapes}|{rest})"


def _literal(arg: Arg) -> bool:
    if isinstance(arg, tuple):
        return any(map(_literal, arg))
    return not isinstance(arg, (Ref, Token)) and arg is not None


def spec_of(tensor: Tensor, requires_grad: bool = False) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), requires_grad)


def run_node(node: Node, operands: list[Tensor], changed: dict[int, Any] | None = None) -> Any:
    """The torch op of a node on these operands."""
    pending = iter(operands)

    def convert(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return next(pending)
        if isinstance(arg, Token):
            return constant(arg)
        if isinstance(arg, tuple):
            return [convert(item) for item in arg]
        return arg

    args = [convert(arg) for arg in node.args]
    kwargs = {key: convert(arg) for key, arg in node.kwargs}
    for position, value in (changed or {}).items():
        args[position] = value
    return resolve(node.op)(*args, **kwargs)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def sample(
    op: str, *args: Any, reference: Callable[..., Any] | None = None, **kwargs: Any
) -> Sample:
    """A call of `op` (``aten.`` and ``.default`` may be left out); tensors become operands."""
    full = op if op.count(".") == 2 else f"aten.{op}" + ("" if "." in op else ".default")
    operands: list[Tensor] = []

    def convert(arg: Any) -> Arg:
        if isinstance(arg, Tensor):
            operands.append(arg)
            return Ref(f"x{len(operands) - 1}")
        if isinstance(arg, torch.dtype):
            return Token("dtype", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Token("device", str(arg))
        if isinstance(arg, (list, tuple)):
            return tuple(convert(item) for item in arg)
        return arg  # type: ignore[no-any-return]

    node_args = tuple(convert(arg) for arg in args)
    node_kwargs = tuple((key, convert(arg)) for key, arg in kwargs.items())
    node = Node(name="y", op=full, args=node_args, kwargs=node_kwargs, outputs=())
    if reference is None:
        outputs = as_tuple(run_node(node, operands))
    else:
        outputs = as_tuple(reference(*operands))
    values = tuple(Value(f"y{i}", spec_of(t)) for i, t in enumerate(outputs))
    node = Node(name="y", op=full, args=node_args, kwargs=node_kwargs, outputs=values)
    return Sample(node=node, operands=tuple(operands), outputs=outputs, reference=reference)


class Draw:
    """Deterministic operands."""

    def __init__(self, name: str) -> None:
        self.generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int, low: float = 0.1, high: float = 0.9) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return drawn * (high - low) + low

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def boolean(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) > 0.5

    def order(self, *shape: int) -> Tensor:
        """Distinct values in random order, so that maxima and sorts are unique."""
        size = math.prod(shape)
        return torch.randperm(size, generator=self.generator).double().view(shape) / size
