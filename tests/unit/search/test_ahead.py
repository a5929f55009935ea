"""A second process that answers ahead, against working everything out alone."""

from __future__ import annotations

import os
import signal
import time

import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.search import exact
from autopar.search.ahead import Ahead
from autopar.search.problem import Problem
from tests.unit.search.problems import traced

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are copied by fork")


def _square(number: int) -> int | None:
    if number == 13:
        raise ValueError("the second process ends here")
    return None if number == 3 else number * number


@pytest.fixture
def ahead():
    found = Ahead(_square)
    yield found
    found.close()


def _answers(ahead: Ahead, numbers: list[int]) -> list[int | None]:
    found = []
    for number in numbers:
        known = ahead.value(number)
        found.append(known[0] if known is not None else _square(number))
    return found


def test_answers_are_the_same_in_any_order(ahead: Ahead) -> None:
    numbers = list(range(12))
    ahead.ask(numbers)
    assert _answers(ahead, numbers[::-1]) == [_square(n) for n in numbers[::-1]]
    ahead.ask([20, 21])
    ahead.ask([30, 31])  # others are dropped, and can be asked for all the same
    assert _answers(ahead, [20, 31, 30, 21]) == [400, 961, 900, 441]
    assert _answers(ahead, [40]) == [1600]  # was never announced


def test_what_is_announced_is_answered_without_asking(ahead: Ahead) -> None:
    ahead.ask(range(5))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and ahead._state[4] == 0:
        time.sleep(0.01)
    assert ahead.value(4) == (16,)
    assert ahead.value(3) == (None,)  # None is an answer


def test_a_process_that_ends_is_not_waited_for(ahead: Ahead) -> None:
    ahead.ask([1, 13, 2])
    assert _answers(ahead, [1]) == [1]
    os.waitid(os.P_PID, ahead._process, os.WEXITED | os.WNOWAIT)  # 13 was the end of it
    assert _answers(ahead, [2]) == [4]
    ahead.ask([5, 6])
    assert _answers(ahead, [6, 5]) == [36, 25]


def test_a_process_that_hangs_is_not_waited_for(
    ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autopar.search.ahead.PATIENCE_S", 0.05)
    os.kill(ahead._process, signal.SIGSTOP)
    ahead.ask([7])
    ahead._state[ahead._slots[7]] = 2  # begun, and never ended
    assert _answers(ahead, [7]) == [49]


def test_a_search_needs_no_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    found = traced("mlp", 2, 2, 8)
    alone, second = (Problem(found.graph, found.loss, ClusterSpec.parse("4xcpu")) for _ in range(2))
    monkeypatch.setattr("autopar.search.exact.is_possible", lambda: True)
    with_one = exact.search(second, ahead=True)
    monkeypatch.setattr(os, "fork", refuse)
    without = exact.search(alone, ahead=True)
    assert with_one.best == without.best and with_one.certificate == without.certificate
