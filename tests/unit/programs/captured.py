"""Models taken the whole way to programs, beside what eager autograd says of the same forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.plan.build import make_plan
from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.lower import LocalForward, lower
from autopar.runtime.mesh import MeshContext
from autopar.runtime.programs.capture import capture
from autopar.runtime.programs.check import check
from autopar.runtime.programs.program import Joint, Program, Slot
from autopar.runtime.programs.recording import RecordingCommunicator
from autopar.runtime.reshard import bind_steps, run_steps
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph, replicated
from autopar.trace import Traced, trace
from tests.models import zoo

Values = dict[Slot, Tensor]
SMALLER = {"gpt2": {"layers": 1}, "resnet": {"layers": 1}}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A traced and planned model, and its full tensors by value name."""

    traced: Traced
    sharded: ShardedGraph
    full: dict[str, Tensor]

    @property
    def outputs(self) -> list[Slot]:
        buffers = [o.value for o in self.traced.graph.outputs if o.kind == "buffer" and o.value]
        loss = self.traced.loss
        assert loss is not None
        return [Slot("loss", loss), *(Slot("buffer", name) for name in dict.fromkeys(buffers))]

    def lower(self, comm: Communicator) -> LocalForward:
        context = MeshContext.create(self.sharded.mesh, comm)
        pairs = self.sharded.pairs()
        wanted = [(slot.name, pairs[slot.name]) for slot in self.outputs]
        custom = self.traced.custom
        return lower(
            self.sharded, context, wanted,
            custom=lambda op: custom[op.removeprefix("autopar.custom_function.")],
        )  # fmt: skip

    def values(self, slots: Iterable[Slot], comm: Communicator) -> Values:
        """Local tensors, those of parameters requiring gradients."""
        context = MeshContext.create(self.sharded.mesh, comm)
        everywhere = replicated(self.sharded.mesh).forward
        found: Values = {}
        for slot in slots:
            if slot.kind in ("seed", "microbatch"):
                found[slot] = torch.tensor(7 if slot.kind == "seed" else 0)
                continue
            full = self.full[slot.name]
            placed = self.sharded.inputs[slot.name].forward
            steps = bind_steps(everywhere, placed, tuple(full.shape), context)
            local = run_steps(steps, full).detach().clone()
            spec = self.sharded.graph.spec(slot.name)
            found[slot] = local.requires_grad_(slot.kind == "parameter" and spec.requires_grad)
        return found


@functools.cache
def planned(model: str, mesh: str = "dp=1", constraints: str = "ddp", **options: Any) -> Planned:
    torch.manual_seed(0)
    module, args, kwargs = getattr(zoo, model)(**options or SMALLER.get(model, {}))
    module.train()
    traced = trace(module, args, dict(kwargs), None)
    _, sharded = make_plan(
        traced.graph, Mesh.parse(mesh), constraints, strict=False, notes=traced.notes
    )
    leaves = iter(traced.flatten_inputs(args, dict(kwargs)))
    held = {**traced.parameters, **traced.buffers, **traced.constants}
    full = {
        item.value.name: next(leaves) if item.kind == "input" else held[item.target].detach()
        for item in traced.graph.inputs
    }
    return Planned(traced=traced, sharded=sharded, full=full)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A joint graph, values for its inputs, and what eager autograd makes of them."""

    joint: Joint
    values: Values
    want: Values

    def run(self, programs: Iterable[Program], comm: Communicator | None = None) -> Values:
        """All that the programs give, run one after the other."""
        comm = comm or SoloCommunicator()
        values, found = {slot: value.detach() for slot, value in self.values.items()}, {}
        for program in programs:
            results = program.compile(comm)([values[slot] for slot in program.inputs])
            made = dict(zip(program.outputs, results, strict=True))
            values |= made
            found |= made
        return found

    def agree(self, programs: Iterable[Program], comm: Communicator | None = None) -> None:
        """Assert that they give what eager gives, to the last bit."""
        found = self.run(programs, comm)
        for slot, value in self.want.items():
            assert torch.equal(found[slot], value), slot


def eager(
    module: Callable[..., Sequence[Tensor]], values: Values, outputs: Sequence[Slot]
) -> tuple[Values, Values]:
    """Outputs and gradients by slot, and the tangents they are for."""
    results = module(*values.values())
    want = dict(zip(outputs, results, strict=True))
    ends = {s: t for s, t in want.items() if s.kind in ("loss", "boundary") and t.requires_grad}
    torch.manual_seed(1)
    tangents = {
        Slot("tangent", slot.name): torch.randn(t.shape).to(t) if t.ndim else torch.ones_like(t)
        for slot, t in ends.items()
    }
    leaves = {slot: value for slot, value in values.items() if value.requires_grad}
    if not leaves:
        return want, {}
    grads = torch.autograd.grad(
        list(ends.values()),
        list(leaves.values()),
        [t.detach() for t in tangents.values()],
        allow_unused=True,
    )
    for slot, grad in zip(leaves, grads, strict=True):
        if grad is not None:
            kind = "gradient" if slot.kind == "parameter" else "input_gradient"
            want[Slot(kind, slot.name)] = grad
    return {slot: value.detach() for slot, value in want.items()}, tangents


@functools.cache
def captured(model: str) -> Captured:
    """A model of the zoo on one rank."""
    plan, comm = planned(model), SoloCommunicator()
    local = plan.lower(comm)
    values = plan.values(local.inputs, comm)
    joint = capture(
        local.module, list(values.items()), plan.outputs, local.origins, name=f"{model} stage"
    )
    want, tangents = eager(local.module, values, plan.outputs)
    return Captured(joint=check(joint), values=values | tangents, want=want)


def capture_rank(plan: Planned, rank: int) -> Joint:
    """The joint graph of a rank of a job that does not run."""
    comm = RecordingCommunicator(rank, plan.sharded.mesh.size, torch.device("cpu"))
    local = plan.lower(comm)
    values = plan.values(local.inputs, comm)
    return check(capture(local.module, list(values.items()), plan.outputs, local.origins))


def captured_function(
    function: Callable[..., Sequence[Tensor]], outputs: Sequence[Slot], values: Values
) -> Captured:
    """A function that `fx` can trace; every call is its own origin."""
    module = fx.symbolic_trace(function) if not isinstance(function, fx.GraphModule) else function
    origins = {node.name: node.name for node in module.graph.nodes}
    joint = capture(module, list(values.items()), outputs, origins)
    want, tangents = eager(module, values, outputs)
    return Captured(joint=check(joint), values=values | tangents, want=want)


def origins_of(joint: Joint) -> list[str]:
    """Origins of what forward computes."""
    found = (node.meta.get("origin") for node in joint.calls() if joint.is_forward(node))
    return sorted({origin for origin in found if origin})
