"""What this machine does: kernels, launches and collectives, timed while all ranks work at once.

Ranks of one machine share cores, caches and memory bandwidth, so nothing is timed on one rank
alone. Where a rank computes with one thread, its own CPU time is taken: other jobs on the machine
are then left out, and what ranks take from each other by sharing cores is put back in as
``ranks / cores``. Everything else is wall time. On CUDA devices kernels are timed by events.

Collectives of CPUs are timed as programs issue them, in turn with kernels: ranks then come to them
one later than the other, sleep, are woken, now and then on a core that is taken, and find what they
send in memory and not in cache. Rounds of all of them follow each other, so that a slow spell of
the machine is in one round of many collectives, and not in all of one.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.runtime.comm import Communicator, Ranks
from autopar.runtime.heap import keep_freed_memory
from autopar.runtime.measure_work import COLLECTIVES, Job, between, collective, jobs, warm_up

_ROUNDS = 3
_QUICK_ROUNDS = 3
_LIMIT_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SIZES = (4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20)
"""Bytes of the tensors that collectives are timed with."""
_REPEATS = {4 * 2**10: 12, 64 * 2**10: 12, 2**20: 10, 16 * 2**20: 6}
"""Calls of a collective in a round."""
_LEAST_S = 1e-6
_FEWEST, _LIMIT_S = 5, 1.0
"""Calls of a collective at least, and for how long otherwise."""
_UNABLE = ("not implemented", "not supported", "unsupported", "no kernel image")
"""What torch says of a kernel that a device does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One thing that was timed.

    Attributes:
        work: ``"matmul"``, ``"convolution"``, ``"attention"``, ``"stream"``, ``"update"``,
            ``"launch"`` or the kind of a collective.
        name: What exactly, for reports.
        sizes: Of a product m, n, k; of a convolution also how many such products it takes, and
            bytes of its operands and results; of attention batch, heads, sequence, head dim; of a
            stream bytes read and written; of an update bytes of parameters; of a launch how many;
            of a collective bytes.
        dtype: Dtype.
        backward: Whether it is a backward.
        ranks: Ranks that take part in a collective.
        seconds: How long it takes a rank, while all are at it.
    """

    work: str
    name: str
    sizes: tuple[int, ...]
    dtype: str = "float32"
    backward: bool = False
    ranks: int = 1
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine, measured.

    Attributes:
        device: ``"cpu"`` or the name that CUDA gives the device.
        ranks: Ranks that measured.
        ranks_per_node: Those on one machine.
        cores: Cores that the ranks of a machine share, 0 where devices compute.
        memory_bytes: Memory of a rank's device; on CPUs an equal part of the machine's.
        host_bytes: Memory of the machine.
        samples: What was timed.
    """

    device: str
    ranks: int
    ranks_per_node: int
    cores: int
    memory_bytes: int
    host_bytes: int
    samples: tuple[Sample, ...]


def measure(comm: Communicator, quick: bool = False) -> Machine:
    """Time everything that the catalogue has a figure for; all ranks call together.

    Reports ``(what, done, of)`` through ``comm.report``.

    Args:
        comm: The ranks, all on one machine or equally many on each.
        quick: Fewer sizes and rounds.

    Returns:
        The same on every rank.
    """
    keep_freed_memory()
    clock = _Clock(comm, _QUICK_ROUNDS if quick else _ROUNDS, 0.008 if quick else 0.03)
    todo = list(jobs(comm.device, quick=quick))
    groups = list(_groups(comm.world_size))
    comm.prepare([group for row in groups for group in row], _channels(comm.world_size))
    sizes = SIZES[:3] if quick else SIZES
    waiting = [(row, kind, size) for row in groups for kind in COLLECTIVES for size in sizes]
    if comm.world_size < 2:
        waiting = []
    total, samples = len(todo) + clock.rounds * len(waiting), []
    warm_up(comm.device)
    for done, job in enumerate(todo):
        comm.report((job.work, done, total))
        sample = _compute(clock, job)
        samples += [sample] if sample is not None else []
    took: list[list[float]] = [[] for _ in waiting]
    for done in range(clock.rounds * len(waiting)):
        place = done % len(waiting)
        comm.report((waiting[place][1], len(todo) + done, total))
        took[place].append(_communicate(clock, *waiting[place]))
    for (row, kind, size), seconds in zip(waiting, took, strict=True):
        samples.append(
            Sample(
                work=kind, name=f"{kind} over {len(row[0])}", sizes=(size,), ranks=len(row[0]),
                seconds=min(seconds) if clock.cuda else statistics.median(seconds),
            )
        )  # fmt: skip
    comm.report(("done", total, total))
    per_node = _ranks_per_node(comm)
    host = host_memory_bytes()
    cuda = comm.device.type == "cuda"
    mine = torch.cuda.get_device_properties(comm.device).total_memory if cuda else host // per_node
    return Machine(
        device=torch.cuda.get_device_name(comm.device) if cuda else "cpu",
        ranks=comm.world_size,
        ranks_per_node=per_node,
        cores=0 if cuda else core_count(),
        memory_bytes=min(comm.gather_objects(mine)),
        host_bytes=min(comm.gather_objects(host)),
        samples=tuple(samples),
    )


def _compute(clock: _Clock, job: Job) -> Sample | None:
    """Time a kernel; None where the device cannot run it."""
    try:
        run = job.prepare()
        run()
    except RuntimeError as error:  # NotImplementedError is one, and so is torch.OutOfMemoryError
        if not _is_unable(error):
            raise
        run = None
    if not all(clock.comm.gather_objects(run is not None)) or run is None:
        return None
    return Sample(
        work=job.work,
        name=job.name,
        sizes=job.sizes,
        dtype=job.dtype,
        backward=job.backward,
        seconds=clock.compute(run),
    )


