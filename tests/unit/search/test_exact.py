"""The search against trying everything, on small random problems."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.search.oracles import campaign


@pytest.mark.parametrize("seed", [4, 26])
def test_the_search_finds_what_trying_everything_finds(seed: int):
    tally = campaign([seed], most=60)
    assert not tally.wrong
    assert tally.counts["problems"]
    assert tally.equal == 1


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 235, 5000])
def test_hundreds_of_problems(first: int, record_property: Callable[[str, object], None]):
    tally = campaign(range(first, first + 40))
    record_property("summary", tally.text())
    assert not tally.wrong
    assert tally.equal >= 0.95
