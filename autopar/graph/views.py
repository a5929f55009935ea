"""View operators as steps of a small alphabet, with the inverse of each step.

A view of a tensor is a chain of steps: ``reshape`` (new shape), ``permute`` (dims), ``slice``
(dim, start, end, step), ``expand`` (new shape), ``diagonal`` (offset, dim1, dim2) and
``detach``. Writing through a view is the inverse of its steps, last to first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.graph.builder import GraphBuilder
from autopar.graph.ir import Arg, Node, Ref, TensorSpec, Token

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a view; `data` as in the module docstring, `shape` is the result's."""

    kind: str
    data: tuple[int, ...]
    shape: Shape


RESHAPES = frozenset(
    f"aten.{name}"
    for name in (
        "view.default", "_unsafe_view.default", "reshape.default", "flatten.using_ints",
        "unflatten.int", "view_as.default", "reshape_as.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims", "unsqueeze.default", "ravel.default",
        "squeeze_.default", "squeeze_.dim", "squeeze_.dims", "unsqueeze_.default",
        "_reshape_alias.default", "atleast_1d.default", "atleast_2d.default",
        "atleast_3d.default",
    )
)  # fmt: skip
PERMUTES = frozenset(
    f"aten.{name}"
    for name in (
        "permute.default", "transpose.int", "transpose_.default", "t.default", "t_.default",
        "numpy_T.default", "T.default", "mT.default", "matrix_H.default", "mH.default",
        "adjoint.default", "movedim.int", "movedim.intlist", "moveaxis.int", "moveaxis.intlist",
        "swapaxes.default", "swapdims.default", "swapaxes_.default", "swapdims_.default",
    )
)  # fmt: skip
EXPANDS = frozenset(
    f"aten.{name}" for name in ("expand.default", "expand_as.default", "broadcast_to.default")
)
SLICES = frozenset(
    f"aten.{name}" for name in ("slice.Tensor", "select.int", "narrow.default", "narrow.Tensor")
)
SPLITS = frozenset(
    f"aten.{name}"
    for name in (
        "split.Tensor", "split.sizes", "split_with_sizes.default", "chunk.default",
        "tensor_split.sections", "tensor_split.indices", "unbind.int", "unsafe_chunk.default",
        "unsafe_split.Tensor", "unsafe_split_with_sizes.default", "hsplit.int", "vsplit.int",
    )
)  # fmt: skip
# Results that share memory with the operand, or are the operand.
ALIASES = frozenset(
    f"aten.{name}"
    for name in (
        "alias.default", "detach.default", "detach_.default", "contiguous.default",
        "to.dtype", "to.device", "to.dtype_layout", "to.other", "type_as.default",
        "resolve_conj.default", "resolve_neg.default", "positive.default",
        "requires_grad_.default", "view.dtype", "float.default", "half.default",
        "dropout.default", "feature_dropout.default", "alpha_dropout.default", "real.default",
    )
)  # fmt: skip
OTHER_VIEWS = frozenset(("aten.diagonal.default", "aten.unfold.default", "aten.as_strided.default"))
VIEWS = RESHAPES | PERMUTES | EXPANDS | SLICES | SPLITS | ALIASES | OTHER_VIEWS


def _arg(node: Node, index: int, name: str, default: Arg = None) -> Arg:
    if len(node.args) > index:
        return node.args[index]
    return dict(node.kwargs).get(name, default)


def _dims(arg: Arg, ndim: int) -> list[int]:
    """One dim or several, non-negative."""
    dims = arg if isinstance(arg, tuple) else (arg,)
    return [int(dim) % ndim for dim in dims]  # type: ignore[arg-type]


