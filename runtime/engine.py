"""One rank's training state and step: stages, their schedule, gradients, optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.errors import NonFiniteError, PlanError
from autopar.graph.ir import Input
from autopar.runtime.execute import Executor, Outcome
from autopar.runtime.execution import Execution
from autopar.runtime.heap import keep_freed_memory
from autopar.runtime.lower import Custom
from autopar.runtime.mesh import MeshContext
from autopar.runtime.nonfinite import Watch
from autopar.runtime.parameters import Item, OptimizerFactory
from autopar.runtime.programs.program import Program, Slot
from autopar.runtime.reshard import bind_steps, run_steps
from autopar.runtime.unit import StagePrograms, StageUnit, build_programs
from autopar.runtime.whole import Whole
from autopar.schedules.actions import Action
from autopar.sharding.placement import PARTIAL, REPLICATE, Shard
from autopar.sharding.sharded import ShardedGraph, replicated
from autopar.trace.compat import no_collection


class Engine(Whole):
    """Runs one rank of a sharded graph.

    Args:
        sharded: The graph and its placements.
        context: The rank.
        tensors: Full initial tensors by FQN (parameters, buffers) and key (constants); equal on
            all ranks.
        loss: Name of the loss value, None if the model has none.
        execution: Stages, schedule and what else a plan decides beside placements; one stage when
            None.
        custom: Callables of opaque ops.
        optimizer: Makes the optimizer over local parameters; None to only compute gradients.
        seed: Seed of dropout and other random ops.
        check_finite: Raise on all ranks when the loss is not finite.
    """

    def __init__(
        self,
        sharded: ShardedGraph,
        context: MeshContext,
        tensors: Mapping[str, Tensor],
        *,
        loss: str | None,
        execution: Execution | None = None,
        custom: Custom | None = None,
        optimizer: OptimizerFactory | None = None,
        seed: int = 0,
        check_finite: bool = True,
    ) -> None:
        self.sharded, self.context, self.loss = sharded, context, loss
        self.comm = context.comm
        self.execution = execution or Execution.single(sharded, loss)
        self.custom = custom
        self.seed, self.check_finite, self.num_steps, self.num_updates = seed, check_finite, 0, 0
        self.everywhere = replicated(sharded.mesh)
        self.items: dict[str, Input] = {item.value.name: item for item in sharded.graph.inputs}
        self._prepare_groups()
        if self.comm.device.type == "cpu":
            keep_freed_memory()
        self.tensors: dict[str, Tensor] = {
            name: tensors[item.target].detach().to(self.comm.device, copy=True)
            for name, item in self.items.items()
            if item.kind in ("buffer", "constant")
        }
        self.buffer_outputs = {
            out.target: out.value
            for out in sharded.graph.outputs
            if out.kind == "buffer" and out.value
        }
        self._factory = optimizer
        self.optimizer: torch.optim.Optimizer | None = None
        self.units: dict[int, StageUnit] = {}
        self._evaluation: dict[int, StageUnit] = {}
        self._build(tensors)

    # Building

    def _build(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the stages of this rank and the optimizer."""
        execution = self.execution
        for index in execution.stages_of(self.context):
            names = execution.parameters_of(index)
            items = execution.items(index, self.context)
            values = {
                name: self._to_local(name, tensors[self.items[name].target].detach())
                for name in names
            }
            self.units[index] = self._unit(self._programs(index, items), items, values)
        self.executor = self._executor()
        order = {name: place for place, name in enumerate(self.items)}
        pieces = sorted(
            (piece for unit in self.units.values() for piece in unit.parameters.pieces),
            key=lambda piece: (order[piece.name], piece.start),
        )
        trainable = [piece.parameter for piece in pieces]
        if self._factory and trainable:
            self.optimizer = self._factory(trainable)

    def _buffer_names(self) -> dict[str, str]:
        """Buffer by the value that replaces it."""
        names = {item.target: name for name, item in self.items.items() if item.kind == "buffer"}
        return {
            value: names[target] for target, value in self.buffer_outputs.items() if target in names
        }

    # A dry run makes these otherwise.

    def _prepare_groups(self) -> None:
        self.execution.prepare_groups(self.context)

    def _programs(self, index: int, items: Sequence[Item]) -> StagePrograms:
        with no_collection():
            return build_programs(
                self.sharded,
                self.context,
                self.execution.task(index, self.context, self.buffer_outputs),
                self.custom,
                items,
                self.execution.zero,
                gradients=self.loss is not None,
            )

    def _unit(
        self, programs: StagePrograms, items: Sequence[Item], values: Mapping[str, Tensor]
    ) -> StageUnit:
        return StageUnit(programs, items, values, **self._unit_options())

    def _unit_options(self) -> dict[str, Any]:
        """What every stage of this rank is made with."""
        return {
            "tensors": self.tensors,
            "comm": self.comm,
            "schedule": self.execution.schedule,
            "buffer_targets": self._buffer_names(),
            "update": self._update,
        }

    def _executor(self) -> Executor:
        return Executor(self.comm, lambda stage: self.execution.rank_of(stage, self.context))

    # Running

    def check_trainable(self) -> None:
        """Refuse a loss that no trainable parameter reaches; eager ``backward()`` would too.

        Raises:
            PlanError: If a step would train nothing although parameters want gradients.
        """
        trainable = any(
            item.kind == "parameter" and item.value.spec.requires_grad
            for item in self.items.values()
        )
        if self.loss and trainable and not self.sharded.graph.spec(self.loss).requires_grad:
            raise PlanError(
                "the loss depends on no trainable parameter, so a step would train nothing",
                fix="look for detach(), no_grad or integer ops between the parameters and the loss",
            )

    def _values(self, inputs: Mapping[str, Tensor]) -> dict[Slot, Tensor]:
        """What slots of kind input and seed stand for in this step."""
        device = self.comm.device
        # Programs are made for contiguous inputs.
        values = {
            Slot("input", name): tensor.detach().to(device).contiguous()
            for name, tensor in inputs.items()
        }
        seed = self.seed * 1_000_003 + self.num_steps
        values[Slot("seed", "seed")] = torch.tensor(seed, device=device)
        return values

    def step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward, gradient sync, optimizer step, buffer updates.

        Args:
            inputs: Full inputs of the global batch by value name; equal on all ranks.

        Returns:
            The loss over the global batch, detached.

        Raises:
            NonFiniteError: On every rank, when the loss is NaN or infinite; nothing was updated
                (with an asynchronous schedule: by later microbatches).
        """
        loss = self.backward(inputs)
        self.update()
        return loss

    @torch.no_grad()
    def backward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A step without the optimizer (with an asynchronous schedule: with its updates).

        Gradients are complete afterwards, see `full_gradients`.
        """
        if self.loss is None:
            raise PlanError(
                "the model returns no loss, so there is nothing to train",
                fix="pass loss_fn=... to compile, or return the loss from the model",
            )
        schedule = self.execution.schedule
        before = {name: self.tensors[name] for name in self._buffer_names().values()}
        values = self._values(inputs)
        outcome = self._run(self.units, self.execution.actions(self.context), values)
        self._reduce_shared()
        loss = self._whole_loss(outcome)
        if self.check_finite and not torch.isfinite(loss).all():
            self.tensors.update(before)
            error = self._non_finite(loss, values)
            self.tensors.update(before)
            raise error
        self.num_steps += 1
        if self.execution.asynchronous:
            self.num_updates += schedule.updates
        return loss

    def _run(
        self,
        units: Mapping[int, StageUnit],
        actions: Sequence[Action],
        values: Mapping[Slot, Tensor],
    ) -> Outcome:
        schedule = self.execution.schedule
        count = schedule.num_microbatches
        for unit in units.values():
            unit.start_step(self.num_updates)
        numbers = self.executor.prepare(count)
        for index in sorted(units):
            units[index].run_prologue(values, numbers)
        return self.executor.run(units, actions, values, count, updates=self.execution.asynchronous)

    def _reduce_shared(self) -> None:
        """Sum the gradients of parameters that several stages use over all of them."""
        for name in self.execution.shared_names():
            users = [u.parameters for u in self.units.values() if name in u.parameters.gradients]
            mine = [parameters.gradients[name] for parameters in users]
            if not mine:
                continue
            total = mine[0] if len(mine) == 1 else torch.stack(mine).sum(0)
            total = self.comm.all_reduce(total, users[0].items[name].ranks)
            for gradient in mine:
                gradient.copy_(total)

    def update(self) -> None:
        """The optimizer step of all stages, after `backward`."""
        if self.execution.asynchronous:
            return
        for index, unit in self.units.items():
            self.executor.watch(Action("UPDATE", index, 0), partial(self._update, unit))
        self.num_updates += 1

    @torch.no_grad()
    def _update(self, unit: StageUnit) -> None:
        if self.optimizer is None:
            return
        pieces = unit.parameters.pieces
        for piece in pieces:
            piece.parameter.grad = piece.gradient
        self.optimizer.step()
        for piece in pieces:
            piece.parameter.grad = None
        if not self.execution.asynchronous:  # else `full_gradients` is asked after the last update
            unit.parameters.drop_reduced()
        unit.parameters.gather()

    def _whole_loss(self, outcome: Outcome) -> Tensor:
        """The loss over the global batch, on every rank."""
        assert self.loss is not None
        spec = self.sharded.graph.spec(self.loss)
        stage = self.execution.loss_stage
        dtype = getattr(torch, spec.dtype)
        loss = torch.zeros(spec.shape, dtype=dtype, device=self.comm.device)
        if stage in self.units:
            parts = [outcome.losses[m] for m in sorted(outcome.losses)]
            total = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            have = self.execution.loss_pair(self.context).forward
            want = self.everywhere.forward
            if self.context.time is not None:  # added up above
                have = tuple(
                    REPLICATE if axis == self.context.time else placement
                    for axis, placement in enumerate(have)
                )
            loss = run_steps(bind_steps(have, want, spec.shape, self.context), total.detach())
        return self._from_stage(loss, stage)

    @torch.no_grad()
    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's outputs on a global batch; buffers are not updated.

        Args:
            inputs: Full inputs by value name; equal on all ranks.

        Returns:
            Full outputs by value name.
        """
        if not self._evaluation:
            for index, unit in self.units.items():
                task = self.execution.task(index, self.context, {}, train=False)
                programs = build_programs(
                    self.sharded, self.context, task, self.custom, (), gradients=False
                )
                self._evaluation[index] = unit.evaluating(programs)
        values = self._values(inputs)
        actions = self.execution.evaluation(self.context)
        outcome = self._run(self._evaluation, actions, values)
        found = {}
        for out in self.sharded.graph.outputs:
            if out.kind != "user" or out.value is None or out.value in found:
                continue
            found[out.value] = self._output(out.value, outcome)
        return found

    def _output(self, name: str, outcome: Outcome) -> Tensor:
        """A whole output put together from microbatches, on every rank."""
        stage = self.execution.stages.owner[name]
        spec = self.sharded.graph.spec(name)
        if stage not in self.units:
            empty = torch.empty(
                spec.shape, dtype=getattr(torch, spec.dtype), device=self.comm.device
            )
            return self._from_stage(empty, stage)
        made = outcome.outputs[name]
        parts = [made[microbatch] for microbatch in sorted(made)]
        time = self.context.time
        placed = REPLICATE if time is None else self.sharded.pairs()[name].forward[time]
        if placed == PARTIAL:
            whole = torch.stack(parts).sum(0)
        elif isinstance(placed, Shard):
            inner = placed.stride * math.prod(spec.shape[placed.dim + 1 :])
            size = placed.size // len(parts)
            whole = torch.cat([part.reshape(-1, size, inner) for part in parts], 1)
            whole = whole.reshape(spec.shape)
        else:
            whole = parts[0]
        return self._from_stage(whole, stage)

    def _non_finite(self, loss: Tensor, values: Mapping[Slot, Tensor]) -> NonFiniteError:
        """Find the op that made the loss what it is, by running forward once more."""
        watch = Watch(self.comm, self.sharded.graph)
        units = {index: watch.unit(unit) for index, unit in self.units.items()}
        self._run(units, self.execution.evaluation(self.context), values)
        return NonFiniteError(
            f"the loss of step {self.num_steps + 1} is {loss.item()}",
            where=watch.where(),
            expected="a finite loss; nothing was updated",
            fix="look at the inputs of that step and at the module named above; "
            "check_finite=False turns this check off",
        )

    def print_readable(self) -> str:
        """The programs of this rank as text, and the order in which they run."""
        modules = {node.name: node.module for node in self.sharded.graph.nodes}
        parts = [program.print_readable(modules) for program in self.programs()]
        actions = " ".join(map(str, self.execution.actions(self.context)))
        return "\n".join([*parts, f"actions {actions}\n"])

    def programs(self) -> list[Program]:
        """The programs of this rank, as a step of one microbatch per update runs them."""
        found = []
        for unit in self.units.values():
            if unit.programs.prologue is not None:
                found.append(unit.programs.prologue)
            found += [unit.variant(kind, first=True, last=True) for kind in unit.programs.parts]
        return found
