"""Folding of names that repeat."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from autopar.plan.fold import fold, numbers_text, runs_of, siblings


def test_layers():
    names = [f"layers.{i}.{name}" for i in range(96) for name in ("up.weight", "up.bias")]
    assert [item.text for item in fold(names)] == [
        "layers.{0..95}.up.weight", "layers.{0..95}.up.bias",
    ]  # fmt: skip
    experts = [f"layers.{i}.experts.{e}.w" for i in (1, 3, 5, 7) for e in range(8)]
    assert [item.text for item in fold(experts)] == ["layers.{1,3..7}.experts.{0..7}.w"]
    assert [item.text for item in fold([*experts, "layers.9.experts.0.w"])] == [
        "layers.{1,3..7}.experts.{0..7}.w", "layers.9.experts.0.w",
    ]  # fmt: skip
    assert [item.text for item in fold(["conv1.weight", "x.01", "x.1"])] == [
        "conv1.weight", "x.01", "x.1",
    ]  # fmt: skip


def test_siblings_and_numbers():
    assert siblings(["up.weight", "up.bias", "norm"]) == [
        ("up.{weight,bias}", (0, 1)),
        ("norm", (2,)),
    ]
    assert [numbers_text(n) for n in ((4,), (0, 1), (0, 2, 4, 6), (0, 1, 2, 3, 7))] == [
        "4", "{0,1}", "{0,2..6}", "{0..3,7}",
    ]  # fmt: skip


def expand(text: str) -> list[str]:
    """All names that a pattern stands for."""
    pieces = re.split(r"\{([^}]*)\}", text)
    choices = [[piece] if i % 2 == 0 else _members(piece) for i, piece in enumerate(pieces)]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _members(text: str) -> list[str]:
    stepped = re.fullmatch(r"(\d+),(\d+)\.\.(\d+)", text)
    if stepped and int(stepped[2]) - int(stepped[1]) > 1:
        first, second, last = map(int, stepped.groups())
        return [str(n) for n in range(first, last + 1, second - first)]
    found = []
    for part in text.split(","):
        low, _, high = part.partition("..")
        found += [str(n) for n in range(int(low), int(high or low) + 1)]
    return found


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 3)), unique=True,
        max_size=60,
    )
)  # fmt: skip
def test_patterns_stand_for_exactly_the_names(rows):
    names = [f"{name}.{i}.x.{j}" for name, i, j in rows]
    found = fold(names)
    assert sorted(itertools.chain.from_iterable(item.names for item in found)) == sorted(names)
    for item in found:
        assert sorted(expand(item.text)) == sorted(item.names)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 10))
def test_runs_keep_order_and_get_few(values, most):
    def alike(a: int, b: int, tolerance: float) -> bool:
        return abs(a - b) <= tolerance * max(a, b)

    runs = runs_of(values, lambda _: 0, alike, most)
    assert [item for run in runs for item in run] == values
    assert len(runs) <= max(1, most) if values else not runs
    keyed = runs_of(values, lambda value: value, alike, 1)
    assert [run[0] for run in keyed] == [key for key, _ in itertools.groupby(values)]
