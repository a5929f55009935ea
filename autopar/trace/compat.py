"""The private corners of torch that tracing needs, in one place.

Each has a public or slower way around, taken when a torch release lacks the private name.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import operator
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch._decomp.decompositions
import torch.fx
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor

from autopar.trace.places import calls_model, is_user_file

# The class between torch.autograd.Function and its base in C++, None in releases without it.
_FUNCTION: Any = next(
    (
        kind
        for kind in torch.autograd.Function.__mro__[1:]
        if kind.__module__ == "torch.autograd.function"
    ),
    None,
)
_PRE_DISPATCH = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
LIBRARY = torch.library.Library("autopar", "DEF")
for _schema in (
    "enter(Tensor[] inputs, str key) -> ()",
    "leave(Tensor[] outputs, str key) -> ()",
    "repeat(Tensor[] inputs, str key) -> Tensor[]",
    "repeat.one(Tensor[] inputs, str key) -> Tensor",
    "custom_function(Tensor[] inputs, str key) -> Tensor[]",
):  # a flexible layout keeps torch from storing the strides of every input with the call
    LIBRARY.define(_schema, tags=(torch.Tag.flexible_layout,))
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

    A trace or a program is tens of thousands of small long-lived objects, each batch of which
    would have the collector walk everything that torch has loaded: a third of the time of a deep
    model.
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
    inner = "_checkpoint_without_reentrant_generator"  # or, where that is a wrapper, what it wraps
    found = [name for name in (inner, f"{inner}_impl") if hasattr(module, name)]
    with contextlib.ExitStack() as stack:
        for name in found:
            stack.enter_context(patched(module, name, plain_generator))
        if not found:
            stack.enter_context(patched(module, "checkpoint", plain_checkpoint))
        yield


@contextlib.contextmanager
def _lstm_states() -> Iterator[None]:
    """The last states of an LSTM have the shape of its first ones.

    Shapes of an LSTM come from its decomposition, one layer of which leaves a dimension of time
    in the last states in some releases.
    """
    module, name = torch._decomp.decompositions, "one_layer_lstm"
    layer = getattr(module, name, None)

    def shaped(inp: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
        out, last = layer(inp, hidden, *args, **kwargs)  # type: ignore[misc]
        return out, tuple(
            state if state.shape == first.shape else state.reshape(first.shape)
            for state, first in zip(last, hidden, strict=True)
        )

    with patched(module, name, shaped) if layer is not None else contextlib.nullcontext():
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
    function = torch.autograd.Function
    if _FUNCTION is not None and isinstance(vars(function)["apply"], classmethod):
        # Written in Python: it ends in the `apply` of its base, wherever it was called from.
        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            run = super(_FUNCTION, cls).apply
            args, kwargs = _bound(cls, args, kwargs)
            return run(*args, **kwargs) if kwargs else handle(cls, run, *args)

        with patched(_FUNCTION, "apply", classmethod(apply)):
            yield
        return
    calls = _Calls(handle, vars(function)["apply"])
    with contextlib.ExitStack() as stack:
        for cls, name, value in calls.replacements():
            stack.enter_context(patched(cls, name, value))
        yield


class _Calls:
    """Sends calls of custom autograd functions to `handle` where `apply` is written in C.

    Replacing `apply` in `torch.autograd.Function` catches ``cls.apply(...)``, but not an `apply`
    that was taken from its class before. Such a one still looks up ``cls.forward`` whenever it
    is called, so that is replaced as well, in all classes there are.
    """

    def __init__(self, handle: Callable[..., Any], apply: Any) -> None:
        self._handle, self._apply = handle, apply
        self._plain: list[type] = []  # classes whose next forward is their own
        self._handled: type | None = None  # class whose next setup_context has nothing to set up

    def replacements(self) -> list[tuple[type, str, Any]]:
        """Class, attribute and new value; nothing is replaced yet."""
        function = torch.autograd.Function
        result: list[tuple[type, str, Any]] = [(function, "apply", classmethod(self._called))]
        pending, seen = list(function.__subclasses__()), {_Differentiable}
        while pending:
            cls: Any = pending.pop()
            if cls in seen:
                continue
            seen.add(cls)
            pending += cls.__subclasses__()
            if not cls.__module__.startswith("torch.") and cls.forward is not function.forward:
                result.append((cls, "forward", staticmethod(self._forward(cls))))
                if _sets_up(cls):
                    result.append((cls, "setup_context", staticmethod(self._setup(cls))))
        return result

    def _called(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _bound(cls, args, kwargs)
        if kwargs or torch._C._are_functorch_transforms_active():
            return self._apply.__get__(None, cls)(*args, **kwargs)
        return self._handle(cls, functools.partial(self._run, cls), *args)

    def _run(self, cls: type, *args: Any) -> Any:
        depth = len(self._plain)
        self._plain.append(cls)
        try:
            return self._apply.__get__(None, cls)(*args)
        finally:
            del self._plain[depth:]

    def _forward(self, cls: Any) -> _Stand:
        own, sets_up = cls.forward, _sets_up(cls)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._plain and self._plain[-1] is cls:
                self._plain.pop()
                return own(*args, **kwargs)
            # Others may call forward too; apply binds keywords, switches forward-mode gradients off
            # and passes a context of the very class.
            applied = bool(args) and not (kwargs or torch._C._is_fwd_grad_enabled())
            applied = applied and (sets_up or type(args[0]) is cls._backward_cls)
            if not applied or torch._C._are_functorch_transforms_active():
                return own(*args, **kwargs)
            inputs = args if sets_up else args[1:]
            result = self._handle(cls, functools.partial(self._run, cls), *inputs)
            self._handled = cls if sets_up else None
            return result

        return _Stand(own, forward)

    def _setup(self, cls: Any) -> _Stand:
        own = cls.setup_context

        def setup_context(*args: Any, **kwargs: Any) -> None:
            handled, self._handled = self._handled is cls, None
            if not handled:
                own(*args, **kwargs)

        return _Stand(own, setup_context)


class _Stand:
    """Called in place of a function, whose code and signature torch and others still find here."""

    def __init__(self, own: Any, call: Callable[..., Any]) -> None:
        code = ("__code__", "__defaults__", "__kwdefaults__")
        functools.update_wrapper(self, own, (*functools.WRAPPER_ASSIGNMENTS, *code))
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _bound(cls: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of a custom function by position, as torch passes them to its forward.

    Keywords that remain, because a position before theirs is not given, are torch's to refuse.
    """
    if not _sets_up(cls) and not kwargs:
        return args, kwargs
    context = () if _sets_up(cls) else (None,)
    bound = inspect.signature(cls.forward).bind(*context, *args, **kwargs)
    if _sets_up(cls):
        bound.apply_defaults()
    return bound.args[len(context) :], bound.kwargs


