"""A rank that runs its local forward as it is lowered, with autograd for backward.

It has nothing of the programs made of that forward, so it tests rules, reshards and lowerings
alone, and starts at once where a program must be captured first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.runtime.comm import Communicator
from autopar.runtime.lower import LocalForward, lower
from autopar.runtime.mesh import MeshContext
from autopar.runtime.microbatch import set_seed
from autopar.runtime.reshard import bind_steps, run_steps
from autopar.sharding.placement import REPLICATE, Pair, Placements
from autopar.sharding.sharded import ShardedGraph, replicated
from tests.distributed.fuzz_models import Subject

LEARNING_RATE = 0.05


class DirectEngine:
    """One rank of a plan; the methods are those of `autopar.runtime.engine.Engine`."""

    def __init__(
        self, subject: Subject, sharded: ShardedGraph, comm: Communicator, seed: int = 0
    ) -> None:
        self.sharded, self.seed, self.num_steps = sharded, seed, 0
        self.context = MeshContext.create(sharded.mesh, comm)
        self.everywhere = replicated(sharded.mesh)
        self.loss = subject.traced.loss
        self.items = {item.value.name: item for item in sharded.graph.inputs}
        self.tensors: dict[str, Tensor] = {}
        for name, item in self.items.items():
            if item.kind == "input":
                continue
            full = subject.tensors[item.target].detach()
            if item.kind == "parameter":
                local = self._move(full, self.everywhere.forward, self._pair(name).forward, name)
                self.tensors[name] = nn.Parameter(local, item.value.spec.requires_grad)
            else:
                self.tensors[name] = full.clone()
        outputs = sharded.graph.outputs
        buffers = {i.target: n for n, i in self.items.items() if i.kind == "buffer"}
        self.renewed = {
            out.value: buffers[out.target] for out in outputs if out.kind == "buffer" and out.value
        }
        user = dict.fromkeys(out.value for out in outputs if out.kind == "user" and out.value)
        pairs = sharded.pairs()
        new = [(name, self.everywhere) for name in self.renewed]
        loss = Pair(pairs[str(self.loss)].forward, self.everywhere.gradient)
        self.local = lower(sharded, self.context, [(str(self.loss), loss), *new])
        self.results = [(name, self.everywhere) for name in user]

    def _pair(self, name: str) -> Pair:
        return self.sharded.inputs[name]

    def _move(self, tensor: Tensor, have: Placements, want: Placements, name: str) -> Tensor:
        shape = self.sharded.graph.spec(name).shape
        return run_steps(bind_steps(have, want, shape, self.context), tensor).detach().clone()

    def _run(self, local: LocalForward, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        values = {**inputs, **self.tensors, "microbatch": torch.tensor(0)}
        values["seed"] = torch.tensor(self.seed * 1_000_003 + self.num_steps)
        results = local.module(*(values[slot.name] for slot in local.inputs))
        set_seed(0)
        return dict(zip(local.outputs, results, strict=True))

    def backward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Loss; gradients are complete afterwards."""
        for name in self._parameters():
            self.tensors[name].grad = None
        outputs = self._run(self.local, inputs)
        loss = outputs[str(self.loss)]
        if loss.requires_grad:
            loss.sum().backward()
        have = self.sharded.pairs()[str(self.loss)].forward
        whole = self._move(loss.detach(), have, self.everywhere.forward, str(self.loss))
        for name in self._parameters():
            grad, pair = self.tensors[name].grad, self._pair(name)
            if grad is not None:
                self.tensors[name].grad = self._move(grad, pair.gradient, pair.forward, name)
        for value, name in self.renewed.items():
            self.tensors[name] = outputs[value].detach()
        self.num_steps += 1
        return whole

    def _parameters(self) -> list[str]:
        return [name for name, item in self.items.items() if item.kind == "parameter"]

    @torch.no_grad()
    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole outputs."""
        return self._run(lower(self.sharded, self.context, self.results), inputs)

    @torch.no_grad()
    def update(self) -> None:
        """A step of gradient descent."""
        for name in self._parameters():
            grad = self.tensors[name].grad
            if grad is not None:
                self.tensors[name].sub_(grad, alpha=LEARNING_RATE)

    def local_gradient(self, name: str) -> Tensor | None:
        """This rank's part of a gradient."""
        return self.tensors[name].grad

    def _full(self, name: str, local: Tensor) -> Tensor:
        return self._move(local.detach(), self._pair(name).forward, self.everywhere.forward, name)

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients by FQN."""
        found: dict[str, Tensor | None] = {}
        for name in self._parameters():
            grad = self.tensors[name].grad
            found[self.items[name].target] = None if grad is None else self._full(name, grad)
        return found

    def full_parameters(self) -> dict[str, Tensor]:
        """Whole parameters by FQN."""
        return {self.items[n].target: self._full(n, self.tensors[n]) for n in self._parameters()}

    def full_buffers(self) -> dict[str, Tensor]:
        """Buffers by FQN."""
        return {
            item.target: self.tensors[name].clone()
            for name, item in self.items.items()
            if item.kind == "buffer"
        }

    def replicas_differ(self) -> str | None:
        """FQN of the first parameter whose copies differ."""
        first = None
        for name in self._parameters():
            placed = enumerate(self._pair(name).forward)
            ranks = self.context.ranks(tuple(a for a, p in placed if p == REPLICATE))
            copies = self.context.comm.all_gather(self.tensors[name].detach(), ranks)
            if first is None and not torch.equal(copies, copies[:1].expand_as(copies)):
                first = self.items[name].target
        return first
