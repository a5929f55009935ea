"""Repeated layers are traced once, and the graph is the one of a full trace."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.graph.blocks import find_blocks
from autopar.trace import expand, repeat, tracer
from autopar.trace.grouping import find_groups
from tests.marks import later
from tests.models import zoo
from tests.unit.trace.support import same_in_both_ways

DEPTH = 6


@pytest.fixture
def copies(monkeypatch):
    """Counts the opaque calls that were expanded, per trace."""
    counts = []
    original = expand._Expander._repeat

    def counted(self, node):
        counts.append(node)
        original(self, node)

    monkeypatch.setattr(expand._Expander, "_repeat", counted)
    return counts


@pytest.mark.parametrize("name", ["gpt", *later("llama", "t5"), "whisper"])
def test_deep_models(name, copies):
    torch.manual_seed(0)
    same_in_both_ways(*zoo.ALL[name](DEPTH))
    assert len(copies) >= DEPTH - 4


def test_layers_of_two_kinds(copies):
    traced = same_in_both_ways(*zoo.gemma3(12))
    assert len(copies) >= 6
    sizes = sorted(block.count for block in find_blocks(traced.graph))
    assert sizes == [12]  # the two kinds differ in the mask and the angles they are given


def test_layers_with_buffers_written_in_place(copies):
    same_in_both_ways(*zoo.resnet(6))
    assert len(copies) >= 4


def test_router_outputs_taken_by_hooks():
    same_in_both_ways(*zoo.mixtral(4))


def test_experts_inside_layers(copies):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9)
            )

        def forward(self, x):
            return x + sum(expert(x) for expert in self.experts)

    model = nn.Sequential(*(Layer() for _ in range(5)))
    same_in_both_ways(model, (torch.randn(2, 4),), {}, lambda y, x: y.mean())
    assert len(copies) > 10


class Layer(nn.Module):
    """A layer with something odd about it."""

    def __init__(self, odd, index):
        super().__init__()
        self.odd, self.index = odd, index
        self.fc = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.notes, self.count, self.last = [], 0, None

    def forward(self, x, store):
        y = self.fc(x)
        if self.odd == "index":
            y = y * (self.index + 1)
        if self.odd == "count":
            self.count += 1
        if self.odd == "attribute":
            self.last = y.mean()
        if self.odd == "leak":
            store["aux"] = store.get("aux", 0) + y.mean()
        if self.odd == "input":
            x.mul_(0.5)
        if self.odd == "buffer":
            with torch.no_grad():
                self.seen.add_(y.mean(0))
        if self.odd == "assign":
            self.seen = self.seen + y.detach().mean(0)
        if self.odd == "view":
            return (y * 2).view(2, 2, 2).view(2, 4)
        if self.odd == "cast":
            return y, x.to(torch.float64)
        if self.odd == "dropout":
            return y, nn.functional.dropout(x, 0.5)
        if self.odd == "same":
            return y, x
        return y


class Stack(nn.Module):
    """Many layers, and odd things done with them."""

    def __init__(self, odd):
        super().__init__()
        self.odd = odd
        self.layers = nn.ModuleList(Layer(odd, index) for index in range(DEPTH))
        if odd == "tied":
            self.layers[3].fc.weight = self.layers[2].fc.weight
        if odd == "frozen":
            self.layers[2].requires_grad_(False)

    def forward(self, x):
        store = {}
        for layer in self.layers:
            x = layer(x * 1.0, store)
            if isinstance(x, tuple):
                store["aux"] = store.get("aux", 0) + x[1].mean()
                x = x[0]
            if self.odd == "grad" and x.requires_grad:
                x = x * 2
            if self.odd == "add":
                x += 1.0
            if self.odd == "view":
                x[:, 0] += 1.0
        if self.odd == "all":
            x = x + sum(parameter.pow(2).sum() for parameter in self.parameters())
        if self.odd == "look":
            x = x + self.layers[2].fc.weight.sum()
        if self.odd == "attribute":
            x = x + self.layers[2].last
        return x.mean() + store.get("aux", 0)


@pytest.mark.parametrize(
    "odd",
    ["index", "count", "attribute", "leak", "input", "buffer", "assign", "view", "tied", "frozen",
     "all", "look", "cast", "dropout", "same", "grad", "add"],
)  # fmt: skip
def test_odd_layers(odd):
    traced = same_in_both_ways(Stack(odd), (torch.randn(2, 4),), {})
    updated = [item for item in traced.graph.outputs if item.kind == "buffer"]
    assert len(updated) == (DEPTH if odd in ("buffer", "assign") else 0)


@pytest.mark.parametrize("odd", ["cast", "same", "grad", "add", ""])
def test_opaque_calls_through_the_dispatcher(odd, monkeypatch, copies):
    monkeypatch.setattr(repeat, "write_call", lambda *_: None)
    same_in_both_ways(Stack(odd), (torch.randn(2, 4),), {})
    assert copies or odd == "grad"  # results of such calls require no gradient: all is traced


def test_opaque_calls_are_written_directly(monkeypatch):
    made = []
    original = repeat.write_call

    def seen(*args):
        made.append(original(*args))
        return made[-1]

    monkeypatch.setattr(repeat, "write_call", seen)
    same_in_both_ways(Stack(""), (torch.randn(2, 4),), {})
    assert len(made) == 2  # the first layer is alone in that its input requires no gradient
    assert all(results and results[0].requires_grad for results in made)


@pytest.mark.parametrize("name", ["gpt", *later("t5", "gemma3", "qwen3_moe")])
def test_blocks_do_not_depend_on_known_copies(name):
    graph = tracer.trace(*zoo.ALL[name](7)).graph
    told = find_blocks(graph)
    assert graph.runs
    unaware = replace(graph, nodes=(*graph.nodes[:1], *graph.nodes[1:]), _specs={})
    assert not unaware.runs
    assert told == find_blocks(unaware)


def test_groups():
    groups = find_groups(Stack("frozen"))
    assert [group.paths for group in groups] == [
        tuple(f"layers.{index}" for index in (0, 1, 3, 4, 5))
    ]
    assert groups[0].indexed == (("", "index"),)


@pytest.mark.parametrize(
    ("build", "deep"), [(zoo.meta_gpt, 96), (zoo.meta_llama, 80)], ids=["gpt3", "llama70b"]
)
def test_distinct_layers_alone_are_traced(build, deep, copies):
    # Seconds are printed by tests/bench/bench_trace.py; this is what they depend on.
    tracer.trace(*build(8))
    shallow = len(copies)
    traced = tracer.trace(*build(deep))
    inline = 8 - shallow
    assert inline <= 4
    assert len(copies) - shallow == deep - inline
    assert max(block.count for block in find_blocks(traced.graph)) >= deep - 1
