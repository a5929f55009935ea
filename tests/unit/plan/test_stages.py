"""Stages of real graphs: everything a stage needs it makes, holds or is sent, and nothing else."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.keys import op_keys
from autopar.plan.stages import Stages, assign_stages, cut_keys, given_keys, staged_nodes
from autopar.sharding.factors import Factors, infer_factors
from autopar.trace import trace
from tests.models import zoo

NAMES = ("gpt2", "llama", "t5", "unet", "resnet", "gpt")


@functools.cache
def graph_of(name: str) -> tuple[Graph, Factors]:
    model, args, kwargs = getattr(zoo, name)()
    graph = trace(model, args, kwargs, None).graph
    return graph, infer_factors(graph)


def of(model: nn.Module, *args: Tensor) -> Graph:
    return trace(model, args, {}, None).graph


def check(graph: Graph, stages: Stages) -> None:
    """Run the stages as sets of names: each has what it uses, when it uses it."""
    given_values = {item.value.name: item for item in graph.inputs}
    sent: dict[tuple[int, str], None] = {}
    produced: dict[str, int] = {}
    for stage in range(stages.count):
        have = set(stages.inputs[stage])
        assert have <= set(given_values)
        for item in stages.received(stage):
            assert (stage, item.value) in sent and item.source < stage
            assert item.value not in have
            have.add(item.value)
        needed: set[str] = set()
        for index in stages.nodes[stage]:
            node = graph.nodes[index]
            assert set(node.operands) <= have, f"stage {stage} lacks operands of {node.name}"
            needed.update(node.operands)
            have.update(value.name for value in node.outputs)
            own = stages.stage_of[node.name]
            assert own in (None, stage)
            if own is not None:
                assert node.name not in produced
                produced[node.name] = stage
        assert set(stages.outputs[stage]) <= have
        needed.update(stages.outputs[stage])
        for item in stages.sent(stage):
            assert item.value in have and item.gradient == graph.spec(item.value).requires_grad
            needed.add(item.value)
            sent.update(((target, item.value), None) for target in item.targets)
        idle = {n for n, i in given_values.items() if i.kind in ("parameter", "buffer")}
        extra = set(stages.inputs[stage]) - needed
        assert extra <= (idle if stage == 0 else set()) | {
            name for name in idle if given_values[name].kind == "buffer"
        }
        assert {item.value for item in stages.received(stage)} <= needed
        for index in stages.nodes[stage]:
            names = {value.name for value in graph.nodes[index].outputs}
            alone = stages.stage_of[graph.nodes[index].name] is None
            assert not alone or names & needed, f"stage {stage} makes {names} for nobody"
    assert set(produced) == {graph.nodes[index].name for index in staged_nodes(graph)}
    wanted = {output.value for output in graph.outputs} - {None}
    assert sorted(name for names in stages.outputs for name in names) == sorted(wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_automatic_stages_are_complete(name: str, count: int):
    graph, factors = graph_of(name)
    stages = assign_stages(graph, factors, count)
    check(graph, stages)
    assert all(any(own == s for own in stages.stage_of.values()) for s in range(count))
    again = assign_stages(graph, factors, count, cut_keys(graph, stages))
    assert again == stages


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 2**32))
def test_any_cut_is_legal_but_through_a_buffer(name: str, seed: int):
    graph, factors = graph_of(name)
    source = random.Random(seed)
    keys = op_keys(graph)
    picked = sorted(source.choices(range(len(keys)), k=source.randint(1, 5)))
    cuts = tuple(keys[index] for index in picked)
    try:
        stages = assign_stages(graph, factors, len(cuts) + 1, cuts)
    except PlanError as error:
        assert "buffer" in error.what and name == "resnet", error
        return
    check(graph, stages)
    assert given_keys(graph, cuts) == cuts


def test_a_skip_connection_jumps_over_stages():
    graph, factors = graph_of("unet")
    stages = assign_stages(graph, factors, 3)
    jumping = [b for b in stages.boundaries if max(b.targets) - b.source > 1]
    assert jumping and all(edge.source < edge.target for edge in stages.edges())
    assert (0, 2) in {(edge.source, edge.target) for edge in stages.edges()}


def test_an_encoder_feeds_every_stage_of_the_decoder():
    graph, factors = graph_of("t5")
    cuts = ("decoder.block.0", "decoder.block.1", "lm_head")
    stages = assign_stages(graph, factors, 4, cuts)
    check(graph, stages)
    (encoded,) = (b for b in stages.boundaries if b.value in stages.outputs[0])
    assert encoded.targets == (1, 2)
    assert stages.shared["shared.weight"] == (0, 3)
    assert all(edge.gradient for edge in stages.edges())


def test_layers_keep_together_and_tied_weights_are_shared():
    graph, factors = graph_of("gpt2")
    stages = assign_stages(graph, factors, 2)
    assert cut_keys(graph, stages) == ("transformer.h.1.ln_1/aten.layer_norm.default#0",)
    (only,) = stages.boundaries
    assert only.value == "add_7" and only.targets == (1,)
    assert stages.shared == {"transformer.wte.weight": (0, 1)}
    assert stages.inputs_of(0, graph, "input") == ("input_ids",)
    assert stages.inputs_of(1, graph, "input") == ("labels",) or "input_ids" in stages.inputs[1]
    masks = [i for i in stages.nodes[1] if stages.stage_of[graph.nodes[i].name] is None]
    assert masks, "each stage makes the attention mask for itself"


class Frozen(nn.Module):
    """A frozen layer, a layer that nothing uses, and a running mean that a later op reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(4))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) + self.mean
        old = self.mean * 1
        self.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        z = self.last(y)
        return (z + old + self.mean).sum()


