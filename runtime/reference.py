"""What one device trains: the other side of `autopar.verify`.

One loop over updates and their microbatches, written apart from schedules and stages. Ordinary
training takes the whole batch at once. A plan that computes batch statistics microbatch by
microbatch is compared with gradient accumulation over the same microbatches in order. One whose
schedule updates weights while microbatches are under way follows the formulas of PipeDream (arXiv
1806.03377) and PipeDream-2BW (arXiv 2006.09503): update t, counted from 0, takes its gradient at
weights that are d updates old, where d belongs to the stage of the parameter,

    w(t+1) = w(t) - lr * grad f(w(t - d)),        w(t) = w(0) for t < 0

and f is the mean over the update's own microbatches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.plan.plan import Plan
from autopar.runtime.compiled import CompiledModel
from autopar.runtime.execution import Execution
from autopar.runtime.optimizers import Factory
from autopar.runtime.programs.program import Slot
from autopar.sharding.placement import Shard
from autopar.sharding.sharded import ShardedGraph
from autopar.trace import Traced
from autopar.trace.guards import leaf_paths
from autopar.units import counted

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """What one device does in a step, in order.

    Attributes:
        microbatches: Number of microbatches.
        updates: Number of updates; each takes equally many of them.
        delays: How many updates old the weights are of which a gradient is taken, by FQN; 0 where
            it says nothing.
    """

    microbatches: int = 1
    updates: int = 1
    delays: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_plan(cls, plan: Plan, execution: Execution, estimated: bool) -> Rounds:
        """What must be done to train as `plan` means to.

        Args:
            plan: The plan.
            execution: Its stages and schedule.
            estimated: Whether programs take statistics of a microbatch for those of the batch.
        """
        asynchronous = execution.asynchronous
        if not (estimated or asynchronous):
            return cls()
        schedule = execution.schedule
        delays = {
            item.target: max(map(schedule.delay, execution.users(item.value.name)), default=0)
            for item in execution.sharded.graph.parameters()
        }
        return cls(
            microbatches=plan.pipeline.microbatches,
            updates=schedule.updates if asynchronous else 1,
            delays={fqn: delay for fqn, delay in delays.items() if delay},
        )

    def describe(self, kind: str) -> str:
        """The reference in words, such as ``eager, 4 microbatches``."""
        words = [kind]
        if self.microbatches > 1:
            words.append(f"{counted(self.microbatches, 'microbatch')}")
        if self.updates > 1:
            words.append(f"{self.updates} updates")
        if self.delays:
            oldest = max(self.delays.values())
            words.append(f"weights up to {oldest} update{'s' * (oldest > 1)} old")
        return ", ".join(words)


class Device(Protocol):
    """A model on one device.

    Attributes:
        parameters: All of its parameters by FQN.
    """

    parameters: dict[str, nn.Parameter]

    def run(self, step: int, microbatch: int, scale: float) -> Tensor:
        """Forward and backward of a microbatch; gradients are added to the parameters.

        Args:
            step: Number of the step.
            microbatch: Number of the microbatch in it.
            scale: What the gradient is multiplied by.

        Returns:
            The microbatch's share of the loss, detached.
        """
        ...

    def buffers(self) -> dict[str, Tensor]:
        """Buffers by FQN, as they are now."""
        ...


def train(device: Device, rounds: Rounds, steps: int, optimizer: Factory | None) -> dict[str, Any]:
    """Losses, first gradients and buffers, and last parameters and buffers of some steps.

    Args:
        device: The model; it is trained.
        rounds: What a step is.
        steps: Number of steps.
        optimizer: Makes the optimizer.
    """
    trainable = {name: p for name, p in device.parameters.items() if p.requires_grad}
    taker = optimizer(trainable.values()) if optimizer and trainable else None
    depth = max(rounds.delays.values(), default=0)
    versions = [{name: p.data.clone() for name, p in trainable.items()}] if depth else []
    group = rounds.microbatches // rounds.updates
    losses: list[Tensor] = []
    gradients: dict[str, Tensor | None] = {}
    first: dict[str, Tensor] = {}
    for step in range(steps):
        shares: list[Tensor] = []
        for update in range(rounds.updates):
            now = {name: p.data for name, p in trainable.items()}
            for name, parameter in trainable.items():
                parameter.grad = None
                if delay := rounds.delays.get(name, 0):
                    # versions[-1] is the current one.
                    parameter.data = versions[max(-1 - delay, -len(versions))][name]
            for microbatch in range(update * group, (update + 1) * group):
                shares.append(device.run(step, microbatch, float(rounds.updates)))
            for name, parameter in trainable.items():
                parameter.data = now[name]
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
            if step == 0:
                gradients = {
                    name: None if p.grad is None else p.grad.detach().clone()
                    for name, p in device.parameters.items()
                }
                first = {name: b.clone() for name, b in device.buffers().items()}
            if taker is not None:
                taker.step()
            if depth:
                versions.append({name: p.data.clone() for name, p in trainable.items()})
                del versions[: -1 - depth]
        losses.append(torch.stack(shares).sum(0) if len(shares) > 1 else shares[0])
    return {
        "loss": {str(step): value for step, value in enumerate(losses)},
        "gradient": gradients,
        "parameter": {name: p.detach() for name, p in device.parameters.items()},
        "buffer": settled_buffers(first, device.buffers()),
    }


def settled_buffers(first: Mapping[str, Tensor], last: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating buffers after the first step, counters and other exact ones after the last.

    After optimizer steps a running mean carries the rounding noise of the parameters before it.
    """
    return {name: first[name] if last[name].is_floating_point() else last[name] for name in last}


