"""One rank's training state and step: local parameters, programs, gradient sync, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from autopar.errors import NonFiniteError, PlanError
from autopar.graph.ir import Input
from autopar.runtime.gradsync import GradientSync
from autopar.runtime.lower import Custom, Program, lower
from autopar.runtime.nonfinite import first_non_finite
from autopar.runtime.reshard import MeshContext, bind_steps, run_steps
from autopar.runtime.special import set_seed
from autopar.sharding.placement import REPLICATE, Pair
from autopar.sharding.sharded import ShardedGraph, replicated

OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Engine:
    """Runs one rank of a sharded graph.

    Args:
        sharded: The graph and its placements.
        context: The rank.
        tensors: Full initial tensors by FQN (parameters, buffers) and key (constants); equal on
            all ranks.
        loss: Name of the loss value, None if the model has none.
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
        custom: Custom | None = None,
        optimizer: OptimizerFactory | None = None,
        seed: int = 0,
        check_finite: bool = True,
    ) -> None:
        self.sharded, self.context, self.loss = sharded, context, loss
        self.seed, self.check_finite, self.num_steps = seed, check_finite, 0
        self.custom = custom
        self.everywhere = replicated(sharded.mesh)
        # The loss may stay a partial sum: backward need not wait until it is complete.
        self.loss_pair = (
            Pair(sharded.pairs()[loss].forward, self.everywhere.gradient) if loss else None
        )
        self._prepare_groups()
        graph = sharded.graph
        self.items: dict[str, Input] = {item.value.name: item for item in graph.inputs}
        self.tensors: dict[str, Tensor] = {}
        device = context.comm.device
        for name, item in self.items.items():
            if item.kind == "input":
                continue
            full = tensors[item.target].detach()
            if item.kind == "parameter":
                local = self._to_local(name, full.to(device))
                self.tensors[name] = nn.Parameter(local, item.value.spec.requires_grad)
            else:
                self.tensors[name] = full.to(device, copy=True)
        self.parameters: dict[str, nn.Parameter] = {
            item.target: tensor
            for name, item in self.items.items()
            if isinstance(tensor := self.tensors.get(name), nn.Parameter)
        }
        self.buffer_outputs = {
            out.target: out.value for out in graph.outputs if out.kind == "buffer" and out.value
        }
        self._programs: dict[str, Program] = {}
        self.sync = GradientSync(
            [
                (self.tensors[name], sharded.inputs[name], item.value.spec.shape)  # type: ignore[misc]
                for name, item in self.items.items()
                if item.kind == "parameter"
            ],
            context,
        )
        trainable = [p for p in self.parameters.values() if p.requires_grad]
        self.optimizer = optimizer(trainable) if optimizer and trainable else None

    def _prepare_groups(self) -> None:
        """Create every group of ranks that any subset of axes forms, in one order everywhere."""
        shape = self.sharded.mesh.shape
        names = self.sharded.mesh.names
        wide = [name for name, size in zip(names, shape, strict=True) if size > 1]
        groups: list[tuple[int, ...]] = []
        for mask in range(1, 2 ** len(wide)):
            axes = tuple(name for bit, name in enumerate(wide) if mask >> bit & 1)
            groups += self.sharded.mesh.groups(axes)
        self.context.comm.prepare(list(dict.fromkeys(groups)))

    def _to_local(self, name: str, full: Tensor) -> Tensor:
        pair = self.sharded.inputs[name]
        steps = bind_steps(self.everywhere.forward, pair.forward, tuple(full.shape), self.context)
        return run_steps(steps, full).detach().clone()

    def _to_full(self, name: str, local: Tensor) -> Tensor:
        pair = self.sharded.inputs[name]
        shape = self.items[name].value.spec.shape
        steps = bind_steps(pair.forward, self.everywhere.forward, shape, self.context)
        full = run_steps(steps, local.detach())
        return full if steps else full.clone()

    def program(self, kind: str) -> Program:
        """The program called `kind`: ``train`` (loss and buffers) or ``forward`` (all outputs)."""
        if kind not in self._programs:
            graph = self.sharded.graph
            wanted: list[tuple[str, Pair]] = []
            if kind == "train":
                if self.loss is None:
                    raise PlanError(
                        "the model returns no loss, so there is nothing to train",
                        fix="pass loss_fn=... to compile, or return the loss from the model",
                    )
                assert self.loss_pair is not None
                wanted.append((self.loss, self.loss_pair))
            else:
                wanted += [
                    (out.value, self.everywhere)
                    for out in graph.outputs
                    if out.kind == "user" and out.value
                ]
            wanted += [(value, self.everywhere) for value in self.buffer_outputs.values()]
            unique = list(dict.fromkeys(wanted))
            custom = {"custom": self.custom} if self.custom else {}
            self._programs[kind] = lower(self.sharded, self.context, unique, **custom)
        return self._programs[kind]

    def check_trainable(self) -> None:
        """Refuse a loss that no trainable parameter reaches; eager ``backward()`` would too.

        Raises:
            PlanError: If a step would train nothing although parameters want gradients.
        """
        trainable = any(parameter.requires_grad for parameter in self.parameters.values())
        if self.loss and trainable and not self.sharded.graph.spec(self.loss).requires_grad:
            raise PlanError(
                "the loss depends on no trainable parameter, so a step would train nothing",
                fix="look for detach(), no_grad or integer ops between the parameters and the loss",
            )

    def run(self, kind: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run a program on full inputs.

        Args:
            kind: ``train`` or ``forward``.
            inputs: Full input tensors by value name; equal on all ranks.

        Returns:
            Full outputs by value name.
        """
        program = self.program(kind)
        device = self.context.comm.device
        set_seed(self.seed * 1_000_003 + self.num_steps)
        arguments = [
            self.tensors[name] if name in self.tensors else inputs[name].detach().to(device)
            for name in program.inputs
        ]
        return dict(zip(program.outputs, program.module(*arguments), strict=True))

    def step(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Forward, backward, gradient sync, optimizer step, buffer updates.

        Args:
            inputs: Full inputs of the global batch by value name; equal on all ranks.

        Returns:
            The loss over the global batch, detached.

        Raises:
            NonFiniteError: On every rank, when the loss is NaN or infinite; nothing was updated.
        """
        loss = self.backward(inputs)
        if self.optimizer is not None:
            self.optimizer.step()
        return loss

    def backward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """A step without the optimizer: gradients are complete in ``parameters[fqn].grad``."""
        self.program("train")
        for parameter in self.parameters.values():
            parameter.grad = None
        self.sync.start_step()
        outputs = self.run("train", inputs)
        local = outputs[str(self.loss)]
        if local.requires_grad:
            local.sum().backward()
        loss = self._whole_loss(local.detach())
        self.sync.finish()
        if self.check_finite and not torch.isfinite(loss).all():
            self._non_finite(loss, inputs)
        self.write_buffers(outputs)
        self.num_steps += 1
        return loss

    def _whole_loss(self, local: Tensor) -> Tensor:
        assert self.loss is not None and self.loss_pair is not None
        shape = self.sharded.graph.spec(self.loss).shape
        have, want = self.loss_pair.forward, self.everywhere.forward
        return run_steps(bind_steps(have, want, shape, self.context), local)

    def write_buffers(self, outputs: Mapping[str, Tensor]) -> None:
        """Keep the new values of mutated buffers."""
        names = {item.target: name for name, item in self.items.items() if item.kind == "buffer"}
        for target, value in self.buffer_outputs.items():
            if target in names:
                self.tensors[names[target]] = outputs[value].detach()

    def _non_finite(self, loss: Tensor, inputs: Mapping[str, Tensor]) -> None:
        set_seed(self.seed * 1_000_003 + self.num_steps)
        program = self.program("train")
        arguments = [
            self.tensors[name] if name in self.tensors else inputs[name].detach()
            for name in program.inputs
        ]
        where = first_non_finite(program, arguments, self.sharded.graph, self.context.comm)
        raise NonFiniteError(
            f"the loss of step {self.num_steps + 1} is {loss.item()}",
            where=where,
            expected="a finite loss; nothing was updated",
            fix="look at the inputs of that step and at the module named above; "
            "check_finite=False turns this check off",
        )

    def full_parameters(self) -> dict[str, Tensor]:
        """Full parameters by FQN, gathered; every rank must call."""
        return {
            item.target: self._to_full(name, self.tensors[name])
            for name, item in self.items.items()
            if item.kind == "parameter"
        }

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Full gradients by FQN after `backward`, gathered; every rank must call."""
        found: dict[str, Tensor | None] = {}
        for name, item in self.items.items():
            if item.kind == "parameter":
                grad = self.tensors[name].grad
                found[item.target] = None if grad is None else self._to_full(name, grad)
        return found

    def full_buffers(self) -> dict[str, Tensor]:
        """Buffers by FQN; every rank holds them whole."""
        return {
            item.target: self.tensors[name].detach().clone()
            for name, item in self.items.items()
            if item.kind == "buffer"
        }

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take full parameters and buffers by FQN."""
        for name, item in self.items.items():
            if item.kind == "parameter" and item.target in tensors:
                full = tensors[item.target].to(self.tensors[name])
                self.tensors[name].copy_(self._to_local(name, full))
            elif item.kind == "buffer" and item.target in tensors:
                self.tensors[name] = tensors[item.target].to(self.tensors[name]).clone()

    def replicas_differ(self) -> str | None:
        """FQN of the first parameter whose copies are not bitwise equal; None if all are.

        Every rank must call; each tells about the copies of its own part.
        """
        first = None
        for name, item in self.items.items():
            if item.kind != "parameter":
                continue
            forward = self.sharded.inputs[name].forward
            axes = tuple(
                axis
                for axis, placement in zip(self.sharded.mesh.names, forward, strict=True)
                if placement == REPLICATE
            )
            ranks = self.sharded.mesh.ranks_along(axes, self.context.comm.rank)
            copies = self.context.comm.all_gather(self.tensors[name].detach(), ranks)
            if first is None and not torch.equal(copies, copies[:1].expand_as(copies)):
                first = item.target  # go on: other ranks may see no difference and gather
        return first
