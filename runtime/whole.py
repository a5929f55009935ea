"""Whole tensors of a rank's engine: what `state_dict` gives and takes, on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.graph.ir import Input
from autopar.runtime.comm import Communicator
from autopar.runtime.execution import Execution
from autopar.runtime.groups import copied_axes
from autopar.runtime.mesh import MeshContext
from autopar.runtime.reshard import bind_steps, run_steps
from autopar.runtime.unit import StageUnit
from autopar.sharding.placement import Pair
from autopar.sharding.sharded import ShardedGraph


class Whole:
    """Parameters, gradients and buffers between their local parts and the whole.

    Attributes:
        sharded: The graph and its placements.
        context: The rank.
        comm: Communicator of all ranks.
        execution: Stages and who holds them.
        everywhere: The pair of what every rank holds whole.
        items: Graph inputs by name.
        tensors: Buffers and constants by name.
        buffer_outputs: Value that replaces a buffer, by FQN.
        units: Stages of this rank.
    """

    sharded: ShardedGraph
    context: MeshContext
    comm: Communicator
    execution: Execution
    everywhere: Pair
    items: dict[str, Input]
    tensors: dict[str, Tensor]
    buffer_outputs: dict[str, str]
    units: dict[int, StageUnit]

    def _to_local(self, name: str, full: Tensor) -> Tensor:
        pair = self.sharded.inputs[name]
        steps = bind_steps(self.everywhere.forward, pair.forward, tuple(full.shape), self.context)
        return run_steps(steps, full.to(self.comm.device)).detach().clone()

    def _to_full(self, name: str, local: Tensor) -> Tensor:
        pair = self.sharded.inputs[name]
        shape = self.items[name].value.spec.shape
        steps = bind_steps(pair.forward, self.everywhere.forward, shape, self.context)
        full = run_steps(steps, local.detach())
        return full if steps else full.clone()

    def _from_stage(self, tensor: Tensor, stage: int) -> Tensor:
        """A tensor of the rank that holds `stage`, on all ranks of this rank's pipeline."""
        ranks = self.execution.pipeline_ranks(self.context)
        if len(ranks) == 1:
            return tensor
        return self.comm.broadcast(tensor, ranks, self.execution.rank_of(stage, self.context))

    def _holder(self, name: str) -> tuple[StageUnit | None, int]:
        """The stage of this rank that has a parameter (if any), and the first stage that has."""
        users = self.execution.users(name)
        unit = next((self.units[stage] for stage in users if stage in self.units), None)
        return unit, users[0]

    def _whole(self, name: str, local: Tensor | None) -> Tensor:
        """A parameter-shaped tensor on every rank, from the local one of whoever has it."""
        _, stage = self._holder(name)
        spec = self.items[name].value.spec
        if local is None:
            shape = self.context.grid.local_shape(spec.shape, self.sharded.inputs[name].forward)
            local = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=self.comm.device)
        return self._to_full(name, self._from_stage(local, stage))

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """Full parameters by FQN, gathered; every rank must call."""
        found = {}
        for name, item in self.items.items():
            if item.kind == "parameter":
                unit, _ = self._holder(name)
                local = unit.parameters.whole_value(name) if unit else None
                found[item.target] = self._whole(name, local)
        return found

    @torch.no_grad()
    def full_gradients(self) -> dict[str, Tensor | None]:
        """Full gradients by FQN after `backward`, gathered; every rank must call."""
        absent = self._absent()
        found: dict[str, Tensor | None] = {}
        for name, item in self.items.items():
            if item.kind != "parameter":
                continue
            if name in absent or not item.value.spec.requires_grad:
                found[item.target] = None
                continue
            unit, _ = self._holder(name)
            local = unit.parameters.whole_gradient(name) if unit else None
            found[item.target] = self._whole(name, local)
        return found

    def _absent(self) -> set[str]:
        """Parameters that no stage has a gradient for."""
        present: set[str] = set()
        for names in self.comm.gather_objects(
            [name for unit in self.units.values() for name in unit.parameters.present()]
        ):
            present.update(names)
        return {n for n, item in self.items.items() if item.kind == "parameter"} - present

    @torch.no_grad()
    def full_buffers(self) -> dict[str, Tensor]:
        """Buffers by FQN, from the stages that update them; every rank must call."""
        found = {}
        for name, item in self.items.items():
            if item.kind != "buffer":
                continue
            value = self.tensors[name].detach().clone()
            new = self.buffer_outputs.get(item.target)
            stage = self.execution.stages.owner.get(new) if new else None
            found[item.target] = value if stage is None else self._from_stage(value, stage)
        return found

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take full parameters and buffers by FQN."""
        for name, item in self.items.items():
            if item.target not in tensors:
                continue
            full = tensors[item.target]
            if item.kind == "parameter":
                dtype = getattr(torch, item.value.spec.dtype)
                local = self._to_local(name, full.to(self.comm.device, dtype))
                for unit in self.units.values():
                    if name in unit.parameters.items:
                        unit.parameters.load(name, local)
            elif item.kind == "buffer":
                self.tensors[name] = full.to(self.tensors[name]).clone()
        for unit in self.units.values():
            unit.forget_versions()

    def replicas_differ(self) -> str | None:
        """FQN of the first parameter whose copies are not bitwise equal; None if all are.

        Every rank must call; each tells about the copies of its own part.
        """
        first = None
        for name, item in self.items.items():  # ranks may share a parameter and not its stages
            held = [u.parameters for u in self.units.values() if name in u.parameters.items]
            if not held:
                continue
            axes = copied_axes(self.sharded.inputs[name], self.context.time)
            ranks = self.execution.ranks_over(self.execution.users(name), self.context, axes)
            mine = [parameters.whole_value(name) for parameters in held]
            copies = [*self.comm.all_gather(mine[0], ranks), *mine[1:]]
            if first is None and not all(torch.equal(copies[0], other) for other in copies[1:]):
                first = item.target  # go on: other ranks may see no difference and gather
        return first
