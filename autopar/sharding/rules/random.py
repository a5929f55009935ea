"""Random ops: drawn per global element (``runtime/special/random.py``), so any split is legal."""

from __future__ import annotations

from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten, broadcast


@family(aten("dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout"))
def _dropout(call: Call) -> OpRule:
    """For a given mask, dropout is linear; the alpha variants shift, so they are not."""
    active = bool(call.arg(2, "train", True)) and call.arg(1, "p", 0.5) != 0
    shifts = active and "alpha" in call.node.op
    single = len(call.outputs) == 1
    return broadcast(call, linear=[{0}] if single and not shifts else [], special=active)


@family(
    aten(
        "bernoulli bernoulli.p bernoulli.Tensor rand_like randn_like randint_like "
        "randint_like.low_dtype uniform exponential normal_functional rrelu "
        "normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor"
    )
)
def _like(call: Call) -> OpRule:
    return broadcast(call, special=True)


_SIZED = {"rand": 0, "randn": 0, "randint": 1, "randint.low": 2}


def _make_sized(name: str, position: int) -> None:
    def of_call(call: Call) -> OpRule:
        names: list[Entry] = list(call.names("d", call.outputs[0].ndim))
        return call.build({}, [names], special=True)

    family(aten(name))(of_call)


for _name, _position in _SIZED.items():
    _make_sized(_name, _position)


@family(aten("randperm"))
def _randperm(call: Call) -> OpRule:
    """A permutation is made whole."""
    return OpRule(letters=(), special=True)
