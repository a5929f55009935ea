"""Run one plan on ranks that are threads, and say how it differs from one device."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.plan.parts import ZeroPlan
from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.engine import Engine
from autopar.runtime.execution import Execution
from autopar.runtime.lower import LocalForward
from autopar.runtime.mesh import MeshContext
from autopar.sharding.choices import REPLICATED
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import REPLICATE
from autopar.sharding.sharded import ShardedGraph, shard_graph
from tests.distributed.direct import LEARNING_RATE, DirectEngine
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


Rank = Engine | DirectEngine

NO_ZERO = ZeroPlan()


def engine(
    subject: Subject,
    sharded: ShardedGraph,
    comm: Communicator,
    seed: int = 0,
    *,
    programs: bool = False,
    zero: ZeroPlan = NO_ZERO,
) -> Rank:
    """One rank of a plan, as explicit programs or as its forward is lowered (without ZeRO)."""
    if not programs:
        assert not zero.stage, zero
        return DirectEngine(subject, sharded, comm, seed)
    single = Execution.single(sharded, subject.traced.loss)
    return Engine(
        sharded,
        MeshContext.create(sharded.mesh, comm),
        subject.tensors,
        loss=subject.traced.loss,
        execution=replace(single, zero=zero.stage, zero_axes=zero.axes),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        seed=seed,
    )


def state(ready: Rank, subject: Subject, thorough: bool) -> State:
    """Loss, full gradients and buffers of one backward.

    If `thorough`, also the model's outputs, then the parameters after an optimizer step, and the
    same of a second backward, with other dropout masks and buffers of the first.
    """
    found = _backward(ready, subject, "")
    if thorough:
        outputs = ready.forward(subject.inputs)
        found |= {f"output {name}": value for name, value in outputs.items()}
        ready.update()
        found |= _backward(ready, subject, " in step 2")
        found |= {f"parameter {name}": p for name, p in ready.full_parameters().items()}
    return found


def _backward(ready: Rank, subject: Subject, suffix: str) -> State:
    found: State = {f"loss{suffix}": ready.backward(subject.inputs)}
    for name, grad in ready.full_gradients().items():
        found[f"gradient of {name}{suffix}"] = grad
    for name, value in ready.full_buffers().items():
        found[f"buffer {name}{suffix}"] = value
    return found


def solo(subject: Subject, seed: int = 0) -> State:
    """What one device has, thoroughly."""
    mesh = Mesh((("alone", 1),))
    choices = ((REPLICATED,),) * len(subject.traced.graph.nodes)
    sharded = shard_graph(subject.traced.graph, subject.factors, mesh, choices)
    return state(engine(subject, sharded, SoloCommunicator(), seed), subject, thorough=True)


def differences(want: State, have: State, rank: int, tolerance: float) -> list[Difference]:
    """Everything in `have` beyond the tolerance.

    Errors are relative to the tensor's largest value, and to a ten-thousandth of the largest
    gradient: a gradient that is zero in exact arithmetic (of a key bias, of a bias before a
    batch norm) holds rounding noise of that scale.
    """
    floor = 1e-4 * max(
        float(t.abs().max()) for n, t in want.items() if t is not None and n.startswith("grad")
    )
    found = []
    for name, value in have.items():
        error = _error(want[name], value, floor if name.startswith("grad") else 0.0)
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


def _local(ready: Rank) -> LocalForward:
    return ready.local if isinstance(ready, DirectEngine) else ready.units[0].programs.local


def _local_gradient(ready: Rank, name: str) -> Tensor | None:
    if isinstance(ready, DirectEngine):
        return ready.local_gradient(name)
    return ready.units[0].parameters.whole_gradient(name)


def _copies_apart(ready: Rank) -> list[str]:
    """Parameters, and gradients, whose copies on the ranks are not equal to the last bit."""
    apart = ready.replicas_differ()
    found = [] if apart is None else [apart]
    mesh, comm = ready.sharded.mesh, ready.context.comm
    for name, item in ready.items.items():
        grad = None
        if item.kind == "parameter":
            grad = _local_gradient(ready, name)
        if grad is None:
            continue
        placed = zip(mesh.names, ready.sharded.inputs[name].forward, strict=True)
        axes = tuple(axis for axis, placement in placed if placement == REPLICATE)
        copies = comm.all_gather(grad, mesh.ranks_along(axes, comm.rank))
        if not torch.equal(copies, copies[:1].expand_as(copies)):
            found.append(f"gradient of {item.target}")
    return found


def compare(ready: Rank, subject: Subject, want: State, thorough: bool) -> list[Difference]:
    """Run one rank and say how it differs; every rank must call."""
    rank = ready.context.comm.rank
    found = differences(want, state(ready, subject, thorough), rank, TOLERANCE)
    for apart in _copies_apart(ready) if thorough else ():
        found.append(Difference(rank=rank, name=f"copies of {apart}", error=math.inf))
    return found


def run(
    subject: Subject,
    sharded: ShardedGraph,
    want: State,
    *,
    thorough: bool = False,
    programs: bool = False,
    zero: ZeroPlan = NO_ZERO,
) -> tuple[list[Difference], LocalForward | None]:
    """Run a plan on threads and compare every rank with one device.

    Args:
        subject: The model.
        sharded: The plan.
        want: What one device has.
        thorough: See `state`; copies must then also be equal to the last bit.
        programs: Run explicit programs instead of the lowered forward.
        zero: What of these ranks hold once; its axes are those of the plan's own mesh.

    Returns:
        The differences, and the forward of rank 0 (None when it failed before).
    """
    locals_: dict[int, LocalForward] = {}

    def rank(comm: Communicator) -> list[Difference]:
        ready = engine(subject, sharded, comm, programs=programs, zero=zero)
        locals_[comm.rank] = _local(ready)
        return compare(ready, subject, want, thorough)

    try:
        results = run_threads(sharded.mesh.size, rank, timeout_s=120.0)
    except AutoparError as error:
        text = " ".join(str(error).split())
        return [Difference(rank=-1, name=f"failed: {text}", error=math.inf)], locals_.get(0)
    return [item for result in results for item in result], locals_.get(0)
