"""Repeated layers traced once.

While the model is exported, the first two members and the last of each group of alike modules
run as usual between two markers; every other call becomes one opaque operator with results like
those recorded. Afterwards `expand` compares the bodies between markers and replaces each opaque
call by a copy of the body with that member's parameters. Whatever casts doubt on the likeness
raises `Regroup`, and the model is traced again without that group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from autopar.graph.ir import Graph, Node, Ref, Value, map_refs
from autopar.graph.mutations import HIDDEN_WRITES, is_inplace
from autopar.graph.views import ALIASES
from autopar.trace.compat import patched, patched_item
from autopar.trace.grouping import Group
from autopar.trace.guards import PLAIN


class Regroup(Exception):
    """Groups whose members cannot be taken for one another.

    Args:
        group: Name of the group, or names.
        reason: Why, for people.
    """

    def __init__(self, group: str | frozenset[str], reason: str) -> None:
        super().__init__(f"{group}: {reason}")
        self.groups = frozenset((group,)) if isinstance(group, str) else group


class Inexact(Exception):
    """Rewritten bodies cannot be copied as they are; the raw ones perhaps can."""


@dataclass(slots=True, kw_only=True)
class _Record:
    """Calls of one group with one kind of input."""

    group: Group
    number: int
    inline: int = 0
    leaves: list[Any] = field(default_factory=list)
    metas: list[tuple[Any, ...]] = field(default_factory=list)
    spec: Any = None


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


class Unhide(Exception):
    """Someone looked inside a member whose parameters are hidden."""


class _Hidden(dict):  # type: ignore[type-arg]
    """Stands for ``_parameters``, ``_buffers`` or ``_modules`` of a member that will not run.

    It looks empty to torch.export, so that the cost of exporting does not grow with the number
    of members, and raises `Unhide` when the model's own code looks into it.
    """

    def __init__(self, names: Iterable[str], watch: Callable[[], bool]) -> None:
        super().__init__()
        self.names, self.watch = frozenset(names), watch

    def _look(self) -> None:
        if self.watch() and self.names:
            raise Unhide

    def __contains__(self, name: object) -> bool:
        if name in self.names:
            self._look()
        return False

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return iter(())

    def __len__(self) -> int:
        self._look()
        return 0

    def items(self) -> Any:
        self._look()
        return ()

    keys = values = items

    def get(self, name: str, default: Any = None) -> Any:
        return default if name not in self else None


class Repeater:
    """Patches the members of groups for the time of one export.

    Args:
        groups: Modules to take for one another.
        hide: Whether members that will not run hide their parameters from torch.export.
    """

    def __init__(self, groups: list[Group], hide: bool = True) -> None:
        self.groups, self.hide = groups, hide
        self.running = False
        self.records: dict[Any, _Record] = {}
        self.numbered: list[_Record] = []

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Calls of members go through the repeater."""
        with contextlib.ExitStack() as stack:
            for group in self.groups:
                for index, module in enumerate(group.modules):
                    forward = self._forward(group, index, module.forward)
                    stack.enter_context(patched(module, "forward", forward))
                    if self.hide and not group.inner and 1 < index < len(group.modules) - 1:
                        self._hide(module, stack)
            yield

    def _hide(self, module: nn.Module, stack: contextlib.ExitStack) -> None:
        for name in ("_parameters", "_buffers", "_modules"):
            hidden = _Hidden(vars(module)[name], lambda: self.running)
            stack.enter_context(patched_item(module, name, hidden))

    def _forward(
        self, group: Group, index: int, original: Callable[..., Any]
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(group, index, original, args, kwargs)

        return forward

    def _call(
        self, group: Group, index: int, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not tensors or not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
            if isinstance(vars(group.modules[index])["_modules"], _Hidden):
                raise Unhide
            return original(*args, **kwargs)
        first: dict[int, int] = {}
        signature = (
            group.name,
            repr(spec),
            tuple(
                (first.setdefault(id(leaf), place), _meta(leaf))
                if isinstance(leaf, torch.Tensor)
                else (type(leaf), leaf)
                for place, leaf in enumerate(leaves)
            ),
            torch.is_grad_enabled(),
            tuple(_autocast(device) for device in ("cpu", "cuda")),
        )
        record = self.records.get(signature)
        if record is None:
            record = self.records[signature] = _Record(group=group, number=len(self.numbered))
            self.numbered.append(record)
        key = f"{record.number}:{index}"
        if record.inline < 2 or index == len(group.modules) - 1:
            if isinstance(vars(group.modules[index])["_modules"], _Hidden):
                raise Unhide
            return self._inline(record, index, key, tensors, lambda: original(*args, **kwargs))
        if len(record.metas) == 1:
            made = iter((torch.ops.autopar.repeat.one(tensors, key),))
        else:
            made = iter(torch.ops.autopar.repeat(tensors, key))
        filled = [next(made) if isinstance(x, torch.Tensor) else x for x in record.leaves]
        return pytree.tree_unflatten(filled, record.spec)

    def _inline(
        self,
        record: _Record,
        index: int,
        key: str,
        tensors: list[torch.Tensor],
        run: Callable[[], Any],
    ) -> Any:
        group = record.group
        module = group.modules[index]
        before = _state(module)
        torch.ops.autopar.enter(tensors, key)
        with _watched(group, module):
            result = run()
        leaves, spec = pytree.tree_flatten(result)
        if not all(isinstance(leaf, (torch.Tensor, *PLAIN)) for leaf in leaves):
            raise Regroup(group.name, "returns an object that is no tree of tensors")
        results = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        torch.ops.autopar.leave(results, key)
        if _state(module) != before:
            raise Regroup(group.name, "forward changes Python attributes")
        metas = [_meta(leaf) for leaf in results]
        values = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        if record.inline:
            same = metas == record.metas and spec == record.spec
            known = [None if isinstance(x, torch.Tensor) else x for x in record.leaves]
            if not same or values != known:
                raise Regroup(group.name, "members return different results")
        record.inline += 1
        record.leaves, record.metas, record.spec = leaves, metas, spec
        return result

    def fake(self, key: str) -> list[torch.Tensor]:
        """Results of the opaque call `key`."""
        record = self.numbered[int(key.split(":")[0])]
        return [
            torch.empty_strided(shape, stride, dtype=dtype, device=device)
            for shape, stride, dtype, device in record.metas
        ]


def _autocast(device: str) -> Any:
    if not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def _state(module: nn.Module) -> list[Any]:
    """Plain attributes of a module and its children, to see whether a call changes them."""
    state: list[Any] = []
    for child in module.modules():
        for name, value in child.__dict__.items():
            if name.startswith("_") and name.endswith(("hooks", "_modules", "_parameters")):
                continue
            if isinstance(value, PLAIN):
                state.append((name, value))
            elif isinstance(value, list | dict | set):
                state.append((name, id(value), len(value)))
            else:
                state.append((name, id(value)))
    return state


@contextlib.contextmanager
def _watched(group: Group, module: nn.Module) -> Iterator[None]:
    """Reading an index attribute of `module` or its children raises `Regroup`."""
    by_path: dict[str, list[str]] = {}
    for path, name in group.indexed:
        by_path.setdefault(path, []).append(name)
    changed = []
    try:
        children = dict(module.named_modules()) if by_path else {}
        for path, names in by_path.items():
            child = children[path]
            kind = type(child)
            space: dict[str, Any] = {n: _watch(group, n) for n in names}
            space |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            child.__class__ = type(kind.__name__, (kind,), space)
            changed.append((child, kind))
        yield
    finally:
        for child, kind in changed:
            child.__class__ = kind


def _watch(group: Group, name: str) -> property:
    def read(_: Any) -> Any:
        raise Regroup(group.name, f"forward reads {name}, which differs between members")

    def write(_: Any, value: Any) -> None:
        raise Regroup(group.name, f"forward writes {name}, which differs between members")

    return property(read, write)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The nodes between two markers."""

    path: str
    index: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]


class _Expander:
    def __init__(
        self, graph: Graph, copies: set[str], repeater: Repeater, state: Any, exact: bool
    ) -> None:
        self.graph, self.copies, self.repeater = graph, copies, repeater
        self.state = state
        self.nodes: list[Node] = []
        self.rename: dict[str, str] = {}
        self.internal: dict[str, str] = {}
        self.leaking: set[str] = set()
        self.bodies: dict[int, _Body] = {}
        self.exact = exact
        self.grads: dict[str, bool] = {}
        self.counter = 0

    def run(self) -> Graph:
        open_bodies: list[tuple[int, tuple[str, ...]]] = []
        for node in self.graph.nodes:
            if self.rename:
                node = _renamed(node, self.rename)
            if node.op == "autopar.enter.default":
                self._check(node.operands)
                open_bodies.append((len(self.nodes), node.operands))
            elif node.op == "autopar.leave.default":
                start, inputs = open_bodies.pop()
                self._close(node, start, inputs)
            elif node.op.startswith("autopar.repeat."):
                self._check(node.operands)
                self._repeat(node)
            else:
                self._check(node.operands)
                self.nodes.append(node)
        outputs = []
        for item in self.graph.outputs:
            if item.value is not None:
                name = self.rename.get(item.value, item.value)
                self._check((name,))
                item = replace(item, value=name)
            outputs.append(item)
        if self.leaking:
            raise Regroup(frozenset(self.leaking), "values made inside are used outside")
        return Graph(inputs=self.graph.inputs, nodes=tuple(self.nodes), outputs=tuple(outputs))

    def _check(self, names: tuple[str, ...]) -> None:
        """No value made inside a closed body is used outside, other than its results."""
        internal = self.internal
        self.leaking.update(internal[name] for name in names if name in internal)

    def _record(self, node: Node) -> tuple[_Record, int]:
        number, index = map(int, str(node.args[1]).split(":"))
        return self.repeater.numbered[number], index

    def _close(self, node: Node, start: int, inputs: tuple[str, ...]) -> None:
        record, index = self._record(node)
        group = record.group
        body = _Body(
            path=group.paths[index],
            index=index,
            inputs=inputs,
            outputs=node.operands,
            nodes=tuple(self.nodes[start:]),
        )
        self._seal(body, group)
        known = self.bodies.get(record.number)
        if known is None:
            self.bodies[record.number] = body
        else:
            self._compare(known, body, group)
            if body.index == known.index + 1 or known.index == 0:
                self.bodies[record.number] = body

    def _seal(self, body: _Body, group: Group) -> None:
        """Note which values must not be used outside the body.

        A result that *is* an operand from outside (of an in-place call, of a cast that casts
        nothing) goes by that operand's name outside: torch.export continues with the result.
        """
        made = {value.name for item in body.nodes for value in item.outputs}
        results = set(body.outputs)
        for item in body.nodes:
            same = is_inplace(item.op) or self._is_operand(item)
            target = item.operands[0] if same else None
            for value in item.outputs:
                if target is not None:
                    target = self.rename.get(target, target)
                    if target not in made:
                        self.rename[value.name] = target
                        continue
                if value.name not in results:
                    self.internal[value.name] = group.name

    def _is_operand(self, node: Node) -> bool:
        """Whether the result of a call is its operand."""
        return node.op in ALIASES and "detach" not in node.op and node.name not in self.copies

    def _parameters(self, group: Group, source: int, target: int) -> dict[str, str]:
        """Value names of the parameters of one member to those of another."""
        mapping: dict[str, str] = {}
        first, second = self.state(group.modules[source]), self.state(group.modules[target])
        for suffix, name in first.items():
            other = second.get(suffix)
            if other is None or mapping.setdefault(name, other) != other:
                raise Regroup(group.name, "members share parameters in different ways")
        return mapping

    def _compare(self, first: _Body, second: _Body, group: Group) -> None:
        """Refuse bodies that differ in more than names."""
        mapping = self._parameters(group, first.index, second.index)
        mapping.update(zip(first.inputs, second.inputs, strict=True))
        if len(first.nodes) != len(second.nodes):
            raise self._doubt(group, "members run different operators")
        for a, b in zip(first.nodes, second.nodes, strict=True):
            mapped = _renamed(a, mapping)
            alike = (
                a.op == b.op
                and _key(mapped.args) == _key(b.args)
                and _key(mapped.kwargs) == _key(b.kwargs)
                and a.context == b.context
                and _relative(a.module, first.path) == _relative(b.module, second.path)
                and [(v.spec.shape, v.spec.dtype) for v in a.outputs]
                == [(v.spec.shape, v.spec.dtype) for v in b.outputs]
                and (a.name in self.copies) == (b.name in self.copies)
            )
            if not alike:
                raise self._doubt(group, f"members differ at {a.op} ({b.source})")
            mapping.update(
                (x.name, y.name) for x, y in zip(a.outputs, b.outputs, strict=True)
            )
        if tuple(mapping.get(name, name) for name in first.outputs) != second.outputs:
            raise self._doubt(group, "members return different values")

    def _doubt(self, group: Group, reason: str) -> Exception:
        return Inexact(reason) if self.exact else Regroup(group.name, reason)

    def _check_grads(
        self, body: _Body, node: Node, mapping: dict[str, str], group: Group
    ) -> None:
        """The body's requires_grad flags hold for the call too."""
        pairs = [*zip(body.inputs, node.operands, strict=True), *mapping.items()]
        pairs += zip(body.outputs, (value.name for value in node.outputs), strict=True)
        for name, other in pairs:
            if self._grad(name) != self._grad(other):
                raise Inexact("gradients flow differently")

    def _grad(self, name: str) -> bool:
        flag = self.grads.get(name)
        return self.graph.spec(name).requires_grad if flag is None else flag

    def _repeat(self, node: Node) -> None:
        record, index = self._record(node)
        body = self.bodies.get(record.number)
        if body is None:
            raise Regroup(record.group.name, "was not traced")
        mapping = self._parameters(record.group, body.index, index)
        if self.exact:
            self._check_grads(body, node, mapping, record.group)
        mapping.update(zip(body.inputs, node.operands, strict=True))
        path = record.group.paths[index]
        modules: dict[str, str] = {}
        for item in body.nodes:
            module = modules.get(item.module)
            if module is None:
                tail = _relative(item.module, body.path)
                module = item.module if tail.startswith("!") else path + tail
                modules[item.module] = module
            outputs = []
            fresh = _renamed(item, mapping)
            for value in item.outputs:
                self.counter += 1
                name = mapping[value.name] = f"r{self.counter}"
                self.grads[name] = value.spec.requires_grad
                outputs.append(Value(name, value.spec))
            if item.name in self.copies:
                self.copies.add(mapping[item.name])
            self.nodes.append(
                Node(
                    name=outputs[0].name if outputs else f"r{item.name}",
                    op=item.op,
                    args=fresh.args,
                    kwargs=fresh.kwargs,
                    outputs=tuple(outputs),
                    module=module,
                    source=item.source,
                    context=item.context,
                )
            )
        for value, name in zip(node.outputs, body.outputs, strict=True):
            self.rename[value.name] = mapping.get(name, name)


def _key(arg: Any) -> Any:
    """Arguments in a form whose equality tells 1 from True and 1.0."""
    if isinstance(arg, tuple):
        return tuple(_key(item) for item in arg)
    return arg if isinstance(arg, Ref) else (type(arg), repr(arg))


def _relative(module: str, path: str) -> str:
    if module == path or module.startswith(path + "."):
        return module[len(path) :]
    return "!" + module


def _renamed(node: Node, names: dict[str, str]) -> Node:
    if not any(name in names for name in node.operands):
        return node

    def now(ref: Ref) -> Ref:
        name = names.get(ref.name)
        return ref if name is None else Ref(name)

    return replace(
        node,
        args=tuple(map_refs(arg, now) for arg in node.args),
        kwargs=tuple((key, map_refs(arg, now)) for key, arg in node.kwargs),
    )


def expand(
    graph: Graph,
    copies: set[str],
    repeater: Repeater,
    state: Callable[[nn.Module], dict[str, str]],
    *,
    exact: bool,
) -> Graph:
    """`graph` with markers gone and opaque calls replaced by the bodies they stand for.

    Args:
        graph: Graph with markers and opaque calls.
        copies: Results that do not alias; names of copied nodes are added.
        repeater: What was recorded while tracing.
        state: Value name of each parameter and buffer of a module, by path inside it.
        exact: Copied bodies must be right as they are, with their requires_grad flags.

    Raises:
        Regroup: Members of a group turn out to differ.
        Inexact: With `exact`, copies of the bodies would not be right as they are.
    """
    return _Expander(graph, copies, repeater, state, exact).run()


class GradientFlags:
    """Tells which results of an opaque call carry a gradient: those of the body it stands for."""

    def __init__(self) -> None:
        self.known: dict[str, tuple[bool, ...]] = {}

    def __call__(self, node: Node, operands: tuple[bool, ...]) -> tuple[bool, ...] | None:
        """Flags of the results of `node`, or None when it is no opaque call.

        Args:
            node: Any call, in execution order.
            operands: Whether each operand carries a gradient.
        """
        if not node.op.startswith(("autopar.leave.", "autopar.repeat.")):
            return None
        number = str(node.args[1]).split(":")[0]
        if node.op.startswith("autopar.leave."):
            self.known[number] = operands
            return ()
        return self.known[number]


def bodies_are_pure(graph: Graph, roots: dict[str, str], written: set[str]) -> bool:
    """Whether no write crosses the border of a body.

    Args:
        graph: Raw graph with markers.
        roots: Root of every value that shares memory with another.
        written: Roots that are written.

    Returns:
        True when bodies may be rewritten to plain values before they are copied: everything
        written inside a body is made and stays inside it, and nothing else that is written
        enters or leaves one.
    """
    made_in: dict[str, int] = {}
    depth = 0
    for node in graph.nodes:
        if node.op == "autopar.enter.default":
            depth += 1
        if node.op.startswith("autopar.") and not node.op.startswith("autopar.custom"):
            crossing = (*node.operands, *(value.name for value in node.outputs))
            if any(roots.get(name, name) in written for name in crossing):
                return False
        if node.op == "autopar.leave.default":
            depth -= 1
        for value in node.outputs:
            made_in[value.name] = depth
        if depth and (is_inplace(node.op) or node.op in HIDDEN_WRITES):
            targets = node.operands[:1]
            if node.op in HIDDEN_WRITES:
                targets = HIDDEN_WRITES[node.op](node)
            if any(made_in.get(roots.get(name, name), 0) != depth for name in targets):
                return False
    return True
