"""A traced model with every floating dtype replaced by float64, for exact comparisons.

Rounding differs between one device and many; in float64 it is far below any mistake, and models
that cast to float32 inside (norms, softmax) would bring it back. So the graph itself is patched,
on both sides of the comparison.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from autopar.graph.ir import FLOATING, Arg, Graph, Node, TensorSpec, Token, Value
from autopar.trace import Traced


def _spec(spec: TensorSpec) -> TensorSpec:
    return replace(spec, dtype="float64") if spec.dtype in FLOATING else spec


def _value(value: Value) -> Value:
    return Value(value.name, _spec(value.spec))


def _arg(arg: Arg) -> Arg:
    if isinstance(arg, Token) and arg.kind == "dtype" and arg.text in FLOATING:
        return Token("dtype", "float64")
    return tuple(map(_arg, arg)) if isinstance(arg, tuple) else arg


def _node(node: Node) -> Node:
    return replace(
        node,
        args=tuple(map(_arg, node.args)),
        kwargs=tuple((key, _arg(arg)) for key, arg in node.kwargs),
        outputs=tuple(map(_value, node.outputs)),
        context=(),
    )


def _tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def in_float64(traced: Traced) -> Traced:
    """`traced` with parameters, buffers, constants and every op in float64."""
    graph = traced.graph
    patched = Graph(
        inputs=tuple(replace(item, value=_value(item.value)) for item in graph.inputs),
        nodes=tuple(map(_node, graph.nodes)),
        outputs=graph.outputs,
    )
    return replace(
        traced,
        graph=patched,
        parameters={
            name: nn.Parameter(_tensor(t), requires_grad=t.requires_grad)
            for name, t in traced.parameters.items()
        },
        buffers={name: _tensor(t) for name, t in traced.buffers.items()},
        constants={name: _tensor(t) for name, t in traced.constants.items()},
    )