def test_no_gradient_flows_into_a_frozen_stage():
    graph = of(Frozen(), torch.randn(2, 4))
    stages = assign_stages(graph, infer_factors(graph), 2, ("last",))
    check(graph, stages)
    assert [edge.gradient for edge in stages.edges()] == [False]
    assert {"idle.weight", "idle.bias"} <= set(stages.inputs[0])
    assert "mean" in stages.inputs[0] and "mean" not in stages.inputs[1]


def test_a_buffer_is_not_parted_from_its_update():
    graph = of(Frozen(), torch.randn(2, 4))
    factors = infer_factors(graph)
    keys = op_keys(graph)
    parting = next(key for key in keys if key.startswith("/aten.add.Tensor#0"))
    after = keys[keys.index(parting) + 1]
    with pytest.raises(PlanError, match="buffer mean is read in stage 0 and updated in stage 1"):
        assign_stages(graph, factors, 2, (after,))
    for count in range(2, 4):
        check(graph, assign_stages(graph, factors, count))


def test_empty_stages_when_asked():
    graph, factors = graph_of("gpt")
    first = op_keys(graph)[staged_nodes(graph)[0]]
    stages = assign_stages(graph, factors, 4, (first, "blocks.1", "blocks.1"))
    check(graph, stages)
    held = [sum(own == s for own in stages.stage_of.values()) for s in range(4)]
    assert held[0] == held[2] == 0 and held[1] and held[3]
    assert {(e.source, e.target) for e in stages.edges()} == {(1, 3)}


@pytest.mark.parametrize(
    ("count", "cuts", "words"),
    [
        (2, ("nowhere",), ("'nowhere', which the model lacks", "cuts[0]", "module paths")),
        (3, ("blocks.1", "blocks.0"), ("lies before cut 'blocks.1'", "cuts[1]")),
        (3, ("blocks.1",), ("1 cut for 2 stages, not 3", "2 cuts")),
    ],
)
def test_wrong_cuts(count: int, cuts: tuple[str, ...], words: tuple[str, ...]):
    with pytest.raises(PlanError) as caught:
        assign_stages(*graph_of("gpt"), count, cuts)
    for word in words:
        assert word in str(caught.value)


def test_more_stages_than_ops():
    graph = of(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.randn(2, 2))
    with pytest.raises(PlanError) as caught:
        assign_stages(graph, infer_factors(graph), 4)
    text = str(caught.value)
    assert "3 ops" in text and "at most 3 stages" in text and "cuts=[...]" in text