def permutation(node: Node, ndim: int) -> Shape:
    """The dims that a permute-like call puts in places 0, 1, ..., all non-negative."""
    op = node.op.split(".")[1].rstrip("_")
    dims = list(range(ndim))
    if op == "permute":
        return tuple(int(dim) % ndim for dim in node.args[1])  # type: ignore[union-attr,arg-type]
    if op in ("t", "numpy_T", "T"):
        return tuple(reversed(dims))
    if op in ("mT", "matrix_H", "mH", "adjoint"):
        dims[-1], dims[-2] = dims[-2], dims[-1]
        return tuple(dims)
    first, second = node.args[1], node.args[2]
    if op in ("movedim", "moveaxis"):
        source, target = _dims(first, ndim), _dims(second, ndim)
        rest = iter(dim for dim in dims if dim not in source)
        return tuple(
            source[target.index(place)] if place in target else next(rest) for place in dims
        )
    if ndim:
        a, b = int(first) % ndim, int(second) % ndim  # type: ignore[arg-type]
        dims[a], dims[b] = dims[b], dims[a]
    return tuple(dims)


def slice_bounds(size: int, start: Arg, end: Arg) -> tuple[int, int]:
    """Start and end of a slice with ``0 <= start <= end <= size``."""
    low = 0 if start is None else int(start)  # type: ignore[arg-type]
    high = size if end is None else int(end)  # type: ignore[arg-type]
    low = min(max(low + size if low < 0 else low, 0), size)
    high = min(max(high + size if high < 0 else high, 0), size)
    return low, max(low, high)


def _slice_steps(node: Node, spec: TensorSpec, out: TensorSpec) -> tuple[Step, ...]:
    dim = int(_arg(node, 1, "dim", 0)) % spec.ndim  # type: ignore[arg-type]
    size = spec.shape[dim]
    if node.op == "aten.select.int":
        start = int(_arg(node, 2, "index")) % size  # type: ignore[arg-type]
        row = (*spec.shape[:dim], 1, *spec.shape[dim + 1 :])
        return (
            Step(kind="slice", data=(dim, start, start + 1, 1), shape=row),
            Step(kind="reshape", data=out.shape, shape=out.shape),
        )
    if node.op.startswith("aten.narrow"):
        start = int(_arg(node, 2, "start"))  # type: ignore[arg-type]
        start = start + size if start < 0 else start
        end, step = start + out.shape[dim], 1
    else:
        start, end = slice_bounds(size, _arg(node, 2, "start"), _arg(node, 3, "end"))
        step = int(_arg(node, 4, "step", 1))  # type: ignore[arg-type]
    return (Step(kind="slice", data=(dim, start, end, step), shape=out.shape),)


def split_dim(node: Node, spec: TensorSpec, outs: tuple[TensorSpec, ...]) -> int:
    """The dim that a split-like call cuts, non-negative."""
    name = node.op.split(".")[1]
    if name == "hsplit":
        return 0 if spec.ndim == 1 else 1
    if name == "vsplit":
        return 0
    return int(_arg(node, 1 if name == "unbind" else 2, "dim", 0)) % spec.ndim  # type: ignore[arg-type]


def split_sizes(node: Node, spec: TensorSpec, outs: tuple[TensorSpec, ...]) -> Shape:
    """Sizes of the pieces of a split-like call along its dim."""
    dim = split_dim(node, spec, outs)
    if node.op == "aten.unbind.int":
        return (1,) * spec.shape[dim]
    return tuple(out.shape[dim] for out in outs)


def _split_steps(
    node: Node, spec: TensorSpec, outs: tuple[TensorSpec, ...]
) -> tuple[tuple[Step, ...], ...]:
    dim, start, result = split_dim(node, spec, outs), 0, []
    for size, out in zip(split_sizes(node, spec, outs), outs, strict=True):
        piece = (*spec.shape[:dim], size, *spec.shape[dim + 1 :])
        steps: tuple[Step, ...] = (
            Step(kind="slice", data=(dim, start, start + size, 1), shape=piece),
        )
        if out.shape != piece:
            steps += (Step(kind="reshape", data=out.shape, shape=out.shape),)
        result.append(steps)
        start += size
    return tuple(result)


