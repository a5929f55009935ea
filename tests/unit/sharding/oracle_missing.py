"""Finds by trial every way of cutting a call in two, to see whether its rule knows it.

Every operand is replicated, cut into two halves along one dim, or cut into two random terms; the
op runs on both; a cut is legal when the results are halves or terms of the whole result.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from autopar.sharding.rule import Letter, OpRule
from tests.unit.sharding.samples import Sample, as_tuple, run_node

Cut = int | str
"""A dim, ``"P"`` for two terms, ``"R"`` for replicated."""
Legal = tuple[tuple[Cut, ...], tuple[Cut, ...]]


# Operands that lend their shape, dtype or device, or are overwritten: cutting them means nothing.
IGNORED = {
    "aten.copy.default": 0,
    "aten.expand_as.default": 1,
    "aten.fill.Tensor": 0,
    "aten.full_like.default": 0,
    "aten.new_full.default": 0,
    "aten.new_ones.default": 0,
    "aten.new_zeros.default": 0,
    "aten.ones_like.default": 0,
    "aten.reshape_as.default": 1,
    "aten.to.other": 1,
    "aten.type_as.default": 1,
    "aten.view_as.default": 1,
    "aten.zeros_like.default": 0,
}


def cuts_of(tensor: Tensor) -> list[Cut]:
    found: list[Cut] = ["R", *(d for d, size in enumerate(tensor.shape) if size and size % 2 == 0)]
    return found if tensor.dtype == torch.bool else [*found, "P"]


def apply(tensor: Tensor, cut: Cut, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    if cut == "R":
        return tensor, tensor
    if isinstance(cut, int):
        first, second = tensor.chunk(2, cut)
        return first.contiguous(), second.contiguous()
    if tensor.is_floating_point():
        term = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    else:
        term = torch.randint(-3, 3, tensor.shape, generator=generator).to(tensor.dtype)
    return term, tensor - term


def result_cuts(parts: tuple[Tensor, Tensor], whole: Tensor) -> list[Cut]:
    """How two results make up the whole one."""
    first, second = parts
    found: list[Cut] = []
    for dim, size in enumerate(whole.shape):
        half = list(whole.shape)
        half[dim] = size // 2
        halved = size and size % 2 == 0 and list(first.shape) == list(second.shape) == half
        if halved and _same(torch.cat(parts, dim), whole):
            found.append(dim)
    if first.shape == second.shape == whole.shape:
        if whole.dtype != torch.bool and _same(first + second, whole):
            found.append("P")
        if _same(first, whole) and _same(second, whole):
            found.append("R")
    return found


def _same(left: Tensor, right: Tensor) -> bool:
    if not left.is_floating_point():
        return torch.equal(left, right)
    tolerance = 1e-9 if left.dtype == torch.float64 else 1e-5
    return torch.allclose(left, right, rtol=tolerance, atol=tolerance, equal_nan=True)


def _attempts(case: Sample, rule: OpRule) -> list[dict[int, Any] | None]:
    """Local values of the size argument to try."""
    if rule.size_arg is None:
        return [None]
    at = rule.size_arg[1]
    shape = list(case.outputs[0].shape)
    if "split" in case.node.op:
        sizes = [int(a) for a in case.node.args[at]]  # type: ignore[union-attr,arg-type]
        return [{at: sizes}, {at: [s // 2 for s in sizes]}]
    halves = [[s // 2 if d == dim else s for d, s in enumerate(shape)] for dim in range(len(shape))]
    return [{at: size} for size in (shape, *halves)]


def legal_cuts(case: Sample, rule: OpRule) -> set[Legal]:
    """All (operand cuts, output cuts) that hold, the all-replicated ones left out."""
    generator = torch.Generator().manual_seed(5)
    found: set[Legal] = set()
    options = [cuts_of(t) for t in case.operands]
    if case.node.op in IGNORED:
        options[IGNORED[case.node.op]] = ["R"]
    for cuts in itertools.product(*options):
        if all(cut == "R" for cut in cuts):
            continue
        pieces = [apply(t, c, generator) for t, c in zip(case.operands, cuts, strict=True)]
        for changed in _attempts(case, rule):
            try:
                results = [
                    as_tuple(run_node(case.node, [p[rank] for p in pieces], changed))
                    for rank in range(2)
                ]
            except (RuntimeError, IndexError, ValueError):
                continue
            if len(results[0]) != len(case.outputs):
                continue
            ways = [
                result_cuts((first, second), whole)
                for first, second, whole in zip(*results, case.outputs, strict=True)
            ]
            for outputs in itertools.product(*ways):
                # A choice shards all results alike, or makes all of them Partial.
                if "R" not in outputs:
                    found.add((cuts, outputs))
    return found


def _halves(letter: Letter, side: str, absent: list[Cut]) -> tuple[Cut, ...]:
    """What splitting a letter in two does to the tensors of one side."""
    cuts = list(absent)
    for place in getattr(letter, side):
        cuts[place.slot] = place.dim
    return tuple(cuts)


def known_cuts(case: Sample, rule: OpRule) -> set[Legal]:
    """What the rule allows, in the same terms; letters that are not outermost give no halves."""
    shapes = {"operands": case.operands, "outputs": case.outputs}
    found: set[Legal] = set()
    for letter in rule.letters:
        outermost = all(
            place.stride * place.size == shapes[side][place.slot].shape[place.dim]
            for side in ("operands", "outputs")
            for place in getattr(letter, side)
        )
        if not letter.split or letter.size % 2 or not outermost:
            continue
        contracted = not letter.outputs and letter.missing == "partial"
        operands: list[Cut] = [
            "P" if contracted and slot in rule.additive else "R"
            for slot in range(len(case.operands))
        ]
        absent: list[Cut] = ["P" if letter.missing == "partial" else "R"] * len(case.outputs)
        inputs = _halves(letter, "operands", operands)
        outputs = _halves(letter, "outputs", absent)
        found.add((inputs, outputs))
    for terms in rule.linear:
        cuts = tuple("P" if slot in terms else "R" for slot in range(len(case.operands)))
        found.add((cuts, ("P",) * len(case.outputs)))
    return found


def missing(case: Sample, rule: OpRule) -> set[Legal]:
    """Legal cuts that the rule does not have."""
    known = known_cuts(case, rule)
    if case.node.op in IGNORED:
        at = IGNORED[case.node.op]
        known = {((*cuts[:at], "R", *cuts[at + 1 :]), outputs) for cuts, outputs in known}
    return legal_cuts(case, rule) - known
