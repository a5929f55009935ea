"""Look-ups by index, and writes to places given by index."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, expansion
from autopar.cost_models.tape.basic import apply, only
from autopar.cost_models.tape.tensors import Local

_LOCALISE = 16


@expansion("embedding")
def _embedding(call: OpCall) -> Sequence[Local]:
    weight, index = call.operands
    tape = call.tape
    owned = None
    if call.is_split("v"):
        # Rows held here; see `autopar.runtime.special.embedding`.
        for _ in range(_LOCALISE):
            index = tape.pointwise("localize", (index,), index.dtype)
        owned = tape.pointwise("bitwise_and", (index,), "bool")
    out = look_up(call, weight, (index,), (*index.shape, weight.shape[-1]))
    if owned is not None:
        mask = Local((*owned.shape, 1), "bool", owned.memory)
        out = apply(tape, "where", (mask, out), out.dtype, {1: "g0"})
    return (out,)


def look_up(call: OpCall, source: Local, indices: Sequence[Local], shape: tuple[int, ...]) -> Local:
    """Rows of `source`; their gradient fills a whole tensor, for which indices are kept."""
    tape = call.tape
    out = tape.emit(call.base, "embedding", (source, *indices), shape, source.dtype)
    step = tape.last()
    # Only the rows are read.
    step.read_bytes = out.memory.size_bytes + sum(x.traffic_bytes for x in indices)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        made = tape.emit(
            call.base + "_backward", "embedding", (grad, *indices), source.shape, grad.dtype,
            flops=grad.numel,
        )  # fmt: skip
        # Rows are added where they belong: read and written again.
        tape.last().read_bytes += grad.traffic_bytes
        return (made,)

    tape.record((out,), (source,), backward)
    return out


@expansion("index gather take_along_dim index_select take")
def _index(call: OpCall) -> Sequence[Local]:
    source, *indices = call.operands
    out = look_up(call, source, indices, call.shape)
    out.dtype = call.dtype
    return (out,)


_WRITES = """
scatter scatter_reduce scatter_add index_add index_copy index_fill index_reduce index_put
_unsafe_index_put
"""


@expansion(_WRITES)
def _write(call: OpCall) -> Sequence[Local]:
    """A copy of a tensor with places overwritten, or added to."""
    tape, operands = call.tape, call.operands
    source, *others = operands
    indices = [x for x in others if not x.is_floating]
    out = tape.emit(call.base, "embedding", operands, call.shape, call.dtype)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        given: list[Local | None] = []
        for operand in operands:
            if not operand.trains:
                given.append(None)
            elif operand is source and "add" in call.base:
                given.append(grad)
            else:
                given.append(
                    tape.emit(
                        call.base + "_backward",
                        "embedding",
                        (grad, *indices),
                        operand.shape,
                        grad.dtype,
                    )
                )
        return given

    tape.record((out,), operands, backward)
    return (out,)


@expansion("embedding_bag _embedding_bag")
def _embedding_bag(call: OpCall) -> Sequence[Local]:
    """Sums of rows; keeps indices, offsets and what the kernel notes."""
    weight, *indices = call.operands
    tape = call.tape
    made = tape.emit_many(call.base, "embedding", call.operands, call.outputs)
    tape.last().read_bytes = sum(x.traffic_bytes for x in (*indices, *made))

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        grad = only(grads)
        out = tape.emit(
            call.base + "_backward", "embedding", (grad, *indices, *made[1:]), weight.shape,
            grad.dtype,
        )  # fmt: skip
        return [out, *[None] * len(indices)]

    tape.record(made, call.operands, backward)
    return made
