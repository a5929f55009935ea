"""Mistakes that the fuzz, or reading for it, has found."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.plan.build import make_plan
from autopar.runtime.comm import Communicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.engine import Engine
from autopar.runtime.mesh import MeshContext
from autopar.runtime.reshard import Reshard
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import PARTIAL, REPLICATE, Pair, Shard
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


def test_a_masked_value_has_the_same_strides_on_all_ranks():
    # Torch's kernels choose the order of sums by the strides of their operands: with a view on the
    # rank that keeps the value and zeros on the others, replicated gradients differed by an ulp.
    mesh = Mesh((("x", 2), ("y", 2)))
    whole = Pair((REPLICATE, REPLICATE), ())
    wanted = Pair((PARTIAL, Shard(1, 1, 6)), ())

    def strides(comm: Communicator) -> tuple[int, ...]:
        move = Reshard(whole, wanted, (4, 6), MeshContext.create(mesh, comm))
        return move(torch.arange(24.0).view(4, 6)).stride()

    assert run_threads(4, strides) == [(3, 1)] * 4


def test_an_uneven_reduce_scatter_gives_dense_tensors_on_all_ranks():
    # With 5 columns in 2 parts, the smaller one was a view into its padded form.
    mesh = Mesh((("x", 2),))
    sums, wanted = Pair((PARTIAL,), ()), Pair((Shard(1, 1, 5),), ())

    def result(comm: Communicator) -> Tensor:
        return Reshard(sums, wanted, (4, 5), MeshContext.create(mesh, comm))(torch.ones(4, 5))

    found = run_threads(2, result)
    assert [part.shape[1] for part in found] == [3, 2]
    assert all(part.is_contiguous() for part in found)
    assert all(torch.equal(part, torch.full_like(part, 2)) for part in found)


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 6, bias=False), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x)).square().mean()


def _value(ready: Engine, fqn: str) -> Tensor:
    """A local parameter."""
    parameters = ready.units[0].parameters
    return next(parameters.values[n] for n, i in parameters.items.items() if i.fqn == fqn)


def test_ranks_that_see_no_difference_do_not_wait_for_those_that_do():
    model, x = _TwoLayers(), torch.randn(4, 4)
    traced = trace(model, (x,), {})
    mesh = Mesh((("x", 2), ("y", 2)))
    _, sharded = make_plan(traced.graph, mesh, {"hidden": "x"})
    assert sharded.inputs["up.weight"].forward == (Shard(0, 1, 6), REPLICATE)

    def first(comm: Communicator) -> str | None:
        ready = Engine(
            sharded,
            MeshContext.create(mesh, comm),
            dict(model.named_parameters()),
            loss=traced.loss,
        )
        if comm.rank == 0:
            with torch.no_grad():
                _value(ready, "up.weight").add_(1)
        return ready.replicas_differ()

    assert run_threads(4, first, timeout_s=10.0) == ["up.weight", "up.weight", None, None]