def batch_dims(sharded: ShardedGraph) -> dict[str, Shard]:
    """Where the samples of a batch lie in the inputs, by path, for a graph in microbatches."""
    paths = {item.value.name: item for item in sharded.graph.inputs if item.kind == "input"}
    found: dict[str, Shard] = {}
    for node, call in zip(sharded.graph.nodes, sharded.calls, strict=True):
        for name, pair in zip(node.operands, call.operands, strict=True):
            placed = pair.forward[0]
            if name in paths and isinstance(placed, Shard):
                found.setdefault(paths[name].target, placed)
    for name, item in paths.items():  # what only masks are made of is used whole
        for dim in range(len(item.value.spec.shape)):
            for factor, stride, size in sharded.factors.dims(name, dim):
                if factor in ("batch", "batch.0"):
                    found.setdefault(item.target, Shard(dim, stride, size))
    return found


def rows(tensor: Tensor, where: Shard, count: int, number: int, copies: int = 1) -> Tensor:
    """Part `number` of `count` of the samples of a batch, `copies` times, in new memory."""
    dim, shape = where.dim, tensor.shape
    split = tensor.reshape(*shape[:dim], -1, where.size, where.stride, *shape[dim + 1 :])
    length = where.size // count
    part = split.narrow(dim + 1, number * length, length)
    part = torch.cat([part] * copies, dim + 1)
    return part.reshape(*shape[:dim], -1, *shape[dim + 1 :]).contiguous()


class EagerDevice:
    """The user's module in eager torch.

    Args:
        model: The module; it is copied.
        arguments: Positional and keyword arguments of a call with the global batch.
        loss_fn: See `autopar.compile`.
        traced: The trace, which knows the loss among the results.
        dims: Where the samples lie in the inputs, see `batch_dims`.
        count: Number of microbatches.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        loss_fn: Callable[..., Any] | None,
        traced: Traced,
        dims: Mapping[str, Shard],
        count: int,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.arguments, self.loss_fn, self.traced = arguments, loss_fn, traced
        self.dims, self.count = dims, count
        self.parameters = dict(self.model.named_parameters())
        self.weight = 1.0

    def _arguments(self, microbatch: int, copies: int = 1) -> Arguments:
        """New tensors: a model may write its inputs, a compiled one leaves the caller's alone."""
        if self.count == 1:
            return copy.deepcopy(self.arguments)
        _, structure = pytree.tree_flatten(self.arguments)
        leaves = [
            rows(leaf, self.dims[path], self.count, microbatch, copies)
            if path in self.dims
            else copy.deepcopy(leaf)
            for path, leaf in leaf_paths(self.arguments, ("args", "kwargs")).items()
        ]
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        return args, kwargs

    def _loss(self, model: nn.Module, arguments: Arguments) -> Tensor:
        args, kwargs = arguments
        # The loss sees what the model has made of its inputs.
        with _without_cache(model):
            outputs = model(*args, **kwargs)
        if self.loss_fn is not None:
            loss: Tensor = self.loss_fn(outputs, *args, *kwargs.values())
            return loss
        path = next(o.target for o in self.traced.graph.outputs if o.value == self.traced.loss)
        own: Tensor = leaf_paths(outputs)[path]
        return own

    def weigh(self) -> bool:
        """Find what a microbatch's own loss counts for in that of the batch.

        A mean over samples does not change when every sample is given twice, a sum doubles.

        Returns:
            False when the loss is neither, or the model cannot take fewer samples.
        """
        if self.count == 1:
            return True
        found = []
        for copies in (1, 2):
            try:
                with torch.no_grad():
                    loss = self._loss(copy.deepcopy(self.model), self._arguments(0, copies))
            except Exception:
                return False
            found.append(float(loss))
        once, twice = found
        scale = 1e-3 * max(abs(once), abs(twice))
        mean, total = abs(twice - once) <= scale, abs(twice - 2 * once) <= scale
        self.weight = 1.0 / self.count if mean else 1.0
        return mean != total

    def run(self, step: int, microbatch: int, scale: float) -> Tensor:
        """See `Device.run`."""
        loss = self._loss(self.model, self._arguments(microbatch)) * self.weight
        if loss.requires_grad:
            (loss * scale).backward()
        return loss.detach()

    def buffers(self) -> dict[str, Tensor]:
        """See `Device.buffers`."""
        return dict(self.model.named_buffers())


