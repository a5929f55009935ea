"""From an exception during tracing to one that says what, where, and the way out."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from autopar.errors import AutoparError, TraceError
from autopar.trace.places import calls_model, describe_place, is_user_file, short_path


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _base(module: Any) -> Any:
    get_base = getattr(type(module), "get_base", None)
    return get_base(module) if get_base is not None else module


def locate(error: BaseException, model: nn.Module) -> tuple[str | None, nn.Module | None, str]:
    """Where in the user's model an exception was raised.

    Returns:
        Path of the innermost module on the stack (None when there is none), that module, and
        ``file:line`` of the innermost frame of the model that is outside torch.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    path, owner, line = None, None, ""
    for frame, number in _frames(error):
        holder = frame.f_locals.get("self")
        if isinstance(holder, nn.Module):
            module = _base(holder)
            found = paths.get(id(module))
            if found is not None:
                path, owner = found, module
        name = frame.f_code.co_filename
        if calls_model(name, frame.f_code.co_name):
            line = ""
        elif is_user_file(name):
            line = f"{short_path(name)}:{number}"
    return path, owner, line


def explain(error: Exception, model: nn.Module) -> Exception:
    """The error to raise for `error`, which came out of tracing `model`.

    An error that the model would also raise when run plainly is returned as it is.
    """
    path, owner, line = locate(error, model)
    where = describe_place(path, line)
    if isinstance(error, AutoparError):
        if error.where is None and where:
            return type(error)(error.what, expected=error.expected, fix=error.fix, where=where)
        return error
    text = f"{type(error).__name__}: {error}"
    cause = _known_cause(error, owner, text)
    if cause is None:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        cause = (
            f"the model cannot be traced: {type(error).__name__}: {reason}",
            "check that the model runs with these inputs; write what torch.export cannot follow "
            "with plain tensor operators",
        )
    what, fix = cause
    return TraceError(what, where=where, fix=fix)


def _known_cause(error: Exception, owner: nn.Module | None, text: str) -> tuple[str, str] | None:
    """What and fix for the failures people meet."""
    if any("flex_attention" in frame.f_code.co_filename for frame, _ in _frames(error)):
        return (
            "flex_attention cannot be traced into one graph",
            "use scaled_dot_product_attention with a mask instead of flex_attention",
        )
    batch_norm = isinstance(owner, nn.modules.batchnorm._NormBase)
    if batch_norm and owner.momentum is None:  # type: ignore[union-attr]
        return (
            f"{type(owner).__name__} with momentum=None reads its counter as a Python number",
            "give the layer a momentum, e.g. momentum=0.1",
        )
    marks = ("data-dependent", "DataDependent", "Unbacked", "unbacked", "Could not guard",
             "Could not extract specialized integer")  # fmt: skip
    if any(mark in text for mark in marks):
        return (
            "forward decides on the values of a tensor (an if, a loop count, .item(), nonzero), "
            "so there is no one graph",
            "keep it a tensor: torch.where or torch.cond instead of if, a fixed loop count; for "
            "experts a dense, batched or grouped form instead of a loop over the experts hit",
        )
    return None
