"""Loss functions. A mean divides by the global count, so its split letters are special."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten, broadcast

NONE, MEAN, SUM = 0, 1, 2


@family(aten("cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"))
def _cross_entropy(call: Call) -> OpRule:
    """Logits ``n v d...``, targets ``n d...`` (or probabilities ``n v d...``).

    Split classes are combined inside (Replicate); split samples leave a Partial.
    """
    logits, target = call.operands[0], call.operands[1]
    mean = call.int_arg(3, "reduction", MEAN) == MEAN
    batch = "~" if mean else ""
    outer: list[Entry] = [f"n{batch}"] if logits.ndim > 1 else []
    inner: list[Entry] = [f"d{i}{batch}" for i in range(logits.ndim - 2)]
    full = [*outer, "v~=", *inner]
    operands = {0: full, 1: full if target.ndim == logits.ndim else [*outer, *inner]}
    weight = call.slot(2, "weight")
    if weight is not None:
        operands[weight] = ["v~="]
    outputs = [[*outer, *inner] if call.outputs[0].ndim else []]
    hints = {"n": ("batch", 2), "v": ("vocab", 4)}
    return call.build(operands, outputs, linear=_linear(call, weight, mean), hints=hints)


def _linear(call: Call, weight: int | None, mean: bool) -> list[set[int]]:
    """Log probabilities, probability targets, and class weights that no mean divides by."""
    probabilities = call.operands[1].is_floating
    found = []
    if call.node.op != "aten.cross_entropy_loss.default":
        found.append({0})
    elif probabilities and call.arg(5, "label_smoothing", 0.0) == 0:
        found.append({1})
    if weight is not None and (probabilities or not mean):
        found.append({weight})
    return found


# Position of `reduction` in the schema.
ELEMENTWISE = {
    "mse_loss": 2,
    "l1_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "soft_margin_loss": 2,
    "kl_div": 2,
    "binary_cross_entropy": 3,
    "binary_cross_entropy_with_logits": 4,
    "poisson_nll_loss": 5,
    "hinge_embedding_loss": 3,
    "margin_ranking_loss": 4,
}


def _make_elementwise(name: str, position: int) -> None:
    def of_call(call: Call) -> OpRule:
        reduction = call.int_arg(position, "reduction", MEAN)
        weight = call.slot(2, "weight") if name.startswith("binary_cross_entropy") else None
        linear = [] if weight is None else [{weight}]
        if reduction == NONE:
            return broadcast(call, linear=linear)
        flag = "~" if reduction == MEAN else ""
        ndim = max(spec.ndim for spec in call.operands)
        names = [f"d{i}{flag}" for i in range(ndim)]
        return call.build(
            [names[ndim - spec.ndim :] for spec in call.operands], [[]], linear=linear
        )

    family(aten(name))(of_call)


for _name, _position in ELEMENTWISE.items():
    _make_elementwise(_name, _position)


VECTORWISE = {"cosine_embedding_loss": (4, 3), "triplet_margin_loss": (7, 3)}


def _make_vectorwise(name: str, position: int) -> None:
    def of_call(call: Call) -> OpRule:
        """Vectors ``b d`` (or ``d``); the last dim is one sample."""
        flag = "~" if call.int_arg(position, "reduction", MEAN) == MEAN else ""
        ndim = max(spec.ndim for spec in call.operands)
        names: list[Entry] = [*(f"b{i}{flag}" for i in range(ndim - 1)), "d!"]
        operands = [
            names[ndim - spec.ndim :] if spec.ndim == ndim else names[: spec.ndim]
            for spec in call.operands
        ]
        return call.build(operands, [names[: call.outputs[0].ndim]])

    family(aten(name))(of_call)


for _name, (_position, _) in VECTORWISE.items():
    _make_vectorwise(_name, _position)


@family(aten("multi_margin_loss multilabel_margin_loss"))
def _margin(call: Call) -> OpRule:
    """Scores ``n c`` (or ``c``) per sample; a mean is over the global samples."""
    position = 5 if call.node.op == "aten.multi_margin_loss.default" else 2
    flag = "~" if call.int_arg(position, "reduction", MEAN) == MEAN else ""
    batch: list[Entry] = [f"n{flag}"] if call.operands[0].ndim == 2 else []
    operands = {0: [*batch, "c!"], 1: [*batch, "c!"][: call.operands[1].ndim]}
    weight = call.slot(4, "weight") if position == 5 else None
    linear = [] if weight is None else [{weight}]
    return call.build(operands, [batch[: call.outputs[0].ndim]], linear=linear)


@family(aten("ctc_loss.Tensor"))
def _ctc(call: Call) -> OpRule | None:
    """Log probabilities ``t n c``, targets ``n s``, lengths ``n``."""
    if call.operands[0].ndim != 3 or call.operands[1].ndim != 2:
        return None  # one sequence, or targets laid end to end
    batch = "n~" if call.int_arg(5, "reduction", MEAN) == MEAN else "n"
    operands: list[list[Entry]] = [["t!", batch, "c!"], [batch, "s!"], [batch], [batch]]
    return call.build(operands, [[batch][: call.outputs[0].ndim]], hints={"n": ("batch", 2)})
