"""Ops that read or write at positions given by index tensors."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten


def _shared(call: Call, dim: int, tensors: list[int]) -> list[Entry]:
    """Letters of the dims in which the indexed tensor and all `tensors` agree, None at `dim`."""
    shape = call.operands[0].shape
    agree = [all(call.operands[s].shape[d] == shape[d] for s in tensors) for d in range(len(shape))]
    return [f"d{d}" if d != dim and agree[d] else None for d in range(len(shape))]


@family(aten("gather take_along_dim"))
def _gather(call: Call) -> OpRule | None:
    """Positions along `dim` may be split; the values there are needed whole."""
    position = 1 if call.node.op == "aten.gather.default" else 2
    index = call.slot(2 if position == 1 else 1, "index")
    if index is None or call.arg(position, "dim") is None or not call.operands[0].ndim:
        return None
    dim = call.int_arg(position, "dim", 0) % call.operands[0].ndim
    if position == 2 and call.operands[0].ndim != call.operands[index].ndim:
        return None
    if position == 1:
        own = _shared(call, dim, [index])
        names = [entry or ("k" if d == dim else None) for d, entry in enumerate(own)]
        return call.build({0: own, index: names}, [names], linear=[{0}])
    names = [f"d{d}" for d in range(call.operands[0].ndim)]  # take_along_dim broadcasts
    own = [None if d == dim else name for d, name in enumerate(names)]
    return call.build({0: own, index: list(names)}, [list(names)], linear=[{0}])


@family(aten("scatter.value scatter.src scatter.reduce scatter_reduce.two scatter.value_reduce"))
def _scatter(call: Call) -> OpRule:
    """Writes along `dim` keep that dim whole: the last write to a place must win."""
    dim = call.int_arg(1, "dim", 0) % max(call.operands[0].ndim, 1)
    others = list(range(1, len(call.operands)))
    own = _shared(call, dim, others)
    plain = call.node.op in aten("scatter.value scatter.src")
    zero = len(call.operands) == 3 or call.arg(3, "value") == 0
    linear = [{0, *others[1:]}] if plain and zero else []
    return call.build(dict.fromkeys(range(len(call.operands)), own), [own], linear=linear)


@family(aten("scatter_add"))
def _scatter_add(call: Call) -> OpRule:
    """Added entries may be split along `dim` too: the sums are Partial."""
    dim = call.int_arg(1, "dim", 0) % max(call.operands[0].ndim, 1)
    own = _shared(call, dim, [1, 2])
    added: list[Entry] = list(own)
    if own and call.operands[1].shape[dim] == call.operands[2].shape[dim]:
        added[dim] = "k"
    for d, entry in enumerate(own):
        # Where fewer rows than the target's are written, rows may still be split among the sums.
        if entry is None and d != dim:
            added[d] = None
    return call.build({0: own, 1: added, 2: added}, [own], additive={0}, linear=[{0, 2}])


@family(aten("index_select index_add index_copy index_fill.int_Scalar index_reduce"))
def _index_dim(call: Call) -> OpRule:
    """One vector of positions along `dim`."""
    ndim = call.operands[0].ndim
    dim = call.int_arg(1, "dim", 0) % max(ndim, 1)
    own: list[Entry] = [None if d == dim else f"d{d}" for d in range(ndim)]
    picked: list[Entry] = [entry or "k" for entry in own]
    vector: list[Entry] = ["k"] * call.operands[1].ndim
    op = call.node.op
    if op == "aten.index_select.default":
        return call.build({0: own, 1: vector}, [picked], linear=[{0}])
    if op == "aten.index_add.default":
        entries = {0: own, 1: vector, 2: picked}
        return call.build(entries, [own], additive={0}, linear=[{0, 2}])
    if op == "aten.index_copy.default":
        return call.build({0: own, 2: own}, [own], linear=[{0, 2}])
    if op == "aten.index_fill.int_Scalar":
        return call.build({0: own}, [own], linear=[{0}] if call.arg(3, "value") == 0 else [])
    return call.build({0: own, 2: own}, [own])


def _index_layout(call: Call, slots: tuple[int | None, ...]) -> tuple[int, int, list[int]] | None:
    """Where the broadcast index dims stand: (dims before, number of index dims, free dims)."""
    given = [d for d, slot in enumerate(slots) if slot is not None]
    if any(call.operands[slot].dtype in ("bool", "uint8") for slot in slots if slot is not None):
        return None  # masks select a number of elements that depends on the data
    ndim = call.operands[0].ndim
    free = [d for d in range(ndim) if d not in given]
    width = max((call.operands[slots[d]].ndim for d in given), default=0)  # type: ignore[index]
    adjacent = bool(given) and given == list(range(given[0], given[-1] + 1))
    return (sum(d < given[0] for d in free) if adjacent else 0), width, free


@family(aten("index.Tensor"))
def _index(call: Call) -> OpRule | None:
    """Broadcast index tensors pick along some dims; the other dims pass."""
    slots = call.slots(1, "indices")
    layout = _index_layout(call, slots)
    if layout is None:
        return None
    before, width, free = layout
    picks: list[Entry] = [f"i{d}" for d in range(width)]
    own: list[Entry] = [f"d{d}" if d in free else None for d in range(call.operands[0].ndim)]
    passed: list[Entry] = [f"d{d}" for d in free]
    operands = {0: own}
    for slot in slots:
        if slot is not None:
            operands[slot] = picks[width - call.operands[slot].ndim :]
    return call.build(operands, [[*passed[:before], *picks, *passed[before:]]], linear=[{0}])


@family(aten("index_put _unsafe_index_put"))
def _index_put(call: Call) -> OpRule | None:
    """Accumulated writes may be split (Partial); others keep the written positions whole."""
    slots = call.slots(1, "indices")
    values = call.slot(2, "values")
    layout = _index_layout(call, slots)
    if layout is None or values is None:
        return None
    before, width, free = layout
    adds = bool(call.arg(3, "accumulate", False))
    picks: list[Entry] = [f"i{d}" if adds else f"i{d}!" for d in range(width)]
    own: list[Entry] = [f"d{d}" if d in free else None for d in range(call.operands[0].ndim)]
    passed: list[Entry] = [f"d{d}" for d in free]
    operands = {0: own}
    for slot in slots:
        if slot is not None:
            operands[slot] = picks[width - call.operands[slot].ndim :]
    full = [*passed[:before], *picks, *passed[before:]]
    operands[values] = full[len(full) - call.operands[values].ndim :]
    linear = [{0, values}]
    return call.build(operands, [own], additive={0} if adds else (), linear=linear)


@family(aten("take"))
def _take(call: Call) -> OpRule:
    """Positions in the flat tensor."""
    names = call.names("i", call.operands[1].ndim)
    return call.build({1: names}, [names], linear=[{0}])


@family(aten("one_hot"))
def _one_hot(call: Call) -> OpRule | None:
    if call.int_arg(1, "num_classes", -1) < 0:
        return None  # the number of classes depends on the data
    return call.match("... -> ... _", "self")


@family(aten("histc bincount"))
def _histogram(call: Call) -> OpRule:
    """Counts add up when the bins are given; else they depend on the whole data."""
    ndim = call.operands[0].ndim
    fixed = call.node.op == "aten.histc.default" and call.arg(2, "min", 0) != call.arg(3, "max", 0)
    names = [f"d{d}" + ("" if fixed else "!") for d in range(ndim)]
    return call.build({0: names}, [[None]])


@family(aten("bucketize.Tensor searchsorted.Tensor"))
def _bucketize(call: Call) -> OpRule:
    """Values are placed among sorted boundaries: parts of these count separately, and add up."""
    bucket = call.node.op == "aten.bucketize.Tensor"
    values, edges = (0, 1) if bucket else (1, 0)
    ndim = call.operands[values].ndim
    names = call.names("d", ndim)
    rows: list[Entry] = [] if call.operands[edges].ndim < 2 else [*names[:-1]]
    return call.build({values: names, edges: [*rows, "k"]}, [names])


@family(aten("tril triu"))
def _triangle(call: Call) -> OpRule:
    """Positions in the last two dims decide, so their split is special."""
    ndim = call.operands[0].ndim
    names = [f"d{d}" + ("~" if d >= ndim - 2 else "") for d in range(ndim)]
    return call.build([names], [names], linear=[{0}])


@family(aten("embedding_bag embedding_bag.padding_idx _embedding_bag"))
def _embedding_bag(call: Call) -> OpRule:
    """Bags are ragged ranges of flat indices: only the embedding dim is split."""
    operands: dict[int, list[Entry]] = {0: [None, "h="]}
    wide = call.outputs[0].shape[1]
    outputs: list[list[Entry]] = []
    for i, spec in enumerate(call.outputs):
        has = spec.ndim == 2 and spec.shape[1] == wide and i in (0, 3)
        outputs.append([None, "h="] if has else [None] * spec.ndim)
    linear = [{0}] if len(call.outputs) == 1 and call.int_arg(4, "mode", 0) != 2 else []
    return call.build(operands, outputs, linear=linear, hints={"h": ("hidden", 2)})
