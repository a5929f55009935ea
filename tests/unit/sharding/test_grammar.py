"""The rule language: what it accepts, what it means, and how it complains."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.graph.ir import Node, Ref, TensorSpec, Value
from autopar.sharding.grammar import parse
from autopar.sharding.rule import OpRule, Place
from autopar.sharding.rules.call import Call, Hints
from autopar.sharding.rules.views import common_factors


def call(operands: list[tuple[int, ...]], outputs: list[tuple[int, ...]]) -> Call:
    specs = tuple(TensorSpec(shape, "float32") for shape in operands)
    results = tuple(TensorSpec(shape, "float32") for shape in outputs)
    node = Node(
        name="y",
        op="test.op.default",
        args=tuple(Ref(f"x{i}") for i in range(len(operands))),
        outputs=tuple(Value(f"y{i}", spec) for i, spec in enumerate(results)),
        module="model.layer",
        source="model.py:3",
    )
    return Call(node=node, operands=specs, outputs=results)


def match(text: str, operands: list[tuple[int, ...]], *outputs: tuple[int, ...], **rest) -> OpRule:
    names = " ".join(f"a{i}" for i in range(len(parse(text).operands)))
    return call(operands, list(outputs)).match(text, names, **rest)


def sizes(rule: OpRule) -> dict[str, int]:
    return {letter.name: letter.size for letter in rule.letters}


def test_letters_of_a_linear():
    rule = match("... k, n k, n? -> ... n", [(2, 3, 4), (5, 4), (5,)], (2, 3, 5), additive={2})
    assert sizes(rule) == {"b0": 2, "b1": 3, "k": 4, "n": 5}
    assert rule.letter("k").outputs == ()
    assert rule.letter("n").operands == (
        Place(slot=1, dim=0, size=5),
        Place(slot=2, dim=0, size=5),
    )
    assert rule.additive == {2}
    assert str(rule) == "b0 b1 k, n k, n -> b0 b1 n"


def test_an_optional_operand_may_be_absent():
    rule = match(
        "... k, n k, n? -> ... n", [(3, 4), (5, 4)], (3, 5), additive={2}, linear=[{0, 2}, {1, 2}]
    )
    assert rule.additive == set()
    assert rule.linear == (frozenset({0}), frozenset({1}))


def test_a_group_gives_strides_and_unknown_sizes():
    rule = match("(c r s) h w -> c (h r) (w s)", [(8, 3, 5)], (2, 6, 10))
    assert sizes(rule) == {"c": 2, "r": 2, "s": 2, "h": 3, "w": 5}
    assert rule.letter("c").operands == (Place(slot=0, dim=0, stride=4, size=2),)
    assert rule.letter("h").outputs == (Place(slot=0, dim=1, stride=2, size=3),)


def test_flags():
    rule = match("a! b~ c~= d= -> a b", [(2, 3, 4, 5)], (2, 3))
    facts = {x.name: (x.split, x.special, x.missing) for x in rule.letters}
    assert facts == {
        "a": (False, False, "partial"),
        "b": (True, True, "partial"),
        "c": (True, True, "replicate"),
        "d": (True, False, "replicate"),
    }


def test_flags_of_an_ellipsis():
    rule = match("...! k -> ... k", [(2, 3, 4)], (2, 3, 4))
    assert [x.split for x in rule.letters] == [False, False, True]


def test_size_one_carries_no_letter():
    rule = match("... k, ... k -> ... k", [(2, 1, 4), (3, 4)], (2, 3, 4))
    assert rule.letter("b1").operands == (Place(slot=1, dim=0, size=3),)
    assert rule.letter("b0").operands == (Place(slot=0, dim=0, size=2),)


def test_blank_has_no_letter_and_scalars_have_no_dims():
    rule = match("_ a, -> _ a", [(7, 2), ()], (9, 2))
    assert sizes(rule) == {"a": 2}


def test_a_diagonal_is_not_split():
    rule = match("i i -> i", [(4, 4)], (4,))
    assert not rule.letter("i").split


def test_hints():
    hints: Hints = {"a": ("batch", 7), "b": "seq"}
    rule = match("a b c -> a b c", [(2, 3, 4)], (2, 3, 4), hints=hints)
    assert [(x.hint, x.hint_strength) for x in rule.letters] == [("batch", 7), ("seq", 1), ("", 0)]


@pytest.mark.parametrize(
    ("text", "complaint", "column"),
    [
        ("a b", "0 arrows", 0),
        ("a -> a -> a", "2 arrows", 0),
        ("a $ -> a", r"an unexpected '\$'", 2),
        ("a (b -> a", "an open group", 3),
        ("a b) -> a", "a misplaced '\\)'", 3),
        ("(a (b)) -> a", "a misplaced '\\('", 3),
        ("(a ...) -> a", "no letter in a group", 3),
        ("... a ... -> a", "two ellipses", 6),
        ("a -> a?", "an optional output", 4),
    ],
)
def test_bad_texts_are_pointed_at(text: str, complaint: str, column: int):
    with pytest.raises(RuleError, match=complaint) as caught:
        parse(text)
    lines = str(caught.value).splitlines()
    at = lines.index(f"    {text}")
    assert lines[at + 1] == "    " + " " * column + "^"


@pytest.mark.parametrize(
    ("operands", "output", "complaint", "column"),
    [
        ([(2, 3), (5, 4)], (2, 5), "k is 4 here and 3 before", 9),
        ([(2, 3), (5, 3)], (2, 6), "n is 6 here and 5 before", 25),
        ([(2, 3), (5,)], (2, 5), "operand 1 has 1 dims", 7),
    ],
)
def test_misfits_quote_the_rule_and_the_shapes(operands, output, complaint, column):
    text = "... k, n k, n? -> ...  n"
    with pytest.raises(RuleError, match=complaint) as caught:
        match(text, operands, output)
    message = str(caught.value)
    assert f"    {text}\n    {' ' * (column - (column > 20) * 2)}^" in message
    assert "test.op.default" in message
    assert "y, model.layer, model.py:3" in message
    assert ", ".join(str(list(shape)) for shape in operands) in message


def test_a_tensor_that_must_be_there():
    with pytest.raises(RuleError, match="a1 is no tensor"):
        match("a, b -> a", [(2,)], (2,))


def test_function_rules_show_their_entries():
    with pytest.raises(RuleError, match=r"does not fit: a is 3 here and 2 before") as caught:
        call([(2,), (3,)], [(2,)]).build([["a"], ["a"]], [["a"]])
    assert "a, a -> a" in str(caught.value)


@st.composite
def two_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 5]), min_size=1, max_size=6))

    def shape(order: list[int]) -> tuple[int, ...]:
        result: list[int] = []
        for prime in order:
            if result and draw(st.booleans()):
                result[-1] *= prime
            else:
                result.append(prime)
        return tuple(result)

    return shape(primes), shape(draw(st.permutations(primes)))


@given(two_shapes())
def test_common_factors_agree_on_the_flat_index(shapes):
    source, target = shapes
    left, right, found = common_factors(source, target)

    def strides(shape: tuple[int, ...], rows: list[list[str]]) -> dict[str, int]:
        step, at = 1, {}
        for size, names in zip(reversed(shape), reversed(rows), strict=True):
            inside = 1
            for name in reversed(names):
                at[name.rstrip("!")] = step * inside
                inside *= found[name.rstrip("!")]
            assert inside == size
            step *= size
        return at

    ours, theirs = strides(source, left), strides(target, right)
    shared = set(ours) & set(theirs)
    assert all(ours[name] == theirs[name] for name in shared)
    assert {name for row in left for name in row if not name.endswith("!")} == shared
    if source == target:
        assert all(found[name] for name in shared) and shared == set(ours)
