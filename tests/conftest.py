"""Pools of local ranks, started on first use and shared by the whole session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from autopar.runtime.launch import LocalRanks


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``summary``, such as the coverage of the fuzz."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, text in getattr(report, "user_properties", []):
                if name == "summary":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(str(text))


@pytest.fixture(scope="session")
def local_ranks() -> Iterator[Callable[[int], LocalRanks]]:
    """``local_ranks(n)``: the session's pool of n ranks."""
    pools: dict[int, LocalRanks] = {}

    def pool(count: int) -> LocalRanks:
        if count not in pools:
            pools[count] = LocalRanks(count, timeout_s=120.0, threads=1)
        return pools[count]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture(scope="session")
def ranks2(local_ranks: Callable[[int], LocalRanks]) -> LocalRanks:
    """A pool of two ranks."""
    return local_ranks(2)


@pytest.fixture(scope="session")
def ranks3(local_ranks: Callable[[int], LocalRanks]) -> LocalRanks:
    """A pool of three ranks."""
    return local_ranks(3)


@pytest.fixture(scope="session")
def ranks4(local_ranks: Callable[[int], LocalRanks]) -> LocalRanks:
    """A pool of four ranks."""
    return local_ranks(4)
