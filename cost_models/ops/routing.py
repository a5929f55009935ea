"""Products of rows with the matrix of their group, see `autopar.runtime.special.routing`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, expansion
from autopar.cost_models.ops.contraction import grouped_product
from autopar.cost_models.tape.basic import only
from autopar.cost_models.tape.tape import Tape
from autopar.cost_models.tape.tensors import Local
from autopar.graph.routing import GROUPED


@expansion(GROUPED)
def _grouped(call: OpCall) -> Sequence[Local]:
    """The rows here are sorted, multiplied and restored, unless the flags say they stay sorted."""
    rows, weight, ids = call.operands
    tape, groups = call.tape, weight.shape[0]
    repeat, arrives, stays = (call.number(place, "", 0) for place in (3, 5, 6))
    order, back, ends = _order(tape, ids, groups, sort=not arrives)
    if not arrives:
        rows = _moved(tape, rows, order, back, int(repeat))
    out = grouped_product(tape, rows, weight, (ends,), call.dtype)
    return (out if stays else _moved(tape, out, back, order, 1),)


def _order(tape: Tape, ids: Local, groups: int, *, sort: bool) -> tuple[Local, Local, Local]:
    """Order, inverse and ends of groups; known from the product before this one if not `sort`."""
    whole = (ids.shape, "int64")
    if not sort:
        order, back, ends = (Local(*spec, ids.memory) for spec in (whole, whole, whole))
        return order, back, ends
    compared = ids.numel * max(1, math.ceil(math.log2(max(ids.numel, 2))))
    ordered, order = tape.emit_many(
        "sort", "reduction", (ids,), ((ids.shape, ids.dtype), whole), flops=compared
    )
    back = tape.emit("scatter", "embedding", (order,), *whole)
    ends = tape.emit("searchsorted", "reduction", (ordered,), (groups,), "int32")
    tape.last().read_bytes = groups * ids.itemsize  # of sorted ids a few are looked at
    return order, back, ends


def _moved(tape: Tape, rows: Local, order: Local, back: Local, repeat: int) -> Local:
    """Rows by an order, each `repeat` times; their gradient by the inverse."""

    def gathered(source: Local, places: Local) -> Local:
        shape = (places.shape[0], *source.shape[1:])
        out = tape.emit("index_select", "embedding", (source, places), shape, source.dtype)
        tape.last().read_bytes = out.memory.size_bytes + places.traffic_bytes
        return out

    out = gathered(rows, order)

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        found = gathered(only(grads), back)
        if repeat > 1:
            found = tape.emit(
                "sum", "reduction", (found,), rows.shape, found.dtype, flops=found.numel
            )
        return (found,)

    tape.record((out,), (rows,), backward)
    return out