class GraphDevice:
    """The traced graph, forward and backward as one program.

    Args:
        compiled: The model compiled for one device with the microbatches that are to be run.
        arguments: Positional and keyword arguments of a call with the global batch.
    """

    def __init__(self, compiled: CompiledModel, arguments: Arguments) -> None:
        engine = self.engine = compiled.build(*arguments)
        self.inputs = compiled.inputs(*arguments)
        (self.unit,) = engine.units.values()
        self.names = {
            item.value.name: item.target
            for item in engine.items.values()
            if item.kind == "parameter"
        }
        held = {name: self.unit.parameters.values[name] for name in self.names}
        self.parameters = {
            self.names[name]: nn.Parameter(value.detach().clone(), value.requires_grad)
            for name, value in held.items()
        }
        self.program = self.unit.programs.joint.compile(engine.comm)
        self.numbers = engine.executor.prepare(engine.context.num_microbatches)
        self.values: dict[Slot, Any] = {}

    def run(self, step: int, microbatch: int, scale: float) -> Tensor:
        """See `Device.run`."""
        joint, unit = self.unit.programs.joint, self.unit
        if microbatch == 0:
            self.engine.num_steps = step
            self.values = dict(self.engine._values(self.inputs))
            unit.run_prologue(self.values, self.numbers)
        arguments = [self._value(slot, microbatch, scale) for slot in joint.inputs]
        with torch.no_grad():
            results = self.program(arguments)
        loss = None
        for slot, value in zip(joint.outputs, results, strict=True):
            if slot.kind == "loss":
                loss = value
            elif slot.kind == "gradient":
                parameter = self.parameters[self.names[slot.name]]
                old = parameter.grad
                parameter.grad = value.clone() if old is None else old + value
            else:
                unit.keep(slot, value)
        assert loss is not None
        share: Tensor = loss.detach()
        return share

    def _value(self, slot: Slot, microbatch: int, scale: float) -> Any:
        if slot.kind == "parameter":
            return self.parameters[self.names[slot.name]].detach()
        if slot.kind == "microbatch":
            return self.numbers[microbatch]
        if slot.kind == "tangent":
            value = self.unit.programs.joint.input_nodes()[slot].meta["val"]
            return torch.full(value.shape, scale, dtype=value.dtype)
        return self.values[slot] if slot in self.values else self.unit.tensor(slot)

    def buffers(self) -> dict[str, Tensor]:
        """See `Device.buffers`."""
        items = self.engine.items.items()
        return {i.target: self.engine.tensors[name] for name, i in items if i.kind == "buffer"}

    def counts_alike(self) -> bool:
        """Whether what inputs alone sum up to (numbers of tokens) is equal in all microbatches."""
        program = self.unit.programs.prologue
        if program is None:
            return True
        self.values = dict(self.engine._values(self.inputs))
        found: list[Sequence[Tensor]] = []
        run = program.compile(self.engine.comm)
        for number in range(len(self.numbers)):
            found.append(run([self._value(slot, number, 1.0) for slot in program.inputs]))
        return all(
            torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True)
        )


class _without_cache:  # noqa: N801 -- used as a function
    """Hugging Face caches off, as while tracing."""

    def __init__(self, model: nn.Module) -> None:
        config = getattr(model, "config", None)
        self.config = config if getattr(config, "use_cache", False) else None

    def __enter__(self) -> None:
        if self.config is not None:
            self.config.use_cache = False

    def __exit__(self, *_: object) -> None:
        if self.config is not None:
            self.config.use_cache = True
