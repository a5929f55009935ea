"""Every collective against its definition, on threads and on gloo processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from autopar.errors import ClusterError, InputError, PlanError, RankError
from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.comm_torch import from_environment
from autopar.runtime.launch import LocalRanks

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip
LARGE = 70_000  # elements: more than fits one message buffer


def world(comm: Communicator) -> tuple[int, ...]:
    return tuple(range(comm.world_size))


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor that `rank` brings: small whole numbers, exact in every dtype."""
    numel = torch.Size(shape).numel()
    base = (torch.arange(numel) * (rank + 1) + rank) % 5
    if dtype == torch.bool:
        base = base % 2
    return base.reshape(shape).to(dtype)


def expected_sum(ranks: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype):
    total = sum(value(rank, shape, dtype).to(torch.complex128) for rank in ranks)
    return total.to(dtype) if dtype.is_complex else total.real.to(dtype)


def check_reductions(comm: Communicator) -> None:
    ranks = world(comm)
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 3), (0,), (LARGE,)):
            mine = value(comm.rank, shape, dtype)
            total = expected_sum(ranks, shape, dtype)
            assert torch.equal(comm.all_reduce(mine, ranks), total)
            assert torch.equal(mine, value(comm.rank, shape, dtype))
            assert torch.equal(comm.all_reduce_start(mine, ranks).wait(), total)
            assert torch.equal(mine, total)
        if not dtype.is_complex:
            stacked = torch.stack([value(rank, (7,), dtype).long() for rank in ranks])
            for op, want in (("max", stacked.amax(0)), ("min", stacked.amin(0))):
                got = comm.all_reduce(value(comm.rank, (7,), dtype), ranks, op)
                assert torch.equal(got, want.to(dtype))


def check_movement(comm: Communicator) -> None:
    ranks, count = world(comm), comm.world_size
    for dtype in DTYPES:
        for shape in ((), (2, 3), (0, 4), (LARGE,)):
            gathered = comm.all_gather(value(comm.rank, shape, dtype), ranks)
            assert torch.equal(gathered, torch.stack([value(r, shape, dtype) for r in ranks]))
            source = count - 1
            got = comm.broadcast(value(comm.rank, shape, dtype), ranks, source)
            assert torch.equal(got, value(source, shape, dtype))
            rows = value(comm.rank, (count, *shape), dtype)
            kept = comm.reduce_scatter(rows, ranks)
            assert torch.equal(kept, expected_sum(ranks, rows.shape, dtype)[comm.rank])
    sent = [torch.full((comm.rank + 1, other), comm.rank) for other in ranks]
    received = comm.all_to_all(sent, ranks, [(other + 1, comm.rank) for other in ranks])
    for other, tensor in zip(ranks, received, strict=True):
        assert torch.equal(tensor, torch.full((other + 1, comm.rank), other))


def check_any_strides(comm: Communicator) -> None:
    ranks, count = world(comm), comm.world_size
    bases = [value(rank, (4, count, 6), torch.float64) for rank in ranks]
    views = [base.permute(1, 2, 0)[:, ::2] for base in bases]
    mine = bases[comm.rank].clone().permute(1, 2, 0)[:, ::2]
    assert not mine.is_contiguous()
    total = torch.stack(views).sum(0)
    assert torch.equal(comm.all_reduce(mine, ranks), total)
    assert torch.equal(comm.all_gather(mine, ranks), torch.stack(views))
    assert torch.equal(comm.reduce_scatter(mine, ranks), total[comm.rank])
    assert torch.equal(comm.broadcast(mine, ranks, 0), views[0])
    received = comm.all_to_all(list(mine), ranks, [mine[0].shape] * count)
    assert all(torch.equal(got, views[other][comm.rank]) for other, got in enumerate(received))
    assert all(result.is_contiguous() for result in received)
    comm.all_reduce_start(mine, ranks).wait()
    assert torch.equal(mine, total)
    expanded = torch.ones(1, 3).expand(5, 3)
    assert torch.equal(comm.all_reduce(expanded, ranks), torch.full((5, 3), float(count)))