def _sets_up(cls: Any) -> bool:
    """Whether the custom function has a `setup_context`, and a forward without a context."""
    return cls.setup_context is not torch.autograd.Function.setup_context


@contextlib.contextmanager
def no_lines() -> Iterator[Any]:
    """Calls do not remember where they were made, which is a fifth of what tracing one costs.

    Yields the tracer whose calls these are.
    """
    find = getattr(proxy_tensor, "get_proxy_mode", lambda: None)
    tracer: Any = getattr(find(), "tracer", None)
    recording = getattr(tracer, "record_stack_traces", False)
    if recording:
        tracer.record_stack_traces = False
    try:
        yield tracer
    finally:
        if recording:
            tracer.record_stack_traces = True


class Meta(NamedTuple):
    """What a tensor is like without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Meta:
        """The meta of `tensor`, read past the modes that watch a traced model."""
        with torch._C.DisableTorchFunction():
            shape, stride = tuple(tensor.shape), tuple(tensor.stride())
            return cls(shape, stride, tensor.dtype, tensor.device, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        """A tensor like this one, made under the modes that are active."""
        shape, stride, dtype, device, _ = self
        return torch.empty_strided(shape, stride, dtype=dtype, device=device)


class _Differentiable(torch.autograd.Function):
    """Makes a fake tensor that requires a gradient and is no leaf, as the result of a layer is."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, mode: Any, base: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """The fake tensor of `base`; `anchor` requires a gradient."""
        return FakeTensor(mode, base, device)


# Past `intercepted_functions`, which looks for the functions of the user.
_differentiable: Any = super(_FUNCTION or torch.autograd.Function, _Differentiable).apply  # type: ignore[arg-type]
_ANCHOR = torch.empty((), requires_grad=True)


def write_call(
    target: Any, tensors: list[torch.Tensor], key: str, metas: list[Meta]
) -> list[torch.Tensor] | None:
    """Write a call of `target` into the graph that is being traced, and make its results.

    This is what torch does with a call of an operator, less its way through the dispatcher, the
    cache of fake tensors and the guesses at constants: a tenth of the time.

    Args:
        target: Operator with the schema ``(Tensor[] inputs, str key)``, of one result or a list.
        tensors: Its inputs.
        key: Its key.
        metas: What the results are like.

    Returns:
        The results, or None, with the graph as it was, when this torch traces in another way.
    """
    written: list[torch.fx.Node] = []
    try:
        with no_lines() as tracer, torch._C.DisableTorchFunction():
            slots = [tracer.tensor_tracker.get(tensor) for tensor in tensors]
            if any(type(tensor) is not FakeTensor for tensor in tensors) or None in slots:
                return None
            mode = tensors[0].fake_mode  # type: ignore[attr-defined]
            made = [_fake(mode, meta) for meta in metas]
            operands = [slot.proxy.node for slot in slots]
            node = tracer.create_node("call_function", target, (operands, key), {})
            written.append(node)
            nodes = [node]
            if str(target._schema.returns[0].type) != "Tensor":
                node.meta["val"] = [kept for _, kept in made]
                nodes = [
                    tracer.create_node("call_function", operator.getitem, (node, place), {})
                    for place in range(len(made))
                ]
                written += nodes
            for item, (given, kept) in zip(nodes, made, strict=True):
                item.meta["val"] = kept
                proxy = tracer.proxy(item)
                proxy_tensor.track_tensor(given, proxy, constant=None, tracer=tracer)
    except (AttributeError, TypeError, AssertionError):
        for node in reversed(written):
            node.graph.erase_node(node)
        return None
    return [given for given, _ in made]


def _fake(mode: Any, meta: Meta) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fake tensors on the same memory: one for the model, one for the graph to keep."""
    with torch._C._DisableTorchDispatch(), torch._C._ExcludeDispatchKeyGuard(_PRE_DISPATCH):
        base = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        kept = FakeTensor(mode, base, meta.device)
        if meta.grad:
            return _differentiable(_ANCHOR, mode, base, meta.device), kept
        return FakeTensor(mode, base, meta.device), kept


