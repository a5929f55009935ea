"""From names in the graph to torch callables and back to torch constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.graph.ir import Graph, Node, Token
from autopar.sharding.factors import Factors


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The torch operator overload called `op`, e.g. ``aten.linear.default``.

    Raises:
        PlanError: If this torch has no such operator.
    """
    namespace, name, overload = op.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)
    except (AttributeError, RuntimeError):
        raise PlanError(
            f"torch {torch.__version__} has no operator {op}",
            fix="import the library that registers it before compiling, or trace again",
        ) from None


@cache
def constant(token: Token) -> object:
    """The torch dtype, device, layout or memory format a token stands for."""
    if token.kind == "device":
        return torch.device(token.text)
    return getattr(torch, token.text.removeprefix("torch."))


def on_device(node: Node, device: torch.device) -> Node:
    """`node` with the device to create its result on, if its op takes one; else `node` itself.

    Graphs say nothing of devices: operands bring theirs, creation ops are told here.
    """
    if node.op.startswith("autopar."):
        return node
    arguments = resolve(node.op)._schema.arguments  # type: ignore[attr-defined]
    if not any(argument.name == "device" for argument in arguments):
        return node
    kwargs = tuple((key, arg) for key, arg in node.kwargs if key != "device")
    return replace(node, kwargs=(*kwargs, ("device", Token("device", str(device)))))


def refuse_unkeyed_random(graph: Graph, factors: Factors, world_size: int) -> None:
    """Refuse random ops without a rule on several ranks: each rank would draw its own numbers.

    Raises:
        PlanError: Names the op and the module.
    """
    if world_size == 1:
        return
    for node, rule in zip(graph.nodes, factors.rules, strict=True):
        if rule is not None or node.op.startswith("autopar."):
            continue
        if torch.Tag.nondeterministic_seeded in resolve(node.op).tags:  # type: ignore[attr-defined]
            raise PlanError(
                f"{node.op} draws random numbers and has no sharding rule: every one of the "
                f"{world_size} ranks would draw its own",
                expected="random ops that autopar keys by element: dropout, bernoulli, rand_like, "
                "randn_like",
                where=f"module {node.module or '(root)'} {node.source}".rstrip(),
                fix="draw the numbers outside the model and pass them in; for an LSTM or GRU set "
                "dropout=0 and put nn.Dropout between single-layer ones",
            )
