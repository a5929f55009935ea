"""Every rule against full tensors: each letter, each part of a letter, each linear set."""

from __future__ import annotations

import pytest

from autopar.errors import RuleError
from autopar.runtime.operators import resolve
from autopar.runtime.special import SPECIALS
from autopar.sharding.choices import GRADIENT, Choices
from autopar.sharding.rule import OpRule, register, registered_ops, rule_for
from tests.unit.sharding.oracle import all_units, check, linear, split, whole_units
from tests.unit.sharding.sample_groups import GROUPS, group
from tests.unit.sharding.samples import Sample

# Their values are undefined; canonical graphs fill them with zeros.
UNDEFINED = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}


def rule_of(case: Sample) -> OpRule | None:
    return rule_for(case.node, case.spec)


def choices_of(case: Sample, rule: OpRule) -> list[tuple[Choices, tuple[int, ...]]]:
    """Every unit on two and three ranks, every linear set, and Partial gradients, on two."""
    found: list[tuple[Choices, tuple[int, ...]]] = [
        ((split(unit),), (ranks,))
        for unit in all_units(rule)
        for ranks in (2, 3)
        if unit.size >= ranks
    ]
    if all(value.spec.is_floating for value in case.node.outputs):
        found += [((linear(i),), (2,)) for i in range(len(rule.linear))]
    return [*found, ((GRADIENT,), (2,))]


@pytest.mark.parametrize("name", GROUPS)
def test_every_choice_equals_the_whole_call(name: str):
    wrong = []
    for case in group(name):
        rule = rule_of(case)
        assert rule is not None, f"{case} has no rule"
        for choices, sizes in choices_of(case, rule):
            try:
                check(case, rule, choices, sizes)
            except Exception as error:
                wrong.append(f"{case}\n  {rule}\n  {choices[0]} over {sizes}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["attention", "norms", "losses", "convolutions", "random"])
def test_two_axes_at_once_through_special_lowerings(name: str):
    wrong = []
    for case in group(name):
        rule = rule_of(case)
        assert rule is not None
        units = whole_units(rule)
        for first in units:
            for second in units:
                if first == second and first.size < 4:
                    continue
                letters = [rule.letter(unit.letter) for unit in (first, second)]
                if not rule.special and not any(letter.special for letter in letters):
                    continue
                choices = (split(first), split(second))
                try:
                    check(case, rule, choices, (2, 2))
                except Exception as error:
                    wrong.append(f"{case}\n  {rule}\n  {first.letter}, {second.letter}: {error}")
    assert not wrong, "\n".join(wrong)


def test_every_rule_has_a_sample():
    sampled = {case.node.op for name in GROUPS for case in group(name)}
    assert set(registered_ops()) - sampled == UNDEFINED


def test_every_rule_is_of_an_operator_that_exists():
    pytest.importorskip("transformers.integrations.moe")
    for op in registered_ops():
        if not op.startswith("autopar."):
            resolve(op)


def test_every_special_letter_has_a_lowering():
    special = {
        case.node.op
        for name in GROUPS
        for case in group(name)
        if (rule := rule_of(case)) is not None
        and (rule.special or any(letter.special for letter in rule.letters))
    }
    assert special == set(SPECIALS)


def test_an_op_has_one_rule():
    registered_ops()
    with pytest.raises(RuleError, match=r"aten\.linear\.default has two sharding rules"):
        register("aten.linear.default", lambda node, spec: None)


def test_an_unknown_op_has_none():
    case = group("contractions")[0]
    node = type(case.node)(name="y", op="aten.nothing.default", args=(), outputs=())
    assert rule_for(node, case.spec) is None
