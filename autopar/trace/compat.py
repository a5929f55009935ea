"""The private corners of torch that tracing needs, in one place.

Each has a public or slower way around, taken when a torch release lacks the private name.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx
import torch.utils.checkpoint
from torch.fx.experimental import proxy_tensor

from autopar.trace.places import is_user_file

LIBRARY = torch.library.Library("autopar", "DEF")
LIBRARY.define("enter(Tensor[] inputs, str key) -> ()")
LIBRARY.define("leave(Tensor[] outputs, str key) -> ()")
LIBRARY.define("repeat(Tensor[] inputs, str key) -> Tensor[]")
LIBRARY.define("repeat.one(Tensor[] inputs, str key) -> Tensor")
LIBRARY.define("custom_function(Tensor[] inputs, str key) -> Tensor[]")
# Markers have no results; without this, export's clean-up would take them for dead code.
for _name in ("enter", "leave"):
    torch.fx.node.has_side_effect(getattr(torch.ops.autopar, _name).default)


class AbortError(Exception):
    """Ends an export whose model raised.

    torch.export hangs the unfinished graph on exceptions as `partial_fx_graph` and prints it;
    this one does not take it.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


@contextlib.contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` replaced for a while; absent again afterwards if it was absent."""
    space = vars(owner)
    had, old = name in space, space.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, old)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """No cyclic garbage collection for a while.

    Tracing makes tens of thousands of small long-lived objects, each batch of which would have
    the collector walk everything that torch has loaded: a third of the time of a deep model.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def patched_item(module: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """``module.__dict__[name]`` replaced for a while, past the module's own ``__setattr__``."""
    old = module.__dict__[name]
    module.__dict__[name] = value
    try:
        yield
    finally:
        module.__dict__[name] = old


@contextlib.contextmanager
def plain_checkpoints(seen: Callable[[], None]) -> Iterator[None]:
    """Activation checkpointing runs as a plain call; `seen` is called once per region."""

    def plain_generator(*args: Any, **kwargs: Any) -> Iterator[None]:
        seen()
        yield

    def plain_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for name in ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check",
                     "debug", "early_stop"):  # fmt: skip
            kwargs.pop(name, None)
        seen()
        return function(*args, **kwargs)

    module = torch.utils.checkpoint
    inner = "_checkpoint_without_reentrant_generator"
    with contextlib.ExitStack() as stack:
        if hasattr(module, inner):
            stack.enter_context(patched(module, inner, plain_generator))
        else:
            stack.enter_context(patched(module, "checkpoint", plain_checkpoint))
        yield


@contextlib.contextmanager
def masks_unread() -> Iterator[None]:
    """`nn.TransformerEncoder` takes a mask as a mask, without reading whether it is causal."""
    module = torch.nn.modules.transformer
    name = "_detect_is_causal_mask"

    def told(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with patched(module, name, told) if hasattr(module, name) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def intercepted_functions(handle: Callable[..., Any]) -> Iterator[None]:
    """Calls of custom autograd functions go to ``handle(cls, run, *args)``.

    ``run(*args)`` is the plain ``cls.apply``.
    """
    base = next(
        (
            kind
            for kind in torch.autograd.Function.__mro__[1:]
            if kind.__module__ == "torch.autograd.function"
        ),
        None,
    )
    owner: Any = base or torch.autograd.Function
    original = owner.apply.__func__ if base is None else None

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if original is None:
            return handle(cls, super(owner, cls).apply, *args)
        return handle(cls, lambda *given: original(cls, *given, **kwargs), *args)

    with patched(owner, "apply", classmethod(apply)):
        yield


@contextlib.contextmanager
def no_lines() -> Iterator[None]:
    """Calls do not remember where they were made, which is a fifth of what tracing one costs."""
    find = getattr(proxy_tensor, "get_proxy_mode", lambda: None)
    tracer: Any = getattr(find(), "tracer", None)
    recording = getattr(tracer, "record_stack_traces", False)
    if recording:
        tracer.record_stack_traces = False
    try:
        yield
    finally:
        if recording:
            tracer.record_stack_traces = True


@contextlib.contextmanager
def _user_lines() -> Iterator[None]:
    """Calls remember the innermost frame outside torch, and only that one.

    torch.export keeps frames of functions called ``forward`` and no other, so a call made in a
    helper would seem to come from the line that calls the helper.
    """
    name = "_filter_traceback_frames"

    def innermost(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        kept = [frame for frame in frames if is_user_file(frame.filename)]
        return traceback.StackSummary.from_list(kept[-1:])

    owner = torch.fx.proxy.TracerBase
    with patched(owner, name, innermost) if hasattr(owner, name) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What torch logs about a failure is not shown: the error raised says more."""
    names = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def export(module: torch.nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """The training IR of `module` on `inputs`, with gradients enabled."""
    with torch.enable_grad(), _user_lines(), _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, inputs, strict=False)
