"""Memory freed in one step serves the next."""

import os
import subprocess
import sys

import pytest

# Faults of a second round of allocations, freed from the top of the heap downwards.
SCRIPT = """
import resource, sys
import torch
from autopar.runtime.heap import keep_freed_memory
taken = sys.argv[1] == "keep" and keep_freed_memory()
def work():
    held = [torch.ones(2**20) for _ in range(8)]
    while held:
        held.pop()
work(), work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
print(int(taken), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
PAGES = 8 * 2**20 * 4 // os.sysconf("SC_PAGE_SIZE")


def faults(mode: str, **environment: str) -> tuple[bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, mode],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    taken, count = map(int, done.stdout.split())
    return bool(taken), count


def test_freed_memory_is_used_again():
    taken, count = faults("keep")
    if taken:  # glibc
        assert count < PAGES / 4
        assert faults("default")[1] > PAGES / 2


def test_the_users_own_setting_stays():
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="1000000") == (False, pytest.approx(PAGES, rel=1))
