"""Constraints of a search: what is read, what is kept, and what cannot be."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import PlanError
from autopar.plan.build import make_plan
from autopar.plan.extras import split_text
from autopar.plan.recompute import recompute_patterns
from autopar.plan.strategies import ROLES
from autopar.search import exact
from autopar.search.asked import Asked, kept_by_search
from autopar.search.bounds import Bounds
from autopar.search.find import STRATEGIES, Found, Request, find
from autopar.search.infeasible import explain_infeasible
from autopar.search.problem import Problem
from autopar.sharding.mesh import Mesh
from tests.marks import later
from tests.unit.search.problems import traced

GPT = ("gpt", 4, 0, 8)
CLUSTER = ClusterSpec.parse("1x4xA100")


def found(constraints: str | dict[str, Any], mesh: str | None = None, **request: Any) -> Found:
    model = traced(*GPT)
    kept = split_text(constraints) if isinstance(constraints, str) else constraints
    return find(
        model.graph, model.loss, CLUSTER, mesh=Mesh.parse(mesh) if mesh else None,
        constraints=kept, request=Request(**request),
    )  # fmt: skip


def problem_of(constraints: dict[str, Any], mesh: str | None = None, **more: Any) -> Problem:
    model = traced(*GPT)
    asked = Asked.of(Mesh.parse(mesh) if mesh else None, constraints)
    return Problem(model.graph, model.loss, CLUSTER, asked=asked, **more)


# What cannot be kept, whatever the model


@pytest.mark.parametrize(
    ("mesh", "constraints", "what", "where"),
    [
        ("tp=2,dp=2", {}, "the order of mesh tp=2,dp=2", "mesh"),
        ("tp=2,pp=2", {}, "the order of mesh tp=2,pp=2", "mesh"),
        ("dp=2,x=2", {}, "cannot fill mesh axis 'x'", "mesh"),
        (None, {"microbatches": "8"}, "constraint 'microbatches' is '8'", "['microbatches']"),
        (None, {"zero": 4}, "constraint 'zero' is 4", "['zero']"),
        (None, {"zero": {"stage": 2, "axes": ["tp"]}}, "cannot divide over axes", "['zero']"),
        (None, {"zero": {"stage": 0, "axes": ["dp"]}}, "cannot divide over axes", "['zero']"),
        (None, {"cuts": "blocks.1"}, "constraint 'cuts' is 'blocks.1'", "['cuts']"),
        (None, {"cuts": ["a"], "stage_layers": {"first": 1, "last": 1, "stages": 3}},
         "and so does stage_layers", "['cuts']"),
        (None, {"stage_layers": {"first": 0, "last": 1, "stages": 3}}, "constraint 'stage_layers'",
         "['stage_layers']"),
        (None, {"recompute": "sometimes"}, "unknown recompute policy", "['recompute']"),
        (None, {"schedule": "zbw"}, "unknown schedule 'zbw'", "['schedule']"),
        (None, {"schedule": "gpipe"}, "no search covers schedule gpipe", "['schedule']"),
        (None, {"schedule": "pipedream"}, "weights that are some updates old", "['schedule']"),
        (None, {"mesh": "dp=4"}, "constraints hold a mesh", "['mesh']"),
        ("dp=4", {"tensor": "megatron"}, "mesh dp=4 has no tensor axis", "mesh"),
        (None, {"tensor": "megatorn"}, "cannot split 'megatorn'", "['tensor']"),
        (None, {"tensor": "megatron", "ffn": "tp"}, "'ffn' says what axes split", "['tensor']"),
        (None, {"heads": "tp", "hidden": "tp"}, "splits heads and hidden", "['heads']"),
        (None, {"heads": "dp"}, "factor 'heads' on axis 'dp'", "['heads']"),
        (None, {"batch": "tp"}, "factor 'batch' on axis 'tp'", "['batch']"),
        (None, {"heads": "pp"}, "factor 'heads' on axis 'pp'", "['heads']"),
        (None, {"colour": 3}, "cannot keep constraint 'colour'", "['colour']"),
        (None, {"update_every": 2}, "cannot keep constraint 'update_every'", "['update_every']"),
        (None, {"placements": "whole"}, "constraint 'placements' is 'whole'", "['placements']"),
        (None, {"placements": {"a": 3}}, "parameter 'a' is to lie as 3", "['placements']['a']"),
        (None, {"placements": {"a": "a b"}}, "is to lie as 'a b'", "['placements']['a']"),
    ],
)  # fmt: skip
def test_what_no_search_keeps_is_one_clear_error(
    mesh: str | None, constraints: dict[str, Any], what: str, where: str
):
    with pytest.raises(PlanError) as caught:
        Asked.of(Mesh.parse(mesh) if mesh else None, constraints)
    assert what in caught.value.what
    assert caught.value.where is not None and caught.value.where.endswith(where)
    assert caught.value.expected


@pytest.mark.parametrize(
    ("mesh", "outside"),
    [("pp=2,dp=4,tp=2", False), ("dp=4,pp=2,tp=2", True), ("dp=4,pp=1", None), ("tp=4", None)],
)
def test_the_first_axis_of_a_mesh_is_outermost(mesh: str, outside: bool | None):
    allowed = Asked.of(Mesh.parse(mesh), {}).allowed
    assert allowed.get("data_outside") == (None if outside is None else (outside,))


@pytest.mark.parametrize(
    ("constraints", "options", "kept"),
    [
        ({"cuts": ["a"], "tensor": "megatron"}, {}, True),
        ("placements=a.weight:whole,recompute=a*+!b*", {}, True),
        ({"heads": "tp"}, {}, True),
        ({"heads": "tp"}, {"mesh": True}, False),
        ({"heads": "tp"}, {"mesh": True, "search": True}, True),
        ({"batch": "dp"}, {}, False),
        ({"batch": "dp", "zero": 1}, {}, False),
        ({"batch": "dp", "cuts": ["a"]}, {}, True),
        ({"heads": "tp"}, {"cluster": False}, False),
        ("megatron,zero=1", {"search": True}, False),
        ("search,zero=1", {"cluster": False}, True),
    ],
)
def test_when_constraints_are_those_of_a_search(
    constraints: str | dict[str, Any], options: dict[str, bool], kept: bool
):
    assert (kept_by_search(constraints, **options) is not None) == kept


# What this model cannot keep


@pytest.mark.parametrize(
    ("constraints", "parts"),
    [
        ({"cuts": ["blocks.9"]}, ("which the model lacks", "'blocks.2'")),
        ({"cuts": ["blocks.1.mlp"]}, ("inside of", "'blocks.1' and 'blocks.2'")),
        ({"cuts": ["blocks.2", "blocks.1"]}, ("lies before cut 'blocks.2'",)),
        ({"cuts": ["blocks.2", "blocks.2"]}, ("lies where cut", "without ops")),
        ({"cuts": ["tokens"]}, ("leaves the first stage without ops", "the nearest is")),
        ({"cuts": ["blocks.1"], "schedule": "zbv"}, ("the 2 stages that its cuts make", "4")),
        ({"heeds": "tp"}, ("no tensor axis that a search knows splits heeds",)),
        ({"experts": "tp"}, ("the model has no factor 'experts'",)),
        ({"placements": {"tokens.wait": "whole"}}, ("no parameter", "'tokens.weight'?")),
        ({"placements": {"tokens": "vocabulary"}}, ("no factor 'vocabulary'", "'vocab'?")),
        ({"placements": {"tokens.*": "ffn"}}, ("no plan that is searched keeps tokens.weight ffn",
                                              "tensor=megatron: vocab@0", "no tensor axis: whole")),
        ({"recompute": ["blocks.9.*"]}, ("matches no op",)),
        ({"microbatches": 7}, ("has microbatches 7", "1, 2, 4, 8")),
        ({"zero": 2, "microbatches": 8}, ("zero 2", "with zero=2, microbatches=8")),
    ],
)  # fmt: skip
def test_what_a_model_cannot_keep_names_what_it_can(
    constraints: dict[str, Any], parts: tuple[str, ...]
):
    with pytest.raises(PlanError) as caught:
        found(constraints)
    assert all(part in str(caught.value) for part in parts), caught.value
    assert caught.value.where is not None and caught.value.where.startswith("constraints[")


def test_a_tensor_axis_wider_than_its_factor_is_not_taken():
    sizes = {point.tensor for point in problem_of({"heads": "tp"}).space.points()}
    assert sizes == {2, 4}
    model, wide = traced(*GPT), ClusterSpec.parse("1x8xA100")
    asked = Asked.of(Mesh.parse("tp=8"), {"heads": "tp"})
    with pytest.raises(PlanError, match="of size 4 cannot be split over the 8 ranks"):
        Problem(model.graph, model.loss, wide, asked=asked)


@pytest.mark.parametrize(("first", "last", "stages"), [(1, None, 2), (1, 1, 3), (None, 2, 3)])
def test_layers_of_the_first_and_last_stage_are_kept(
    first: int | None, last: int | None, stages: int
):
    given = {"stage_layers": {"first": first, "last": last, "stages": stages}}
    problem = problem_of(given)
    blocks, edges = problem.units.block, problem.edges
    assert edges is not None and len(edges) == stages - 1
    sizes = [sum(number >= 0 for number in blocks[a:b])
             for a, b in pairwise((0, *edges, len(blocks)))]  # fmt: skip
    assert sizes == {2: [1, 3], 3: [1, 2, 1] if first else [1, 1, 2]}[stages]
    with pytest.raises(PlanError, match="do not divide among 3 stages"):
        problem_of({"stage_layers": {"first": 2, "last": 4, "stages": 3}})


def test_a_mesh_without_a_tensor_axis_splits_nothing():
    with pytest.raises(PlanError, match="what a tensor axis splits, and the mesh has none"):
        problem_of({"heads": "tp"}, "pp=2,dp=2")
    with pytest.raises(PlanError, match="splits what is asked for") as caught:
        problem_of({"tensor": "features", "placements": {"norm": "whole"}}, "dp=2,tp=2",
                   allowed={"role": ("", "megatron")})  # fmt: skip
    assert caught.value.expected is not None and "megatron" in caught.value.expected


# What is kept


@pytest.mark.parametrize("strategy", ["exact", *later("mcmc", "rl", "expert", "dp", "ilp")])
def test_every_strategy_keeps_the_cuts(strategy: str):
    model = traced(*GPT)
    asked = Asked.of(None, {"cuts": ["blocks.1", "blocks.3"]})
    cluster = ClusterSpec.parse("1x3xA100")
    answer = STRATEGIES[strategy](Problem(model.graph, model.loss, cluster, asked=asked), Request())
    assert answer.best is not None and "cuts=blocks.1+blocks.3" in answer.certificate.space
    tried = [answer.best, *answer.alternatives]
    assert len({item.candidate.edges for item in tried}) == 1


def test_a_file_says_what_was_asked_for_as_a_plan_without_a_search_does():
    kept: dict[str, Any] = {
        "cuts": ["blocks.3"], "tensor": "megatron", "recompute": ["blocks.1.*", "!blocks.1.mlp*"],
    }  # fmt: skip
    answer, graph = found(kept), traced(*GPT).graph
    plan, best = answer.plan, answer.result.best
    assert best is not None
    assert plan.recompute == recompute_patterns(graph, kept["recompute"])
    assert dict(plan.order)["tp"] == ROLES["megatron"] and not plan.overrides
    assert [cut.split(".")[:2] for cut in plan.pipeline.cuts] == [["blocks", "3"]]
    point = best.candidate.point
    rest = {"microbatches": point.microbatches, "schedule": point.schedule, "zero": point.zero}
    same, _ = make_plan(graph, Mesh(plan.mesh), {**kept, **rest})
    for name in ("order", "parameters", "pipeline", "zero", "recompute"):
        assert getattr(same, name) == getattr(plan, name)


def test_refinement_leaves_alone_what_is_asked_for():
    """Without the placement, tokens end up whole."""

    def lies(constraints: dict[str, Any]) -> tuple[str, str]:
        plan = found({"heads": "tp", **constraints}, "dp=2,tp=2").plan
        assert plan.overrides
        placed = {item.fqn: plan.placed(item.placement) for item in plan.parameters}
        return placed["tokens.weight"], placed["blocks.2.attention.qkv.weight"]

    assert lies({}) == ("whole", "heads (dim 0) over tp")
    asked = {"placements": {"tokens.weight": "vocab"}}
    assert lies(asked) == ("vocab (dim 0) over tp", "heads (dim 0) over tp")


def test_bounds_hold_where_backward_computes_everything_again():
    """But for what a stage hands on: its backward does not need that."""
    asked = {
        "recompute": ["*"], "cuts": ["blocks.1", "blocks.2", "blocks.3"], "microbatches": 4
    }  # fmt: skip
    problem = problem_of(asked, "pp=2,dp=2")
    bounds = Bounds(problem)
    for point in problem.space.points():
        best, _ = exact.best_candidate(problem, bounds, point)
        assert best is not None and bounds.cut(point) <= best.step_s * (1 + 1e-9)


# What does not fit


def test_the_constraint_that_does_not_fit_is_named():
    """Of two stages one has nearly all layers, and a device room for half of them."""
    model = traced("gpt", 4, 1, 2)

    def problem(cut: str, memory_bytes: int | None = None) -> Problem:
        asked = Asked.of(None, {"cuts": [cut], "recompute": "none"})
        cluster = ClusterSpec.parse("1x2xA100")
        return Problem(model.graph, model.loss, cluster, asked=asked, memory_bytes=memory_bytes)

    even = exact.search(even_problem := problem("blocks.2")).best
    assert even is not None
    tight = problem(
        "blocks.1", even_problem.capacity_bytes(even_problem.device) + even.over_bytes
    )  # fmt: skip
    result = exact.search(tight)
    assert result.best is None
    text = str(explain_infeasible(tight, result))
    assert "no plan fits 2xA100 with cuts=blocks.1, recompute=none" in text
    assert "without cuts=blocks.1 there is a plan of" in text and "(predicted)" in text


@pytest.mark.long
def test_where_nothing_is_fixed_and_nothing_fits_constraints_are_not_blamed():
    model, cluster = traced("gpt", 4, 1, 2), ClusterSpec.parse("1x2xA100")
    asked = Asked.of(Mesh.parse("pp=2"), {"zero": 0})
    free = Problem(model.graph, model.loss, cluster)
    both = Problem(
        model.graph, model.loss, cluster, asked=asked,
        memory_bytes=free.software.context_bytes + 2**20,
    )  # fmt: skip
    text = str(explain_infeasible(both, exact.search(both)))
    assert "with nothing fixed nothing fits, either" in text


def test_chunks_that_were_cut_unevenly_share_the_memory_of_a_rank():
    asked = {"cuts": ["blocks.3", "norm", "head"], "schedule": "zbv"}
    free = problem_of(asked, "pp=2,dp=2")
    best = exact.search(free).best
    assert best is not None
    needs = min(
        item.over_bytes for item in free.outcomes if item.candidate.edges == best.candidate.edges
    )
    room = free.capacity_bytes(free.device) + needs
    assert exact.search(problem_of(asked, "pp=2,dp=2", memory_bytes=room)).best is not None
