"""Ops that move elements without computing: reshape, permute, expand, cat, split, slice."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten, broadcast


def common_factors(
    source: Sequence[int], target: Sequence[int]
) -> tuple[list[list[str]], list[list[str]], dict[str, int]]:
    """Factor two shapes of equal volume into the letters they share.

    Both shapes are walked from the inside, taking the greatest common divisor of what is left of
    the current dims; where neither divides the other the walk goes on from the outside, and what
    remains between (``6 = 2*3`` against ``4 = 2*2``) becomes one letter per dim, marked ``!``.

    Returns:
        Letters per source dim, letters per target dim (outer to inner), and their sizes.

    Example:
        >>> common_factors((12,), (3, 4))
        ([['r1', 'r0']], [['r1'], ['r0']], {'r0': 4, 'r1': 3})
    """
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    for dims, others in _groups(source, target):
        _factor_group(source, target, dims, others, left, right, sizes)
    return left, right, sizes


def _groups(source: Sequence[int], target: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Minimal runs of dims with equal products; dims of size 1 are left out."""
    ours = [d for d, size in enumerate(source) if size != 1]
    theirs = [d for d, size in enumerate(target) if size != 1]
    groups = []
    while ours and theirs:
        group, other = [ours.pop()], [theirs.pop()]
        a, b = source[group[0]], target[other[0]]
        while a != b:
            if a < b:
                group.insert(0, ours.pop())
                a *= source[group[0]]
            else:
                other.insert(0, theirs.pop())
                b *= target[other[0]]
        groups.append((group, other))
    return groups


def _factor_group(
    source: Sequence[int],
    target: Sequence[int],
    dims: list[int],
    others: list[int],
    left: list[list[str]],
    right: list[list[str]],
    sizes: dict[str, int],
) -> None:
    """Factor one group from the inside, then from the outside until the two walks meet."""
    rest = {0: [source[d] for d in dims], 1: [target[d] for d in others]}
    heads: tuple[list[list[str]], list[list[str]]] = ([[] for _ in dims], [[] for _ in others])
    tails: tuple[list[list[str]], list[list[str]]] = ([[] for _ in dims], [[] for _ in others])
    for inside in (True, False):
        while True:
            at = [_next(rest[side], inside) for side in (0, 1)]
            if at[0] is None or at[1] is None:
                break
            a, b = rest[0][at[0]], rest[1][at[1]]
            factor = math.gcd(a, b)
            if factor == 1:
                break
            name = f"r{len(sizes)}"
            sizes[name] = factor
            for side in (0, 1):
                rest[side][at[side]] //= factor  # type: ignore[index]
                if inside:
                    tails[side][at[side]].insert(0, name)  # type: ignore[index]
                else:
                    heads[side][at[side]].append(name)  # type: ignore[index]
    for side, (rows, result) in enumerate(((dims, left), (others, right))):
        for i, dim in enumerate(rows):
            middle = []
            if rest[side][i] > 1:
                middle = [f"r{len(sizes)}!"]
                sizes[f"r{len(sizes)}"] = rest[side][i]
            result[dim] = heads[side][i] + middle + tails[side][i]


def _next(sizes: list[int], inside: bool) -> int | None:
    order = range(len(sizes) - 1, -1, -1) if inside else range(len(sizes))
    return next((i for i in order if sizes[i] > 1), None)


_RESHAPES = aten("reshape view _unsafe_view flatten.using_ints unsqueeze view_as reshape_as ravel")
_SHAPED = ("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")


@family(_RESHAPES)
def _reshape(call: Call) -> OpRule:
    """Letters are the factors of the flat index that both shapes share."""
    size_arg = ("args", 1) if call.node.op in _SHAPED else None
    if call.outputs[0].numel == 0:
        return OpRule(letters=(), linear=(frozenset({0}),), size_arg=size_arg)
    source, target, sizes = common_factors(call.operands[0].shape, call.outputs[0].shape)
    operands: list[Sequence[Entry]] = [[tuple(names) or None for names in source]]
    outputs: list[Sequence[Entry]] = [[tuple(names) or None for names in target]]
    if len(call.operands) == 2:
        operands += outputs  # lends its shape
    return call.build(operands, outputs, sizes=sizes, linear=[{0}], size_arg=size_arg)