def check_subgroups(comm: Communicator) -> None:
    assert comm.world_size == 4
    rows, columns = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    odd = ((0, 1, 3),)
    comm.prepare([*columns, *rows, *odd])
    for groups in (rows, columns, odd):
        for ranks in groups:
            if comm.rank in ranks:
                got = comm.all_reduce(torch.tensor([float(comm.rank)]), ranks)
                assert got.item() == sum(ranks)
                assert comm.all_gather(torch.tensor(comm.rank), ranks).tolist() == list(ranks)
                big = comm.all_reduce_start(torch.full((LARGE,), float(comm.rank)), ranks)
                assert torch.equal(big.wait(), torch.full((LARGE,), float(sum(ranks))))
    alone = (comm.rank,)
    assert comm.all_gather(torch.ones(2), alone).shape == (1, 2)
    assert comm.gather_objects({"rank": comm.rank}) == [{"rank": rank} for rank in range(4)]
    comm.barrier()


def check_no_autograd(comm: Communicator) -> None:
    weight = torch.ones(3, requires_grad=True)
    for result in (
        comm.all_reduce(weight, world(comm)),
        comm.all_gather(weight, world(comm)),
        comm.broadcast(weight, world(comm), 0),
        comm.all_reduce(weight, (comm.rank,)),
    ):
        assert not result.requires_grad
    assert torch.equal(weight.detach(), torch.ones(3))


def traffic(comm: Communicator) -> dict[str, int]:
    ranks, count = world(comm), comm.world_size
    comm.take_traffic()
    comm.all_reduce(torch.ones(count * 5), ranks)
    comm.all_reduce_start(torch.ones(count * 5), ranks).wait()
    comm.all_gather(torch.ones(5), ranks)
    comm.reduce_scatter(torch.ones(count, 5), ranks)
    comm.all_to_all([torch.ones(5)] * count, ranks, [(5,)] * count)
    comm.all_reduce(torch.ones(1000), (comm.rank,))
    taken = comm.take_traffic()
    assert comm.traffic == {}
    return taken


def disagree(comm: Communicator) -> None:
    comm.prepare([(0, 1)] if comm.rank else [(0, 1), (1, 2)])


CHECKS = [
    check_reductions, check_movement, check_any_strides, check_subgroups, check_no_autograd,
]  # fmt: skip


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_threads(check):
    run_threads(4, check)


@pytest.mark.distributed
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_processes(ranks4: LocalRanks, check):
    ranks4.run(check)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check_reductions, check_movement, check_any_strides])
def test_three_processes(ranks3: LocalRanks, check):
    ranks3.run(check)


def test_solo():
    comm = SoloCommunicator()
    check_any_strides(comm)
    check_no_autograd(comm)
    assert traffic(comm) == {}
    assert comm.gather_objects(1) == [1]


@pytest.mark.distributed
def test_traffic_is_what_theory_sends(ranks2: LocalRanks):
    item = 4
    per_rank = {
        "all_reduce": 2 * 2 * 1 * (2 * 5 * item) // 2,
        "all_gather": 1 * 5 * item,
        "reduce_scatter": 1 * (2 * 5 * item) // 2,
        "all_to_all": 1 * 5 * item,
    }
    assert ranks2.run(traffic) == [per_rank] * 2
    assert run_threads(2, traffic) == [per_rank] * 2


def test_threads_name_the_failing_rank():
    def fail(comm: Communicator) -> None:
        if comm.rank == 2:
            raise ZeroDivisionError("by design")
        comm.barrier()

    with pytest.raises(RankError, match="rank 2 failed: ZeroDivisionError: by design"):
        run_threads(4, fail)


def test_threads_keep_autopar_errors():
    def fail(comm: Communicator) -> None:
        raise PlanError("no such axis", fix="name another")

    with pytest.raises(PlanError, match="no such axis") as caught:
        run_threads(2, fail)
    assert caught.value.fix == "name another"


def test_threads_report_a_rank_that_leaves():
    with pytest.raises(RankError, match=r"for ranks \[1\], which have finished"):
        run_threads(2, lambda comm: comm.barrier() if comm.rank == 0 else None)


def test_threads_report_different_collectives():
    def mismatched(comm: Communicator) -> None:
        shape = (2,) if comm.rank else (3,)
        comm.all_reduce(torch.ones(shape), (0, 1))

    with pytest.raises(RankError, match="different collectives"):
        run_threads(2, mismatched)


