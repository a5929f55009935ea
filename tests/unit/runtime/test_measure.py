"""A machine is measured: everything once, on one rank and on threads that are ranks."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest
import torch

from autopar.cost_models.calibrate import calibrate
from autopar.runtime import measure as module
from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.measure import Machine, _Clock, _groups, core_count, host_memory_bytes
from autopar.runtime.measure_work import COLLECTIVES, Job, collective, jobs


def test_groups_halve_the_ranks():
    assert list(_groups(1)) == []
    assert list(_groups(2)) == [[(0, 1)]]
    assert list(_groups(4)) == [[(0, 1), (2, 3)], [(0, 1, 2, 3)]]
    assert list(_groups(3)) == [[(0, 1)], [(0, 1, 2)]]
    assert [len(row[0]) for row in _groups(8)] == [2, 4, 8]


def test_every_job_of_a_cpu_runs():
    works = []
    for job in jobs(torch.device("cpu"), quick=True):
        if job.work != "launch" or job.name == "2 layers":
            job.prepare()()
            works.append(job.work)
    assert works.count("launch") == 1
    backward = [job for job in jobs(torch.device("cpu"), quick=False) if job.backward]
    assert {job.work for job in backward} == {"convolution", "attention"}


def test_collectives_are_those_of_the_communicator():
    def work(comm: Communicator) -> dict[str, int]:
        comm.prepare([(0, 1)])
        for kind in COLLECTIVES:
            collective(comm, kind, (0, 1), 4096)()
        return comm.take_traffic()

    first, second = run_threads(2, work)
    assert first == {
        "all_reduce": 4096, "all_gather": 2048, "reduce_scatter": 2048, "all_to_all": 2048,
        "send": 4096,
    }  # fmt: skip
    assert second == {kind: size for kind, size in first.items() if kind != "send"}


def test_ranks_call_equally_often_whatever_their_clocks_say(monkeypatch):
    monkeypatch.setattr(module, "_LIMIT_S", 0.05)

    def work(comm: Communicator) -> tuple[int, float, float]:
        clock, calls = _Clock(comm, 1, 0.001), list[int]()
        comm.barrier()

        def call() -> None:
            calls.append(0)
            end = time.perf_counter() + (0.02 if comm.rank == 0 else 0.001)
            while time.perf_counter() < end:
                pass

        seconds = clock.collective(call if comm.rank < 2 else None, 50)
        return len(calls), seconds, clock.sharing

    first, second, third = run_threads(3, work)
    assert first[0] == second[0] == module._FEWEST + 1
    assert third[0] == 0
    assert {found[1:] for found in (first, second, third)} == {first[1:]}
    assert 0.01 < first[1] < 1


def test_only_what_a_device_cannot_do_is_left_out():
    comm = SoloCommunicator()
    clock = _Clock(comm, 1, 0.001)

    def fails(error: Exception) -> Job:
        def prepare() -> Callable[[], object]:
            raise error

        return Job(work="matmul", name="", sizes=(1, 1, 1), prepare=prepare)

    for error in (
        RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'"),
        NotImplementedError(),
        torch.OutOfMemoryError(),
    ):
        assert module._compute(clock, fails(error)) is None
    with pytest.raises(RuntimeError, match="shapes"):
        module._compute(clock, fails(RuntimeError("shapes cannot be multiplied")))


@pytest.mark.long
def test_one_rank_measures_and_is_fitted(monkeypatch):
    monkeypatch.setattr(module, "_QUICK_ROUNDS", 1)
    told: list[tuple[str, int, int]] = []
    comm = SoloCommunicator()
    comm.report = told.append  # type: ignore[assignment]
    machine: Machine = module.measure(comm, quick=True)
    assert {item.work for item in machine.samples} == {
        "matmul", "convolution", "attention", "stream", "update", "launch"
    }  # fmt: skip
    assert all(0 < item.seconds < 10 for item in machine.samples)
    assert told[-1][0] == "done"
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    found = calibrate(machine, source="measured by a test")
    device = found.cluster.hardware(0)
    assert device.memory_bytes <= machine.host_bytes == host_memory_bytes()
    assert device.node.cores == core_count()


def test_convolutions_say_what_they_move():
    """As an op that reads its operands and writes its results."""
    for job in jobs(torch.device("cpu"), quick=True):
        if job.work == "convolution" and "4 x 4" in job.name:
            *_, passes, moved_bytes = job.sizes
            side, (outputs, k) = 4 * 4 * 4, job.sizes[1:3]
            inputs = k // (9 if "kernel 3" in job.name else 1)
            image, weight, out = side * inputs, outputs * k, side * outputs
            assert passes == 1 + job.backward
            made = image + weight if job.backward else 0
            assert moved_bytes == 4 * (image + weight + out + made)


def test_what_a_call_adds_is_told_apart_from_kernels(monkeypatch):
    """Kernels take three times the time of the CPU, as three ranks share a core."""

    class Time:
        wall = cpu = 0.0
        perf_counter = staticmethod(lambda: Time.wall)
        thread_time = staticmethod(lambda: Time.cpu)

    def kernel() -> None:
        Time.wall, Time.cpu = Time.wall + 0.012, Time.cpu + 0.004

    waits = itertools.cycle((0.001, 0.001, 0.004))

    def call() -> None:
        Time.wall += next(waits)

    monkeypatch.setattr(module, "time", Time)
    clock = _Clock(SoloCommunicator(), 1, 0.001)
    clock.own, clock.sharing, clock.kernel = True, 3.0, kernel
    assert clock.collective(call, 6) == pytest.approx(0.002)