def _is_unable(error: RuntimeError) -> bool:
    """Whether a device has no such kernel, or too little memory for it."""
    if isinstance(error, NotImplementedError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in _UNABLE)


def _communicate(clock: _Clock, row: Sequence[Ranks], kind: str, size_bytes: int) -> float:
    """Seconds of a collective in one round."""
    comm = clock.comm
    group = next((ranks for ranks in row if comm.rank in ranks), None)
    run = collective(comm, kind, group, size_bytes) if group is not None else None
    return clock.collective(run, _REPEATS[size_bytes])


def _groups(count: int) -> Iterator[list[Ranks]]:
    """Ways to divide ranks into equal groups that communicate at the same time."""
    size = 2
    while size <= count:
        yield [tuple(range(start, start + size)) for start in range(0, count - size + 1, size)]
        size = size * 2 if size * 2 <= count or size == count else count


def _channels(count: int) -> list[tuple[int, int]]:
    pairs = [(rank, rank + 1) for rank in range(0, count - 1, 2)]
    return [*pairs, *((later, earlier) for earlier, later in pairs)]


class _Clock:
    """Times what all ranks do at once."""

    def __init__(self, comm: Communicator, rounds: int, window_s: float) -> None:
        self.comm, self.rounds, self.window_s = comm, rounds, window_s
        self.cuda = comm.device.type == "cuda"
        self.own = not self.cuda and torch.get_num_threads() == 1
        # One rank decides what all do: they may not see the same number of cores or threads.
        own, cores = comm.gather_objects((self.own, core_count()))[0]
        self.own = own
        self.sharing = max(1.0, _ranks_per_node(comm) / cores) if own else 1.0
        self.kernel = between(comm.device)

    def compute(self, run: Callable[[], object]) -> float:
        """Seconds of one call, the mean of all ranks' medians over rounds."""
        once = self._seconds(run, 1)
        want = max(1, round(self.window_s / max(once, 1e-7)))
        repeats = min(self.comm.gather_objects(min(want, 2000)))  # the same on all ranks
        self.comm.barrier()
        took = [self._seconds(run, repeats) for _ in range(self.rounds)]
        return statistics.mean(self.comm.gather_objects(statistics.median(took))) * self.sharing

    def _seconds(self, run: Callable[[], object], repeats: int) -> float:
        if self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / repeats
        now = time.thread_time if self.own else time.perf_counter
        begun = now()
        for _ in range(repeats):
            run()
        return (now() - begun) / repeats

    def collective(self, run: Callable[[], object] | None, repeats: int) -> float:
        """Seconds that a call takes, from the last rank's start to the last rank's end.

        Args:
            run: What this rank does, None if it does not take part.
            repeats: Calls, fewer if they take long.
        """
        self.comm.barrier()
        begun = time.perf_counter()
        self.kernel()
        if run is not None:
            run()
        took = time.perf_counter() - begun
        # Rank 0 decides: by their own clocks ranks would call unequally often, and wait for ever.
        most = max(_FEWEST, round(_LIMIT_S / took))
        repeats = min(repeats, self.comm.gather_objects(most)[0])
        return self._back_to_back(run, repeats) if self.cuda else self._in_turn(run, repeats)

    def _in_turn(self, run: Callable[[], object] | None, repeats: int) -> float:
        """What a call adds to the kernels before and after it, the mean of calls in a row.

        While a rank waits, others that share its core compute. So what calls add is the time of the
        slowest rank less what the kernels of all ranks take all cores. A call is over at once, or
        waits some milliseconds for a core that another computes on; programs pay the mean of both.
        """
        now = time.thread_time if self.own else time.perf_counter
        computed = 0.0
        self.comm.barrier()
        begun = time.perf_counter()
        for _ in range(repeats):
            mark = now()
            self.kernel()
            computed += now() - mark
            if run is not None:
                run()
        took = time.perf_counter() - begun
        everyone, kernels = zip(*self.comm.gather_objects((took, computed)), strict=True)
        added = max(everyone) - statistics.mean(kernels) * self.sharing
        return max(added / repeats, _LEAST_S)

    def _back_to_back(self, run: Callable[[], object] | None, repeats: int) -> float:
        """The fastest call."""
        took = []
        for _ in range(repeats + 1):
            self.comm.barrier()
            torch.cuda.synchronize(self.comm.device)
            begun = time.perf_counter()
            if run is not None:
                run()
            torch.cuda.synchronize(self.comm.device)
            took.append(time.perf_counter() - begun if run is not None else 0.0)
        everyone = self.comm.gather_objects(took[1:])
        return min(map(max, zip(*everyone, strict=True)))


def _ranks_per_node(comm: Communicator) -> int:
    names = comm.gather_objects(os.uname().nodename)
    return max(names.count(name) for name in names)


def core_count() -> int:
    """Cores that this process may use."""
    with suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory_bytes() -> int:
    """Memory of this machine, or of the container if that has less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMIT_FILES:
        with suppress(OSError, ValueError):
            found = min(found, int(Path(file).read_text(encoding="ascii")))
    return found


def as_rows(machine: Machine) -> list[dict[str, object]]:
    """The samples as plain data, for ``--json``."""
    return [dataclasses.asdict(sample) for sample in machine.samples]
