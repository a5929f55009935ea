"""Recurrent layers: only the batch is split, never time or gates."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten


@family(aten("lstm.input gru.input rnn_tanh.input rnn_relu.input"))
def _recurrent(call: Call) -> OpRule | None:
    """``b t i`` (or ``t b i``) with states ``layers b h``."""
    dropout, layers = call.arg(5, "dropout", 0.0), call.int_arg(4, "num_layers", 1)
    if call.arg(6, "train", False) and dropout != 0 and layers > 1:
        return None  # draws masks between the layers
    batch_first = bool(call.arg(8, "batch_first", False))

    def sequence(ndim: int) -> list[Entry]:
        if ndim < 3:
            return [None] * ndim
        return ["b", None, None] if batch_first else [None, "b", None]

    def state(ndim: int) -> list[Entry]:
        return [None, "b", None] if ndim == 3 else [None] * ndim

    operands = {0: sequence(call.operands[0].ndim)}
    for slot in call.slots(1, "hx"):
        assert slot is not None
        operands[slot] = state(call.operands[slot].ndim)
    outputs = [sequence(call.outputs[0].ndim)]
    outputs += [state(spec.ndim) for spec in call.outputs[1:]]
    return call.build(operands, outputs, hints={"b": ("batch", 4)})


@family(aten("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"))
def _cell(call: Call) -> OpRule:
    """One step: ``b i`` with states ``b h``."""
    states = [slot for slot in call.slots(1, "hx") if slot is not None]
    row: list[Entry] = ["b", None]
    rows = {slot: row[2 - call.operands[slot].ndim :] for slot in (0, *states)}
    return call.build(rows, [["b", None] for _ in call.outputs], hints={"b": ("batch", 4)})