@family(aten("permute transpose.int t numpy_T mT swapaxes swapdims movedim.int movedim.intlist"))
def _permute(call: Call) -> OpRule:
    ndim = call.operands[0].ndim
    names: list[Entry] = list(call.names("d", ndim))
    op = call.node.op
    if op == "aten.permute.default":
        order = list(call.dims(1, "dims", ndim)) if ndim else []
    elif op in aten("transpose.int swapaxes swapdims") and ndim:
        order = list(range(ndim))
        first, second = call.dims(1, "dim0", ndim)[0], call.dims(2, "dim1", ndim)[0]
        order[first], order[second] = second, first
    elif op.startswith("aten.movedim") and ndim:
        moved, to = call.dims(1, "source", ndim), call.dims(2, "destination", ndim)
        fixed = iter(d for d in range(ndim) if d not in moved)
        order = [moved[to.index(d)] if d in to else next(fixed) for d in range(ndim)]
    elif op == "aten.mT.default":
        order = [*range(ndim - 2), ndim - 1, ndim - 2]
    else:
        order = list(range(ndim))[::-1]
    return call.build([names], [[names[d] for d in order]], linear=[{0}])


@family(aten("expand broadcast_to expand_as"))
def _expand(call: Call) -> OpRule:
    """A dim of size 1 that grows has a letter in the output only."""
    shaped = call.node.op != "aten.expand_as.default"
    return broadcast(call, linear=[{0}], size_arg=("args", 1) if shaped else None)


@family(aten("cat concat"))
def _cat(call: Call) -> OpRule | None:
    """Equal pieces keep a letter inside the joined dim; otherwise that dim is not split."""
    slots = [slot for slot in call.slots(0, "tensors") if slot is not None]
    ndim = call.outputs[0].ndim
    dim = call.dims(1, "dim", ndim)[0] if call.arg(1, "dim", 0) is not None else 0
    if call.arg(1, "dim") is None:
        dim = 0
    names: list[Entry] = list(call.names("d", ndim))
    pieces = {call.operands[slot].shape for slot in slots}
    inner: Entry = "p" if len(pieces) == 1 else None
    operands = {s: [*names[:dim], inner, *names[dim + 1 :]] for s in slots}
    for slot in slots:
        if call.operands[slot].ndim != ndim:  # the legacy empty tensor of shape (0,)
            return None
    out: Entry = ("c!", "p") if inner else None
    sizes = {"c": len(slots)} if inner else {}
    return call.build(
        operands, [[*names[:dim], out, *names[dim + 1 :]]], sizes=sizes, linear=[slots]
    )


@family(aten("split_with_sizes split_with_sizes_copy split.sizes"))
def _split(call: Call) -> OpRule:
    """Equal pieces share a letter inside the cut dim; otherwise that dim is not split."""
    ndim = call.operands[0].ndim
    dim = call.int_arg(2, "dim", 0) % ndim
    names: list[Entry] = list(call.names("d", ndim))
    sizes = {value.shape[dim] for value in call.outputs}
    equal = (
        len(sizes) == 1 and sum(v.shape[dim] for v in call.outputs) == call.operands[0].shape[dim]
    )
    source: Entry = ("c!", "p") if equal else None
    target: Entry = "p" if equal else None
    return call.build(
        [[*names[:dim], source, *names[dim + 1 :]]],
        [[*names[:dim], target, *names[dim + 1 :]] for _ in call.outputs],
        sizes={"c": len(call.outputs)} if equal else {},
        linear=[{0}],
        size_arg=("args", 1),
    )


@family(aten("slice.Tensor"))
def _slice(call: Call) -> OpRule:
    """A slice that is one of equal blocks, or one phase of an even stride, keeps a letter.

    ``x[:, n:2*n]`` of a dim ``m*n`` is row 1 of ``(m, n)``; ``x[:, 1::2]`` of a dim ``n*2`` is
    column 1 of ``(n, 2)``. Splitting ``n`` is legal and moves the bounds (special).
    """
    shape = call.operands[0].shape
    dim = call.int_arg(1, "dim", 0) % len(shape)
    names: list[Entry] = list(call.names("d", len(shape)))
    size, length = shape[dim], call.outputs[0].shape[dim]
    start = slice_start(call.arg(2, "start"), size)
    step = call.int_arg(4, "step", 1)
    source: Entry = None
    sizes = {}
    if length > 1 and step == 1 and size % length == 0 and start % length == 0:
        source, sizes = ("c!", "p~"), {"c": size // length}
    elif length > 1 and step > 1 and length * step == size and start < step:
        source, sizes = ("p~", "c!"), {"c": step}
    target: Entry = "p~" if source else None
    return call.build(
        [[*names[:dim], source, *names[dim + 1 :]]],
        [[*names[:dim], target, *names[dim + 1 :]]],
        sizes=sizes,
        linear=[{0}],
    )


def slice_start(start: object, size: int) -> int:
    """First index of a slice, non-negative."""
    value = start if isinstance(start, int) else 0
    return max(0, value + size if value < 0 else value)
