"""Steps that would train nothing are refused, and so are calls of verify that mean nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import InputError, PlanError


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).detach().sum()


class Plain(Detached):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_refused(mode: type) -> None:
    compiled = autopar.compile(Plain())
    with mode(), pytest.raises(InputError, match="no_grad"):
        compiled.step(torch.ones(2, 3))


def test_a_loss_that_no_parameter_reaches_is_refused() -> None:
    with pytest.raises(PlanError, match="no trainable parameter"):
        autopar.compile(Detached()).step(torch.ones(2, 3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"args": torch.ones(2, 3)}, "args is of type Tensor"),
        ({"kwargs": [1]}, "kwargs is of type list"),
        ({"steps": 0}, "steps is 0"),
        ({"mesh": [("dp", 2)]}, "mesh is of type list"),
    ],
)
def test_verify_refuses_arguments_that_mean_nothing(changes: dict, said: str) -> None:
    call = {"args": (torch.ones(2, 3),), "mesh": "dp=2", "threads": True} | changes
    with pytest.raises(InputError, match=said):
        autopar.verify(Plain(), **call)
