"""Pipeline, ZeRO and recompute of a plan: asked for, written, read, and refused."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.build import apply_plan, make_plan, op_keys, plan_stages
from autopar.plan.extras import split_text
from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.plan import Plan
from autopar.plan.random_plans import random_pipeline, random_recompute, random_zero
from autopar.plan.strategies import fine_axes, parse_constraints, strategy_name, tensor_mesh
from autopar.schedules.make import SCHEDULES, make_schedule
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.trace import trace
from tests.models.cases import language

MESH = "pp=2,dp=2,tp=2"


@functools.cache
def graph() -> Graph:
    """A decoder of two blocks with a batch of ten."""
    case = language.decoder()
    return trace(case.model, case.args, dict(case.kwargs), case.loss).graph


def planned(constraints: Any, mesh: str = MESH) -> Plan:
    return make_plan(graph(), Mesh.parse(mesh), constraints)[0]


words = st.text("abc.*[]!/#0", min_size=2, max_size=6)
keys = st.builds("{}/{}#0".format, words, words)
pipelines = st.builds(
    PipelinePlan, axis=st.sampled_from(["pp", "dp"]), microbatches=st.integers(1, 99),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb_h1"]), cuts=st.just(()) | st.tuples(keys),
)  # fmt: skip
zeros = st.just(0) | st.integers(1, 3)


@settings(max_examples=100, deadline=None)
@given(pipelines, zeros, st.lists(words).map(tuple))
def test_parts_survive_their_file(pipeline: PipelinePlan, stage: int, recompute):
    rest = "dp" if pipeline.axis == "pp" else "pp"
    plan = Plan(
        mesh=(("pp", 2), ("dp", 2)), strategy="ddp", order=((rest, ("batch",)),),
        pipeline=pipeline, zero=ZeroPlan(stage=stage, axes=(rest,) if stage else ()),
        recompute=recompute,
    )  # fmt: skip
    assert Plan.from_json(plan.to_json()) == plan


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([MESH, "dp=2,tp=2", "pp=3"]))
def test_random_parts_are_legal(seed: int, text: str):
    source, mesh = random.Random(seed), Mesh.parse(text)
    factors = infer_factors(graph())
    pipeline = random_pipeline(graph(), factors, mesh, source)
    plan = replace(
        planned("megatron", text),
        pipeline=pipeline,
        zero=random_zero(pipeline, ("dp",) if "dp" in mesh.names else (), source),
        recompute=random_recompute(graph(), source),
    )
    again = Plan.from_json(plan.to_json())
    assert again == plan
    apply_plan(again, graph())
    assert plan_stages(plan, graph(), factors).count == plan.num_stages
    make_schedule(
        pipeline.schedule, pipeline.ranks(mesh.axes), pipeline.microbatches,
        chunks=pipeline.chunks, vertical_sync=pipeline.vertical_sync,
    )  # fmt: skip


def test_text_and_map_say_the_same():
    text = "megatron,zero=1,microbatches=2,schedule=interleaved_1f1b,recompute=full"
    plan = planned(text)
    assert plan == planned(
        {"strategy": "megatron", "zero": 1, "microbatches": 2, "schedule": "interleaved_1f1b",
         "chunks": 2, "recompute": "full"}
    )  # fmt: skip
    assert plan.order == planned("megatron", "dp=2,tp=2").order and plan.strategy == "megatron"
    assert plan.pipeline.chunks == 2 and plan.num_stages == 4 and len(plan.pipeline.cuts) == 3
    assert plan.zero == ZeroPlan(stage=1, axes=("dp",))
    assert split_text("vertical_sync=true,cuts=a+b") == {"vertical_sync": True, "cuts": ["a", "b"]}
    assert strategy_name(text.partition(",")[0]) == strategy_name({"strategy": "megatron"})
    assert apply_plan(Plan.from_json(plan.to_json()), graph())


def test_notes_tell_what_stages_consist_of():
    plan = planned("megatron,zero=2,microbatches=2,recompute=selective")
    assert (
        plan.notes[0].startswith("stage 0: embed to blocks.0") and "parameters of" in plan.notes[0]
    )


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_every_schedule_by_name(name: str):
    plan = planned({"schedule": name, "microbatches": 2})
    kind = SCHEDULES[name]
    assert plan.pipeline.chunks == (kind.chunks or 2)
    assert plan.num_stages == 2 * plan.pipeline.chunks == len(plan.pipeline.cuts) + 1


def test_zero_strategies_are_ddp_with_zero():
    for stage in (1, 2, 3):
        made = planned(f"zero{stage}", "a=2,b=2")
        plain = planned("ddp", "a=2,b=2")
        assert made.zero == ZeroPlan(stage=stage, axes=("a", "b"))
        assert (made.order, made.parameters) == (plain.order, plain.parameters)
    one = planned({"strategy": "ddp", "zero": {"stage": 3, "axes": ["b"]}}, "a=2,b=2")
    assert one.zero.axes == ("b",)
    both = planned({"batch": "dp", "seq": "cp", "heads": "tp", "zero": 1}, "dp=2,cp=2,tp=2")
    assert both.zero.axes == ("dp", "cp") and both.explicit


def test_the_pipeline_axis_by_another_name():
    plan = planned({"pipeline_axis": "depth", "strategy": "megatron"}, "depth=2,tp=2")
    assert plan.num_stages == 2 and [axis for axis, _ in plan.order] == ["tp"]
    assert all(len(item.placement) == 1 for item in plan.parameters)
    assert Plan.from_json(plan.to_json()) == plan and apply_plan(plan, graph())


def test_axes_of_a_sharded_graph():
    mesh = Mesh.parse("pp=2,dp=6")
    assert tensor_mesh(mesh).axes == (("dp", 6),)
    fine, owner = fine_axes(mesh, PipelinePlan(microbatches=4))
    assert fine.axes == (("microbatch", 4), ("dp_0", 2), ("dp_1", 3))
    assert owner == ("microbatch", "dp", "dp")
    assert fine_axes(mesh, PipelinePlan())[0].names == ("dp_0", "dp_1")
    assert parse_constraints("ddp,microbatches=4", mesh).names("microbatch") == ("batch",)


def test_cuts_by_module_are_kept_as_op_keys():
    plan = planned({"cuts": ["blocks.1"]})
    (cut,) = plan.pipeline.cuts
    assert cut.startswith("blocks.1") and cut in op_keys(graph())


WRONG: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
    ("ddp,zero=1", "pp=2", ("no data axis", "constraints['zero'].axes", "dp=2")),
    ({"heads": "tp", "zero": 1}, "tp=2", ("no data axis",)),
    ({"strategy": "megatron", "zero": {"stage": 1, "axes": ["tp"]}}, MESH,
     ("axis 'tp'", "not only data", "each once: dp")),
    ({"zero": {"stage": 1, "axes": ["dp", "dp"]}}, MESH, ("'dp' twice",)),
    ("ddp,zero=4", MESH, ("ZeRO stage 4", "0, 1, 2 or 3")),
    ("fsdp,zero=1", MESH, ("stored split over axis 'dp' already",)),
    ("ddp,zero=2,schedule=pipedream", MESH, ("ZeRO stage 2 with schedule pipedream",)),
    ({"zero": "all"}, MESH, ("constraint 'zero' is 'all'", '{"stage": 2')),
    ("ddp,microbatches=3", MESH, ("global batch 10 does not divide into 3 microbatches",
                                  "use 2 or 5", "constraints['microbatches']")),
    ("ddp,microbatches=0", MESH, ("constraint 'microbatches' is 0", "from 1")),
    ({"microbatches": True}, MESH, ("constraint 'microbatches' is True",)),
    ("ddp,schedule=1f1", MESH, ("unknown schedule '1f1'", "did you mean '1f1b'?", "zbv")),
    ({"schedule": 3}, MESH, ("constraint 'schedule' is 3",)),
    ("ddp,chunks=2", MESH, ("schedule 1f1b with 2 chunks", "constraints['chunks']",
                            "interleaved_1f1b")),
    ("ddp,schedule=zbv,chunks=3", MESH, ("schedule zbv with 3 chunks", "2")),
    ("ddp,schedule=interleaved_1f1b,chunks=1", MESH, ("with 1 chunk", "2 or more")),
    ("ddp,vertical_sync=true", MESH, ("vertical_sync is set with schedule 1f1b", "pipedream")),
    ({"vertical_sync": 1}, MESH, ("constraint 'vertical_sync' is 1",)),
    ("ddp,update_every=3", MESH, ("update every 3 of 1 microbatch", "pipedream_2bw")),
    ("ddp,schedule=pipedream_2bw,microbatches=2,update_every=1", MESH, ("not below 2",)),
    ({"cuts": ["blocks.1", "blocks.0"]}, MESH, ("2 cuts for 3 stages", "2 ranks")),
    ({"cuts": ["blocks.1"]}, "dp=2", ("1 cut for 2 stages", "no cut")),
    ({"cuts": ["block.1"]}, MESH, ("'block.1', which the model lacks", "constraints['cuts'][0]")),
    ({"cuts": "blocks.1"}, MESH, ("constraint 'cuts'", "a list")),
    ("ddp", "pp=64", ("64 stages are asked for",)),
    ({"recompute": ["blocks.9/*"]}, MESH, ("'blocks.9/*' matches no op",
                                           "constraints['recompute'][0]")),
    ("ddp,recompute=ful+x", MESH, ("'ful' matches no op",)),
    ({"recompute": "ful"}, MESH, ("unknown recompute policy 'ful'", "did you mean 'full'?")),
    ({"recompute": 3}, MESH, ("constraint 'recompute' is 3",)),
    ("megatron,zeros=1", MESH, ("cannot read 'zeros=1'", "did you mean 'zero'?")),
    ("megatron,1f1b", MESH, ("cannot read '1f1b'", "key=value")),
    ("megatron,zero=1,zero=2", MESH, ("'zero=2' is given twice",)),
    ("gpipe", MESH, ("unknown strategy 'gpipe'", "one of ddp")),
    ({"strategy": "megatron", "heads": "tp"}, MESH, ("strategy 'megatron'", "'heads'", "not both")),
    ({"heads": "pp"}, MESH, ("axis 'pp', which holds the pipeline", "one of dp, tp")),
    ({"pipeline_axis": "ppp"}, MESH, ("'ppp'", "did you mean 'pp'?")),
    ("ddp,microbatches=2", "microbatch=2", ("a mesh axis is called 'microbatch'",)),
)  # fmt: skip


@pytest.mark.parametrize(("constraints", "mesh", "expected"), WRONG)
def test_what_cannot_be_is_refused(constraints: Any, mesh: str, expected: tuple[str, ...]):
    with pytest.raises(PlanError) as caught:
        planned(constraints, mesh)
    for word in expected:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pipeline": {"microbatches": 3}}, "pipeline.microbatches"),
        ({"pipeline": {"cuts": []}}, ""),
        ({"pipeline": {"cuts": ["x"]}}, "pipeline.cuts[0]"),
        ({"pipeline": {"axis": "zz"}}, "pipeline.axis"),
        ({"pipeline": {"schedule": "zz"}}, "pipeline.schedule"),
        ({"zero": {"stage": 1, "axes": []}}, "zero.axes"),
        ({"zero": {"stage": 0, "axes": ["dp"]}}, "zero.axes"),
        ({"zero": {"stage": 1, "axes": ["tp"]}}, "zero.axes"),
        ({"recompute": ["nothing"]}, "recompute[0]"),
        ({"order": [["pp", []], ["dp", ["batch"]], ["tp", []]]}, "order"),
    ],
)
def test_edited_parts_are_checked(changes: dict[str, Any], expected: str):
    data = json.loads(planned("megatron").to_json())
    for name, value in changes.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    if not expected:  # no cuts: the best ones
        assert apply_plan(Plan.from_json(json.dumps(data)), graph())
        return
    with pytest.raises(PlanError) as caught:
        apply_plan(Plan.from_json(json.dumps(data), "p.json"), graph())
    assert caught.value.where is not None and expected in caught.value.where
