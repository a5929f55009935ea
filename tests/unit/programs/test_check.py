"""The checker finds every way in which a pass may break a program."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from autopar.runtime.programs import ops
from autopar.runtime.programs.check import ProgramError, check, check_order, collectives
from autopar.runtime.programs.compat import fake_mode
from autopar.runtime.programs.program import Program, Slot

aten = torch.ops.aten
RANKS = [0, 1]
Build = Callable[..., fx.Node | tuple[fx.Node, ...]]


def program(
    build: Build, *kinds: str, outputs: tuple[Slot, ...] = (Slot("output", "y"),)
) -> Program:
    """`build` writes calls on placeholders of the given kinds; every value is ``f32[2]``."""
    graph, value = fx.Graph(), fake_mode().from_tensor(torch.ones(2))
    holders = [graph.placeholder(f"in_{i}") for i in range(len(kinds))]
    result = build(graph, *holders)
    graph.output(result if isinstance(result, tuple) else (result,))
    for node in graph.nodes:
        node.meta["val"] = value
    slots = tuple(Slot(kind, f"in_{i}") for i, kind in enumerate(kinds))  # type: ignore[arg-type]
    return Program(name="test", graph=graph, inputs=slots, outputs=outputs)


def start(graph, x, function=ops.start_all_reduce):
    return graph.call_function(function, (x, RANKS, "sum"))


def wait(graph, handle):
    return graph.call_function(ops.wait, (handle,))


def add_(graph, x, y):
    return graph.call_function(aten.add_.Tensor, (x, y))


def refused(made: Program, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check(made)


def in_place(graph, bucket, *members):
    return graph.call_function(ops.start_all_reduce_, (bucket, RANKS, "sum", *members))


def bucketed(graph, bucket, gradient):
    part = graph.call_function(aten.slice.Tensor, (bucket, 0, 0, 1))
    written = add_(graph, part, gradient)
    return wait(graph, in_place(graph, bucket, written))


def test_a_sound_program_passes():
    made = program(bucketed, "bucket", "tangent")
    assert check(made) is made


def test_reading_before_computing():
    def build(graph, x):
        first = graph.call_function(aten.exp.default, (x,))
        second = graph.call_function(aten.exp.default, (first,))
        first.prepend(second)
        return second

    refused(program(build, "input"), "reads exp_default before it is computed")


def test_slots_that_do_not_match():
    made = program(lambda graph, x: x, "input")
    made.outputs = (Slot("output", "y"), Slot("output", "z"))
    refused(made, "1 results, 2 output slots")
    made.outputs, made.inputs = made.outputs[:1], ()
    refused(made, "1 placeholders, 0 input slots")


def test_a_late_input():
    def build(graph, x):
        made = graph.call_function(aten.exp.default, (x,))
        x.prepend(made)
        made.args = ()
        return made

    refused(program(build, "input"), "is an input after the first call")


def test_a_call_without_a_fake_value():
    made = program(lambda graph, x: graph.call_function(aten.exp.default, (x,)), "input")
    made.graph.find_nodes(op="call_function", target=aten.exp.default)[0].meta.clear()
    refused(made, "has no fake value")


@pytest.mark.parametrize("kind", ["parameter", "saved", "input", "tangent", "buffer"])
def test_writing_what_is_not_owned(kind: str):
    refused(program(add_, kind, "input"), f"lies in the memory of {kind}:in_0")

    def through_a_view(graph, x, y):
        return add_(graph, graph.call_function(aten.view.default, (x, [2])), y)

    refused(program(through_a_view, kind, "input"), f"lies in the memory of {kind}:in_0")


@pytest.mark.parametrize("kind", ["gradient", "bucket", "shard"])
def test_writing_what_is_owned(kind: str):
    check(program(add_, kind, "input"))


def test_writing_results():
    def computed(graph, x):
        return add_(graph, graph.call_function(aten.exp.default, (x,)), x)

    def allocated(graph, x):
        return add_(graph, graph.call_function(aten.zeros.default, ([2],)), x)

    def out(graph, x):
        return graph.call_function(aten.mm.out, (x, x), {"out": x})

    refused(program(computed, "input"), "memory of exp")
    check(program(allocated, "input"))
    refused(program(out, "input"), "memory of input:in_0")


def test_reading_or_writing_between_start_and_wait():
    def reads(graph, bucket, gradient):
        handle = in_place(graph, bucket)
        read = graph.call_function(aten.exp.default, (bucket,))
        return wait(graph, handle), read

    def writes(graph, bucket, gradient):
        view = graph.call_function(aten.view.default, (bucket, [2]))
        handle = in_place(graph, bucket)
        written = add_(graph, view, gradient)
        return wait(graph, handle), written

    def writes_a_copied(graph, bucket, gradient):
        handle = start(graph, bucket)
        written = add_(graph, bucket, gradient)
        return wait(graph, handle), written

    two = (Slot("output", "y"), Slot("output", "z"))
    for build in (reads, writes, writes_a_copied):
        refused(program(build, "bucket", "tangent", outputs=two), "between start_all_reduce")


def test_a_member_written_after_its_bucket_was_reduced():
    def build(graph, bucket, gradient):
        done = wait(graph, in_place(graph, bucket))
        return done, add_(graph, bucket, gradient)

    two = (Slot("output", "y"), Slot("output", "z"))
    refused(program(build, "bucket", "tangent", outputs=two), "after start_all_reduce_ has reduced")


def test_every_start_is_waited_for_once():
    def never(graph, x):
        start(graph, x)
        return x

    def twice(graph, x):
        handle = start(graph, x)
        return wait(graph, handle), wait(graph, handle)

    def as_tensor(graph, x):
        handle = start(graph, x)
        return wait(graph, handle), graph.call_function(aten.exp.default, (handle,))

    def nothing(graph, x):
        return wait(graph, x)

    two = (Slot("output", "y"), Slot("output", "z"))
    refused(program(never, "input"), "never waited for")
    refused(program(twice, "input", outputs=two), "a second time")
    refused(program(as_tensor, "input", outputs=two), "no tensor")
    refused(program(nothing, "input"), "starts nothing")


def test_handles_cross_programs():
    handle = (Slot("handle", "y"),)
    check(program(start, "input", outputs=handle))
    check(program(wait, "handle"))
    refused(program(lambda graph, x, h: x, "input", "handle"), "never waited for")

    def both(graph, x):
        made = start(graph, x)
        return wait(graph, made), made

    two = (Slot("output", "y"), *handle)
    refused(program(both, "input", outputs=two), "waited for and handed out")
    refused(program(start, "input"), "never waited for")


def test_collectives_read_alike_whether_started_or_not():
    def plain(graph, x):
        first = graph.call_function(ops.ALL_REDUCE, (x, RANKS, "sum"))
        return graph.call_function(ops.ALL_GATHER, (first, [0, 1, 2]))

    def started(graph, x):
        first = wait(graph, start(graph, x))
        return wait(graph, graph.call_function(ops.start_all_gather, (first, [0, 1, 2])))

    def other(graph, x):
        first = graph.call_function(ops.ALL_GATHER, (x, RANKS))
        return graph.call_function(ops.ALL_GATHER, (first, [0, 1, 2]))

    made = [program(build, "input") for build in (plain, started, other)]
    assert collectives(made[0]) == {(0, 1): ["all_reduce f32[2]"], (0, 1, 2): ["all_gather f32[2]"]}
    check_order(made[:1], made[1:2])
    with pytest.raises(ProgramError, match=r"ranks \(0, 1\) differ"):
        check_order(made[:1], made[2:])
    with pytest.raises(ProgramError, match="differ"):
        check_order(made[:1], made[:1] * 2)
