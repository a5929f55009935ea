"""Constraints: what each strategy splits, what each factor map means, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import PlanError
from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.plan.strategies import (
    STRATEGIES,
    default_mesh,
    parse_constraints,
    prime_factors,
    split_axes,
)
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import build_decoder
from autopar.search.asked import Asked
from autopar.sharding.mesh import Mesh
from tests.models.cases import language, structure, vision
from tests.models.check import Case, compare


def planned(case: Case, mesh: str, constraints, **options) -> Plan:
    return make_plan(case.traced.graph, Mesh.parse(mesh), constraints, **options)[0]


def stored(plan: Plan) -> dict[str, tuple[str, ...]]:
    return {i.fqn: tuple(w.partition("@")[0] for w in i.placement) for i in plan.parameters}


@pytest.mark.parametrize("number", range(1, 200))
def test_prime_factors(number: int):
    found = prime_factors(number)
    assert math.prod(found) == number and found == sorted(found)
    assert all(all(p % d for d in range(2, p)) for p in found)


def test_axes_are_split_into_primes():
    mesh, owner = split_axes(Mesh.parse("dp=6,tp=2,pp=1,x=4"))
    assert mesh.axes == (
        ("dp_0", 2), ("dp_1", 3), ("tp", 2), ("pp", 1), ("x_0", 2), ("x_1", 2)
    )  # fmt: skip
    assert owner == ("dp", "dp", "tp", "pp", "x", "x")


@pytest.mark.parametrize(
    ("strategy", "devices", "mesh"),
    [
        ("ddp", 6, "dp=6"), ("fsdp", 3, "dp=3"), ("ddp", 1, "dp=1"), ("megatron", 1, "dp=1"),
        ("megatron", 8, "tp=8"), ("megatron", 12, "dp=3,tp=4"), ("megatron_sp", 16, "dp=2,tp=8"),
        ("megatron", 7, "dp=7"), ("2d", 4, "x=2,y=2"), ("2d", 6, "x=2,y=3"),
    ],
)  # fmt: skip
def test_default_meshes(strategy: str, devices: int, mesh: str):
    made = default_mesh(strategy, devices)
    assert str(made) == mesh and made.size == devices


def test_data_parallel_keeps_weights_whole():
    plan = planned(language.decoder(), "dp=2", "ddp")
    assert set(stored(plan).values()) == {("whole",)}
    assert plan.strategy == "ddp" and plan.order == (("dp", ("batch",)),) and not plan.searched
    assert planned(language.decoder(), "dp=2", None) == plan


def test_fsdp_stores_weights_split():
    plan = planned(language.decoder(), "dp=2", "fsdp")
    assert plan.storage == ("dp",)
    kept = {fqn for fqn, words in stored(plan).items() if words == ("whole",)}
    assert all(fqn.endswith("gain") for fqn in kept)  # a number cannot be split


def test_megatron_splits_heads_hidden_and_vocabulary():
    words = stored(planned(language.decoder(), "dp=2,tp=2", "megatron"))
    assert words["embed.weight"] == words["logits.weight"] == ("whole", "vocab")
    assert words["blocks.0.query.weight"] == words["blocks.0.out.weight"] == ("whole", "heads")
    assert words["blocks.0.up.bias"] == words["blocks.0.down.weight"] == ("whole", "ffn")
    assert words["blocks.1.before.weight"] == ("whole", "whole")


def test_sequence_parallelism_splits_what_is_left():
    case = language.decoder()
    plain, sharded = make_plan(case.traced.graph, Mesh.parse("tp=2"), "megatron_sp")
    assert stored(plain) == stored(planned(case, "tp=2", "megatron"))
    split = {
        choice.unit.base
        for node, choices in zip(sharded.graph.nodes, sharded.choices, strict=True)
        if "layer_norm" in node.op or "rms_norm" in node.op
        for choice in choices
        if choice.unit is not None
    }
    assert "seq" in split


def test_two_dims_of_every_weight():
    words = stored(planned(language.decoder(), "x=2,y=2", "2d"))
    assert words["blocks.0.up.weight"] == ("ffn", "hidden")
    with pytest.raises(PlanError, match="two tensor axes") as caught:
        planned(language.decoder(), "tp=2", "2d")
    assert "x=2,y=2" in str(caught.value)


def test_a_factor_map_is_taken_literally():
    case = language.decoder()
    plan = planned(case, "dp=2,tp=2", {"heads": "tp", "batch": "dp"})
    words = stored(plan)
    assert plan.strategy == "custom" and plan.explicit
    assert words["blocks.0.query.weight"] == ("whole", "heads")
    assert words["blocks.0.up.weight"] == words["embed.weight"] == ("whole", "whole")
    both = planned(case, "a=2,b=2", {"batch": ["a", "b"], "ffn": ("b",)})
    assert both.order == (("a", ("batch",)), ("b", ("batch", "ffn")))
    assert compare(case, "a=2,b=2", {"batch": ["a", "b"]}, dtype="float64", steps=1).equal


def test_channels_of_a_convolution_by_name():
    report = compare(vision.long_skips(), "tp=2", {"channels": "tp"}, dtype="float64", steps=1)
    assert report.equal
    assert any(words != ("whole",) for words in stored(report.plan).values())


@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        ({"mesh": {"dp": 2, "tp": 2}}, ("hold a mesh", "say --mesh dp=2,tp=2 (in Python mesh=")),
        ("zero=1,mesh=dp=2,tp=4,chunks=2", ("hold a mesh", "say --mesh dp=2,tp=4 (")),
        ({"zeroo": 1}, ("cannot read constraint 'zeroo': 1", "did you mean 'zero'?")),
        ({"schedulex": "1f1b"}, ("on mesh axis '1f1b'", "did you mean 'schedule'?")),
        ("zero=1,schedule=zbw", ("unknown schedule 'zbw'", "did you mean 'zbv'?")),
        ("cuts=a,b,zero=1", ("cannot read 'b'", "join the parts of a list with +: cuts=a+b")),
        ("zero=1,placements=a:whole+b:split,c:whole",
         ("cannot read 'c:whole'", "with +: placements=a:whole+b:split+c:whole")),
        ("megatrom", ("unknown strategy 'megatrom'", "did you mean 'megatron'?", *STRATEGIES)),
        ("gpipe", ("unknown strategy 'gpipe'", "gpipe is a schedule: say schedule=gpipe")),
        ("ddp,recompute=fullx", ("'fullx' matches no op", "did you mean 'full'?")),
        ("ddp,recompute=block.1.*", ("'block.1.*' matches no op", "did you mean 'blocks.1.*'?")),
        ("xyz", ("unknown strategy 'xyz'", "ddp")),
        (3, ("of type int", '{"heads": "tp"')),
        (["ddp"], ("of type list",)),
        ({"heads": "tpp"}, ("mesh axis 'tpp'", "dp=2,tp=2", "constraints['heads']",
                           "did you mean 'tp'?")),
        ({"heads": 2}, ("mesh axis 2", "one of dp, tp")),
        ({"heads": ["tp", None]}, ("mesh axis None",)),
        ({2: "tp"}, ("factor 2", '"heads"')),
        ({"head": "tp"}, ("no factor 'head'", "did you mean 'heads'?", "constraints['head']",
                          "'tp'")),
        ({"experts": "tp"}, ("no factor 'experts'", "one of batch")),
    ],
)  # fmt: skip
def test_wrong_constraints(constraints, words: tuple[str, ...]):
    with pytest.raises(PlanError) as caught:
        planned(language.decoder(), "dp=2,tp=2", constraints)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("mesh", "like"),
    [("dp=4", "dp=2,tp=2"), ("pp=2,dp=3", "pp=2,tp=3"), ("dp=2,tp=1", "tp=2")],
)
def test_what_tensor_ranks_split_needs_some(mesh: str, like: str):
    """The mesh that is named instead has the axis."""
    for read in (
        lambda mesh: parse_constraints({"tensor": "megatron"}, mesh),
        lambda mesh: Asked.of(mesh, {"tensor": "megatron"}),
    ):
        with pytest.raises(PlanError, match="has no tensor axis") as caught:
            read(Mesh.parse(mesh))
        assert caught.value.expected is not None and caught.value.expected.endswith(like)
        read(Mesh.parse(like))


def test_a_factor_too_small_for_its_axis():
    with pytest.raises(PlanError) as caught:
        planned(language.decoder(), "tp=8", {"heads": "tp"})
    text = str(caught.value)
    assert "'heads' of size 4" in text and "8 ranks of axis 'tp'" in text and "at most 4" in text
    assert "module blocks.0" in text and "language.py:" in text
    with pytest.raises(PlanError, match="3 ranks of axis 'b' beside those of axis 'a'"):
        planned(language.decoder(), "a=2,b=3", {"heads": ["a", "b"]})


def test_strict_refuses_what_has_no_rule():
    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            return torch.linalg.svdvals(self.inner(x)).sum()

    case = Case(model=nn.Sequential(Spectrum()), args=(torch.randn(6, 4),))
    plan = planned(case, "dp=2", "ddp")
    (op,) = plan.unruled
    assert op.op == "aten.linalg_svdvals.default" and op.module == "0"
    assert "test_strategies.py:" in op.source and op.size_bytes == 4 * (24 + 4)
    assert compare(case, "dp=2", "ddp").equal
    with pytest.raises(PlanError) as caught:
        planned(case, "dp=2", "ddp", strict=True)
    text = str(caught.value)
    assert "aten.linalg_svdvals.default has no sharding rule" in text and "112 bytes" in text
    assert "module 0" in text and "test_strategies.py:" in text and "strict=True" in text


def test_normal_form():
    mesh = Mesh.parse("dp=2,tp=2")
    made = parse_constraints({"batch": "dp", "heads": "tp", "ffn": "tp"}, mesh)
    assert made.order == (("dp", ("batch",)), ("tp", ("heads", "ffn")))
    assert made.names("tp") == ("heads", "ffn") and made.names("none") == ()
    assert parse_constraints(None, mesh).strategy == "ddp"
    assert structure.samples(2).traced.loss is not None


def test_megatron_splits_a_fused_gate_by_its_inner_factor():
    config = DecoderConfig(
        layers=2, hidden=64, heads=8, vocab=128, ffn=96, positions="rope", norm="rms", gated=True,
        bias=False, context=32, fused_gate=True,
    )  # fmt: skip
    model, args, kwargs = build_decoder(config, batch=4, seq=32)
    plan = autopar.plan(model, None, args, kwargs, mesh="tp=2", constraints="megatron_sp")
    placed = {item.fqn: item.placement for item in plan.parameters}
    assert placed["blocks.0.mlp.up.weight"] == ("ffn@0:1x96",)
    assert placed["blocks.0.mlp.down.weight"] == ("ffn@1:1x96",)
