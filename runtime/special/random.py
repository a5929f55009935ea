"""Random ops as functions of (seed, op, global element index).

Every element's number depends on nothing else, so that any sharding, and any recomputation, draws
the same. The generator is the two-round integer hash of https://github.com/skeeto/hash-prospector
(multipliers 0x21f0aaad and 0x735a2d97, which keep 32-bit products defined), in wrapping int32
arithmetic: the same bits on CPU and CUDA.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from autopar.graph.ir import Ref, Token
from autopar.runtime.special.base import SpecialCall, special

_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32."""
    return (value >> bits) & ((1 << (32 - bits)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 16)) * _FIRST
    value = (value ^ _shift(value, 15)) * _SECOND
    return value ^ _shift(value, 15)


def _wrap(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + 2**31) % 2**32 - 2**31


def _mix_number(value: int) -> int:
    """`_mix` of a number that is known beforehand: nothing to trace."""
    value %= 2**32
    value = (value ^ (value >> 16)) * _FIRST % 2**32
    value = (value ^ (value >> 15)) * _SECOND % 2**32
    return _wrap(value ^ (value >> 15))


def _halves(value: int | Tensor, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
    """Low and high 32 bits as int32."""
    if not isinstance(value, Tensor):
        return _wrap(value), _wrap(value >> 32)
    whole = value.to(device, torch.int64)
    low, high = (whole << 32) >> 32, whole >> 32
    return low.to(torch.int32), high.to(torch.int32)


def _salt(key: int, seed: int | Tensor, device: torch.device) -> int | Tensor:
    low, high = _wrap(key), _wrap(key >> 32)
    mixed = _mix_number(_mix_number(low) + high)
    seed_low, seed_high = _halves(seed, device)
    if isinstance(seed_low, Tensor):
        return _mix(_mix(seed_low + mixed) + seed_high)
    assert isinstance(seed_high, int)
    return _mix_number(_mix_number(mixed + seed_low) + seed_high)


def uniform(index: Tensor, key: int, seed: int | Tensor) -> Tensor:
    """Numbers in [0, 1), multiples of 2**-24, float32.

    Args:
        index: Global element indices, int32 or int64, not negative.
        key: Which stream, a 64-bit signed integer.
        seed: Changes every step, a number or a 0-dim int64 tensor.
    """
    salt = _salt(key, seed, index.device)
    if index.dtype == torch.int64:
        low, high = ((index << 32) >> 32).to(torch.int32), (index >> 32).to(torch.int32)
        mixed = _mix(_mix(high ^ salt) ^ low)
    else:
        start = _mix(salt) if isinstance(salt, Tensor) else _mix_number(salt)
        mixed = _mix(index ^ start)
    bits = _shift(_mix(mixed + salt), 8)
    return bits.to(torch.float32) * 2.0**-24


def key_of(name: str, stream: int = 0) -> int:
    """A 64-bit signed key from the name of a call; `stream` numbers further draws of it."""
    digest = hashlib.blake2b(f"{name}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniform_of(call: SpecialCall, index: Tensor, stream: int = 0) -> Tensor:
    """Numbers in [0, 1) for elements of the tensor a call makes."""
    return uniform(index, key_of(call.node.name, stream), call.seed())


def _draw(call: SpecialCall, device: torch.device, stream: int = 0) -> Tensor:
    return uniform_of(call, call.global_index(0, device), stream)


def _normal(call: SpecialCall, device: torch.device) -> Tensor:
    """Standard normal numbers, float32 (Box and Muller, 1958)."""
    radius = (-2 * torch.log1p(-_draw(call, device))).sqrt()
    return radius * torch.cos(2 * math.pi * _draw(call, device, 1))


def _dtype(call: SpecialCall) -> torch.dtype:
    found = getattr(torch, call.outputs[0].dtype)
    assert isinstance(found, torch.dtype)
    return found


@special("dropout native_dropout")
def dropout(call: SpecialCall, source: Tensor) -> Tensor | tuple[Tensor, Tensor]:
    """Zero an element with probability p, scale the others by 1 / (1 - p)."""
    p = call.number(1, "p", 0.5)
    keep = _draw(call, source.device) >= p
    result = (source * (1 / (1 - p) if p < 1 else 0.0)).where(keep, 0)
    return result if len(call.outputs) == 1 else (result, keep)


@special("feature_dropout")
def feature_dropout(call: SpecialCall, source: Tensor) -> Tensor:
    """Dropout of whole channels (dims 0 and 1)."""
    p = call.number(1, "p", 0.5)
    keep = uniform_of(call, call.global_index(0, source.device, dims=2)) >= p
    return (source * (1 / (1 - p) if p < 1 else 0.0)).where(keep, 0)


_ALPHA = 1.7580993408473766  # scale * alpha of SELU: Klambauer et al., arXiv:1706.02515


@special("alpha_dropout feature_alpha_dropout")
def alpha_dropout(call: SpecialCall, source: Tensor) -> Tensor:
    """Dropout to SELU's negative saturation, keeping mean and variance."""
    p = call.number(1, "p", 0.5)
    dims = 2 if "feature" in call.node.op else None
    keep = uniform_of(call, call.global_index(0, source.device, dims)) >= p
    a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p)) if p < 1 else 0.0
    kept, lost = source * a + _ALPHA * a * p, _ALPHA * a * (p - 1)
    return kept.where(keep, lost) if p < 1 else source * 0


