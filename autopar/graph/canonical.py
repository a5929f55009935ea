"""Rewriting of a traced graph to few spellings.

Later passes see ``reshape``, ``expand``, ``permute``, ``slice``, ``split_with_sizes``, ``to``
and ``full`` in place of the dozens of ATen operators that mean the same; clones, no-op casts
and assertions are gone, and `TensorSpec.requires_grad` is right everywhere. Values are named
after their operator and counted, so equal graphs print equally.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.graph.builder import GraphBuilder
from autopar.graph.ir import Arg, Graph, Node, Ref, TensorSpec, Token, map_refs
from autopar.graph.views import (
    EXPANDS,
    PERMUTES,
    RESHAPES,
    SLICES,
    SPLITS,
    VIEWS,
    apply_step,
    cast,
    split_dim,
    split_sizes,
    view_steps,
)

Names = tuple[str, ...]
_DROPPED_KWARGS = frozenset({"device", "layout", "pin_memory", "memory_format", "generator"})
_DROPPED = frozenset(
    f"aten.{name}"
    for name in (
        "_assert_tensor_metadata.default", "_assert_async.default", "_assert_async.msg",
        "_assert_scalar.default", "sym_constrain_range.default",
        "sym_constrain_range_for_size.default", "_functional_assert_async.msg",
    )
)  # fmt: skip
_COPIES = frozenset(
    f"aten.{name}"
    for name in (
        "clone.default", "lift_fresh_copy.default", "lift_fresh.default", "lift.default",
        "_to_copy.default", "to.dtype", "to.device", "to.dtype_layout", "to.other",
        "type_as.default", "contiguous.default", "alias.default", "alias_copy.default",
        "detach_copy.default", "requires_grad_.default", "resolve_conj.default",
        "resolve_neg.default", "positive.default", "float.default", "half.default",
        "double.default", "_cast_Float.default", "_cast_Half.default",
    )
)  # fmt: skip
_RENAMED = {
    "aten.__and__.Tensor": "aten.bitwise_and.Tensor",
    "aten.__or__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__xor__.Tensor": "aten.bitwise_xor.Tensor",
    "aten.__and__.Scalar": "aten.bitwise_and.Scalar",
    "aten.__or__.Scalar": "aten.bitwise_or.Scalar",
    "aten.__xor__.Scalar": "aten.bitwise_xor.Scalar",
    "aten.concat.default": "aten.cat.default",
    "aten.concatenate.default": "aten.cat.default",
    "aten.multiply.Tensor": "aten.mul.Tensor",
    "aten.divide.Tensor": "aten.div.Tensor",
    "aten.true_divide.Tensor": "aten.div.Tensor",
    "aten.subtract.Tensor": "aten.sub.Tensor",
    "aten.greater.Tensor": "aten.gt.Tensor",
    "aten.less.Tensor": "aten.lt.Tensor",
    "aten.not_equal.Tensor": "aten.ne.Tensor",
    "aten.embedding_bag.default": "aten.embedding_bag.padding_idx",
}
# Operator -> the value it fills with, or the index of the argument that holds it.
_FILLS: dict[str, int | str] = {
    "zeros.default": 0, "zeros_like.default": 0, "new_zeros.default": 0, "zero.default": 0,
    "ones.default": 1, "ones_like.default": 1, "new_ones.default": 1,
    "empty.memory_format": 0, "empty_like.default": 0, "new_empty.default": 0,
    "empty_strided.default": 0, "new_empty_strided.default": 0, "empty_permuted.default": 0,
    "full.default": "1", "full_like.default": "1", "new_full.default": "2",
    "fill.Scalar": "1", "scalar_tensor.default": "0",
}  # fmt: skip


GradientRule = Callable[[Node, tuple[bool, ...]], tuple[bool, ...] | None]


def canonicalise(graph: Graph, gradients: GradientRule | None = None) -> Graph:
    """`graph` in canonical spelling (see the module docstring).

    Args:
        graph: A functional graph.
        gradients: Given a call and whether each operand requires a gradient, whether each
            result does; None for calls that follow the usual rule (any operand does).
    """
    return _Pass(graph, gradients).run()


class _Pass:
    def __init__(self, graph: Graph, gradients: GradientRule | None) -> None:
        self.graph, self.gradients = graph, gradients
        self.builder = GraphBuilder(graph.inputs)
        self.names: dict[str, str] = {}

    def run(self) -> Graph:
        names, builder = self.names, self.builder
        for node in self.graph.nodes:
            builder.at(node)
            node = self._renamed(node)
            rewrite = _REWRITES.get(node.op)
            results = self._copy(node) if rewrite is None else rewrite(builder, node)
            for value, name in zip(node.outputs, results, strict=True):
                names[value.name] = name
        outputs = tuple(
            item if item.value is None else replace(item, value=names.get(item.value, item.value))
            for item in self.graph.outputs
        )
        return builder.graph(self.graph.inputs, outputs)

    def _renamed(self, node: Node) -> Node:
        names = self.names

        def now(ref: Ref) -> Ref:
            name = names.get(ref.name)
            return ref if name is None else Ref(name)

        args = tuple(map_refs(arg, now) for arg in node.args)
        kwargs = tuple(
            (key, map_refs(arg, now)) for key, arg in node.kwargs if key not in _DROPPED_KWARGS
        )
        return Node(
            name=node.name,
            op=_RENAMED.get(node.op, node.op),
            args=args,
            kwargs=kwargs,
            outputs=node.outputs,
            module=node.module,
            source=node.source,
            context=node.context,
        )

    def _copy(self, node: Node) -> Names:
        specs = tuple(value.spec for value in node.outputs)
        flags = None
        if self.gradients is not None:
            operands = tuple(self.builder.specs[name].requires_grad for name in node.operands)
            flags = self.gradients(node, operands)
        return self.builder.emit(node.op, node.args, specs, node.kwargs, flags)


Rewrite = Callable[[GraphBuilder, Node], Names]


def _spec_of(builder: GraphBuilder) -> Callable[[str], TensorSpec]:
    return builder.specs.__getitem__


def _ref(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name


def _dropped(builder: GraphBuilder, node: Node) -> Names:
    return node.operands[: len(node.outputs)]


def _view(builder: GraphBuilder, node: Node) -> Names:
    chains = view_steps(node, _spec_of(builder))
    assert chains is not None
    name = node.operands[0]
    for step in chains[0]:
        name = apply_step(builder, step, name)
    return (name,)


def _split(builder: GraphBuilder, node: Node) -> Names:
    name, outs = node.operands[0], tuple(value.spec for value in node.outputs)
    spec = builder.specs[name]
    dim = split_dim(node, spec, outs)
    sizes = split_sizes(node, spec, outs)
    names: Names = (name,)
    if len(sizes) > 1:
        shapes = [(*spec.shape[:dim], size, *spec.shape[dim + 1 :]) for size in sizes]
        names = builder.emit(
            "aten.split_with_sizes.default",
            (Ref(name), sizes, dim),
            [TensorSpec(shape, spec.dtype) for shape in shapes],
        )
    return tuple(builder.reshape(piece, out.shape) for piece, out in zip(names, outs, strict=True))


def _cast(builder: GraphBuilder, node: Node) -> Names:
    return (cast(builder, node.operands[0], node.outputs[0].spec.dtype),)


def _full(builder: GraphBuilder, node: Node) -> Names:
    out = node.outputs[0].spec
    rule = _FILLS[node.op.removeprefix("aten.")]
    value = node.args[int(rule)] if isinstance(rule, str) else rule
    if isinstance(value, int | float):
        kind = bool if out.dtype == "bool" else float if out.is_floating else int
        value = kind(value)
    kwargs = (("dtype", Token("dtype", out.dtype)),)
    return (builder.one("aten.full.default", (out.shape, value), out.shape, out.dtype, kwargs),)


def _random_like(builder: GraphBuilder, node: Node) -> Names:
    out = node.outputs[0].spec
    op = node.op.replace("_like", "")
    kwargs = (("dtype", Token("dtype", out.dtype)),)
    return (builder.one(op, (out.shape,), out.shape, out.dtype, kwargs),)


def _dropout(builder: GraphBuilder, node: Node) -> Names:
    if not node.args[1] or not node.args[2]:
        return (node.operands[0],)
    return builder.emit(node.op, node.args, (node.outputs[0].spec,))


def _detach(builder: GraphBuilder, node: Node) -> Names:
    name = node.operands[0]
    spec = builder.specs[name]
    if not spec.requires_grad:
        return (name,)
    return (builder.one("aten.detach.default", (Ref(name),), spec.shape, spec.dtype),)


def _stack(builder: GraphBuilder, node: Node) -> Names:
    out, parts = node.outputs[0].spec, node.args[0]
    assert isinstance(parts, tuple)
    dim = int(node.args[1]) % out.ndim if len(node.args) > 1 else 0  # type: ignore[arg-type]
    row = (*out.shape[:dim], 1, *out.shape[dim + 1 :])
    names = tuple(Ref(builder.reshape(_ref(part), row)) for part in parts)
    return (_concatenate(builder, names, dim, out),)


def _cat(builder: GraphBuilder, node: Node) -> Names:
    out, parts = node.outputs[0].spec, node.args[0]
    assert isinstance(parts, tuple)
    dim = int(node.args[1]) % max(out.ndim, 1) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    kept = tuple(part for part in parts if builder.specs[_ref(part)].shape != (0,) or out.ndim == 1)
    return (_concatenate(builder, kept, dim, out),)


def _wide_stack(builder: GraphBuilder, node: Node) -> Names:
    """Hstack and vstack."""
    out, parts = node.outputs[0].spec, node.args[0]
    assert isinstance(parts, tuple)
    vertical = node.op == "aten.vstack.default"
    names = []
    for part in parts:
        shape = builder.specs[_ref(part)].shape
        if len(shape) < (2 if vertical else 1):
            shape = (1, *shape) if shape else (1,) * out.ndim
        names.append(Ref(builder.reshape(_ref(part), shape)))
    dim = 0 if vertical or out.ndim == 1 else 1
    return (_concatenate(builder, tuple(names), dim, out),)


def _concatenate(builder: GraphBuilder, parts: tuple[Arg, ...], dim: int, out: TensorSpec) -> str:
    if len(parts) == 1:
        return cast(builder, _ref(parts[0]), out.dtype)
    return builder.one("aten.cat.default", (parts, dim), out.shape, out.dtype)


def _write(builder: GraphBuilder, node: Node) -> Names:
    """Copy and fill.Tensor: the written tensor gives shape and dtype only."""
    out = node.outputs[0].spec
    return (builder.expand(cast(builder, _ref(node.args[1]), out.dtype), out.shape),)


def _broadcast(builder: GraphBuilder, node: Node) -> Names:
    pairs = zip(node.operands, node.outputs, strict=True)
    return tuple(builder.expand(name, value.spec.shape) for name, value in pairs)


def _meshgrid(builder: GraphBuilder, node: Node) -> Names:
    swapped = node.args[1:] == ("xy",) and len(node.outputs) > 1
    results = []
    for index, (name, value) in enumerate(zip(node.operands, node.outputs, strict=True)):
        dim = 1 - index if swapped and index < 2 else index
        shape = value.spec.shape
        row = tuple(size if place == dim else 1 for place, size in enumerate(shape))
        results.append(builder.expand(builder.reshape(name, row), shape))
    return tuple(results)


def _dense(builder: GraphBuilder, node: Node) -> Names:
    """Embedding and embedding_bag: gradients are dense here."""
    index = 4 if node.op == "aten.embedding.default" else 5
    args = tuple(False if place == index else arg for place, arg in enumerate(node.args))
    if node.op == "aten.embedding_bag.padding_idx" and len(args) < 9:
        args += (None,) * (9 - len(args))
    return builder.emit(node.op, args, tuple(v.spec for v in node.outputs), node.kwargs)


_REWRITES: dict[str, Rewrite] = {
    **dict.fromkeys(RESHAPES | PERMUTES | EXPANDS | SLICES, _view),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(_COPIES, _cast),
    **dict.fromkeys(_DROPPED, _dropped),
    **{f"aten.{op}": _full for op in _FILLS},
    "aten.rand_like.default": _random_like,
    "aten.randn_like.default": _random_like,
    "aten.dropout.default": _dropout,
    "aten.feature_dropout.default": _dropout,
    "aten.alpha_dropout.default": _dropout,
    "aten.detach.default": _detach,
    "aten.detach_.default": _detach,
    "aten.stack.default": _stack,
    "aten.cat.default": _cat,
    "aten.hstack.default": _wide_stack,
    "aten.vstack.default": _wide_stack,
    "aten.copy.default": _write,
    "aten.fill.Tensor": _write,
    "aten.broadcast_tensors.default": _broadcast,
    "aten.meshgrid.default": _meshgrid,
    "aten.meshgrid.indexing": _meshgrid,
    "aten.embedding.default": _dense,
    "aten.embedding_bag.padding_idx": _dense,
}

CANONICAL_AWAY = (VIEWS | _COPIES | _DROPPED) - {
    "aten.reshape.default", "aten.permute.default", "aten.expand.default", "aten.slice.Tensor",
    "aten.split_with_sizes.default", "aten.to.dtype", "aten.detach.default",
    "aten.diagonal.default", "aten.unfold.default", "aten.as_strided.default",
    "aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default",
    "aten.view.dtype", "aten.real.default",
}  # fmt: skip
"""Operators that a canonical graph does not hold."""
