"""`trace`: a module and example inputs to a canonical graph."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.canonical import canonicalise
from autopar.graph.dce import number, remove_dead
from autopar.graph.functional import functionalise, memory
from autopar.graph.ir import Graph, Output
from autopar.graph.routing import route
from autopar.graph.verify import verify
from autopar.trace import compat
from autopar.trace.capture import Capture, capture, convert
from autopar.trace.custom import CustomFunction, CustomFunctions
from autopar.trace.diagnose import explain
from autopar.trace.expand import GradientFlags, bodies_are_pure, expand
from autopar.trace.grouping import find_groups
from autopar.trace.guards import (
    InputGuard,
    check_leaves,
    check_loss_function,
    describe,
    leaf_paths,
)
from autopar.trace.hidden import (
    Change,
    python_state_watched,
    refuse_dependence,
    refuse_hooks,
    refuse_shared_memory,
    refuse_tensor_hook,
)
from autopar.trace.repeat import InexactError, RegroupError, Repeater, UnhideError
from autopar.trace.state import ModelState, named_modules, untouched

LossFunction = Callable[..., torch.Tensor]
Table = tuple[str, dict[str, Any], dict[str, Any], str]
LOSS_PATH = "loss_fn(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A model as a graph, with everything that ties it to the user's objects.

    Attributes:
        graph: Canonical, functional, without dead code.
        parameters: FQN to the user's parameter, each once.
        buffers: FQN to the user's buffer, each once.
        aliases: Other FQNs of tied parameters and buffers to the FQN in the tables above.
        constants: Key to tensor for the graph's constant inputs.
        custom: Key to custom autograd function, for ``autopar.custom_function.<key>`` calls.
        in_spec: Tree of ``(args, kwargs)``.
        out_spec: Tree of the model's result; its leaves are the graph's user outputs in order.
        loss: Name of the value that is the scalar loss, or None.
        frozen: FQNs of the parameters that do not require a gradient.
        guard: What the inputs were.
        notes: What tracing changed or left out, one sentence each.
    """

    graph: Graph
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    custom: Mapping[str, CustomFunction]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    loss: str | None
    frozen: tuple[str, ...]
    guard: InputGuard
    notes: tuple[str, ...] = ()

    def flatten_inputs(
        self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[torch.Tensor]:
        """The tensors of a call in the order of the graph's user inputs.

        Raises:
            InputError: An input differs from what the model was traced with.
        """
        return self.guard.flatten(args, kwargs or {})

    def unflatten_outputs(self, values: list[Any]) -> Any:
        """The model's result from its leaves (user outputs of the graph, in order)."""
        return pytree.tree_unflatten(values[: self.out_spec.num_leaves], self.out_spec)


@dataclass(slots=True)
class _Session:
    """State of one export; torch operators find it through `_SESSION`."""

    repeater: Repeater
    custom: CustomFunctions = field(default_factory=CustomFunctions)
    outputs: list[Output] = field(default_factory=list)
    out_spec: Any = None
    loss: str | None = None
    checkpoints: int = 0
    error: Exception | None = None
    changes: list[Change] = field(default_factory=list)


_SESSION: contextvars.ContextVar[_Session] = contextvars.ContextVar("autopar_trace")


def _marker(tensors: list[torch.Tensor], key: str) -> None:
    return None


def _repeat(tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return _SESSION.get().repeater.fake(key)


def _repeat_one(tensors: list[torch.Tensor], key: str) -> torch.Tensor:
    return _SESSION.get().repeater.fake(key)[0]


def _custom_function(tensors: list[torch.Tensor], key: str) -> list[torch.Tensor]:
    return _SESSION.get().custom.fake(tensors, key)


for _name, _fake in (
    ("enter", _marker),
    ("leave", _marker),
    ("repeat", _repeat),
    ("repeat.one", _repeat_one),
    ("custom_function", _custom_function),
):
    torch.library.register_fake(f"autopar::{_name}", _fake)


class _Wrapper(nn.Module):
    """The user's model and loss on a flat list of tensors."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction | None, leaves: list[Any], spec: Any
    ) -> None:
        super().__init__()
        self.model = model
        self.training = model.training
        self.loss_fn, self.leaves, self.spec = loss_fn, leaves, spec
        self.listed = named_modules(model)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run model and loss; returns the tensors of the result, then the loss."""
        repeater = _SESSION.get().repeater
        tables = _tables(self.model)
        repeater.running = True
        try:
            return self._run(tensors, tables)
        except Exception as error:
            _SESSION.get().error = error
            raise compat.AbortError from error
        finally:
            repeater.running = False

    def _run(
        self, tensors: tuple[torch.Tensor, ...], tables: list[Table]
    ) -> tuple[torch.Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        with (
            python_state_watched(self.listed, _SESSION.get().changes),
            compat.patched(torch.Tensor, "register_hook", refuse_tensor_hook),
        ):
            result = self.model(*args, **kwargs)
        session = _SESSION.get()
        found = leaf_paths(result)
        check_leaves(found, "the model's result")
        _, session.out_spec = pytree.tree_flatten(result)
        returned: list[torch.Tensor] = []
        session.outputs = [_output(path, leaf, returned) for path, leaf in found.items()]
        if self.loss_fn is None:
            session.loss = _own_loss(found, session.outputs)
        else:
            loss = self.loss_fn(result, *args, *kwargs.values())
            _check_loss(loss)
            session.outputs.append(_output(LOSS_PATH, loss, returned))
            session.loss = session.outputs[-1].value
        session.outputs += _assigned_buffers(tables, returned)
        return tuple(returned)


def _tables(model: nn.Module) -> list[Table]:
    """The tables of parameters and buffers of every module, and what is in them now."""
    return [
        (path, vars(child)[kind], dict(vars(child)[kind]), kind)
        for path, child in named_modules(model)
        for kind in ("_buffers", "_parameters")
        if vars(child)[kind]
    ]


def _assigned_buffers(tables: list[Table], returned: list[torch.Tensor]) -> list[Output]:
    """Outputs for the buffers that forward replaced by new tensors (``self.b = ...``)."""
    outputs = []
    for path, table, old, kind in tables:
        for name, tensor in table.items():
            if tensor is old.get(name):
                continue
            target = f"{path}.{name}" if path else name
            was = old.get(name)
            alike = isinstance(tensor, torch.Tensor) and was is not None
            if kind != "_buffers" or not alike or _kind(tensor) != _kind(was):  # type: ignore[arg-type]
                raise TraceError(
                    f"forward replaces {target!r} by {describe(tensor)}",
                    where=f"module '{path}'",
                    expected="parameters that stay, and buffers that keep shape and dtype",
                    fix="update a buffer of the same shape and dtype",
                )
            returned.append(tensor)
            value = f"#{len(returned) - 1}"
            outputs.append(Output(kind="buffer", value=value, target=target))
        table.clear()
        table.update(old)
    return outputs


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype


def _output(path: str, leaf: Any, returned: list[torch.Tensor]) -> Output:
    if not isinstance(leaf, torch.Tensor):
        literal = str(leaf) if isinstance(leaf, complex) else convert(leaf, {})
        return Output(kind="user", value=None, target=path, literal=literal)
    returned.append(leaf)
    return Output(kind="user", value=f"#{len(returned) - 1}", target=path)


def _check_loss(loss: Any) -> None:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return
    raise TraceError(
        f"loss_fn returned {describe(loss)}",
        where="loss_fn",
        expected="a floating tensor with one element",
        fix="reduce the loss to a scalar, e.g. with .mean()",
    )


def _own_loss(found: dict[str, Any], outputs: list[Output]) -> str | None:
    """The leaf that is the loss when the model returns it: ``loss``, else the first scalar."""
    scalars = [
        (path, item.value)
        for (path, leaf), item in zip(found.items(), outputs, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 0 and leaf.is_floating_point()
    ]
    for path, value in scalars:
        if path in ("['loss']", ".loss"):
            return value
    return scalars[0][1] if scalars else None


def trace(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: LossFunction | None = None,
    *,
    share_layers: bool = True,
) -> Traced:
    """Trace `module` on example inputs, with its loss.

    Args:
        module: The user's model, on any device, meta included. It is left as it was.
        args: Positional example inputs; trees of tensors and Python values.
        kwargs: Keyword example inputs.
        loss_fn: ``loss_fn(outputs, *args, *kwargs.values())`` to a scalar; None when the model
            returns its loss.
        share_layers: Trace alike layers once. The result is the same either way.

    Returns:
        The graph and what ties it to `module`.

    Raises:
        TraceError: The model cannot be one graph; says what, where and the way out.
        InputError: `loss_fn` cannot be called as described.
    """
    kwargs = dict(kwargs or {})
    check_leaves(leaf_paths((tuple(args), kwargs), ("args", "kwargs")), "input")
    if loss_fn is not None:
        check_loss_function(loss_fn, tuple(args), kwargs)
    refuse_hooks(module)
    changes: list[Change] = []
    traced = _traced(module, tuple(args), kwargs, loss_fn, share_layers, changes)
    if changes:
        refuse_dependence(
            traced.graph,
            lambda: _traced(module, tuple(args), kwargs, loss_fn, share_layers, []).graph,
            changes,
        )
    return traced


def _traced(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    share_layers: bool,
    changes: list[Change],
) -> Traced:
    """`trace` without checks; `changes` takes the Python attributes that forward changed."""
    notes: list[str] = []
    excluded: set[str] = set()
    hide = True
    with contextlib.ExitStack() as stack:
        stack.enter_context(compat.no_collection())
        _quieten(module, stack, notes)
        while True:
            groups = find_groups(module, excluded) if share_layers else []
            repeater = Repeater(groups, hide)
            try:
                changes.clear()
                session = _Session(repeater, changes=changes)
                return _trace_once(module, args, kwargs, loss_fn, session, notes)
            except RegroupError as doubt:
                excluded |= doubt.groups
                share_layers = share_layers and len(excluded) < 12
            except UnhideError:
                hide = False


def _quieten(module: nn.Module, stack: contextlib.ExitStack, notes: list[str]) -> None:
    """Switch caches off for the time of tracing, and note what else is left out."""
    seen: set[int] = set()
    modules = named_modules(module)
    for _, child in modules:
        config = _attribute(child, "config")
        for part in (config, *(vars(config).values() if hasattr(config, "__dict__") else ())):
            if id(part) not in seen and getattr(part, "use_cache", None) is True:
                seen.add(id(part))
                stack.enter_context(compat.patched(part, "use_cache", False))
    if seen:
        notes.append("config.use_cache was taken as False while tracing")
    sparse = [path for path, child in modules if _attribute(child, "sparse") is True]
    if sparse:
        notes.append(f"sparse gradients of {', '.join(sparse)} are made dense")


def _attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module, None if absent, which the module itself is slow to find out."""
    if name in vars(module) or hasattr(type(module), name):
        return getattr(module, name, None)
    return None


def _trace_once(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_fn: LossFunction | None,
    session: _Session,
    notes: list[str],
) -> Traced:
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    by_path = leaf_paths((args, kwargs), ("args", "kwargs"))
    tensors = _distinct([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], module)
    wrapper = _Wrapper(module, loss_fn, leaves, in_spec)
    program = _export(wrapper, module, tuple(tensors), session)
    state = ModelState(module)
    refuse_shared_memory(state)
    raw = capture(
        program,
        prefix="model",
        input_paths=[path for path, leaf in by_path.items() if isinstance(leaf, torch.Tensor)],
        canonical=state.canonical,
        state=state.table,
        outputs=session.outputs,
    )
    graph, loss = _finish(raw, session, state)
    checkpoints = session.checkpoints + session.custom.checkpoints
    if checkpoints:
        notes = [*notes, "activation checkpointing in the model is ignored: the plan decides "
                 f"what is recomputed ({checkpoints} regions)"]  # fmt: skip
    return Traced(
        graph=graph,
        parameters=MappingProxyType(state.parameters),
        buffers=MappingProxyType(state.buffers),
        aliases=MappingProxyType(state.aliases),
        constants=MappingProxyType(
            {i.target: raw.constants[i.target] for i in graph.inputs if i.kind == "constant"}
        ),
        custom=MappingProxyType(session.custom.calls),
        in_spec=in_spec,
        out_spec=session.out_spec,
        loss=loss,
        frozen=tuple(n for n, p in state.parameters.items() if not p.requires_grad),
        guard=InputGuard.of(by_path),
        notes=tuple(notes),
    )


def _distinct(tensors: list[torch.Tensor], module: nn.Module) -> list[torch.Tensor]:
    """Inputs as distinct tensors, on meta when the model is."""
    meta = any(parameter.is_meta for parameter in module.parameters())
    seen: set[int] = set()
    result = []
    for tensor in tensors:
        if meta and not tensor.is_meta:
            tensor = tensor.to("meta")
        elif id(tensor) in seen or isinstance(tensor, nn.Parameter):
            tensor = tensor.detach().requires_grad_(tensor.requires_grad)
        seen.add(id(tensor))
        result.append(tensor)
    return result


def _export(
    wrapper: nn.Module, module: nn.Module, tensors: tuple[torch.Tensor, ...], session: _Session
) -> torch.export.ExportedProgram:
    def count() -> None:
        session.checkpoints += 1

    with untouched(module), contextlib.ExitStack() as stack:
        stack.callback(_SESSION.reset, _SESSION.set(session))
        stack.enter_context(session.repeater.active())
        stack.enter_context(compat.plain_checkpoints(count))
        stack.enter_context(compat.masks_unread())
        stack.enter_context(compat.intercepted_functions(session.custom.intercept))
        try:
            return compat.export(wrapper, tensors)
        except Exception as raised:
            error = session.error or raised
            placed = isinstance(error, TraceError) and error.where
            if placed or isinstance(error, RegroupError | UnhideError):
                raise error from None
            hidden = session.repeater.groups and session.repeater.hide
            if hidden and isinstance(error, AttributeError | KeyError | IndexError):
                raise UnhideError from error  # perhaps the fault of hiding: try without
            raise explain(error, module) from error


def _finish(raw: Capture, session: _Session, state: ModelState) -> tuple[Graph, str | None]:
    """The passes from raw to canonical, and the name of the loss."""
    graph = _canonical(raw, session, state)
    verify(graph)
    loss = None
    if session.loss is not None:
        place = next(i for i, item in enumerate(session.outputs) if item.value == session.loss)
        loss = graph.outputs[place].value
    return graph, loss


def _canonical(raw: Capture, session: _Session, state: ModelState) -> Graph:
    """The canonical graph, with repeated layers expanded and without dead code.

    Bodies are rewritten before they are copied, which is quick, unless writes in place cross
    their border or gradients flow differently through the copies.
    """
    repeater = session.repeater
    if not repeater.groups:
        return _cleaned(raw.graph, raw.copies)
    values = {
        item.target: item.value.name
        for item in raw.graph.inputs
        if item.kind in ("parameter", "buffer")
    }
    names = functools.partial(state.names, values)
    roots, written = memory(raw.graph, raw.copies)
    if bodies_are_pure(raw.graph, roots, written):
        graph = functionalise(raw.graph, frozenset(raw.copies))
        graph = route(canonicalise(graph, GradientFlags()))
        with contextlib.suppress(InexactError):
            return expand(graph, set(), repeater, names, exact=True)
    graph = expand(raw.graph, raw.copies, repeater, names, exact=False)
    return _cleaned(graph, raw.copies)


def _cleaned(graph: Graph, copies: set[str]) -> Graph:
    return number(remove_dead(route(canonicalise(functionalise(graph, frozenset(copies))))))