@special("bernoulli bernoulli.p bernoulli.Tensor")
def bernoulli(call: SpecialCall, source: Tensor, chance: Tensor | None = None) -> Tensor:
    """1 with the given probability, else 0."""
    p = call.number(1, "p", 0.5) if call.node.op == "aten.bernoulli.p" else source
    return (_draw(call, source.device) < (p if chance is None else chance)).to(_dtype(call))


@special("rand_like uniform rand randn_like randn exponential normal_functional")
def numbers(call: SpecialCall, source: Tensor | None = None) -> Tensor:
    """Uniform, normal or exponential numbers shaped like the output."""
    device = _device(call) if source is None else source.device
    kind = call.node.op.split(".")[1]
    if kind.startswith("randn"):
        return _normal(call, device).to(_dtype(call))
    if kind == "normal_functional":
        mean, deviation = call.number(1, "mean", 0.0), call.number(2, "std", 1.0)
        return (_normal(call, device) * deviation + mean).to(_dtype(call))
    drawn = _draw(call, device)
    if kind == "exponential":
        return (-torch.log1p(-drawn) / call.number(1, "lambd", 1.0)).to(_dtype(call))
    if kind == "uniform":
        low, high = call.number(1, "from", 0.0), call.number(2, "to", 1.0)
        return (drawn * (high - low) + low).to(_dtype(call))
    return drawn.to(_dtype(call))


@special("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor")
def normal(call: SpecialCall, *operands: Tensor) -> Tensor:
    """Normal numbers with a mean and a deviation per element."""
    tensors = iter(operands)
    mean, deviation = (
        next(tensors) if isinstance(call.arg(i, name), Ref) else call.number(i, name, default)
        for i, (name, default) in enumerate((("mean", 0.0), ("std", 1.0)))
    )
    drawn = _normal(call, operands[0].device).to(_dtype(call))
    return drawn * deviation + mean


@special("randint_like randint_like.low_dtype randint randint.low")
def integers(call: SpecialCall, source: Tensor | None = None) -> Tensor:
    """Integers in [low, high)."""
    device = _device(call) if source is None else source.device
    first = 0 if source is None else 1
    two = call.node.op.endswith(("low", "low_dtype"))
    low = int(call.number(first, "low", 0)) if two else 0
    high = int(call.number(first + two, "high", 1))
    return (low + (_draw(call, device).double() * (high - low)).floor()).to(_dtype(call))


@special("rrelu")
def rrelu(call: SpecialCall, source: Tensor) -> Tensor:
    """Leaky relu with a random slope per element while training."""
    low, high = call.number(1, "lower", 1 / 8), call.number(2, "upper", 1 / 3)
    if call.arg(3, "training", False):
        slope = (_draw(call, source.device) * (high - low) + low).to(source.dtype)
    else:
        slope = torch.full_like(source, (low + high) / 2)
    return source.where(source >= 0, source * slope)


@special("randperm")
def randperm(call: SpecialCall) -> Tensor:
    """The order of uniform numbers."""
    return _draw(call, _device(call)).argsort(stable=True).to(_dtype(call))


def _device(call: SpecialCall) -> torch.device:
    token = dict(call.node.kwargs).get("device")
    return torch.device(token.text if isinstance(token, Token) else "cpu")
