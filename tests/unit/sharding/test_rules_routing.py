"""The rule of grouped rows against full tensors, whatever the routing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.graph.routing import GROUPED
from autopar.runtime.special.routing import grouped_mm, multiply, order_rows
from autopar.sharding.rule import rule_for
from tests.unit.sharding.oracle import all_units, check, linear, split
from tests.unit.sharding.samples import Draw, sample
from tests.unit.sharding.samples_model import distances  # noqa: F401  (registers the product)

EXPERTS = 3
PRODUCT = "transformers.grouped_mm_fallback.default"
ROUTINGS = st.one_of(
    st.lists(st.integers(0, EXPERTS - 1), min_size=12, max_size=12),
    st.integers(0, EXPERTS - 1).map(lambda expert: [expert] * 12),  # one expert has all rows
    st.just([2, 0] * 6),  # one has none
)


@settings(max_examples=10)
@given(routing=ROUTINGS, repeat=st.sampled_from([1, 2, 3]))
def test_every_choice_equals_the_whole_call(routing: list[int], repeat: int):
    d = Draw("routing")
    rows, weight = d.normal(12 // repeat, 4), d.normal(EXPERTS, 4, 6)
    case = sample(GROUPED, rows, weight, torch.tensor(routing), repeat, PRODUCT)
    rule = rule_for(case.node, case.spec)
    assert rule is not None
    units = [unit for unit in all_units(rule) if unit.size >= 2]
    assert {unit.letter for unit in units} == {"t", "k", "n"}
    for unit in units:
        check(case, rule, (split(unit),), (2,))
    for index in range(len(rule.linear)):
        check(case, rule, (linear(index),), (2,))


@settings(max_examples=30)
@given(routing=ROUTINGS, repeat=st.sampled_from([1, 2, 3]))
def test_every_row_meets_the_matrix_of_its_id(routing: list[int], repeat: int):
    d, ids = Draw("meets"), torch.tensor(routing)
    rows, weight = d.normal(12 // repeat, 4), d.normal(EXPERTS, 4, 6)
    want = torch.einsum("ak,akn->an", rows.repeat_interleave(repeat, 0), weight[ids])
    for product in (PRODUCT, "aten._grouped_mm.default"):
        assert torch.allclose(grouped_mm(rows, weight, ids, repeat, product), want)
    order, back, ends = order_rows(ids, EXPERTS)
    assert torch.equal(order[back], torch.arange(12))
    assert torch.equal(ends.long(), torch.bincount(ids, minlength=EXPERTS).cumsum(0))


def test_gradients_of_repeated_rows_are_summed():
    d, ids = Draw("gradients"), torch.tensor([1, 1, 0, 2, 0, 1])
    rows, weight = (d.normal(3, 4).requires_grad_(), d.normal(EXPERTS, 4, 6).requires_grad_())
    assert torch.autograd.gradcheck(
        lambda x, w: grouped_mm(x, w, ids, 2, PRODUCT), (rows, weight), raise_exception=True
    )


@pytest.mark.parametrize("size", [1, 5])
def test_groups_without_rows_add_nothing(size: int):
    rows, weight = torch.ones(size, 4), torch.ones(EXPERTS, 4, 6)
    ends = torch.tensor([0, size, size], dtype=torch.int32)
    assert torch.equal(
        multiply(rows, weight, ends, "aten._grouped_mm.default"), torch.full((size, 6), 4.0)
    )


def test_experts_are_not_split() -> None:
    d = Draw("experts")
    operands = d.normal(4, 4), d.normal(EXPERTS, 4, 6), torch.tensor([0, 1, 2, 0])
    case = sample(GROUPED, *operands, 1, PRODUCT)
    assert str(rule_for(case.node, case.spec)) == "t k, k n, t -> t n"
