"""Run one plan on ranks that are threads, and say how it differs from one device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.engine import Engine
from autopar.runtime.lower import Program
from autopar.runtime.reshard import MeshContext
from autopar.sharding.choices import REPLICATED
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph, shard_graph
from tests.distributed.fuzz_models import Subject

TOLERANCE = 1e-11
"""Largest relative error: float64 rounding over these models stays below 1e-13."""

State = dict[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A tensor that is not what one device has.

    Attributes:
        rank: Where; -1 for an error of the whole run.
        name: ``loss``, ``gradient of FQN`` or ``buffer FQN``; for an error its text.
        error: Relative error, infinite for another shape or a failure.
    """

    rank: int
    name: str
    error: float

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.name} differs by {self.error:.3g}"


def engine(subject: Subject, sharded: ShardedGraph, comm: Communicator, seed: int = 0) -> Engine:
    """One rank of a plan."""
    context, loss = MeshContext.create(sharded.mesh, comm), subject.traced.loss
    return Engine(sharded, context, subject.tensors, loss=loss, seed=seed)


def state(ready: Engine, subject: Subject) -> State:
    """Loss, full gradients and buffers after one backward."""
    found: State = {"loss": ready.backward(subject.inputs)}
    found |= {f"gradient of {name}": grad for name, grad in ready.full_gradients().items()}
    return found | {f"buffer {name}": value for name, value in ready.full_buffers().items()}


def solo(subject: Subject, seed: int = 0) -> State:
    """What one device has."""
    mesh = Mesh((("alone", 1),))
    choices = ((REPLICATED,),) * len(subject.traced.graph.nodes)
    sharded = shard_graph(subject.traced.graph, subject.factors, mesh, choices)
    return state(engine(subject, sharded, SoloCommunicator(), seed), subject)


def differences(want: State, have: State, rank: int, tolerance: float) -> list[Difference]:
    """Everything beyond the tolerance.

    Errors are relative to the tensor's largest value, and to a ten-thousandth of the largest
    gradient: a gradient that is zero in exact arithmetic (of a key bias, of a bias before a
    batch norm) holds rounding noise of that scale.
    """
    floor = 1e-4 * max(
        float(t.abs().max()) for n, t in want.items() if t is not None and n.startswith("grad")
    )
    found = []
    for name, expected in want.items():
        error = _error(expected, have[name], floor if name.startswith("grad") else 0.0)
        if not error <= tolerance:
            found.append(Difference(rank=rank, name=name, error=error))
    return found


def _error(want: Tensor | None, have: Tensor | None, floor: float) -> float:
    if want is None or have is None:
        other = have if want is None else want
        return 0.0 if other is None or not other.any() else math.inf
    if want.shape != have.shape:
        return math.inf
    scale = max(float(want.abs().max()), floor)
    error = float((want - have).abs().max())
    return error / scale if scale else (math.inf if error else 0.0)


def run(
    subject: Subject, sharded: ShardedGraph, want: State, tolerance: float = TOLERANCE
) -> tuple[list[Difference], Program | None]:
    """Run a plan on threads and compare every rank with one device.

    Returns:
        The differences, and the program of rank 0 (None when it failed before).
    """
    programs: dict[int, Program] = {}

    def rank(comm: Communicator) -> list[Difference]:
        ready = engine(subject, sharded, comm)
        programs[comm.rank] = ready.program("train")
        return differences(want, state(ready, subject), comm.rank, tolerance)

    try:
        results = run_threads(sharded.mesh.size, rank, timeout_s=30.0)
    except AutoparError as error:
        text = " ".join(str(error).split())
        return [Difference(rank=-1, name=f"failed: {text}", error=math.inf)], programs.get(0)
    return [item for result in results for item in result], programs.get(0)
