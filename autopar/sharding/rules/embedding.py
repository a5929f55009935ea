"""Tables looked up by index."""

from __future__ import annotations

from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family
from autopar.sharding.rules.pointwise import aten

HINTS = {"v": ("vocab", 6), "h": ("hidden", 3)}


@family(aten("embedding"))
def _embedding(call: Call) -> OpRule:
    """A rank with a part of the vocabulary gives zeros for the other rows: Partial."""
    if call.arg(3, "scale_grad_by_freq", False):
        # The gradient divides by how often a row occurs in the whole batch.
        text = "v! h, ...! -> ... h"
    else:
        text = "v~ h, ... -> ... h"
    return call.match(text, "weight indices", linear=[{0}], hints=HINTS)
