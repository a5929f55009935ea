"""Recurrent layers, roughly: the products of all steps, and what a step keeps."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost_models.ops.call import OpCall, expansion
from autopar.cost_models.tape.tensors import Local
from autopar.cost_models.work import Matmul

_LAYERS = "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"


@expansion(_LAYERS)
def _recurrent(call: OpCall) -> Sequence[Local]:
    """Every matrix is multiplied with every row of every step; gates of all steps are kept."""
    tape, operands = call.tape, call.operands
    source = operands[0]
    rows = source.numel // source.shape[-1]
    matrices = [x for x in operands if x.ndim == 2 and x.trains] or [
        x for x in operands[1:] if x.ndim == 2
    ]
    flops = 2 * rows * sum(x.numel for x in matrices)
    widest = max((x.shape[0] for x in matrices), default=source.shape[-1])
    results = [*call.outputs, ((rows, widest * max(1, len(matrices) // 2)), source.dtype)]
    names = (*("value" for _ in call.outputs), "gates")
    made = tape.emit_many(call.base, "matmul", operands, results, names=names, flops=flops)
    sizes = Matmul(batch=1, m=rows, n=widest, k=source.shape[-1])
    step = tape.last()
    step.detail, step.launches = sizes, rows * len(matrices) // max(1, source.shape[0])
    results_only, gates = made[:-1], made[-1]

    def backward(grads: list[Local | None]) -> Sequence[Local | None]:
        reads = [grad for grad in grads if grad is not None]
        wanted = [(x.shape, x.dtype) if x.trains else None for x in operands]
        given = iter(
            tape.emit_many(
                call.base + "_backward",
                "matmul",
                (*reads, *operands, *results_only, gates),
                wanted,
                flops=2 * flops,
                dtype=source.dtype,
            )
        )
        tape.last().detail = sizes
        return [next(given) if item is not None else None for item in wanted]

    tape.record(results_only, operands, backward)
    return results_only
