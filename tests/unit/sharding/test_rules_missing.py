"""Every legal way of cutting a call in two is in its rule, or listed here with the reason."""

from __future__ import annotations

import pytest

from autopar.sharding.rule import rule_for
from tests.unit.sharding.oracle_missing import missing
from tests.unit.sharding.sample_groups import GROUPS, group

LEFT_OUT = {
    "aten.nextafter.default": "equals its first operand within the tolerance of the comparison",
    "aten.heaviside.default": "the second operand matters at zero only",
    "aten.bitwise_left_shift.Tensor": "integers: nothing gains from a Partial",
    "aten.bitwise_left_shift.Tensor_Scalar": "integers: nothing gains from a Partial",
    "aten.nansum.default": "not linear where there are NaNs",
    "aten.nanmean.default": "not linear where there are NaNs",
    "aten.scatter.reduce": "a deprecated spelling without derivative",
    "aten.embedding.default": "with scale_grad_by_freq the gradient counts the whole batch",
}
UNTRIED = {
    "aten._weight_norm.default": "torch reads out of bounds when the shapes disagree",
    "aten.ctc_loss.Tensor": "torch reads out of bounds when the shapes disagree",
    "aten.multilabel_margin_loss.default": "torch reads out of bounds when the shapes disagree",
}
MOST_OPERANDS = 5  # beyond it there are too many ways


@pytest.mark.parametrize("name", [name for name in GROUPS if name != "random"])
@pytest.mark.filterwarnings("ignore")
def test_no_legal_cut_is_missing(name: str):
    found = {}
    for case in group(name):
        rule = rule_for(case.node, case.spec)
        assert rule is not None
        if case.reference or case.node.op in UNTRIED or len(case.operands) > MOST_OPERANDS:
            continue
        if cuts := missing(case, rule):
            found[str(case)] = (case.node.op, str(rule), sorted(cuts, key=str))
    unexplained = {text: rest for text, rest in found.items() if rest[0] not in LEFT_OUT}
    assert not unexplained


def test_all_exceptions_are_needed():
    needed = set()
    for name in GROUPS:
        for case in group(name):
            if case.node.op in LEFT_OUT:
                rule = rule_for(case.node, case.spec)
                assert rule is not None
                if missing(case, rule):
                    needed.add(case.node.op)
    assert needed == set(LEFT_OUT)
