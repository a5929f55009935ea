"""Placements of single parameters among the constraints of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.plan.build import apply_plan, make_plan
from autopar.plan.extras import split_text
from autopar.plan.placements import Wanted, read_placements
from autopar.plan.plan import Plan
from autopar.plan.strategies import ROLES, parse_constraints
from autopar.sharding.mesh import Mesh
from tests.unit.search.problems import traced

MESH = Mesh.parse("dp=2,tp=2")


@pytest.mark.parametrize(
    ("wanted", "words", "holds"),
    [
        (("whole",), ("whole", "whole"), True),
        (("whole",), ("whole", "vocab@0:1x64"), False),
        (("split",), ("whole", "vocab@0:1x64"), True),
        (("split",), ("whole",), False),
        (("vocab",), ("whole", "vocab@0:1x64"), True),
        (("vocab",), ("vocab.1@0:1x64",), True),
        (("vocab@0",), ("vocab@0:1x64",), True),
        (("vocab@1",), ("vocab@0:1x64",), False),
        (("vocab@0:1x64",), ("vocab@0:1x64",), True),
        (("vocab",), ("whole",), False),
        (("heads",), ("heads@0:8x4", "group@0:1x2"), False),
        (("heads", "group"), ("heads@0:8x4", "group@0:1x2"), True),
        (("whole", "heads", "group"), ("heads@0:8x4", "group@0:1x2"), True),
        (("group", "heads"), ("heads@0:8x4", "group@0:1x2"), False),
        (("whole", "whole"), ("whole",), True),
    ],
)
def test_words_of_plan_files_are_told_apart(
    wanted: tuple[str, ...], words: tuple[str, ...], holds: bool
):
    assert Wanted("a.weight", wanted).holds(words) == holds


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.up", ["a.up.weight", "a.up.bias"]),
        ("a.up.weight", ["a.up.weight"]),
        ("*.up", ["a.up.weight", "a.up.bias"]),
        ("*.bias", ["a.up.bias"]),
        ("a", ["a.up.weight", "a.up.bias", "a.upper.weight"]),
        ("up", []),
    ],
)
def test_parameters_modules_and_patterns_are_named(pattern: str, names: list[str]):
    every = ["a.up.weight", "a.up.bias", "a.upper.weight"]
    assert [name for name in every if Wanted(pattern, ("whole",)).means(name)] == names


def test_text_and_maps_say_the_same():
    text = split_text("tensor=megatron,placements=tokens.weight:vocab@0:1x64+norm:whole")
    assert text["placements"] == {"tokens.weight": "vocab@0:1x64", "norm": "whole"}
    assert read_placements({"norm": ["whole", "whole"]})[0].text() == "norm:whole whole"


@pytest.mark.parametrize("role", ROLES)
def test_what_tensor_axes_split_may_be_named(role: str):
    made = parse_constraints({"tensor": role, "zero": 1}, MESH)
    assert made.order == (("dp", ("batch",)), ("tp", ROLES[role]))
    if role.startswith("megatron"):
        assert made == parse_constraints(f"{role},zero=1", MESH)


@pytest.mark.parametrize(
    ("constraints", "what", "where"),
    [
        ({"tensor": "heads"}, "cannot split 'heads'", "constraints['tensor']"),
        (
            {"tensor": "megatron", "strategy": "ddp"},
            "'strategy' says what",
            "constraints['tensor']",
        ),
        ({"tensor": "megatron", "ffn": "tp"}, "'ffn' says what", "constraints['tensor']"),
        ({"placements": ["a"]}, "constraint 'placements'", "constraints['placements']"),
        (
            {"tensor": "megatron", "placements": {"tokens": "hidden"}},
            "tokens.weight is to be hidden, but what the axes split leaves it vocab@0",
            "constraints['placements']['tokens']",
        ),
        (
            {"strategy": "ddp", "placements": {"tokens": "vocab"}},
            "tokens.weight is to be vocab, but what the axes split leaves it whole",
            "constraints['placements']['tokens']",
        ),
        ({"placements": {"token": "whole"}}, "no parameter", "constraints['placements']['token']"),
    ],
)
def test_what_a_plan_does_not_keep_is_refused(constraints: dict[str, Any], what: str, where: str):
    with pytest.raises(PlanError) as caught:
        make_plan(traced("gpt", 4, 0, 8).graph, MESH, constraints)
    assert what in caught.value.what and caught.value.where == where


@pytest.mark.parametrize("constraints", [{"tensor": "megatron_sp"}, {"vocab": "tp", "ffn": "tp"}])
def test_ops_choose_otherwise_where_a_parameter_has_to_stay_whole(constraints: dict[str, Any]):
    graph = traced("gpt", 4, 0, 8).graph
    free, _ = make_plan(graph, MESH, constraints)
    wanted = {"tokens": "whole", "blocks.2.mlp": "whole"}
    plan, _ = make_plan(graph, MESH, {**constraints, "placements": wanted})
    for before, after in zip(free.parameters, plan.parameters, strict=True):
        kept = before.fqn.startswith(("tokens", "blocks.2.mlp."))
        assert after.placement == (("whole", "whole") if kept else before.placement)
    assert plan.overrides and not free.overrides
    again = Plan.from_json(plan.to_json())
    for item in apply_plan(again, graph).graph.parameters():  # says if a placement is another
        assert item.target in {planned.fqn for planned in again.parameters}


def test_a_plan_that_keeps_its_placements_is_made():
    wanted = {"tokens": "vocab", "blocks.*.mlp.up": "split", "norm": "whole"}
    plan, _ = make_plan(
        traced("gpt", 4, 0, 8).graph, MESH, {"tensor": "megatron", "placements": wanted}
    )
    assert dict(plan.order)["tp"] == ROLES["megatron"]
