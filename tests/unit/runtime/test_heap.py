"""Memory freed in one step serves the next."""

import os
import subprocess
import sys

# Faults of a second round of allocations, freed from the top of the heap downwards.
SCRIPT = """
import resource
import torch
from autopar.runtime.heap import keep_freed_memory
taken = keep_freed_memory()
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


def faults(**environment: str) -> tuple[bool, int]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    taken, count = map(int, done.stdout.split())
    return bool(taken), count


def test_freed_memory_is_used_again():
    taken, count = faults()
    if taken:  # glibc
        assert count < PAGES / 4


def test_the_users_own_setting_stays():
    taken, count = faults(MALLOC_MMAP_THRESHOLD_="65536")
    assert not taken
    assert count > PAGES / 2
