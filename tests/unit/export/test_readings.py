"""What exports read out of a plan: where layers and cuts are, how matrices are split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.export.facts import facts_of
from autopar.export.layers import layers_of, recomputed, stage_layers, stage_spans
from autopar.export.splits import cut_of, splits_of
from autopar.graph.ir import Graph, Node
from autopar.plan.plan import ParameterPlan
from autopar.plan.remarks import stage_remarks
from autopar.plan.stages import Stages
from tests.unit.export.plans import plan_of


def test_what_remarks_write_is_read_again():
    modules = ("tokens", "layers.0.up", "layers.0", "layers.1.up", "norm")
    nodes = tuple(
        Node(name=f"n{place}", op="aten.relu.default", args=(), outputs=(), module=module)
        for place, module in enumerate(modules)
    )
    graph = Graph(nodes=nodes, inputs=(), outputs=())
    stages = Stages(
        count=3,
        stage_of={"n0": 0, "n1": 0, "n2": 0, "n3": 1, "n4": 2},
        nodes=((0, 1, 2), (3,), (4,)),
        starts=(0, 3, 4),
        boundaries=(),
        inputs=((), (), ()),
        shared={},
        outputs=((), (), ()),
        owner={},
    )
    assert stage_spans(stage_remarks(graph, stages)) == {
        0: ("tokens", "layers.0"), 1: ("layers.1.up", "layers.1.up"), 2: ("norm", "norm"),
    }  # fmt: skip


def test_layers_are_found_by_name():
    layers = layers_of(plan_of({"dp": 2}, layers=3))
    assert (layers.prefix, layers.numbers, layers.count) == ("layers", (0, 1, 2), 3)
    assert layers.lead == ("tokens.weight",)
    assert layers.tail == ("norm.weight", "head.weight")
    assert layers.place("layers.2.mlp.up") == 2
    assert layers.place("layersmore.2") is None and layers.place("norm") is None


def test_a_cut_inside_of_a_layer_is_seen():
    plan = plan_of({"pp": 2}, pipeline={"microbatches": 2})
    layers = layers_of(plan)
    assert stage_layers(plan, layers).counts == (2, 2)
    notes = ("stage 0: tokens to layers.2.attention, 9 ops, 9 parameters of 9 elements",)
    cut = replace(plan.pipeline, cuts=("layers.2.mlp_norm/aten.mul#0",))
    found = stage_layers(replace(plan, pipeline=cut, notes=notes), layers)
    assert found.inside == ("layers.2.mlp_norm",)
    silent = stage_layers(replace(plan, pipeline=cut, notes=()), layers)
    assert silent.unknown == cut.cuts and not silent.inside


@pytest.mark.parametrize(
    ("patterns", "kinds"),
    [
        ((), ("none",) * 3),
        (("layers.**/*",), ("full",) * 3),
        (("layers.**/*", "!layers.1*/*"), ("full", "none", "full")),
        (("layers.*.attention_norm/*",), ("selective",) * 3),
        (("layers.*.attention/aten.scaled_dot_product_attention.default#*",), ("selective",) * 3),
        (("layers.0.mlp.up/*",), ("mixed", "none", "none")),
    ],
)
def test_what_layers_compute_again(patterns, kinds):
    plan = plan_of({"dp": 2}, layers=3, recompute=patterns)
    assert recomputed(plan, layers_of(plan)) == kinds


@pytest.mark.parametrize(
    ("shape", "words", "copies", "even"),
    [
        ((64, 8), ("ffn@0:1x64", "ffn@0:1x64"), 1, True),
        ((64, 8), ("ffn@0:1x64", "whole"), 1, False),
        ((96, 8), ("heads@0:8x4", "heads@0:8x4"), 3, True),
        ((64, 8), ("kv_heads@0:32x2", "group@0:8x4"), 1, True),
        ((64, 8), ("kv_heads@0:16x4", "group@0:8x2"), 1, False),
        ((61, 8), ("vocab@0:1x61", "vocab@0:1x61"), 1, False),
    ],
)
def test_how_a_dim_is_divided(shape, words, copies, even):
    plan = plan_of({"dp": 1, "tp": 4})
    item = ParameterPlan(fqn="w", shape=shape, dtype="float32", placement=("whole", *words))
    cut = cut_of(item, facts_of(plan), ("tp",))
    assert cut is not None
    assert (cut.copies, cut.even) == (copies, even)


def test_kinds_of_matrices():
    plan = plan_of({"dp": 2, "tp": 2}, layers=2)
    kinds = {item.module: item.kind for item in splits_of(facts_of(plan), layers_of(plan))}
    assert kinds == {
        "tokens": "embedding", "head": "head", "layers.*.attention.q": "column",
        "layers.*.attention.k": "column", "layers.*.attention.v": "column",
        "layers.*.attention.o": "row", "layers.*.mlp.gate": "column", "layers.*.mlp.up": "column",
        "layers.*.mlp.down": "row",
    }  # fmt: skip
