"""Recompute: patterns over op keys, and what the policies keep."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.graph.blocks import find_blocks
from autopar.graph.ir import Graph
from autopar.plan.keys import op_keys
from autopar.plan.recompute import recompute_patterns, resolve_recompute
from autopar.trace import trace
from tests.models import zoo


@functools.cache
def graph_of(name: str) -> Graph:
    model, args, kwargs = getattr(zoo, name)()
    return trace(model, args, kwargs, None).graph


def ops(graph: Graph, names: frozenset[str]) -> set[str]:
    return {node.op.split(".")[1] for node in graph.nodes if node.name in names}


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "gpt", "bert"])
def test_full_keeps_only_what_enters_a_block(name: str):
    graph = graph_of(name)
    chosen = resolve_recompute(graph, ("full",))
    expected: set[str] = set()
    for block in find_blocks(graph):
        for indexes, outputs in zip(block.nodes, block.outputs, strict=True):
            nodes = [graph.nodes[index] for index in indexes]
            leaves = {n.name for n in nodes if {v.name for v in n.outputs} & set(outputs)}
            expected |= {node.name for node in nodes} - leaves
    assert chosen == expected and chosen


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "gpt", "bert", "resnet"])
@pytest.mark.parametrize("policy", ["full", "selective"])
def test_policies_are_patterns_that_fold_layers(name: str, policy: str):
    graph = graph_of(name)
    patterns = recompute_patterns(graph, (policy,))
    assert resolve_recompute(graph, patterns) == resolve_recompute(graph, (policy,))
    assert policy not in patterns
    if name in ("gpt2", "llama", "gpt"):
        deeper = zoo.gpt2(5) if name == "gpt2" else zoo.llama(5) if name == "llama" else zoo.gpt(5)
        other = trace(deeper[0], deeper[1], deeper[2], None).graph
        assert recompute_patterns(other, (policy,)) == patterns


def test_selective_recomputes_what_is_cheap():
    graph = graph_of("gpt2")
    chosen = resolve_recompute(graph, ("selective",))
    found = ops(graph, chosen)
    assert {"layer_norm", "dropout", "tanh", "scaled_dot_product_attention"} <= found
    assert not found & {"addmm", "linear", "reshape", "cross_entropy_loss", "embedding"}
    residual = {node.name for node in graph.nodes if node.module in ("transformer.h.0",)}
    assert not chosen & residual


class Written(nn.Module):
    """Attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.out = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.query(x) @ self.key(x).transpose(1, 2)).softmax(-1)
        return self.out(scores @ x).sum()


def test_scores_written_by_hand_are_recomputed():
    graph = trace(Written(), (torch.randn(2, 3, 4, requires_grad=True),), {}, None).graph
    found = ops(graph, resolve_recompute(graph, ("selective",)))
    assert "softmax" in found and found & {"matmul", "bmm"} and "linear" not in found


class Halves(nn.Module):
    """Two parts that differ, so that nothing repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.b = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_full_goes_by_top_level_modules_where_nothing_repeats():
    graph = trace(Halves(), (torch.randn(2, 4),), {}, None).graph
    chosen = resolve_recompute(graph, ("full",))
    modules = [node.module for node in graph.nodes if node.name in chosen]
    assert modules == ["a.0", "a.1", "b.0", "b.1"]


def test_patterns_add_and_take_away():
    graph = graph_of("gpt")
    keys = dict(zip(op_keys(graph), (node.name for node in graph.nodes), strict=True))
    first = resolve_recompute(graph, ("blocks.0*",))
    assert first == {name for key, name in keys.items() if key.startswith("blocks.0")}
    less = resolve_recompute(graph, ("blocks.0*", "!*/aten.layer_norm*"))
    assert first - less == {
        name for key, name in keys.items() if key.startswith("blocks.0") and "layer_norm" in key
    }
    one = next(iter(keys))
    assert resolve_recompute(graph, (one,)) == {keys[one]}
    assert resolve_recompute(graph, ()) == frozenset()


@pytest.mark.parametrize("pattern", ["blocks.9/*", "", "!nothing", "all"])
def test_patterns_that_match_nothing(pattern: str):
    with pytest.raises(PlanError) as caught:
        resolve_recompute(graph_of("gpt"), ("blocks.0*", pattern))
    assert f"{pattern!r} matches no op" in str(caught.value)
    assert "constraints['recompute'][1]" in str(caught.value)
