"""Where in the user's code something happened, in words and in errors."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from autopar.errors import TraceError

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in ')
_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_TRACER = str(Path(__file__).parent / "tracer.py")


def is_user_file(name: str) -> bool:
    """Whether a source file is neither torch's nor the tracer's."""
    return not name.startswith((_TORCH, _HERE, "<"))


def calls_model(name: str, function: str) -> bool:
    """Whether this frame calls the model: the frames outside it are of the tracer's caller."""
    return name == _TRACER and function == "_run"


def user_line(trace: str) -> str:
    """``file:line`` of the innermost frame of a stack trace that is outside torch."""
    for line in reversed(trace.splitlines()):
        match = _FRAME.match(line)
        if match and is_user_file(match[1]):
            return f"{short_path(match[1])}:{match[2]}"
    return ""


def short_path(path: str) -> str:
    """`path` from site-packages on, for files that are installed there."""
    return path.rsplit("site-packages/", 1)[-1]


def describe_place(path: str | None, line: str) -> str:
    """Module and line in words; no module when `path` is None."""
    if path is None:
        return line
    module = f"module '{path}'" if path else "the root module"
    return f"{module}, {line}" if line else module


def higher_order_error(name: str, module: str, source: str) -> TraceError:
    """The error for a control-flow or attention operator that the graph cannot hold."""
    fix = "write it with plain tensor operators"
    if "flex_attention" in name:
        fix = "use scaled_dot_product_attention with a mask"
    return TraceError(
        f"{name} cannot be sharded: it holds a program of its own",
        where=describe_place(module, source),
        fix=fix,
    )


def data_dependent_error(module: str, source: str) -> TraceError:
    """The error for a number or a size that comes from the values of a tensor."""
    return TraceError(
        "forward takes a number or a size from the values of a tensor (.item(), nonzero, a "
        "boolean index), so there is no one graph",
        where=describe_place(module, source),
        fix="keep it a tensor: torch.where instead of if, masks instead of nonzero",
    )
