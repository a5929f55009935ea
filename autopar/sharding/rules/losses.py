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
    nll = call.node.op != "aten.cross_entropy_loss.default"
    hints = {"n": ("batch", 2), "v": ("vocab", 4)}
    return call.build(operands, outputs, linear=[{0}] if nll else [], hints=hints)


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
        if reduction == NONE:
            return broadcast(call)
        flag = "~" if reduction == MEAN else ""
        ndim = max(spec.ndim for spec in call.operands)
        names = [f"d{i}{flag}" for i in range(ndim)]
        return call.build([names[ndim - spec.ndim :] for spec in call.operands], [[]])

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