@contextlib.contextmanager
def _user_lines() -> Iterator[None]:
    """Calls remember the innermost frame outside torch, and only that one.

    torch.export keeps frames of functions called ``forward`` and no other, so a call made in a
    helper would seem to come from the line that calls the helper.
    """
    name = "_filter_traceback_frames"

    def innermost(tracer: Any, frames: traceback.StackSummary) -> traceback.StackSummary:
        calls = [i for i, frame in enumerate(frames) if calls_model(frame.filename, frame.name)]
        inside = frames[calls[-1] + 1 :] if calls else frames
        kept = [frame for frame in inside if is_user_file(frame.filename)]
        return traceback.StackSummary.from_list(kept[-1:])

    owner = torch.fx.proxy.TracerBase
    with patched(owner, name, innermost) if hasattr(owner, name) else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Graph modules get Python code when they are first called, not whenever they change.

    torch.export changes its graph in half a dozen passes and never calls it.
    """
    compile_now = torch.fx.GraphModule.recompile

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        compile_now(self)
        return self.forward(*args, **kwargs)

    def later(self: Any) -> None:
        type(self).forward = forward

    with patched(torch.fx.GraphModule, "recompile", later):
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
    with (
        torch.enable_grad(),
        _lstm_states(),
        _user_lines(),
        _quiet(),
        _uncompiled(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return torch.export.export(module, inputs, strict=False)
