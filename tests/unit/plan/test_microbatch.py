"""Microbatches as an axis in time: what is split, what stays a sum, what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.plan.build import make_plan
from autopar.plan.microbatch import microbatch_obstacles
from autopar.plan.plan import Plan
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import PARTIAL, REPLICATE, Shard
from autopar.sharding.reshard import plan_steps
from autopar.sharding.sharded import ShardedGraph
from autopar.trace import trace
from tests.models import zoo


def placed(
    model: nn.Module, args: tuple[Tensor, ...], constraints: str, mesh: str = "dp=2"
) -> tuple[Plan, ShardedGraph, str]:
    traced = trace(model, args, {}, None)
    plan, sharded = make_plan(traced.graph, Mesh.parse(mesh), constraints)
    outputs = [out.value for out in traced.graph.outputs if out.kind == "user" and out.value]
    return plan, sharded, outputs[0]


class Scaled(nn.Module):
    """A loss with arithmetic after the sum over samples, and an exact count of the inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.layer(x).square()
        if self.kind == "counted":
            return (y.sum(1) * mask).sum() / mask.sum() * 0.5 + 0.1 * y.mean()
        if self.kind == "root":
            return y.mean().sqrt()
        if self.kind == "sorted":
            return (y.sort(dim=0).values * y).sum()
        if self.kind == "gram":
            return (y @ y.T).exp().sum()
        if self.kind == "penalty":
            return y.sum() + self.layer.weight.square().sum()
        raise AssertionError(self.kind)


def scaled(kind: str, constraints: str = "ddp,microbatches=2", mesh: str = "dp=2"):
    torch.manual_seed(0)
    return placed(Scaled(kind), (torch.randn(4, 3), torch.ones(4)), constraints, mesh)


def time_steps(sharded: ShardedGraph) -> set[str]:
    """Kinds of all steps along the axis in time, forward and backward."""
    pairs = sharded.pairs()
    found = set()
    for node, call in zip(sharded.graph.nodes, sharded.calls, strict=True):
        for name, want in zip(node.operands, call.operands, strict=True):
            ways = [(pairs[name].forward, want.forward)]
            if sharded.graph.spec(name).requires_grad:
                ways.append((want.gradient, pairs[name].gradient))
            for a, b in ways:
                found.update(step.kind for step in plan_steps(a, b) if 0 in step.axes)
    return found


def test_a_loss_stays_a_sum_over_time():
    plan, sharded, loss = scaled("counted")
    assert sharded.mesh.axes == (("microbatch", 2), ("dp", 2))
    assert sharded.pairs()[loss].forward[0] == PARTIAL
    assert not any("per microbatch" in note for note in plan.notes), "the count is exact"
    assert all(len(item.placement) == 1 for item in plan.parameters)


def test_gradients_of_parameters_are_summed_over_time_and_inputs_whole():
    _, sharded, _ = scaled("penalty")
    for item in sharded.graph.inputs:
        pair = sharded.inputs[item.value.name]
        assert pair.forward[0] == REPLICATE
        assert pair.gradient[0] == (PARTIAL if item.kind == "parameter" else REPLICATE)


def test_what_is_no_sum_is_computed_per_microbatch_and_said():
    plan, sharded, _ = scaled("root")
    (note,) = (note for note in plan.notes if "per microbatch" in note)
    assert "aten.mean" in note and "all_reduce" in time_steps(sharded)


@pytest.mark.parametrize(("kind", "op"), [("sorted", "aten.sort"), ("gram", "aten.m")])
def test_what_mixes_samples_is_refused(kind: str, op: str):
    with pytest.raises(PlanError) as caught:
        scaled(kind)
    text = str(caught.value)
    assert "2 microbatches" in text and op in text and "microbatches=1" in text
    assert "test_microbatch.py:" in text
    assert scaled(kind, "ddp")[1].mesh.names == ("dp",)


def test_a_batch_that_does_not_divide():
    with pytest.raises(PlanError, match="global batch 4 does not divide into 3") as caught:
        scaled("root", "ddp,microbatches=3")
    assert "use 4 or 2" in str(caught.value)
    ten = (torch.randn(10, 3), torch.ones(10))
    with pytest.raises(PlanError, match="global batch 10 does not divide into 4") as caught:
        placed(Scaled("root"), ten, "ddp,microbatches=4")
    assert "use 5 or 2" in str(caught.value)


class NoBatch(nn.Module):
    """A model of parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.weight).sum() * x


def test_a_model_without_a_batch():
    with pytest.raises(PlanError, match="treats samples one by one"):
        placed(NoBatch(), (torch.tensor(1.0),), "ddp,microbatches=2")


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama", "unet", "resnet", "bert", "vit"])
def test_models_are_split_in_time(name: str):
    model, args, kwargs = getattr(zoo, name)()
    traced = trace(model, args, kwargs, None)
    _, sharded = make_plan(traced.graph, Mesh.parse("pp=2"), "ddp,microbatches=2")
    assert sharded.mesh.axes == (("microbatch", 2),) and not microbatch_obstacles(sharded)
    assert not time_steps(sharded) & {"all_gather", "all_to_all", "reduce_scatter"}
    split = [c[0].kind for c in sharded.choices].count("split")
    assert split > len(sharded.choices) / 3
    for node, call in zip(sharded.graph.nodes, sharded.calls, strict=True):
        for value, pair in zip(node.outputs, call.outputs, strict=True):
            if "batch_norm" in node.op:
                continue  # its statistics are whole, and nothing uses them
            if value.spec.requires_grad and not isinstance(pair.forward[0], Shard):
                forward, gradient = pair.forward[0], pair.gradient[0]
                assert (forward, gradient) in {(REPLICATE, PARTIAL), (PARTIAL, REPLICATE)}
