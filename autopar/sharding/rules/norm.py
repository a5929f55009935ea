"""Normalisations. Statistics over split letters are combined by the special lowering."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten


def _affine(weight: int | None, bias: int | None) -> list[set[int]]:
    """Normalised input * weight + bias is linear in both together, given a weight."""
    return [] if weight is None else [{weight} | ({bias} if bias is not None else set())]


@family(aten("layer_norm native_layer_norm rms_norm _fused_rms_norm"))
def _layer_norm(call: Call) -> OpRule:
    """Leading dims pass; the normalised ones need sums over the ranks."""
    ndim = call.operands[0].ndim
    shape = call.arg(1, "normalized_shape")
    count = len(shape) if isinstance(shape, tuple) else 1
    names = [f"d{d}" + ("~=" if d >= ndim - count else "") for d in range(ndim)]
    weight, bias = call.slot(2, "weight"), call.slot(3, "bias")
    operands: dict[int, list[Entry]] = {0: list(names)}
    for slot in (weight, bias):
        if slot is not None:
            operands[slot] = list(names[ndim - count :])
    outputs: list[list[Entry]] = [
        [n if spec.shape[d] != 1 else None for d, n in enumerate(names)] for spec in call.outputs
    ]
    linear = _affine(weight, bias) if len(call.outputs) == 1 else []
    hints = {f"d{d}": ("hidden", 1) for d in range(ndim - count, ndim)}
    return call.build(operands, outputs, linear=linear, hints=hints)


@family(aten("group_norm"))
def _group_norm(call: Call) -> OpRule:
    """Channels are ``(g c)`` with g groups."""
    groups = call.int_arg(1, "num_groups", 1)
    shape = call.operands[0].shape
    weight, bias = call.slot(2, "weight"), call.slot(3, "bias")
    channels: Entry = ("g~", "c~")
    full: list[Entry] = ["n", channels, *(f"s{d}~" for d in range(len(shape) - 2))]
    operands: dict[int, list[Entry]] = {0: full}
    for slot in (weight, bias):
        if slot is not None:
            operands[slot] = [channels]
    return call.build(
        operands,
        [full],
        sizes={"g": groups, "c": shape[1] // groups},
        linear=_affine(weight, bias),
        hints={"n": ("batch", 2), "g": ("groups", 1), "c": ("channels", 2)},
    )


@family(aten("_native_batch_norm_legit_functional batch_norm instance_norm"))
def _batch_norm(call: Call) -> OpRule | None:
    """Statistics over the global batch; running statistics stay replicated.

    The functional form gives the saved and the new running statistics as further results; tracing
    writes every batch norm that trains in this form.
    """
    names = ("input", "weight", "bias", "running_mean", "running_var")
    slots = [call.slot(i, name) for i, name in enumerate(names)]
    ndim = call.operands[0].ndim
    instance = call.node.op == "aten.instance_norm.default"
    functional = call.node.op == "aten._native_batch_norm_legit_functional.default"
    training = bool(call.arg(5, "training", False))
    if functional != (training and slots[3] is not None):
        return None  # in place, or with empty statistics
    flags = "~=" if training else ""
    full: list[Entry] = ["n" if instance else f"n{flags}", "c"]
    full = [*full, *(f"s{d}{flags}" for d in range(ndim - 2))]
    operands: dict[int, list[Entry]] = {0: full}
    channels: list[Entry] = ["c"]
    operands.update({slot: channels for slot in slots[1:] if slot is not None})
    outputs = [full, *(channels for _ in call.outputs[1:])]
    linear = []
    if not functional:  # else the statistics are results too
        linear = _affine(slots[1], slots[2])
        if not training and not instance:
            linear.append({0, *(slot for slot in slots[2:4] if slot is not None)})
    hints = {"n": ("batch", 3), "c": ("channels", 2)}
    return call.build(operands, outputs, linear=linear, hints=hints)


@family(aten("_weight_norm"))
def _weight_norm(call: Call) -> OpRule:
    """V * g / norm(v) over all dims but one."""
    ndim = call.operands[0].ndim
    dim = call.int_arg(2, "dim", 0) % ndim
    names: list[Entry] = [f"d{d}" + ("" if d == dim else "!") for d in range(ndim)]
    return call.build([names, names], [names], linear=[{1}])
