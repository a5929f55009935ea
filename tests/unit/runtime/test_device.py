"""Programs create what they create on the rank's device: the meta device stands for a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.plan.build import make_plan
from autopar.runtime.comm import SoloCommunicator
from autopar.runtime.engine import Engine
from autopar.runtime.mesh import MeshContext
from autopar.runtime.tiny_gpt import GPT, GPTConfig
from autopar.sharding.mesh import Mesh
from autopar.trace import trace


class Noisy(nn.Module):
    """Creates tensors in forward: a mask, positions, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0], dtype=x.dtype)
        mask = torch.tril(torch.ones(x.shape[0], 6))
        noise = torch.rand_like(x) + torch.rand(6) + torch.zeros(6)
        return (self.drop(self.linear(x) * mask + noise) * rows[:, None]).sum()


@pytest.mark.parametrize("name", ["gpt", "noisy"])
def test_everything_is_created_on_the_device_of_the_rank(name: str) -> None:
    torch.manual_seed(0)
    if name == "gpt":
        model: nn.Module = GPT(GPTConfig(layers=1, heads=2, width=8, vocabulary=16, context=8))
        tokens = torch.randint(0, 16, (2, 8))
        args = (tokens, tokens)
    else:
        model, args = Noisy(), (torch.randn(4, 6),)
    traced = trace(model, args)
    device = torch.device("meta")
    _, sharded = make_plan(traced.graph, Mesh((("dp", 1),)))
    comm = SoloCommunicator(device)
    engine = Engine(
        sharded,
        MeshContext.create(sharded.mesh, comm),
        {**traced.parameters, **traced.buffers, **traced.constants},
        loss=traced.loss,
        check_finite=False,
    )
    names = [item.value.name for item in traced.graph.inputs if item.kind == "input"]
    loss = engine.backward(dict(zip(names, args, strict=True)))
    assert loss.device == device
    for gradient in engine.full_gradients().values():
        assert gradient is not None and gradient.device == device
