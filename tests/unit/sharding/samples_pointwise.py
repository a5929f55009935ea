"""Samples of pointwise ops, creation ops and random ops."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.runtime.comm import SoloCommunicator
from autopar.runtime.mesh import MeshContext
from autopar.runtime.microbatch import set_seed
from autopar.runtime.special import bind_special
from autopar.sharding.choices import REPLICATED, place_call
from autopar.sharding.mesh import Mesh
from autopar.sharding.rule import rule_for
from tests.unit.sharding.samples import Draw, Sample, as_tuple, sample

# fmt: off
UNARY = """
abs angle arccos arcsin arcsinh arctan arctanh acos asin asinh atan atanh ceil celu cos cosh
digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardshrink hardsigmoid hardswish
hardtanh i0 isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2
log_sigmoid logit mish nan_to_num neg negative positive deg2rad rad2deg detach clone contiguous
alias lift_fresh real reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin
sinc sinh softplus softshrink special_digamma special_entr special_erf special_erfc special_erfinv
special_exp2 special_expit special_expm1 special_gammaln special_i0 special_log1p special_ndtr
special_ndtri special_sinc sqrt square tan tanh trunc
"""
# In (0, 1), where they are defined; the others get values of both signs.
UNIT_INTERVAL = """
arccos arcsin arctanh acos asin atanh digamma erfinv lgamma log log10 log1p log2 logit reciprocal
rsqrt special_digamma special_entr special_erfinv special_gammaln special_log1p special_ndtri sqrt
"""
MADE_OF_BOTH_KINDS = ["isfinite", "isinf", "isnan", "isneginf", "isposinf", "nan_to_num"]
BINARY_REAL = """
arctan2 atan2 copysign.Tensor fmax fmin fmod.Tensor hypot logaddexp logaddexp2 max.other maximum
min.other minimum nextafter remainder.Tensor add.Tensor sub.Tensor mul.Tensor div.Tensor
rsub.Tensor subtract.Tensor multiply.Tensor divide.Tensor true_divide.Tensor floor_divide
heaviside
"""
BINARY_POSITIVE = """
pow.Tensor_Tensor xlogy.Tensor special_xlogy special_xlog1py float_power.Tensor_Tensor
ldexp.Tensor
"""
SCALAR_LAST = """
copysign.Scalar floor_divide.Scalar fmod.Scalar remainder.Scalar xlogy.Scalar_Other add.Scalar
sub.Scalar mul.Scalar div.Scalar rsub.Scalar pow.Tensor_Scalar float_power.Tensor_Scalar
true_divide.Scalar
"""
SCALAR_FIRST = ["pow.Scalar", "remainder.Scalar_Tensor", "xlogy.Scalar_Self", "float_power.Scalar"]
COMPARE = ["eq", "ne", "lt", "le", "gt", "ge"]
LOGICAL = ["logical_and", "logical_or", "logical_xor"]
INTEGER = """
bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor
bitwise_right_shift.Tensor __and__.Tensor __or__.Tensor __xor__.Tensor gcd lcm
"""
INTEGER_SCALAR = """
bitwise_and.Scalar bitwise_or.Scalar bitwise_xor.Scalar bitwise_left_shift.Tensor_Scalar
bitwise_right_shift.Tensor_Scalar __and__.Scalar __or__.Scalar __xor__.Scalar
"""
INTEGER_SCALAR_FIRST = """
bitwise_and.Scalar_Tensor bitwise_or.Scalar_Tensor bitwise_xor.Scalar_Tensor
bitwise_left_shift.Scalar_Tensor bitwise_right_shift.Scalar_Tensor
"""
# fmt: on


def unary() -> list[Sample]:
    found = []
    for op in UNARY.split():
        d = Draw(op)
        x = d.uniform(4, 3) if op in UNIT_INTERVAL.split() else d.normal(4, 3) * 2
        if op in MADE_OF_BOTH_KINDS:
            x = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]).double()[
                d.integers(4, 4, 3)
            ]
        found.append(sample(op, x))
    d = Draw("unary")
    x, two = d.normal(4, 3), d.normal(4, 3)
    n = d.integers(9, 4, 3)
    found += [sample(op, d.uniform(4, 3, low=1.1, high=3)) for op in ("acosh", "arccosh")]
    found += [sample("bitwise_not", n), sample("logical_not", d.boolean(4, 3))]
    found += [sample("clamp", x, -0.5, 0.5), sample("clip", x, -0.5, 0.5)]
    found += [sample("clamp_min", x, 0.1), sample("clamp_max", x, 0.1)]
    found += [sample("threshold", x, 0.1, 0.0), sample("round.decimals", x, decimals=1)]
    found += [
        sample("polygamma", 1, d.uniform(4, 3)),
        sample("isclose", n.double(), n.double().roll(1)),
    ]
    found += [sample(f"{op}.Tensor", x, two.min(two + 0.5), None) for op in ("clamp", "clip")]
    found += [sample("clamp_min.Tensor", x, two), sample("clamp_max.Tensor", x, two)]
    found += [
        sample("prelu", d.normal(4, 3), d.normal(3)),
        sample("prelu", d.normal(4, 3), d.normal(1)),
    ]
    found += [sample("prelu", d.normal(4) - 1, d.normal(1))]
    return found


def binary() -> list[Sample]:
    found = []
    for op in BINARY_REAL.split():
        d = Draw(op)
        found.append(sample(op, d.normal(4, 3), d.normal(4, 3)))
        found.append(sample(op, d.normal(2, 4, 3), d.normal(4, 1)))
    for op in BINARY_POSITIVE.split():
        d = Draw(op)
        found.append(sample(op, d.uniform(4, 3), d.uniform(3)))
    for op in SCALAR_LAST.split():
        found.append(sample(op, Draw(op).uniform(4, 3, high=9), 2.0))
    for op in SCALAR_FIRST:
        found.append(sample(op, 2.0, Draw(op).uniform(4, 3)))
    for op in COMPARE:
        d = Draw(op)
        found.append(sample(f"{op}.Tensor", d.integers(3, 4, 3), d.integers(3, 3)))
        found.append(sample(f"{op}.Scalar", d.integers(3, 4, 3), 1))
    for op in LOGICAL:
        d = Draw(op)
        found.append(sample(op, d.boolean(4, 3), d.boolean(4, 3)))
    for op in INTEGER.split():
        d = Draw(op)
        found.append(sample(op, d.integers(9, 4, 3) + 1, d.integers(9, 4, 3) + 1))
    for op in INTEGER_SCALAR.split():
        found.append(sample(op, Draw(op).integers(9, 4, 3), 3))
    for op in INTEGER_SCALAR_FIRST.split():
        found.append(sample(op, 3, Draw(op).integers(9, 4, 3)))
    d = Draw("binary")
    x, y = d.normal(4, 3), d.normal(4, 3)
    found += [
        sample("add.Tensor", x, 1.5),
        sample("mul.Tensor", x, 1.5),
        sample("div.Tensor", x, 2),
    ]
    found += [sample("add.Tensor", x, y, alpha=2), sample("rsub.Tensor", x, y, alpha=3)]
    found += [sample("div.Tensor_mode", x, y, rounding_mode="floor")]
    found += [sample("div.Tensor_mode", x, y, rounding_mode=None)]
    found += [sample("div.Scalar_mode", x, 0.3, rounding_mode="trunc")]
    found += [
        sample("mul.Tensor", x, d.normal()),
        sample("add.Tensor", d.normal(1, 3), d.normal(4, 1)),
    ]
    return found


def ternary() -> list[Sample]:
    d = Draw("ternary")
    x, y, m = d.normal(4, 3), d.normal(4, 3), d.boolean(4, 3)
    found = [sample("where.self", m, x, y), sample("where.self", d.boolean(4, 1), x, d.normal())]
    found += [sample("where.ScalarOther", m, x, v) for v in (0, 0.0, -1.0)]
    found += [sample("where.ScalarSelf", m, v, x) for v in (0, 2.0)]
    found += [sample("where.Scalar", m, 1.0, 0.0)]
    found += [sample("masked_fill.Scalar", x, d.boolean(3), v) for v in (0, -5.0)]
    found += [sample("masked_fill.Tensor", x, m, d.normal())]
    found += [sample("lerp.Scalar", x, y, 0.3), sample("lerp.Tensor", x, y, d.uniform(4, 3))]
    found += [sample("addcmul", x, y, d.normal(3), value=0.5)]
    found += [sample("addcdiv", x, y, d.uniform(4, 3))]
    found += [
        sample("copy", x, y),
        sample("fill.Scalar", x, 2.0),
        sample("fill.Tensor", x, d.normal()),
    ]
    n = d.integers(9, 4, 3)
    f32 = torch.float32
    found += [sample("to.dtype", x, f32), sample("to.dtype", x * 5, torch.int64)]
    found += [sample("to.dtype", n, torch.float64), sample("to.dtype", m, torch.float64)]
    found += [sample("to.dtype", n, torch.int32), sample("to.dtype", n, torch.bool)]
    found += [sample("to.dtype_layout", x, dtype=f32), sample("_to_copy", x, dtype=f32)]
    found += [sample("to.device", x, torch.device("cpu"), f32), sample("to.other", x, y.float())]
    found += [
        sample("to.prim_Device", x, torch.device("cpu"), f32),
        sample("type_as", x, y.float()),
    ]
    found += [sample("prims.convert_element_type.default", x, f32)]
    found += [sample(f"{kind}_like", x) for kind in ("zeros", "ones")]
    found += [sample("full_like", x, 2.0)]
    return found


def creation() -> list[Sample]:
    d = Draw("creation")
    x = d.normal(2)
    found = [sample("full", [4, 3], 2.0, dtype=torch.float64), sample("full", [], 1.0)]
    found += [sample("zeros", [4, 3]), sample("ones", [4, 3])]
    found += [sample("new_zeros", x, [4, 3]), sample("new_ones", x, [4, 3])]
    found += [sample("new_full", x, [4, 3], 2.0)]
    found += [
        sample("arange", 5),
        sample("arange.start", 1, 5),
        sample("arange.start_step", 1, 9, 2),
    ]
    found += [sample("linspace", 0, 1, 5), sample("logspace", 0, 1, 5), sample("eye", 4)]
    found += [sample("eye.m", 4, 3), sample("tril_indices", 4, 3), sample("triu_indices", 4, 3)]
    found += [sample("scalar_tensor", 2.0)]
    found += [sample(f"{kind}_window", 6) for kind in ("hann", "hamming", "blackman", "bartlett")]
    return found


def keyed(case: Sample) -> Sample:
    """The sample with what the keyed generator draws on one rank as its truth."""
    rule = rule_for(case.node, case.spec)
    assert rule is not None and rule.special
    choices = (REPLICATED,)
    context = MeshContext.create(Mesh((("a", 1),)), SoloCommunicator())
    call = place_call(case.node, rule, choices)
    function = bind_special(case.node, rule, choices, call, case.spec, context)

    def reference(*operands: torch.Tensor) -> object:
        set_seed(7)
        return function(*operands)

    outputs = tuple(t.detach() for t in as_tuple(reference(*case.operands)))
    return replace(case, outputs=outputs, reference=reference)


def random() -> list[Sample]:
    d = Draw("random")
    x, u = d.normal(4, 3, 2), d.uniform(4, 3)
    f64 = torch.float64
    cases = [sample(op, x, 0.4, True) for op in ("dropout", "feature_dropout", "native_dropout")]
    cases += [sample(op, x, 0.4, True) for op in ("alpha_dropout", "feature_alpha_dropout")]
    cases += [
        sample("bernoulli", u),
        sample("bernoulli.p", u, 0.3),
        sample("bernoulli.Tensor", u, u),
    ]
    cases += [sample(op, u) for op in ("rand_like", "randn_like", "exponential", "uniform")]
    cases += [sample("normal_functional", u, 1.0, 2.0), sample("randint_like", u, 9)]
    cases += [sample("randint_like.low_dtype", u, 2, 9), sample("rrelu", u - 0.5, 0.1, 0.4, True)]
    cases += [sample("rand", [4, 3], dtype=f64), sample("randn", [4, 3], dtype=f64)]
    cases += [sample("randint", 9, [4, 3]), sample("randint.low", 2, 9, [4, 3])]
    cases += [sample("normal.Tensor_Tensor", u, u), sample("normal.Tensor_float", u, 2.0)]
    cases += [sample("normal.float_Tensor", 1.0, u), sample("randperm", 7)]
    return [*map(keyed, cases), sample("dropout", x, 0.4, False)]
