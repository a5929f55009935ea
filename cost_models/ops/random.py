"""Random ops: by position, as `autopar.runtime.special.random` has them, or in one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, expansion
from autopar.cost_models.tape.basic import apply
from autopar.cost_models.tape.tape import Tape
from autopar.cost_models.tape.tensors import Local, Shape

_HASH = 28
"""Pointwise ops on 32-bit integers per number: two rounds of three mixes."""


def drawn(tape: Tape, shape: Shape) -> Local:
    """Uniform numbers, float32."""
    if tape.implementation.dropout == "native":
        out = tape.emit("uniform", "random", (), shape, "float32")
        tape.last().random = True
        return out
    index = tape.emit("global_index", "random", (), shape, "int32")
    # The middle of the hash: value, its shift, and their exclusive or.
    for _ in range(_HASH // 2):
        shifted = tape.pointwise("shift", (index,), "int32", kind="random")
        index = tape.pointwise("bitwise_xor", (index, shifted), "int32", kind="random")
    bits = tape.pointwise("_to_copy", (index,), "float32", kind="random")
    return tape.pointwise("mul", (bits,), "float32", kind="random")


def keep_mask(tape: Tape, shape: Shape, call: OpCall) -> Local:
    """Which elements a dropout keeps."""
    if tape.implementation.dropout == "native":
        out = tape.emit("dropout_mask", "random", (), shape, "uint8")
        step = tape.last()
        step.random, step.launches = True, 0
        step.write_bytes = out.memory.size_bytes = (
            out.numel * tape.implementation.dropout_mask_bytes
        )
        out.memory.what = "mask"
        return out
    out = tape.pointwise("ge", (drawn(tape, shape),), "bool", kind="random")
    out.memory.what = "mask"
    return out


def where_kept(tape: Tape, source: Local, keep: Local, op: str = "native_dropout") -> Local:
    """`source` with zeros where it is not kept, by a kernel called `op` where one does it."""
    if tape.implementation.dropout != "native":
        return apply(tape, "where", (keep, source), source.dtype, {1: "g0"})
    return apply(tape, op, (keep, source), source.dtype, {1: "g0"}, kind="elementwise")


@expansion("dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout")
def _dropout(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    tape = call.tape
    active = bool(call.arg(2, "train", True)) and call.number(1, "p", 0.5) > 0
    if not active:
        return (source,)
    shape = source.shape
    if "feature" in call.base:
        shape = (*shape[:2], *(1,) * (len(shape) - 2))
    keep = keep_mask(tape, shape, call)
    if tape.implementation.dropout != "native":
        source = apply(tape, "mul", (source,), source.dtype, {0: "g"})
        if "alpha" in call.base:
            source = apply(tape, "add", (source,), source.dtype, {0: ""})
    out = where_kept(tape, source, keep)
    return (out,) if len(call.outputs) == 1 else (out, keep)


_LIKE = """
bernoulli rand_like randn_like randint_like uniform exponential normal_functional normal rand
randn randint randperm
"""


@expansion(_LIKE)
def _numbers(call: OpCall) -> Sequence[Local]:
    """Numbers of the shape of the output; what parameters they have is read."""
    tape = call.tape
    found = drawn(tape, call.shape)
    reads = [found, *(x for x in call.operands if call.base in ("normal", "bernoulli"))]
    return (tape.pointwise(call.base, reads, call.dtype, shape=call.shape, kind="random"),)


@expansion("rrelu")
def _rrelu(call: OpCall) -> Sequence[Local]:
    (source,) = call.operands
    tape = call.tape
    slope = drawn(tape, source.shape)
    scaled = apply(tape, "mul", (source, slope), source.dtype, {0: "g1"})
    positive = tape.pointwise("ge", (source,), "bool")
    operands = (positive, source, scaled)
    return (apply(tape, "where", operands, source.dtype, {2: "g0", 1: "g0"}),)
