"""The oracle itself: rules with one deliberate mistake must not pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopar.sharding.factors import Unit
from autopar.sharding.rule import Letter, OpRule, rule_for
from tests.unit.sharding.oracle import check, linear, split
from tests.unit.sharding.oracle_missing import missing
from tests.unit.sharding.samples import Draw, Sample, sample

D = Draw("wrong")
CASES: dict[str, Sample] = {
    "linear": sample("linear", D.normal(4, 6), D.normal(2, 6), D.normal(2)),
    "softmax": sample("softmax.int", D.normal(4, 6), -1),
    "mean": sample("mean.dim", D.normal(4, 6), [1]),
    "layer_norm": sample("layer_norm", D.normal(4, 6), [6], D.normal(6), D.normal(6)),
    "cat": sample("cat", [D.normal(4, 6), D.normal(4, 6)], 1),
    "add": sample("add.Tensor", D.normal(4, 6), 1.5),
    "cross_entropy": sample("cross_entropy_loss", D.normal(4, 6), D.integers(6, 4)),
    "loss": sample("mse_loss", D.normal(4, 6), D.normal(4, 6)),
    "max": sample("amax", D.normal(4, 6), [1]),
    "attention": sample(
        "scaled_dot_product_attention",
        *(D.normal(2, 2, 4, 2) for _ in "qkv"),
        None,
        0.0,
        True,
    ),
    "embedding": sample("embedding", D.normal(6, 4), D.integers(6, 4)),
    "batch_norm": sample("batch_norm", D.normal(4, 6), *[None] * 4, True, 0.1, 1e-5, False),
}


def rule_of(name: str) -> OpRule:
    case = CASES[name]
    rule = rule_for(case.node, case.spec)
    assert rule is not None
    return rule


def changed(letter: str, **fields: object) -> Callable[[OpRule], OpRule]:
    def change(rule: OpRule) -> OpRule:
        return replace(
            rule,
            letters=tuple(
                replace(x, **fields) if x.name == letter else x  # type: ignore[arg-type]
                for x in rule.letters
            ),
        )

    return change


def without(name: str, letter: str) -> tuple[Letter, ...]:
    return tuple(x for x in rule_of(name).letters if x.name != letter)


MISTAKES = {
    "bias added on every rank": ("linear", "k", lambda rule: replace(rule, additive=frozenset())),
    "softmax of each part": ("softmax", "d1", changed("d1", special=False)),
    "mean over the local count": ("mean", "d1", changed("d1", special=False)),
    "statistics of each part": ("layer_norm", "d1", changed("d1", special=False)),
    "batch statistics of each part": ("batch_norm", "n", changed("n", special=False)),
    "operands of cat change places": ("cat", "c", changed("c", split=True)),
    "mean loss over the local count": ("loss", "d0", changed("d0", special=False)),
    "cross entropy over the local count": ("cross_entropy", "n", changed("n", special=False)),
    "split classes add up": ("cross_entropy", "v", changed("v", missing="partial")),
    "maximum adds up": ("max", "d1", changed("d1", split=True)),
    "causal mask of each part": ("attention", "s", changed("s", special=False)),
    "keys of each part": ("attention", "t", changed("t", split=True)),
    "rows of another rank": ("embedding", "v", changed("v", special=False)),
    "looked-up rows are replicas": ("embedding", "v", changed("v", missing="replicate")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_letter_is_caught(mistake: str):
    name, letter, change = MISTAKES[mistake]
    case, rule = CASES[name], change(rule_of(name))
    size = rule.letter(letter).size
    with pytest.raises(Exception, match=r"differs|shape|index|size|dtype"):
        check(case, rule, (split(Unit(letter, 1, size, letter)),), (2,))


def test_a_wrong_stride_is_caught():
    rule = rule_of("cat")
    inner = rule.letter("p")
    places = tuple(replace(place, stride=2) for place in inner.outputs)
    wrong = changed("p", outputs=places)(rule)
    with pytest.raises(Exception, match="differs"):
        check(CASES["cat"], wrong, (split(Unit("p", 1, 6, "p")),), (2,))


@pytest.mark.parametrize(("name", "slots"), [("add", {0}), ("softmax", {0}), ("linear", {0})])
def test_a_wrong_linear_set_is_caught(name: str, slots: set[int]):
    wrong = replace(rule_of(name), linear=(frozenset(slots),))
    with pytest.raises(Exception, match="differs"):
        check(CASES[name], wrong, (linear(0),), (2,))


@pytest.mark.parametrize(("name", "letter"), [("linear", "k"), ("linear", "n"), ("cat", "d0")])
def test_a_missing_letter_is_found(name: str, letter: str):
    rule = rule_of(name)
    assert not missing(CASES[name], rule)
    assert missing(CASES[name], replace(rule, letters=without(name, letter)))


def test_a_missing_linear_set_is_found():
    rule = rule_of("linear")
    assert missing(CASES["linear"], replace(rule, linear=rule.linear[:1]))
