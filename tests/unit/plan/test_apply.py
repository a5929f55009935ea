"""Plans carried out: on their model, edited by hand, and refused on any other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from autopar.plan.build import apply_plan, make_plan, op_keys
from autopar.plan.plan import Plan
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph
from tests.models.cases import language, structure
from tests.models.check import Case, compare


def made(case: Case, mesh: str = "dp=2,tp=2", constraints="megatron") -> tuple[Plan, ShardedGraph]:
    return make_plan(case.traced.graph, Mesh.parse(mesh), constraints)


@pytest.mark.parametrize(
    ("mesh", "constraints"),
    [
        ("dp=2,tp=2", "megatron"), ("tp=4", "megatron_sp"), ("dp=3", "fsdp"), ("x=2,y=2", "2d"),
        ("dp=2,tp=2", {"heads": "tp", "ffn": "tp", "batch": "dp"}),
        ("a=2,b=1", {"batch": ["a", "b"]}),
    ],
)  # fmt: skip
def test_a_plan_stands_for_the_placements_it_was_made_of(mesh: str, constraints):
    case = language.normed_regions()
    plan, sharded = made(case, mesh, constraints)
    again = apply_plan(Plan.from_json(plan.to_json()), case.traced.graph)
    assert again.choices == sharded.choices
    assert again.inputs == sharded.inputs
    assert not plan.overrides


def refusal(plan: Plan, case: Case) -> str:
    with pytest.raises(PlanError) as caught:
        apply_plan(plan, case.traced.graph)
    assert caught.value.where is not None
    return str(caught.value)


def linears(*sizes: int, bias: bool = True, batch: int = 4, relu: bool = False) -> Case:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers, nn.ReLU() if relu else nn.Tanh())
    return Case(model=model, args=(torch.randn(batch, sizes[0]),), loss=lambda y, x: y.mean())


def test_another_model_is_refused_with_the_first_difference():
    plan, _ = made(linears(4, 8, 8, 2))
    text = refusal(plan, linears(4, 8, 2))
    assert "another model" in text and "1.weight is float32[8, 8]" in text and "[2, 8]" in text
    text = refusal(plan, linears(4, 8, 8, 2, bias=False))
    assert "has a parameter 0.bias, this model has none" in text
    text = refusal(plan, linears(4, 8, 8, 2, 2))
    assert "this model has a parameter 3.weight that the plan lacks" in text
    wide = linears(4, 8, 8, 2)
    text = refusal(plan, Case(model=wide.model.double(), args=(wide.args[0].double(),)))
    assert "0.weight is float32[8, 4] in the plan and float64[8, 4]" in text
    text = refusal(plan, linears(4, 8, 8, 2, batch=6))
    assert "input args[0] is float32[4, 4] in the plan and float32[6, 4] here" in text
    text = refusal(plan, linears(4, 8, 8, 2, relu=True))
    assert "the computation differs" in text


def test_the_same_model_built_anew_is_accepted():
    plan, _ = made(linears(4, 8, 8, 2))
    assert apply_plan(plan, linears(4, 8, 8, 2).traced.graph)


def test_names_of_values_do_not_count():
    one, other = structure.samples(6), structure.samples(6)
    assert made(one)[0].graph == made(other)[0].graph
    assert made(structure.samples(8))[0].graph != made(one)[0].graph


def test_an_edited_override_is_carried_out():
    case = language.normed_regions()
    plan, _ = made(case, "dp=2,tp=2")
    key = "0.up/aten.linear.default#0"
    assert key in op_keys(case.traced.graph)
    stored = {item.fqn: item for item in plan.parameters}
    whole = ("whole", "whole")
    edited = replace(
        plan,
        overrides={key: ("batch@b0:1x2", "replicate")},
        parameters=tuple(
            replace(item, placement=whole) if item.fqn.startswith("0.up.") else item
            for item in plan.parameters
        ),
    )
    assert stored["0.up.weight"].placement != whole
    sharded = apply_plan(edited, case.traced.graph)
    up = next(i for i, name in enumerate(op_keys(case.traced.graph)) if name == key)
    assert tuple(map(str, sharded.choices[up])) == ("batch@b0:1x2", "replicate")
    report = compare(case, "dp=2,tp=2", None, plan=edited, dtype="float64")
    assert report.equal and report.plan == edited


@pytest.mark.parametrize(
    ("key", "words", "expected"),
    [
        ("0.up/aten.linear.default#7", None, "an op that the model lacks"),
        (None, ("replicate",), "one choice for each of dp, tp"),
        (None, ("replicate", "batsh@b0:1x2"), "cannot do 'batsh@b0:1x2'"),
        (None, ("batch@b0:1x2", "batch@b0:1x2"), "more parts than it has"),
        (None, ("replicate", "linear:9"), "one of replicate"),
    ],
)
def test_a_wrong_override_is_refused_by_its_key(key, words, expected: str):
    case = language.normed_regions()
    plan, _ = made(case, "dp=2,tp=2")
    key = key or "0.up/aten.linear.default#0"
    text = refusal(replace(plan, overrides={key: words or ("replicate", "replicate")}), case)
    assert expected in text and f"overrides[{key!r}]" in text


def test_an_edited_storage_is_refused_where_it_contradicts():
    case = language.normed_regions()
    plan, _ = made(case)
    first = plan.parameters[0]
    wrong = replace(plan, parameters=(replace(first, placement=("whole", "whole")),
                                      *plan.parameters[1:]))  # fmt: skip
    text = refusal(wrong, case)
    assert first.fqn in text and "imply" in text and "order" in text and "fix" in text


def test_an_edited_order_is_checked():
    case = language.normed_regions()
    plan, _ = made(case)
    text = refusal(replace(plan, order=(("dp", ("batch",)),)), case)
    assert "every axis of the mesh once" in text
    text = refusal(replace(plan, order=(*plan.order, ("pp", ()))), case)
    assert "axis 'pp'" in text and "dp, tp" in text
    text = refusal(replace(plan, order=(("dp", ("bacth",)), plan.order[1])), case)
    assert "no factor 'bacth'" in text and "did you mean 'batch'?" in text
    text = refusal(replace(plan, storage=("zp",)), case)
    assert "axis 'zp'" in text and "plan: storage" in text


def test_a_better_order_by_hand():
    case = language.decoder()
    plan, _ = made(case, "tp=2", "megatron")
    only = replace(plan, order=(("tp", ("vocab",)),))
    text = refusal(only, case)  # what is stored must be edited with it
    assert "imply" in text
    plan, _ = made(case, "tp=2", {"vocab": "tp"})
    report = compare(case, "tp=2", None, plan=plan, dtype="float64", steps=1)
    assert report.equal
