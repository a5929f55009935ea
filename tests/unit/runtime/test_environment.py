"""What launchers say in environment variables, and two processes that meet by Slurm's alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import ClusterError
from autopar.runtime.environment import (
    JobEnvironment,
    expand_nodes,
    local_rank,
    read_environment,
)

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}  # fmt: skip
# As an allocation of 4 nodes shows itself in a batch script, ...
BATCH = {
    "SLURM_JOB_ID": "200505", "SLURM_JOBID": "200505", "SLURM_NTASKS": "4", "SLURM_NNODES": "4",
    "SLURM_JOB_NODELIST": "gnode[010,020-021],gpu3", "SLURM_NODELIST": "gnode[010,020-021],gpu3",
    "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
}  # fmt: skip
# ... in a task of srun, ...
STEP = {**BATCH, "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "2"}
# ... and in the shell of salloc.
SALLOC = {name: BATCH[name] for name in BATCH if name not in ("SLURM_PROCID", "SLURM_LOCALID")}


def without(variables, *names):
    return {name: text for name, text in variables.items() if name not in names}


def test_torchrun():
    job = read_environment(TORCHRUN)
    assert job == JobEnvironment(
        launcher="torchrun", rank=5, world_size=8, local_rank=1, address="head", port=29500
    )
    assert read_environment(without(TORCHRUN, "LOCAL_RANK")).local_rank == 5
    alone = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    assert read_environment(alone).world_size == 1


def test_a_task_of_srun():
    job = read_environment(STEP)
    assert (job.launcher, job.rank, job.world_size, job.local_rank) == ("slurm", 3, 4, 2)
    assert job.address == "gnode010"
    assert 20_000 <= job.port < 32_000
    others = [{**STEP, "SLURM_PROCID": str(rank)} for rank in range(4)]
    assert {read_environment(other).port for other in others} == {job.port}
    assert read_environment({**STEP, "SLURM_STEP_ID": "1"}).port != job.port
    assert read_environment({**STEP, "SLURM_JOB_ID": "200506"}).port != job.port


def test_a_step_on_part_of_the_allocation():
    part = {**STEP, "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "gpu3"}
    job = read_environment(part)
    assert (job.world_size, job.address) == (8, "gpu3")


def test_a_given_address_and_port_win():
    job = read_environment({**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"})
    assert (job.address, job.port, job.rank) == ("10.0.0.7", 1234, 3)
    needless = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    bare = without({**STEP, "MASTER_ADDR": "head", "MASTER_PORT": "1"}, *needless)
    assert read_environment(bare).address == "head"


@pytest.mark.parametrize("allocation", [BATCH, STEP, SALLOC], ids=["batch", "step", "salloc"])
def test_torchrun_inside_slurm_wins(allocation):
    assert read_environment({**allocation, **TORCHRUN}) == read_environment(TORCHRUN)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        BATCH,
        SALLOC,
        {**SALLOC, "MASTER_ADDR": "head", "MASTER_PORT": "29500"},
        {**BATCH, "SLURM_STEP_ID": "4294967291"},  # some versions mark the batch script so
        {**STEP, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0"},  # salloc's own step
        {**STEP, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {"WORLD_SIZE": "1"},
        {"RANK": "0"},
    ],
)
def test_alone(variables):
    assert read_environment(variables) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (without(STEP, "SLURM_STEP_ID"), "SLURM_PROCID is 3, but SLURM_STEP_ID is not set"),
        (without(STEP, "SLURM_PROCID"), "in step 0 of a Slurm job, but SLURM_PROCID is not set"),
        (without(STEP, "SLURM_LOCALID"), "but SLURM_LOCALID is not set"),
        (without(STEP, "SLURM_NTASKS"), "but SLURM_NTASKS is not set"),
        (without(STEP, "SLURM_JOB_ID", "SLURM_JOBID"), "but SLURM_JOBID is not set"),
        (without(STEP, "SLURM_NODELIST", "SLURM_JOB_NODELIST"), "but SLURM_NODELIST is not set"),
        ({**STEP, "WORLD_SIZE": "8"}, "WORLD_SIZE is 8, but SLURM_NTASKS is 4"),
        ({**STEP, "RANK": "1"}, "RANK is 1, but SLURM_PROCID is 3"),
        ({**STEP, "SLURM_PROCID": "4"}, "rank 4 of a job of 4"),
        ({**STEP, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
        ({**STEP, "SLURM_JOB_NODELIST": "node[1-"}, r"node list 'node\[1-' cannot be read"),
        ({**STEP, "MASTER_PORT": "70000"}, "port 70000"),
        (without(TORCHRUN, "MASTER_ADDR"), "WORLD_SIZE is 8, but MASTER_ADDR is not set"),
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of a job of 8"),
        ({"RANK": "0", "MASTER_ADDR": "head"}, "RANK is 0, but WORLD_SIZE, MASTER_PORT is not set"),
    ],
)
def test_refused(variables, message):
    with pytest.raises(ClusterError, match=message):
        read_environment(variables)


def test_equal_variables_of_both_are_no_contradiction():
    both = {**STEP, "WORLD_SIZE": "4"}
    assert read_environment(both) == read_environment(STEP)
    assert read_environment({**STEP, "RANK": "3"}) == read_environment(STEP)


def test_local_rank_of_a_job_already_joined():
    assert local_rank(TORCHRUN) == 1
    assert local_rank(STEP) == 2
    assert local_rank({**STEP, "LOCAL_RANK": "7"}) == 7
    assert local_rank({**BATCH, "RANK": "6"}) == 6
    assert local_rank({}) == 0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("localhost", ["localhost"]),
        ("node[001-004,007],gpu3", ["node001", "node002", "node003", "node004", "node007", "gpu3"]),
        ("a[8-11]", ["a8", "a9", "a10", "a11"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("rack[1-2]n[01-02].lan", ["rack1n01.lan", "rack1n02.lan", "rack2n01.lan", "rack2n02.lan"]),
        ("a-1,b-2", ["a-1", "b-2"]),
        ("10.0.0.[7-8]", ["10.0.0.7", "10.0.0.8"]),
    ],
)
def test_node_lists(text, names):
    assert expand_nodes(text) == tuple(names)


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,", "a[", "a]", "a[]", "a[1-]", "a[3-1]", "a[1-2-3]", "a[x]", "a[[1]]", "a b"],
)
def test_what_is_no_node_list(text):
    with pytest.raises(ClusterError, match="cannot be read"):
        expand_nodes(text)


prefixes = st.from_regex(r"[a-z][a-z0-9.-]{0,6}", fullmatch=True)
ranges = st.lists(
    st.tuples(st.integers(0, 999), st.integers(0, 20)), min_size=1, max_size=3
)  # first, further


@given(st.lists(st.tuples(prefixes, st.none() | st.tuples(ranges, st.integers(1, 4))), min_size=1))
def test_compressed_lists_expand_to_what_was_compressed(groups):
    parts: list[str] = []
    names: list[str] = []
    for prefix, numbers in groups:
        if numbers is None:
            parts.append(prefix)
            names.append(prefix)
            continue
        pieces = []
        for first, further in numbers[0]:
            width = numbers[1]
            pieces.append(f"{first:0{width}}" + (f"-{first + further:0{width}}" if further else ""))
            # Slurm pads to the width in which the first number is written.
            names += [
                prefix + str(n).zfill(max(width, len(str(first))))
                for n in range(first, first + further + 1)
            ]
        parts.append(f"{prefix}[{','.join(pieces)}]")
    assert expand_nodes(",".join(parts)) == tuple(names)


TASK = """
import torch
from autopar.runtime.comm_torch import from_environment
comm = from_environment("cpu", timeout_s=60)
print(comm.rank, comm.world_size, comm.all_reduce(torch.tensor(comm.rank + 1.0), (0, 1)).item())
"""


@pytest.mark.distributed
def test_two_processes_meet_by_slurms_variables_alone():
    # The port follows from the job's id; other tests may run on this machine.
    free = (
        n for n in range(os.getpid(), 2**31) if is_free(read_environment(slurm_task(0, n)).port)
    )
    job_id = next(free)
    own = without(os.environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    tasks = [
        subprocess.Popen(
            [sys.executable, "-c", TASK],
            stdout=subprocess.PIPE,
            text=True,
            env={**own, **slurm_task(rank, job_id)},
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0]
    assert outputs == ["0 2 3.0\n", "1 2 3.0\n"]


def slurm_task(rank: int, job_id: int) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_NODELIST": "localhost",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