@pytest.mark.parametrize("ranks", [(1, 0), (0, 0, 1), (1,), (0, 5)])
def test_a_bad_group_is_refused(ranks):
    def reduce(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.all_reduce(torch.ones(1), ranks)

    with pytest.raises(RankError):
        run_threads(2, reduce)


def fail_on_one(comm: Communicator) -> None:
    if comm.rank == 1:
        raise ValueError("by design")
    comm.barrier()


def refuse_on_all(comm: Communicator) -> None:
    raise PlanError("no such axis", expected="dp", fix="name another", where="constraints")


def die(comm: Communicator, how: str) -> None:
    if comm.rank == 1:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()


def sleep_on_one(comm: Communicator) -> None:
    if comm.rank == 1:
        time.sleep(60)
    comm.barrier()


def process_id(comm: Communicator) -> int:
    return os.getpid()


def report_twice(comm: Communicator) -> str:
    comm.report(10 * comm.rank)
    comm.barrier()
    comm.report(10 * comm.rank + 1)
    return "done"


class OwnModule(torch.nn.Linear):
    """Defined here, so workers must import this very file to unpickle it."""


def module_name(comm: Communicator, module: torch.nn.Module) -> str:
    assert isinstance(module, OwnModule)
    return type(module).__name__


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.distributed
def test_pool_runs_functions_by_name_and_object(ranks2: LocalRanks):
    assert ranks2.run(module_name, OwnModule(2, 2)) == ["OwnModule"] * 2
    target = f"{__file__}:process_id"
    assert ranks2.run(target) == ranks2.run(process_id)


@pytest.mark.distributed
def test_ranks_report_while_they_run(ranks2: LocalRanks):
    heard: list[tuple[int, int]] = []
    results = ranks2.run(report_twice, on_report=lambda rank, value: heard.append((rank, value)))
    assert results == ["done"] * 2
    assert sorted(heard) == [(0, 0), (0, 1), (1, 10), (1, 11)]
    assert ranks2.run(report_twice) == ["done"] * 2


@pytest.mark.distributed
def test_pool_failures_are_named_and_leave_nobody():
    with LocalRanks(2, timeout_s=60.0, threads=1) as pool:
        first = pool.run(process_id)
        with pytest.raises(RankError, match="rank 1 failed: ValueError: by design") as caught:
            pool.run(fail_on_one)
        assert "fail_on_one" in "".join(caught.value.__notes__)
        assert not any(map(is_running, first))

        second = pool.run(process_id)
        for _ in range(2):
            with pytest.raises(PlanError, match="no such axis") as refused:
                pool.run(refuse_on_all)
            assert refused.value.where == "constraints"
        assert pool.run(process_id) == second  # all failed alike: the pool lives on

        with pytest.raises(RankError, match="rank 1 died: exit code 3"):
            pool.run(die, "exit")
        assert not any(map(is_running, second))
        with pytest.raises(RankError, match="rank 1 died: killed by SIGKILL"):
            pool.run(die, "kill")

        last = pool.run(process_id)
        pool.timeout_s = 1.0
        start = time.monotonic()
        with pytest.raises(RankError, match="did not answer within 1 s"):
            pool.run(sleep_on_one)
        assert time.monotonic() - start < 10.0
        assert not any(map(is_running, last))


@pytest.mark.distributed
def test_ranks_that_disagree_on_groups(ranks3: LocalRanks):
    with pytest.raises(RankError, match="ask for different groups"):
        ranks3.run(disagree)


UNGUARDED = """
from autopar.runtime.launch import LocalRanks
class Value:
    pass
def work(comm, value):
    return comm.rank
print(LocalRanks(2).run(work, Value()))
"""


def test_an_unguarded_script_is_told_so_once(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    # Not -m or -c: the ranks import the file that is __main__.
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr.count("Traceback") == 1, run.stderr
    assert "InputError: a local rank was about to start local ranks again" in run.stderr
    assert 'if __name__ == "__main__":' in run.stderr


def test_pool_refuses_what_cannot_be_sent():
    pool = LocalRanks(2)
    with pytest.raises(InputError, match="cannot be sent"):
        pool.run(lambda comm: None)
    with pytest.raises(InputError, match="an argument cannot be sent"):
        pool.run(process_id, lambda: None)
    with pytest.raises(InputError, match="0 local ranks"):
        LocalRanks(0)


@pytest.fixture
def no_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_ID", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_job_this_process_is_alone(no_job):
    comm = from_environment("cpu")
    assert isinstance(comm, SoloCommunicator)
    assert (comm.rank, comm.world_size, comm.device.type) == (0, 1, "cpu")


def test_a_job_half_announced_is_refused(no_job):
    no_job.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterError, match="RANK, MASTER_ADDR, MASTER_PORT is not set"):
        from_environment("cpu")
    no_job.setenv("WORLD_SIZE", "two")
    with pytest.raises(ClusterError, match="WORLD_SIZE is 'two'"):
        from_environment("cpu")
