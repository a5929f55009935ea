"""Mistakes that the fuzz, or reading for it, has found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.sharding.factors import infer_factors
from autopar.trace import trace


class _BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, index: Tensor) -> Tensor:
        return (self.weight[index] * self.weight[:, index]).sum()


def test_calls_that_differ_in_where_a_tensor_stands_have_different_rules():
    # x[i] and x[:, i] of a square x agree in all shapes; only the place of i tells them apart.
    graph = trace(_BothWays(), (torch.tensor([3, 1, 0, 2]),), {}).graph
    factors = infer_factors(graph)
    rules = [
        str(rule)
        for node, rule in zip(graph.nodes, factors.rules, strict=True)
        if node.op == "aten.index.Tensor"
    ]
    assert rules == ["d1, i0 -> i0 d1", "d0, i0 -> d0 i0"]
