"""Products of rows with the matrix of their group, see `autopar.graph.routing`."""

from __future__ import annotations

from autopar.graph.routing import GROUPED
from autopar.sharding.grammar import Entry
from autopar.sharding.rule import OpRule
from autopar.sharding.rules.call import Call, family


@family(GROUPED)
def _grouped(call: Call) -> OpRule:
    """Rows, in any order, times the matrix that each row's id names; k rows per token.

    Tokens may be split however they are counted: what a row becomes depends on it alone.
    """
    repeat = call.int_arg(3, "repeat", 1)
    many: Entry = ("t", "r!") if repeat > 1 else "t"
    sizes = {"r": repeat} if repeat > 1 else {}
    return call.build(
        [["t", "k"], [None, "k", "n"], [many]],
        [[many, "n"]],
        sizes=sizes,
        linear=[{0}, {1}],
    )
