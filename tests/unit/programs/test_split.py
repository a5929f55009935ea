"""Cut programs give what eager autograd gives, whatever is computed again."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.runtime.comm_threads import run_threads
from autopar.runtime.programs import kinds
from autopar.runtime.programs.check import check, check_order, collectives
from autopar.runtime.programs.program import Program, Slot
from autopar.runtime.programs.prologue import hoist_prologue
from autopar.runtime.programs.split import Programs, split
from tests.unit.programs.captured import (
    Captured,
    capture_rank,
    captured,
    captured_function,
    eager,
    origins_of,
    planned,
)

MODELS = ("gpt2", "resnet", "moe", "unet")


def saved(program: Program) -> list[str]:
    return [slot.name for slot in program.outputs if slot.kind == "saved"]


def checked(programs: Programs) -> tuple[Program, ...]:
    return tuple(check(program) for program in programs.all())


def on_numbers(function, **values: Tensor) -> Captured:
    """Of tensors, named after what they are; results are losses."""
    kinds_of = {"w": "parameter", "b": "parameter", "x": "boundary", "s": "buffer"}
    slots = {Slot(kinds_of[name[0]], name): value for name, value in values.items()}
    return captured_function(function, [Slot("loss", "loss")], slots)


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_programs_agree_with_eager(model: str, weight: bool, everything: bool):
    case = captured(model)
    recompute = origins_of(case.joint) if everything else ()
    programs = split(case.joint, recompute=recompute, weight=weight)
    case.agree(checked(programs))
    kept = {case.joint.input_nodes()[s].name for s in case.joint.inputs if s.kind == "buffer"}
    if everything:
        assert set(saved(programs.forward)) <= kept


@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_any_recomputation_agrees_with_eager(model: str, data: st.DataObject):
    case = captured(model)
    names = origins_of(case.joint)
    flags = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    recompute = {name for name, flag in zip(names, flags, strict=True) if flag}
    weight = data.draw(st.booleans())
    case.agree(checked(split(case.joint, recompute=recompute, weight=weight)))


def test_splitting_leaves_the_joint_graph_alone():
    case = captured("resnet")
    before = case.joint.print_readable()
    split(case.joint, recompute=origins_of(case.joint)[::2], weight=True)
    assert case.joint.print_readable() == before


def test_parameters_are_read_again_and_views_are_redone():
    case = on_numbers(
        lambda w, x: ((x.t() @ w).view(-1)[1:].exp().view(1, -1).squeeze(0).sum(),),
        w1=leaf(4, 5), x1=leaf(4, 3),
    )  # fmt: skip
    programs = split(case.joint)
    case.agree(checked(programs))
    assert saved(programs.forward) == ["boundary_x1", "exp"]
    assert Slot("parameter", "w1") in programs.backward.inputs


def test_pieces_of_a_split_share_one_saved_tensor():
    def function(w, x):
        first, second, third = (x @ w).split(2, dim=1)
        return ((first * second * third.sigmoid()).sum(),)

    case = on_numbers(function, w1=leaf(3, 6), x1=leaf(4, 3))
    programs = split(case.joint)
    case.agree(checked(programs))
    assert sorted(saved(programs.forward)) == ["boundary_x1", "mm", "mul", "sigmoid"]


def test_statistics_of_a_norm_are_saved_apart():
    def function(w, b, x):
        return (nn.functional.layer_norm(x, (6,), w, b).exp().sum(),)

    case = on_numbers(function, w1=leaf(6), b1=leaf(6), x1=leaf(4, 6))
    programs = split(case.joint)
    case.agree(checked(programs))
    assert sorted(saved(programs.forward)) == ["boundary_x1", "exp", "getitem_1", "getitem_2"]
    assert all(isinstance(r.meta["val"], Tensor) for r in programs.forward.results())


def test_a_buffer_is_handed_over_as_the_version_that_forward_read():
    case = on_numbers(lambda w, s: ((w * s).exp().sum(),), w1=leaf(6), s1=torch.arange(6.0))
    names = origins_of(case.joint)
    programs = split(case.joint, recompute=names)
    assert saved(programs.forward) == ["buffer_s1"]
    assert Slot("buffer", "s1") not in programs.backward.inputs
    case.agree(checked(programs))


def test_unkeyed_random_numbers_are_never_drawn_twice():
    case = on_numbers(lambda w, x: ((torch.bernoulli(x) * w.exp()).sum(),),
                      w1=leaf(50), x1=torch.full((50,), 0.5))  # fmt: skip
    programs = split(case.joint, recompute=origins_of(case.joint))
    calls = [node for program in programs.all() for node in program.calls()]
    assert len([node for node in calls if kinds.is_random(node)]) == 1
    found = case.run(checked(programs))
    # The gradient of w is the draw times exp(w), and the loss is its sum.
    gradient = found[Slot("gradient", "w1")]
    exp = case.values[Slot("parameter", "w1")].detach().exp()
    assert 0 < (gradient != 0).sum() < 50
    assert torch.equal(gradient, exp * (gradient != 0))
    torch.testing.assert_close(found[Slot("loss", "loss")], gradient.sum())


def test_recomputation_happens_right_before_it_is_needed():
    def function(w, x):
        for _ in range(3):
            x = (x @ w).tanh().exp()
        return (x.sum(),)

    case = on_numbers(function, w1=leaf(3, 3), x1=leaf(2, 3))
    exps = [name for name in origins_of(case.joint) if name.startswith("exp")]
    programs = split(case.joint, recompute=exps)
    case.agree(checked(programs))
    assert len([name for name in saved(programs.forward) if name.startswith("exp")]) == 0
    ops = [str(node.target).split(".")[1] for node in programs.backward.calls()]
    places = [i for i, op in enumerate(ops) if op == "exp"]
    # One before each use, with gradient work in between.
    assert len(places) == 3
    assert all("tanh_backward" in ops[a:b] for a, b in itertools.pairwise(places))


def test_weight_gradients_are_apart_and_what_they_share_is_not():
    def function(w1, w2, b1, x):
        hidden = nn.functional.linear(x, w1, b1).tanh()
        return (nn.functional.linear(hidden, w2).exp().sum(),)

    case = on_numbers(function, w1=leaf(5, 4), w2=leaf(3, 5, seed=1), b1=leaf(5, seed=2),
                      x1=leaf(2, 4, seed=3))  # fmt: skip
    _, backward, weight = checked(split(case.joint, weight=True))
    gradients = {Slot("gradient", name) for name in ("w1", "w2", "b1")}
    assert gradients <= set(weight.outputs)
    assert [slot.kind for slot in backward.outputs] == ["input_gradient", "saved", "saved"]
    case.agree(split(case.joint, weight=True).all())


def test_a_first_stage_keeps_the_shared_part_of_backward():
    def function(w0, w1, w2, x):
        return (((x @ w0).tanh() @ w1).sigmoid() @ w2).exp().sum(), x

    slots = {
        Slot("parameter", "w0"): leaf(4, 5),
        Slot("parameter", "w1"): leaf(5, 6, seed=1),
        Slot("parameter", "w2"): leaf(6, 3, seed=2),
        Slot("input", "x"): torch.ones(2, 4),
    }
    case = captured_function(function, [Slot("loss", "loss"), Slot("output", "x")], slots)
    _, backward, weight = checked(split(case.joint, weight=True))
    assert {slot.kind for slot in backward.outputs} == {"saved"}
    ops = [str(node.target).split(".")[1] for node in backward.calls()]
    # Down to where only the gradient of w0 goes on.
    assert ops.count("mm") == 1 and "sigmoid_backward" in ops and "tanh_backward" not in ops
    assert [str(n.target) for n in weight.calls()].count("aten.mm.default") == 4
    case.agree(split(case.joint, weight=True).all())


def test_backward_of_a_convolution_is_done_in_two_parts():
    def function(w, b, x):
        return (nn.functional.conv2d(x, w, b).exp().sum(),)

    case = on_numbers(function, w1=leaf(3, 2, 3, 3), b1=leaf(3), x1=leaf(1, 2, 5, 5))
    _, backward, weight = checked(split(case.joint, weight=True))
    masks = [
        [list(n.args[10]) for n in program.calls() if "convolution_backward" in str(n.target)]
        for program in (backward, weight)
    ]
    assert masks == [[[True, False, False]], [[False, True, True]]]
    case.agree(split(case.joint, weight=True).all())


@functools.cache
def ranks_of(model: str, mesh: str, constraints: str):
    plan = planned(model, mesh, constraints)
    joints = [capture_rank(plan, rank) for rank in range(plan.sharded.mesh.size)]
    return plan, joints


PARALLEL = (("gpt2", "tp=3", "megatron"), ("gpt2", "tp=2", "megatron_sp"))


@pytest.mark.parametrize(("model", "mesh", "constraints"), PARALLEL)
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_ranks_meet_in_one_order(model: str, mesh: str, constraints: str, data: st.DataObject):
    _, joints = ranks_of(model, mesh, constraints)
    recompute = data.draw(st.sets(st.sampled_from(origins_of(joints[0]))))
    weight = data.draw(st.booleans())
    cut = [checked(split(joint, recompute=recompute, weight=weight)) for joint in joints]
    assert any(collectives(program) for program in cut[0])
    for step in zip(*cut, strict=True):
        meetings = [collectives(program) for program in step]
        for rank, mine in enumerate(meetings):
            for group, names in mine.items():
                assert all(meetings[other][group] == names for other in group), (rank, group)
    if not recompute:
        check_order([joints[0]], cut[0])


@pytest.mark.parametrize(("model", "mesh", "constraints"), PARALLEL)
@pytest.mark.parametrize("recomputed", [0, 2, 1])
def test_programs_of_ranks_agree_with_eager(
    model: str, mesh: str, constraints: str, recomputed: int
):
    plan, joints = ranks_of(model, mesh, constraints)
    names = origins_of(joints[0])
    recompute = names[::recomputed] if recomputed else ()

    def rank(comm) -> None:
        local = plan.lower(comm)
        values = plan.values(local.inputs, comm)
        want, tangents = eager(local.module, values, plan.outputs)
        joint = joints[comm.rank]
        case = Captured(joint=joint, values=values | tangents, want=want)
        case.agree(split(joint, recompute=recompute, weight=True).all(), comm)

    run_threads(plan.sharded.mesh.size, rank)


def test_the_prologue_changes_nothing_without_microbatches():
    prologue, joint = hoist_prologue(captured("unet").joint)
    assert prologue is None and joint.estimated == ()
