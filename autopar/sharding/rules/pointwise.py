"""Ops that work element by element on operands broadcast to one shape."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.graph.ir import TensorSpec
from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family, register_function

# fmt: off
_UNARY = """
abs acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh
bitwise_not ceil celu clamp clamp_max clamp_min clip cos cosh digamma elu erf erfc erfinv exp exp2
expm1 fix floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan
isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish
nan_to_num reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh
softplus softshrink special_digamma special_entr special_erf special_erfc special_erfinv
special_exp2 special_expit special_expm1 special_gammaln special_i0 special_log1p special_ndtr
special_ndtri special_sinc sqrt square tan tanh threshold trunc
"""
_COMPARE = "eq ne lt le gt ge"
_OVERLOADS = ("Tensor", "Scalar")
_SHIFTS = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
_PAIRS = """
arctan2 atan2 copysign.Tensor copysign.Scalar floor_divide floor_divide.Scalar fmax fmin
fmod.Tensor fmod.Scalar heaviside hypot logaddexp logaddexp2 logical_and logical_or logical_xor
max.other maximum min.other minimum nextafter pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar
remainder.Tensor remainder.Scalar remainder.Scalar_Tensor xlogy.Scalar_Self round.decimals
float_power.Tensor_Tensor float_power.Tensor_Scalar float_power.Scalar isclose gcd lcm
clamp.Tensor clamp_min.Tensor clamp_max.Tensor clip.Tensor polygamma __and__.Tensor __or__.Tensor
__xor__.Tensor __and__.Scalar __or__.Scalar __xor__.Scalar
"""
# fmt: on


def broadcast(call: Call, linear: Iterable[Iterable[int]] = (), **options: object) -> OpRule:
    """One letter per output dim; operands align at the right."""
    ndim = call.outputs[0].ndim
    names = call.names("d", ndim)
    operands = [names[ndim - spec.ndim :] for spec in call.operands]
    outputs = [names[ndim - spec.ndim :] for spec in call.outputs]
    return call.build(operands, outputs, linear=linear, **options)  # type: ignore[arg-type]


def aten(names: str | Iterable[str]) -> list[str]:
    """``"exp pow.Scalar"`` to ``["aten.exp.default", "aten.pow.Scalar"]``."""
    words = names.split() if isinstance(names, str) else names
    return [f"aten.{word}" if "." in word else f"aten.{word}.default" for word in words]


register_function(aten(_UNARY + _PAIRS), broadcast)
register_function(
    aten([f"{op}.{kind}" for op in _COMPARE.split() for kind in _OVERLOADS]), broadcast
)
register_function(
    aten([f"bitwise_{op}.{kind}" for op in ("and", "or", "xor") for kind in _OVERLOADS[:2]])
    + aten([f"bitwise_{op}.Scalar_Tensor" for op in ("and", "or", "xor")])
    + aten([f"bitwise_{op}_shift.{kind}" for op in ("left", "right") for kind in _SHIFTS]),
    broadcast,
)


@family(aten("neg negative deg2rad rad2deg positive detach clone contiguous alias lift_fresh real"))
def _linear_unary(call: Call) -> OpRule:
    return broadcast(call, linear=[{0}])


@family(aten("add.Tensor sub.Tensor add.Scalar sub.Scalar subtract.Tensor rsub.Tensor rsub.Scalar"))
def _add(call: Call) -> OpRule:
    """Sum of two tensors; a scalar would be added once per rank to a Partial."""
    return broadcast(call, linear=[{0, 1}] if len(call.operands) == 2 else [])


@family(aten("mul.Tensor mul.Scalar multiply.Tensor"))
def _mul(call: Call) -> OpRule:
    return broadcast(call, linear=[{slot} for slot in range(len(call.operands))])


@family(
    aten("div.Tensor div.Scalar divide.Tensor true_divide.Tensor true_divide.Scalar")
    + aten("div.Tensor_mode div.Scalar_mode xlogy.Tensor xlogy.Scalar_Other special_xlogy")
    + aten("special_xlog1py ldexp.Tensor")
)
def _div(call: Call) -> OpRule:
    """Linear in the numerator (the factor, the mantissa), unless rounded."""
    exact = call.arg(2, "rounding_mode") is None and call.slot(0, "self") is not None
    return broadcast(call, linear=[{0}] if exact else [])


@family(aten("where.self where.ScalarOther where.ScalarSelf where.Scalar"))
def _where(call: Call) -> OpRule:
    """Linear in the branches when every branch that is a scalar is 0."""
    branches = [
        (call.slot(1, "self"), call.arg(1, "self")),
        (call.slot(2, "other"), call.arg(2, "other")),
    ]
    slots = {slot for slot, _ in branches if slot is not None}
    zeros = all(slot is not None or value == 0 for slot, value in branches)
    return broadcast(call, linear=[slots] if zeros else [])


@family(aten("masked_fill.Scalar masked_fill.Tensor"))
def _masked_fill(call: Call) -> OpRule:
    value = call.slot(2, "value")
    if value is not None:
        return broadcast(call, linear=[{0, value}])
    return broadcast(call, linear=[{0}] if call.arg(2, "value") == 0 else [])


@family(aten("lerp.Tensor lerp.Scalar"))
def _lerp(call: Call) -> OpRule:
    return broadcast(call, linear=[{0, 1}])


@family(aten("addcmul addcdiv"))
def _addcmul(call: Call) -> OpRule:
    """A tensor plus value * a * b, or plus value * a / b."""
    both = call.node.op == "aten.addcmul.default"
    return broadcast(call, linear=[{0, 1}, {0, 2}] if both else [{0, 1}])


@family(aten("copy fill.Scalar fill.Tensor"))
def _copy(call: Call) -> OpRule:
    """Overwrites the first operand by the second."""
    return broadcast(call, linear=[{1}] if len(call.operands) == 2 else [])


_CASTS = "to.dtype to.dtype_layout to.device to.other to.prim_Device _to_copy type_as"


@family([*aten(_CASTS), "prims.convert_element_type.default"])
def _cast(call: Call) -> OpRule:
    """Linear unless it rounds to integers or booleans."""
    exact = is_linear_cast(call.operands[0], call.outputs[0])
    return broadcast(call, linear=[{0}] if exact else [])


def is_linear_cast(source: TensorSpec, target: TensorSpec) -> bool:
    """Whether the cast of a sum is the sum of the casts (up to rounding of floats)."""
    if source.dtype == "bool" or target.dtype == "bool":
        return source.dtype == target.dtype
    if target.is_floating:
        return True
    return not source.is_floating


@family(aten("zeros_like ones_like full_like empty_like"))
def _like(call: Call) -> OpRule:
    return broadcast(call)


@family(aten("prelu"))
def _prelu(call: Call) -> OpRule:
    """The weight has one value, or one per channel (dim 1)."""
    names: list[Entry] = list(call.names("d", call.outputs[0].ndim))
    channel = names[1] if len(names) > 1 else None
    single = call.operands[1].numel == 1
    return call.build([names, [None if single else channel]], [names])
