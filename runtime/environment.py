"""Which job this process belongs to, read from environment variables.

Two launchers announce one: torchrun (and `autopar run`) with RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT, and Slurm's srun with SLURM_* (https://slurm.schedmd.com/srun.html,
"Output environment variables"). torchrun's win, since it may itself run under Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from autopar.errors import ClusterError

# Steps that are no srun of the user's have ids from here on: batch script, interactive shell
# (SLURM_PENDING_STEP and below in slurm/slurm.h).
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0
# Below the ports that Linux gives to outgoing connections (32768 and above).
_FIRST_PORT, _NUM_PORTS = 20_000, 12_000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """What a launcher says of this process.

    Attributes:
        launcher: Who said so.
        rank: This rank, from 0.
        world_size: Number of ranks.
        local_rank: Number of this rank among those on its machine.
        address: Host of rank 0.
        port: Port on which rank 0 listens.
    """

    launcher: Literal["torchrun", "slurm"]
    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ClusterError(
                f"this process is rank {self.rank} of a job of {self.world_size}",
                expected=f"a rank from 0 to {self.world_size - 1}",
                where=f"variables of {self.launcher}",
            )
        if not 0 < self.port < 65536:
            raise ClusterError(
                f"port {self.port} of rank 0",
                expected="a port from 1 to 65535",
                where="MASTER_PORT",
            )


def read_environment(variables: Mapping[str, str]) -> JobEnvironment | None:
    """The job that `variables` announce, or None when this process is alone.

    A process in a Slurm allocation is alone unless srun started it: a batch script and the shell of
    `salloc` see the allocation's variables too.

    Args:
        variables: Such as ``os.environ``.

    Raises:
        ClusterError: If the variables are incomplete, malformed or contradict each other.
    """
    if not ("RANK" in variables and "WORLD_SIZE" in variables) and _in_step(variables):
        return _slurm(variables)
    return _torchrun(variables)


def local_rank(variables: Mapping[str, str]) -> int:
    """Number of this rank on its machine, for a job that somebody else has joined already."""
    slurm = ("SLURM_LOCALID",) if "SLURM_STEP_ID" in variables else ()
    for name in ("LOCAL_RANK", *slurm, "RANK"):
        if name in variables:
            return _integer(variables, name)
    return 0


def _torchrun(variables: Mapping[str, str]) -> JobEnvironment | None:
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    world_size = _integer(variables, "WORLD_SIZE") if "WORLD_SIZE" in variables else 1
    if world_size == 1 and "MASTER_ADDR" not in variables:
        return None
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in variables]
    if missing:
        given = next(name for name in ("WORLD_SIZE", "RANK") if name in variables)
        raise ClusterError(
            f"{given} is {variables[given]}, but {', '.join(missing)} is not set",
            expected="the variables that torchrun sets",
            fix="start the script with `torchrun --nproc-per-node N` or `autopar run -n N`",
        )
    rank = _integer(variables, "RANK")
    return JobEnvironment(
        launcher="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_integer(variables, "LOCAL_RANK") if "LOCAL_RANK" in variables else rank,
        address=variables["MASTER_ADDR"],
        port=_integer(variables, "MASTER_PORT"),
    )


def _in_step(variables: Mapping[str, str]) -> bool:
    """Whether srun started this process."""
    if "SLURM_STEP_ID" in variables:
        return _integer(variables, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP
    if variables.get("SLURM_PROCID", "0") != "0":
        raise ClusterError(
            f"SLURM_PROCID is {variables['SLURM_PROCID']}, but SLURM_STEP_ID is not set",
            expected="both, as srun sets them, or neither",
            fix="start the script with `srun`, and pass on all SLURM_* variables",
        )
    return False


def _slurm(variables: Mapping[str, str]) -> JobEnvironment | None:
    # The step's own number and nodes: srun may use a part of the allocation.
    size = _first(variables, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    rank, own = (_needed(variables, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    for name, slurm_name in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", size)):
        if name in variables and _integer(variables, name) != _integer(variables, slurm_name):
            raise ClusterError(
                f"{name} is {variables[name]}, but {slurm_name} is {variables[slurm_name]}",
                expected="torchrun's variables RANK and WORLD_SIZE, Slurm's, or equal ones",
                fix=f"unset {name}, or start the ranks with torchrun",
            )
    world_size = _integer(variables, size)
    if world_size == 1:
        return None
    return JobEnvironment(
        launcher="slurm",
        rank=_integer(variables, rank),
        world_size=world_size,
        local_rank=_integer(variables, own),
        address=variables.get("MASTER_ADDR") or _first_node(variables),
        port=_integer(variables, "MASTER_PORT") if "MASTER_PORT" in variables else _port(variables),
    )


def _first_node(variables: Mapping[str, str]) -> str:
    name = _first(variables, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return expand_nodes(variables[name])[0]


def _port(variables: Mapping[str, str]) -> int:
    """A port that all ranks agree on and that other steps on the machine hardly use."""
    job = _integer(variables, _first(variables, "SLURM_JOB_ID", "SLURM_JOBID"))
    step = _integer(variables, "SLURM_STEP_ID")
    return _FIRST_PORT + (job + 997 * step) % _NUM_PORTS  # 997: steps of one job lie far apart


def expand_nodes(text: str) -> tuple[str, ...]:
    """Host names of a Slurm node list.

    Args:
        text: Names separated by commas; brackets hold numbers and ranges, zeros in front count.

    Raises:
        ClusterError: If it is no node list.

    Example:
        >>> expand_nodes("node[001-003,007],gpu3")
        ('node001', 'node002', 'node003', 'node007', 'gpu3')
    """
    if not re.fullmatch(r"(?:[^][,\s]|\[[\d,-]+\])+(?:,(?:[^][,\s]|\[[\d,-]+\])+)*", text):
        raise _malformed(text)
    names: list[str] = []
    # Commas outside of brackets separate; brackets do not nest.
    for pattern in re.findall(r"(?:[^][,]|\[[^]]*\])+", text):
        parts = re.split(r"\[([^]]*)\]", pattern)  # plain, bracket, plain, bracket, ..., plain
        choices = [
            _numbers(part, text) if index % 2 else [part] for index, part in enumerate(parts)
        ]
        names.extend("".join(combination) for combination in product(*choices))
    return tuple(names)


def _numbers(bracket: str, text: str) -> list[str]:
    numbers: list[str] = []
    for item in bracket.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise _malformed(text)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _malformed(text)
        numbers.extend(str(n).zfill(len(first)) for n in range(int(first), int(last) + 1))
    return numbers


def _malformed(text: str) -> ClusterError:
    return ClusterError(
        f"the node list {text!r} cannot be read",
        expected="a list such as node[001-004,007],gpu3",
        fix="set MASTER_ADDR to the host of rank 0",
    )


def _first(variables: Mapping[str, str], *names: str) -> str:
    """The first of `names` that is set."""
    for name in names:
        if name in variables:
            return name
    return _needed(variables, names[-1])


def _needed(variables: Mapping[str, str], name: str) -> str:
    if name not in variables:
        raise ClusterError(
            f"this process is in step {variables['SLURM_STEP_ID']} of a Slurm job, but {name} is "
            "not set",
            expected="the variables that srun sets",
            fix=f"pass {name} on, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
        )
    return name


def _integer(variables: Mapping[str, str], name: str) -> int:
    try:
        return int(variables[name])
    except ValueError:
        raise ClusterError(
            f"environment variable {name} is {variables[name]!r}", expected="a whole number"
        ) from None
