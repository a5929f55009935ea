"""Ops that repeat, pad, window or overwrite parts of a tensor."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten


@family(aten("repeat tile"))
def _repeat(call: Call) -> OpRule:
    """Copies stand outside: the output dim is ``(copies n)``."""
    source, target = call.operands[0].shape, call.outputs[0].shape
    lead = len(target) - len(source)
    names = [f"d{d}" for d in range(len(target))]
    out: list[Entry] = [(f"c{d}!", name) for d, name in enumerate(names)]
    out[:lead] = [None] * lead
    sizes = {f"c{lead + d}": target[lead + d] // max(size, 1) for d, size in enumerate(source)}
    sizes |= {f"d{lead + d}": size for d, size in enumerate(source)}
    return call.build([names[lead:]], [out], sizes=sizes, linear=[{0}])


@family(aten("repeat_interleave.self_int"))
def _repeat_interleave(call: Call) -> OpRule | None:
    """Copies stand inside: the output dim is ``(n copies)``."""
    if call.arg(2, "dim") is None and call.operands[0].ndim != 1:
        return None  # flattens first
    ndim = call.operands[0].ndim
    dim = (call.int_arg(2, "dim", 0) if call.arg(2, "dim") is not None else 0) % ndim
    names: list[Entry] = list(call.names("d", ndim))
    sizes = {"c": call.int_arg(1, "repeats", 1), f"d{dim}": call.operands[0].shape[dim]}
    out: list[Entry] = [*names[:dim], (f"d{dim}", "c!"), *names[dim + 1 :]]
    if call.arg(3, "output_size") is not None:
        names[dim] = out[dim] = None  # a literal size of the output
        sizes = {}
    return call.build([names], [out], sizes=sizes, linear=[{0}])


@family(aten("pad constant_pad_nd"))
def _pad(call: Call) -> OpRule:
    """Padded dims are whole; padding with zeros, or with copies, is linear."""
    ndim = call.operands[0].ndim
    amounts = call.arg(1, "pad", ())
    assert isinstance(amounts, tuple)
    names: list[Entry] = list(call.names("d", ndim))
    for i in range(len(amounts) // 2):
        if amounts[2 * i] != 0 or amounts[2 * i + 1] != 0:
            names[ndim - 1 - i] = None
    if call.node.op == "aten.pad.default":
        value = call.arg(3, "value") if call.arg(2, "mode", "constant") == "constant" else 0
    else:
        value = call.arg(2, "value", 0)
    copies = call.node.op == "aten.pad.default" and call.arg(2, "mode", "constant") != "constant"
    if copies:
        # Reflect, replicate and circular padding look at the number of dims: keep them whole.
        for i in range(len(amounts) // 2):
            names[ndim - 1 - i] = None
    return call.build([names], [names], linear=[{0}] if value in (None, 0) else [])


@family(aten("unfold"))
def _unfold(call: Call) -> OpRule:
    """Windows of a dim become a dim each; windows that do not overlap keep a letter."""
    shape = call.operands[0].shape
    dim = call.int_arg(1, "dimension", 0) % len(shape)
    size, step = call.int_arg(2, "size", 1), call.int_arg(3, "step", 1)
    names: list[Entry] = list(call.names("d", len(shape)))
    source, target, sizes = None, None, {}
    if size == step and shape[dim] % size == 0:
        source, target, sizes = ("w", "k!"), "w", {"k": size}
    last: Entry = "k!" if source else None
    return call.build(
        [[*names[:dim], source, *names[dim + 1 :]]],
        [[*names[:dim], target, *names[dim + 1 :], last]],
        sizes=sizes,
        linear=[{0}],
    )


@family(aten("slice_scatter select_scatter"))
def _overwrite(call: Call) -> OpRule:
    """A part along one dim is replaced; that dim is whole."""
    ndim = call.operands[0].ndim
    at = call.arg(2, "dim", 0)
    dim = (at if isinstance(at, int) else 0) % ndim
    names: list[Entry] = [None if d == dim else f"d{d}" for d in range(ndim)]
    select = call.node.op == "aten.select_scatter.default"
    part = [n for d, n in enumerate(names) if d != dim] if select else names
    return call.build([names, part], [names], linear=[{0, 1}])


@family(aten("diagonal diag_embed linalg_diagonal"))
def _diagonal(call: Call) -> OpRule:
    """Two dims meet in one (or one spreads into two); the others pass."""
    embed = call.node.op == "aten.diag_embed.default"
    big = call.outputs[0].ndim if embed else call.operands[0].ndim
    defaults = (0, 1) if call.node.op == "aten.diagonal.default" else (-2, -1)
    apart = {
        call.int_arg(2, "dim1", defaults[0]) % big,
        call.int_arg(3, "dim2", defaults[1]) % big,
    }
    whole: list[Entry] = [None if d in apart else f"d{d}" for d in range(big)]
    small: list[Entry] = [*(n for n in whole if n is not None), None]
    return call.build([small if embed else whole], [whole if embed else small], linear=[{0}])


@family(aten("select.int"))
def _select(call: Call) -> OpRule:
    """One position of a dim, which is whole."""
    ndim = call.operands[0].ndim
    dim = call.int_arg(1, "dim", 0) % ndim
    names: list[Entry] = [None if d == dim else f"d{d}" for d in range(ndim)]
    return call.build([names], [[n for n in names if n is not None]], linear=[{0}])


@family(aten("unbind.int chunk split.Tensor tensor_split.sections"))
def _pieces(call: Call) -> OpRule:
    """Spellings of split that canonical graphs do not have: the cut dim is whole."""
    ndim = call.operands[0].ndim
    unbind = call.node.op == "aten.unbind.int"
    dim = call.int_arg(1 if unbind else 2, "dim", 0) % ndim
    names: list[Entry] = [None if d == dim else f"d{d}" for d in range(ndim)]
    out = [n for n in names if n is not None] if unbind else names
    return call.build([names], [out for _ in call.outputs], linear=[{0}])


@family(aten("stack"))
def _stack(call: Call) -> OpRule:
    """Joins along a new dim, which is whole."""
    slots = [slot for slot in call.slots(0, "tensors") if slot is not None]
    ndim = call.outputs[0].ndim
    dim = call.int_arg(1, "dim", 0) % ndim
    names: list[Entry] = list(call.names("d", ndim - 1))
    out = [*names[:dim], None, *names[dim:]]
    return call.build(dict.fromkeys(slots, names), [out], linear=[slots])


@family(aten("meshgrid meshgrid.indexing"))
def _meshgrid(call: Call) -> OpRule:
    """Every result has one dim per vector."""
    slots = [slot for slot in call.slots(0, "tensors") if slot is not None]
    names: list[Entry] = list(call.names("d", len(slots)))
    out = list(names)
    if call.arg(1, "indexing", "ij") == "xy" and len(out) > 1:
        out[0], out[1] = out[1], out[0]
    operands = {slot: names[slot : slot + 1] * call.operands[slot].ndim for slot in slots}
    return call.build(operands, [out for _ in call.outputs], linear=[slots])