def view_steps(
    node: Node, spec: Callable[[str], TensorSpec]
) -> tuple[tuple[Step, ...], ...] | None:
    """The steps from the first operand of a view operator to each of its results.

    Args:
        node: The call.
        spec: Spec of an operand by name.

    Returns:
        One chain per result, empty where the result is the operand itself; None when the
        operator is no view or has no inverse here.
    """
    if node.op not in VIEWS or not node.outputs:
        return None
    source = spec(node.operands[0])
    outs = tuple(value.spec for value in node.outputs)
    out, op = outs[0], node.op
    if op in SPLITS:
        return _split_steps(node, source, outs)
    if op in SLICES:
        return (_slice_steps(node, source, out),)
    if op in RESHAPES:
        return ((Step(kind="reshape", data=out.shape, shape=out.shape),),)
    if op in PERMUTES:
        dims = permutation(node, source.ndim)
        return ((Step(kind="permute", data=dims, shape=out.shape),),)
    if op in EXPANDS:
        return ((Step(kind="expand", data=out.shape, shape=out.shape),),)
    if op == "aten.diagonal.default":
        data = (
            int(_arg(node, 1, "offset", 0)),  # type: ignore[arg-type]
            int(_arg(node, 2, "dim1", 0)),  # type: ignore[arg-type]
            int(_arg(node, 3, "dim2", 1)),  # type: ignore[arg-type]
        )
        return ((Step(kind="diagonal", data=data, shape=out.shape),),)
    if op in ("aten.detach.default", "aten.detach_.default"):
        return ((Step(kind="detach", data=(), shape=out.shape),),)
    if op.endswith("dropout.default") and node.args[1] and node.args[2]:
        return None
    if op in ALIASES and out.dtype == source.dtype:
        return ((),)
    return None


def apply_step(builder: GraphBuilder, step: Step, name: str) -> str:
    """Emit `step` on the value `name`; returns the name of the result."""
    spec = builder.specs[name]
    if step.kind == "reshape":
        return builder.reshape(name, step.shape)
    if step.kind == "expand":
        return builder.expand(name, step.shape)
    if step.kind == "detach":
        if not spec.requires_grad:
            return name
        return builder.one("aten.detach.default", (Ref(name),), spec.shape, spec.dtype)
    if step.kind == "permute":
        if step.data == tuple(range(spec.ndim)):
            return name
        args: tuple[Arg, ...] = (Ref(name), step.data)
        return builder.one("aten.permute.default", args, step.shape, spec.dtype)
    if step.kind == "slice":
        dim, start, end, stride = step.data
        if (start, end, stride) == (0, spec.shape[dim], 1):
            return name
        return builder.one("aten.slice.Tensor", (Ref(name), *step.data), step.shape, spec.dtype)
    return builder.one("aten.diagonal.default", (Ref(name), *step.data), step.shape, spec.dtype)


def write_step(builder: GraphBuilder, step: Step, base: str, value: str) -> str | None:
    """The new value of `base` after its view by `step` became `value`.

    Returns:
        The name of the new value, or None when the step has no inverse.
    """
    spec = builder.specs[base]
    if step.kind == "reshape" or (step.kind == "expand" and step.shape == spec.shape):
        return builder.reshape(value, spec.shape)
    if step.kind == "permute":
        inverse = tuple(step.data.index(dim) for dim in range(spec.ndim))
        back = Step(kind="permute", data=inverse, shape=spec.shape)
        return apply_step(builder, back, value)
    if step.kind == "slice":
        dim, start, end, stride = step.data
        if (start, end, stride) == (0, spec.shape[dim], 1):
            return value
        op, data = "aten.slice_scatter.default", step.data
    elif step.kind == "diagonal":
        op, data = "aten.diagonal_scatter.default", step.data
    elif step.kind == "detach" and not spec.requires_grad:
        return value
    else:
        return None
    return builder.one(op, (Ref(base), Ref(value), *data), spec.shape, spec.dtype)


def cast(builder: GraphBuilder, name: str, dtype: str) -> str:
    """`name` converted to `dtype`; nothing is emitted when it has that dtype."""
    spec = builder.specs[name]
    if spec.dtype == dtype:
        return name
    args: tuple[Arg, ...] = (Ref(name), Token("dtype", dtype))
    return builder.one("aten.to.dtype", args, spec.shape, dtype)
