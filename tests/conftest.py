"""Pools of local ranks, started on first use and shared by the whole session."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import Phase, settings

from autopar.runtime.launch import LocalRanks

# Every run tries the same examples, so that it fails only by what was changed. A failing example is
# shown as it was found: making one smaller that traces a model takes longer than all tests do.
settings.register_profile(
    "suite",
    derandomize=True,
    deadline=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate),
)
# ``--hypothesis-profile=random``: other examples in every run, and a failing one is made small.
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("suite")

# The files that take longest start first, so that the workers end together.
LONGEST = (
    "test_families", "test_fuzz", "test_examples", "test_cases", "test_pipeline_matrix",
    "test_memory", "test_pipeline_cases", "test_dryrun", "test_comm", "test_injected_bugs",
    "test_cli_models", "test_cases_random", "test_repeat", "test_compiled", "test_pipeline_fuzz",
    "test_rules", "test_comm_async", "test_cases_training", "test_pipeline_async", "test_zero",
)  # fmt: skip


def pytest_configure() -> None:
    """One thread each for workers and for the scripts they start: together they fill the cores."""
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of `LONGEST` in front, in its order."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded as ``summary``, such as the coverage of the fuzz."""
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            for name, text in getattr(report, "user_properties", []):
                if name == "summary":
                    terminalreporter.section(report.nodeid)
                    terminalreporter.write_line(str(text))


@pytest.fixture(autouse=True)
def settled_heap() -> None:
    """What lives before a test is left out of later garbage collections.

    Traces are shared by the tests of a worker, whose heap grows to millions of objects: walking
    them anew in each full collection took a third of the suite's time.
    """
    gc.collect()
    gc.freeze()
    # Nothing older than the test is counted, and so a share of it would be reached at once.
    gc.set_threshold(10_000, 20, 50)


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
