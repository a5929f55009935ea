"""From names in the graph to torch callables and back to torch constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopar.errors import PlanError
from autopar.graph.ir import Token


@cache
def resolve(op: str) -> Callable[..., Any]:
    """The torch operator overload called `op`, e.g. ``aten.linear.default``.

    Raises:
        PlanError: If this torch has no such operator.
    """
    namespace, name, overload = op.split(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        raise PlanError(
            f"torch {torch.__version__} has no operator {op}",
            fix="import the library that registers it before compiling, or trace again",
        ) from None


@cache
def constant(token: Token, device: str | None = None) -> object:
    """The torch dtype, device, layout or memory format a token stands for.

    Args:
        token: The token.
        device: Device to use instead of the traced one.
    """
    if token.kind == "device":
        return torch.device(device or token.text)
    return getattr(torch, token.text.removeprefix("torch."))
