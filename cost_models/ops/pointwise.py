"""Ops that work element by element. Gradients: torch's ``tools/autograd/derivatives.yaml``."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, expansion
from autopar.cost_models.tape.basic import Derivative, apply, contiguous, detach, only
from autopar.cost_models.tape.tensors import Local

# What backward reads, by the text of its ops (see `Derivative`).
_UNARY = {
    "g": "neg negative deg2rad rad2deg",
    "g0": "gelu silu softplus elu celu selu hardtanh hardswish hardsigmoid mish "
    "leaky_relu threshold softshrink hardshrink relu6 log logit",
    "go": "relu tanh sigmoid special_expit exp",
    "go _": "exp2 special_exp2",
    "0 g_": "abs sin sinh cosh log1p log2 log10 special_log1p nan_to_num digamma lgamma i0 "
    "special_digamma special_gammaln special_i0 polygamma clamp_min clamp_max",
    "0 _ g_": "cos square sinc special_sinc acos acosh arccos arccosh arcsin arcsinh arctan "
    "arctanh asin asinh atan atanh special_entr",
    "0 0 a_ g_": "clamp clip",
    "o g_": "sqrt expm1 special_expm1",
    "o _ g_": "tan",
    "o g a_": "rsqrt",
    "g o a_": "reciprocal",
    "0 _ _ _ g_": "erf erfc erfinv special_erf special_erfc special_erfinv special_ndtr "
    "special_ndtri angle",
    "0 a g_": "sgn",
    "": "frac positive",
}
_ZERO = """
ceil floor round round.decimals sign trunc fix heaviside nextafter floor_divide
floor_divide.Scalar bitwise_not isfinite isinf isnan isneginf isposinf logical_not signbit
eq ne lt le gt ge bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift
logical_and logical_or logical_xor isclose gcd lcm __and__ __or__ __xor__
"""
_BINARY: dict[str, Derivative] = {
    "add subtract_scalar": {0: "", 1: ""},
    "sub subtract": {1: "g", 0: ""},
    "rsub": {1: "", 0: "g"},
    "mul multiply": {1: "g0", 0: "g1"},
    "div.Tensor divide.Tensor true_divide.Tensor": {1: "g 01 _1 a_", 0: "g1"},
    "mul.Scalar div.Scalar true_divide.Scalar ldexp": {0: "g"},
    "div.Tensor_mode div.Scalar_mode": {},
    "pow.Tensor_Scalar float_power.Tensor_Scalar": {0: "0 _ g_"},
    "pow.Scalar float_power.Scalar": {0: "0o g_"},
    "pow.Tensor_Tensor float_power.Tensor_Tensor": {1: "0 o_ g_", 0: "1 0_ 1_ g_"},
    "atan2 arctan2": {1: "01 0_ g_", 0: "01 1_ g_"},
    "hypot": {1: "1o g_", 0: "0o g_"},
    "maximum minimum max.other min.other fmax fmin": {1: "01 g_", 0: "01 g_"},
    "clamp.Tensor clamp_min.Tensor clamp_max.Tensor clip.Tensor": {
        0: "01 g_",
        1: "01 g_",
        2: "02 g_",
    },
    "logaddexp logaddexp2": {1: "01 _ g_", 0: "01 _ g_"},
    "fmod remainder": {0: "", 1: "01 g_"},
    "copysign": {0: "0o g_"},
    "xlogy special_xlogy special_xlog1py": {0: "1 g_", 1: "01 g_"},
    "where": {2: "g0", 1: "g0"},
    "masked_fill": {0: "g1", 2: "g1"},
    "lerp.Scalar": {1: "g", 0: "g"},
    "lerp.Tensor": {1: "g2", 0: "2 g_", 2: "01 g_"},
    "addcmul": {0: "", 1: "g2", 2: "g1"},
    "addcdiv": {0: "", 1: "g2", 2: "12 g_"},
    "prelu": {0: "g01", 1: "g0"},
}

_DERIVATIVES: dict[str, Derivative] = {}
for _text, _names in _UNARY.items():
    _DERIVATIVES |= {name: {0: _text} for name in _names.split()}
_DERIVATIVES |= {name: {} for name in _ZERO.split()}
for _names, _rule in _BINARY.items():
    _DERIVATIVES |= dict.fromkeys(_names.split(), _rule)


def _derivative(call: OpCall) -> Derivative:
    _, name, overload = call.node.op.split(".", 2)
    found = _DERIVATIVES.get(f"{name}.{overload}")
    if found is None:
        found = _DERIVATIVES[name]
    if len(call.operands) == 1 and name in ("mul", "multiply", "div", "divide", "true_divide"):
        return {0: "g"}
    if name == "where" and overload != "self":
        # One branch is a number.
        return {1: "g0"} if len(call.operands) == 2 else {}
    if len(call.operands) == 1 and 0 in found:  # the other operand, if any, is a number
        return {0: "0 g_" if "1" in found[0] else found[0]}
    return found


@expansion(_DERIVATIVES)
def pointwise(call: OpCall) -> Sequence[Local]:
    """One pass over the operands."""
    out = apply(
        call.tape, call.base, call.operands, call.dtype, _derivative(call), shape=call.shape
    )
    return (out,)


@expansion("to _to_copy type_as prims.convert_element_type.default")
def _cast(call: OpCall) -> Sequence[Local]:
    source = call.operands[0]
    if source.dtype == call.dtype:
        return (source,)
    return (apply(call.tape, "_to_copy", (source,), call.dtype, {0: ""}),)


@expansion("detach")
def _detach(call: OpCall) -> Sequence[Local]:
    return (detach(call.operands[0]),)


@expansion("alias lift_fresh real")
def _alias(call: OpCall) -> Sequence[Local]:
    return (call.operands[0],)


@expansion("contiguous")
def _contiguous(call: OpCall) -> Sequence[Local]:
    return (contiguous(call.tape, call.operands[0]),)


@expansion("clone")
def _clone(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    return (apply(call.tape, "clone", (source,), source.dtype, {0: ""}, kind="copy"),)


@expansion("copy fill")
def _copy(call: OpCall) -> Sequence[Local]:
    """Overwrites the first operand, which is not read."""
    given = call.operands[1:]
    return (apply(call.tape, "copy", given, call.dtype, {0: ""}, shape=call.shape, kind="copy"),)


_CREATIONS = """
full zeros ones empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like
empty_like arange linspace logspace eye tril_indices triu_indices scalar_tensor hann_window
hamming_window blackman_window bartlett_window
"""


@expansion(_CREATIONS)
def _create(call: OpCall) -> Sequence[Local]:
    """Made of no tensor."""
    shape, dtype = call.outputs[0]
    return (call.tape.emit(call.base, "elementwise", (), shape, dtype),)


@expansion("glu")
def _glu(call: OpCall) -> Sequence[Local]:
    """Half of a dim times the sigmoid of the other half."""
    (source,) = call.operands
    tape = call.tape
    out = tape.emit("glu", "elementwise", (source,), call.shape, call.dtype)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (tape.emit("glu_backward", "elementwise", (grad, source), source.shape, grad.dtype),)

    tape.record((out,), (source,), backward)
    return (out,)


@expansion("log_sigmoid")
def _log_sigmoid(call: OpCall) -> Sequence[Local]:
    """Keeps its input, on a CPU the exponential as well."""
    (source,) = call.operands
    tape = call.tape
    results = [(source.shape, source.dtype)]
    if tape.implementation.device == "cpu":
        results.append((source.shape, source.dtype))
    out, *buffer = tape.emit_many(
        "log_sigmoid", "elementwise", (source,), results, names=("value", "exponential"),
        flops=source.numel,
    )  # fmt: skip

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        return (tape.pointwise("log_sigmoid_backward", (grad, source, *buffer), grad.dtype),)

    tape.record((out,), (source,), backward)
    return (out,)
