"""Ops that reduce dims, or work along one."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten


def reduce(
    call: Call,
    dims: Iterable[int],
    flags: str,
    linear: Iterable[Iterable[int]] = (),
) -> OpRule:
    """Reduce `dims` of the first operand (kept as size 1 or dropped in the outputs)."""
    source = call.operands[0]
    gone = set(dims)
    names = [f"d{d}{flags if d in gone else ''}" for d in range(source.ndim)]

    def result(ndim: int) -> list[Entry]:
        if ndim == source.ndim:
            return [None if d in gone else names[d] for d in range(ndim)]
        return [names[d] for d in range(source.ndim) if d not in gone]

    return call.build([names], [result(spec.ndim) for spec in call.outputs], linear=linear)


@family(aten("sum sum.dim_IntList nansum count_nonzero count_nonzero.dim_IntList trace"))
def _sum(call: Call) -> OpRule:
    """Partial sums; linear except for booleans and for what treats values apart."""
    dims = call.dims(1, "dim", call.operands[0].ndim)
    op = call.node.op
    if op == "aten.trace.default":
        return reduce(call, dims, "!", [{0}])
    plain = op.startswith("aten.sum") and call.operands[0].dtype != "bool"
    return reduce(call, dims, "", [{0}] if plain else [])


@family(aten("mean mean.dim"))
def _mean(call: Call) -> OpRule:
    """The special lowering divides local sums by the global count."""
    return reduce(call, call.dims(1, "dim", call.operands[0].ndim), "~", [{0}])


# fmt: off
_REDUCTIONS = """
amax amin aminmax max min max.dim min.dim argmax argmin any any.dim any.dims all all.dim all.dims
prod prod.dim_int var var.dim var.correction std std.dim std.correction var_mean var_mean.dim
var_mean.correction std_mean std_mean.dim std_mean.correction logsumexp norm.ScalarOpt_dim
norm.Scalar linalg_vector_norm linalg_norm frobenius_norm.dim kthvalue median median.dim nanmedian
nanmedian.dim mode nanmean
"""
# fmt: on
_DIM_AT = {
    "norm.ScalarOpt_dim": 2,
    "linalg_vector_norm": 2,
    "linalg_norm": 2,
    "kthvalue": 2,
}
_WHOLE = "max min var std var_mean std_mean any all prod norm.Scalar median nanmedian"
_UNDIMMED = frozenset(_WHOLE.split())


def _make_reduction(name: str) -> None:
    position = _DIM_AT.get(name, 1)

    def of_call(call: Call) -> OpRule:
        ndim = call.operands[0].ndim
        if name in _UNDIMMED:
            return reduce(call, range(ndim), "!")
        default = -1 if name in ("kthvalue", "mode") else None
        dims = call.dims(position, "dim", ndim)
        if call.arg(position, "dim", default) == -1 and ndim:
            dims = (ndim - 1,)
        return reduce(call, dims, "!")

    family(aten(name))(of_call)


for _name in _REDUCTIONS.split():
    _make_reduction(_name)


def along(
    call: Call, dims: Iterable[int], flags: str = "!", linear: Iterable[Iterable[int]] = ()
) -> OpRule:
    """Outputs shaped like the first operand but for sizes along `dims`, which get `flags`."""
    source = call.operands[0]
    apart = set(dims)
    names = [f"d{d}{flags if d in apart else ''}" for d in range(source.ndim)]
    same = all(spec.shape == source.shape for spec in call.outputs)
    entries: list[Entry] = [n if same or d not in apart else None for d, n in enumerate(names)]
    return call.build({0: entries}, [entries for _ in call.outputs], linear=linear)


def _make_along(names: str, position: int, default: int | None, linear: bool) -> None:
    def of_call(call: Call) -> OpRule:
        ndim = call.operands[0].ndim
        value = call.arg(position, "dim", default)
        if value is None:
            dims = call.dims(position, "dims", ndim)
        else:
            values = value if isinstance(value, tuple) else (value,)
            dims = tuple(v % max(ndim, 1) for v in values if isinstance(v, int))
        return along(call, dims or tuple(range(ndim)), linear=[{0}] if linear else [])

    family(aten(names))(of_call)


_make_along("cumsum flip", 1, None, True)
_make_along("roll", 2, None, True)
_make_along("cumprod logcumsumexp cummax cummin", 1, None, False)
_make_along("sort argsort glu", 1, -1, False)
_make_along("topk sort.stable argsort.stable", 2, -1, False)


@family(aten("softmax.int _softmax log_softmax.int _log_softmax"))
def _softmax(call: Call) -> OpRule:
    """Along a split dim the maximum and the sum of exponentials are all-reduced (special)."""
    return along(call, [call.int_arg(1, "dim", -1) % max(call.operands[0].ndim, 1)], "~")


@family(aten("diff"))
def _diff(call: Call) -> OpRule:
    """Differences along one dim, with optional tensors joined before and after."""
    ndim = call.operands[0].ndim
    dim = call.int_arg(2, "dim", -1) % ndim
    names: list[Entry] = [None if d == dim else f"d{d}" for d in range(ndim)]
    slots = range(len(call.operands))
    return call.build(dict.fromkeys(slots, names), [names], linear=[slots])
