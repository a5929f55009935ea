"""Products of tensors that sum over shared letters."""

from __future__ import annotations

import re

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family, rule

rule(
    "aten.linear.default",
    "... k, n k, n? -> ... n",
    "input weight bias",
    additive={2},
    linear=[{0, 2}, {1, 2}],
)
rule("aten.outer.default aten.ger.default", "m, n -> m n", "self vec2", linear=[{0}, {1}])
rule(
    "aten.bilinear.default",
    "... i, ... j, o i j, o? -> ... o",
    "input1 input2 weight bias",
    additive={3},
    linear=[{0, 3}, {1, 3}, {2, 3}],
)
rule("aten.cdist.default", "... p d!, ... r d! -> ... p r", "x1 x2")
rule("aten.inner.default", "... k, n k -> ... n", "self other", linear=[{0}, {1}])


_SUMMED = {
    "addmm": ("m k", "k n", "m n"),
    "addmv": ("m k", "k", "m"),
    "baddbmm": ("b m k", "b k n", "b m n"),
    "addbmm": ("b m k", "b k n", "m n"),
    "addr": ("m", "n", "m n"),
}


def _make_summed(name: str) -> None:
    first, second, result = (text.split() for text in _SUMMED[name])

    def of_call(call: Call) -> OpRule:
        """A product plus a tensor that broadcasts to it."""
        bias = result[len(result) - call.operands[0].ndim :]
        return call.build([bias, first, second], [result], additive={0}, linear=[{0, 1}, {0, 2}])

    family(f"aten.{name}.default")(of_call)


for _name in _SUMMED:
    _make_summed(_name)


@family(
    "aten.matmul.default aten.mm.default aten.bmm.default aten.mv.default aten.dot.default "
    "aten.vdot.default"
)
def _matmul(call: Call) -> OpRule:
    left, right = (min(spec.ndim, 3) for spec in call.operands)
    first = {1: "k", 2: "m k", 3: "... m k"}[left]
    second = {1: "k", 2: "k n", 3: "... k n"}[right]
    batch = "... " if 3 in (left, right) else ""
    out = batch + ("m " if left > 1 else "") + ("n" if right > 1 else "")
    return call.match(f"{first}, {second} -> {out}", "self other", linear=[{0}, {1}])


@family("aten.einsum.default")
def _einsum(call: Call) -> OpRule:
    """Any equation; a letter that occurs twice in one operand (a diagonal) is not split."""
    equation = call.arg(0, "equation")
    assert isinstance(equation, str)
    equation = equation.replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = re.findall("[A-Za-z]", left)
        once = "".join(sorted(name for name in set(letters) if letters.count(name) == 1))
        right = ("..." if "..." in left else "") + once
    slots = [slot for slot in call.slots(1, "tensors") if slot is not None]
    width = max(
        (
            call.operands[s].ndim - len(t) + 3
            for s, t in zip(slots, terms, strict=True)
            if "..." in t
        ),
        default=0,
    )

    def entries(term: str, ndim: int) -> list[Entry]:
        before, dots, after = term.partition("...")
        batch = ndim - len(before) - len(after) if dots else 0
        return [*before, *(f"b{i}" for i in range(width - batch, width)), *after]

    operands = {s: entries(t, call.operands[s].ndim) for s, t in zip(slots, terms, strict=True)}
    outputs = [entries(right, call.outputs[0].ndim)]
    return call.build(operands, outputs, linear=[{slot} for slot in slots])


@family("transformers.grouped_mm_fallback.default aten._grouped_mm.default")
def _grouped_mm(call: Call) -> OpRule | None:
    """Tokens sorted by expert times one matrix per expert; `offs` are the ends of the groups."""
    ranks = (call.operands[0].ndim, call.operands[1].ndim)
    if call.slot(2, "offs") is None or call.slot(3, "bias") is not None or ranks != (2, 3):
        return None
    return call.match("s~ k, _ k n, _ -> s n", "self mat2 offs", linear=[{0}, {1}])


@family("aten.linalg_vecdot.default aten.cosine_similarity.default aten.linalg_cross.default")
def _along_dim(call: Call) -> OpRule:
    """Two broadcast operands meet along one dim; only a dot product may split it."""
    ndim = max(spec.ndim for spec in call.operands)
    op = call.node.op
    default = 1 if op == "aten.cosine_similarity.default" else -1
    dim = call.int_arg(2, "dim", default) % ndim
    dot = op == "aten.linalg_vecdot.default"
    names: list[Entry] = [f"d{d}" + ("!" if d == dim and not dot else "") for d in range(ndim)]
    operands = [names[ndim - spec.ndim :] for spec in call.operands]
    kept = names if op == "aten.linalg_cross.default" else [*names[:dim], *names[dim + 1 :]]
    sets = [] if op == "aten.cosine_similarity.default" else [{0}, {1}]
    return call.build(operands, [kept], linear=sets)


@family("aten.pairwise_distance.default")
def _pairwise_distance(call: Call) -> OpRule:
    """Distance along the last dim."""
    ndim = max(spec.ndim for spec in call.operands)
    names: list[Entry] = [*(f"d{d}" for d in range(ndim - 1)), "k!"]
    operands = [names[ndim - spec.ndim :] for spec in call.operands]
    kept = [*names[:-1], None] if call.outputs[0].ndim == ndim else names[:-1]
    return call.build(operands, [kept])
