"""What each in-place operator computes, as a plain call.

The generic rule is ``aten.op_.overload`` -> ``aten.op.overload`` with the result cast to the
dtype of the written tensor; the tables below hold the exceptions.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.errors import TraceError
from autopar.graph.builder import GraphBuilder
from autopar.graph.ir import Arg, Node, Ref, TensorSpec, Token, iter_refs
from autopar.graph.views import cast

# Operators named like in-place ones, or in-place ones that only change how a tensor is seen.
_NOT_WRITES = frozenset({"detach_", "requires_grad_", "squeeze_", "unsqueeze_", "transpose_", "t_"})
_REFUSED = frozenset({"resize_", "set_", "resize_as_", "as_strided_", "swapaxes_", "swapdims_"})
_RENAMED = {
    "aten.normal_.default": "aten.normal_functional.default",
    "aten.__iand__.Tensor": "aten.bitwise_and.Tensor",
    "aten.__ior__.Tensor": "aten.bitwise_or.Tensor",
    "aten.__ixor__.Tensor": "aten.bitwise_xor.Tensor",
    "aten.__iand__.Scalar": "aten.bitwise_and.Scalar",
    "aten.__ior__.Scalar": "aten.bitwise_or.Scalar",
    "aten.__ixor__.Scalar": "aten.bitwise_xor.Scalar",
    "aten._index_put_impl_.default": "aten.index_put.default",
    "aten.bernoulli_.float": "aten.bernoulli.p",
    "aten.floor_divide_.Tensor": "aten.floor_divide.default",
    "aten.random_.from": "aten.random.from",
    "aten.copy_.default": "aten.copy.default",
}
_COMPARISONS = frozenset(
    (
        "eq", "ne", "lt", "le", "gt", "ge", "greater", "greater_equal", "less", "less_equal",
        "not_equal", "logical_and", "logical_or", "logical_xor", "logical_not",
    )
)  # fmt: skip
_PROMOTING = frozenset(
    (
        "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow",
        "remainder", "fmod", "atan2", "arctan2", "addcmul", "addcdiv", "lerp", "maximum",
        "minimum", "hypot", "xlogy", "clamp", "clamp_min", "clamp_max", "copysign",
        "floor_divide", "bitwise_and", "bitwise_or", "bitwise_xor",
    )
)  # fmt: skip
_RANDOM_FILLS = frozenset(
    (
        "bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_", "cauchy_",
        "log_normal_",
    )
)  # fmt: skip
_RANK = {"bool": 0, "uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float8_e4m3fn": 6,
         "float8_e5m2": 6, "float16": 7, "bfloat16": 7, "float32": 8, "float64": 9,
         "complex64": 10, "complex128": 11}  # fmt: skip


def place(node: Node) -> str:
    """Module and line of a call, for messages."""
    module = f"module '{node.module}'" if node.module else "the root module"
    return f"{module}, {node.source}" if node.source else module


def changes_view(op: str) -> bool:
    """Whether `op` changes in place how a tensor is seen, not what it holds."""
    return op.split(".")[1] in _NOT_WRITES


def is_inplace(op: str) -> bool:
    """Whether `op` writes its first operand."""
    parts = op.split(".")
    name = parts[1] if len(parts) > 1 else op
    if name.startswith("__i"):
        return name in ("__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__")
    if not name.endswith("_") or name.endswith("__"):
        return False
    return name not in _NOT_WRITES


def promote(specs: list[TensorSpec]) -> str:
    """The dtype of a pointwise result: dims before scalars, floats before ints, wider wins."""

    def category(dtype: str) -> int:
        rank = _RANK[dtype]
        return 0 if rank == 0 else 1 if rank < 6 else 2 if rank < 10 else 3

    best = None
    for wanted in (True, False):
        group = [spec.dtype for spec in specs if (spec.ndim > 0) is wanted]
        if not group:
            continue
        widest = group[0]
        for dtype in group[1:]:
            if {dtype, widest} == {"float16", "bfloat16"}:
                widest = "float32"
            elif {dtype, widest} == {"uint8", "int8"}:
                widest = "int16"
            elif _RANK[dtype] > _RANK[widest]:
                widest = dtype
        if best is None or category(widest) > category(best):
            best = widest
    assert best is not None
    return best


def functional_call(builder: GraphBuilder, node: Node, spec: TensorSpec) -> str:
    """Emit what the in-place call `node` computes.

    Args:
        builder: Where to emit.
        node: The call, with operands already named as they are now.
        spec: Spec of the written tensor.

    Returns:
        Name of the new value, of the written tensor's shape and dtype.

    Raises:
        TraceError: The operator changes storage or has no plain form.
    """
    name = node.op.split(".")[1]
    if name in _REFUSED:
        raise TraceError(
            f"{node.op} changes the storage of a tensor in place",
            where=place(node),
            fix="make a new tensor instead",
        )
    if name == "zero_":
        return _full(builder, spec, False if spec.dtype == "bool" else 0)
    if node.op == "aten.fill_.Scalar":
        return _full(builder, spec, node.args[1])
    if name in ("copy_", "fill_"):
        return builder.expand(cast(builder, _name(node.args[1]), spec.dtype), spec.shape)
    op = _RENAMED.get(node.op) or _plain_name(node.op)
    stem = op.split(".")[1]
    dtype = spec.dtype
    if stem in _COMPARISONS:
        dtype = "bool"
    elif stem in _PROMOTING:
        refs = [ref.name for arg in node.args for ref in iter_refs(arg)]
        dtype = promote([builder.specs[ref] for ref in refs])
    args = node.args
    if name in _RANDOM_FILLS:  # the old content matters neither to the result nor to gradients
        args = (Ref(_full(builder, spec, 0)), *args[1:])
    result = builder.one(op, args, spec.shape, dtype, node.kwargs)
    return cast(builder, result, spec.dtype)


def _plain_name(op: str) -> str:
    space, name, overload = op.split(".", 2)
    return f"{space}.{name.removesuffix('_')}.{overload}"


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref)
    return arg.name


def _full(builder: GraphBuilder, spec: TensorSpec, value: Arg) -> str:
    kwargs = (("dtype", Token("dtype", spec.dtype)),)
    return builder.one("aten.full.default", (spec.shape, value), spec.shape, spec.dtype, kwargs)


def _running(node: Node) -> tuple[str, ...]:
    """Running statistics that a normalisation in training mode updates."""
    if len(node.args) > 5 and node.args[5] is True and isinstance(node.args[3], Ref):
        return (_name(node.args[3]), _name(node.args[4]))
    return ()


# Operators that write some operands silently -> names of those operands in one call.
HIDDEN_WRITES: dict[str, Callable[[Node], tuple[str, ...]]] = {
    "aten.batch_norm.default": _running,
    "aten.instance_norm.default": _running,
    "aten.cudnn_batch_norm.default": _running,
}


def _norm_call(
    builder: GraphBuilder, args: tuple[Arg, ...], momentum: Arg, eps: Arg
) -> tuple[str, str, str]:
    spec = builder.specs[_name(args[0])]
    running = builder.specs[_name(args[3])]
    stats = TensorSpec(running.shape, running.dtype)
    names = builder.emit(
        "aten._native_batch_norm_legit_functional.default",
        (*args[:5], True, momentum, eps),
        (TensorSpec(spec.shape, spec.dtype), stats, stats, stats, stats),
    )
    return names[0], names[3], names[4]


def hidden_call(builder: GraphBuilder, node: Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Emit the plain form of a call of `HIDDEN_WRITES`.

    Returns:
        Names of the call's results, and names of the new values of what it writes.
    """
    momentum, eps = node.args[6], node.args[7]
    if node.op != "aten.instance_norm.default":
        result, mean, variance = _norm_call(builder, node.args, momentum, eps)
        return (result,), (mean, variance)
    # torch folds the batch into the channels, and averages the statistics over the batch.
    x = _name(node.args[0])
    spec = builder.specs[x]
    batch, channels = spec.shape[:2]
    folded = builder.reshape(x, (1, batch * channels, *spec.shape[2:]))
    repeated: list[Arg] = [Ref(folded)]
    for arg in node.args[1:5]:
        if not isinstance(arg, Ref):
            repeated.append(None)
            continue
        wide = builder.expand(builder.reshape(arg.name, (1, channels)), (batch, channels))
        repeated.append(Ref(builder.reshape(wide, (batch * channels,))))
    result, *stats = _norm_call(builder, tuple(repeated), momentum, eps)
    written = []
    for name in stats:
        table = builder.reshape(name, (batch, channels))
        dtype = builder.specs[table].dtype
        args: tuple[Arg, ...] = (Ref(table), (0,), False)
        written.append(builder.one("aten.mean.dim", args, (channels,), dtype))
    return (builder.reshape(result, spec.shape),), tuple(written)
