"""Collectives as graph nodes: what is recorded, what fakes look like, what kernels do."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.runtime.comm import Communicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.programs import ops
from autopar.runtime.programs.recording import RecordingCommunicator

CPU = torch.device("cpu")
RANKS = (0, 1, 2)


class Twice(torch.autograd.Function):
    """All-reduce forward and backward, as resharding does it."""

    @staticmethod
    def forward(ctx, tensor, comm):
        ctx.comm = comm
        return comm.all_reduce(tensor, RANKS)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad, RANKS), None


def targets(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def record(function, *examples):
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(example) for example in examples]
        return make_fx(function)(*fakes)


def test_every_collective_is_recorded_as_one_node():
    comm = RecordingCommunicator(1, 3, CPU)
    cases = {
        "autopar.all_reduce.default": lambda x: comm.all_reduce(x, RANKS, "max"),
        "autopar.all_gather.default": lambda x: comm.all_gather(x, RANKS),
        "autopar.reduce_scatter.default": lambda x: comm.reduce_scatter(x, RANKS),
        "autopar.all_to_all.default": lambda x: comm.all_to_all_flat(
            x.view(-1), RANKS, [2, 4, 0], [1, 1, 1]
        ),
    }
    shapes = [(3, 2), (3, 3, 2), (2,), (3,)]
    for (name, function), shape in zip(cases.items(), shapes, strict=True):
        traced = record(function, torch.ones(3, 2))
        assert targets(traced.graph)[-1] == name
        assert not {"aten.detach.default", "aten.clone.default"} & set(targets(traced.graph))
        node = next(node for node in traced.graph.nodes if str(node.target) == name)
        assert node.meta["val"].shape == shape
    assert comm.take_traffic() == {
        "all_reduce": 2 * 2 * 24 // 3,
        "all_gather": 2 * 24,
        "reduce_scatter": 2 * 24 // 3,
        "all_to_all": 2 * 4,
    }


def test_collectives_of_autograd_functions_are_recorded_backward_too():
    comm = RecordingCommunicator(0, 3, CPU)

    def step(weight):
        weight = weight.requires_grad_()
        loss = Twice.apply(weight * 2, comm).sin().sum()
        return loss, *torch.autograd.grad(loss, [weight])

    assert targets(record(step, torch.ones(4)).graph).count("autopar.all_reduce.default") == 2


def test_a_group_of_one_records_no_collective():
    comm = RecordingCommunicator(1, 3, CPU)
    traced = record(lambda x: comm.reduce_scatter(comm.all_gather(x, (1,)), (1,)), torch.ones(2))
    assert not any("autopar" in target for target in targets(traced.graph))
    assert comm.traffic == {}


def program(comm: Communicator, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flag = comm.all_reduce(x > 3, RANKS)
    gathered = comm.all_gather(x.t(), RANKS)
    row = comm.reduce_scatter(gathered.view(3, -1) * comm.rank, RANKS)
    highest = comm.reduce_scatter(x, RANKS, "max")
    pieces = comm.all_to_all([x[0], x[1, :1], x[:0]], RANKS, SHAPES[comm.rank])
    return flag, gathered, row, highest, *pieces, comm.all_reduce(x.t(), RANKS, "min")


# What rank 0 sends everybody has 2 elements, rank 1 gets 1 and rank 2 nothing from each rank.
SHAPES = [[(2,)] * 3, [(1,)] * 3, [(0, 2)] * 3]


def recorded(comm: RecordingCommunicator) -> torch.fx.GraphModule:
    return record(lambda x: program(comm, x), torch.ones(3, 2))


def test_recorded_programs_do_what_the_communicator_does():
    recorders = [RecordingCommunicator(rank, 3, CPU) for rank in RANKS]
    graphs = [recorded(comm) for comm in recorders]

    def run(comm: Communicator) -> None:
        x = torch.arange(6.0).view(3, 2) + comm.rank
        expected, traffic = program(comm, x), comm.take_traffic()
        graph = graphs[comm.rank]
        with ops.use_communicator(comm):
            got = graph(x)
        assert comm.take_traffic() == traffic == recorders[comm.rank].traffic
        fakes = [node.meta["val"] for node in graph.graph.output_node().args[0]]
        for fake, real, want in zip(fakes, got, expected, strict=True):
            assert torch.equal(real, want)
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            assert fake.stride() == real.stride() == want.stride()

    run_threads(3, run)


def check_operators(comm: Communicator) -> None:
    x = torch.arange(6.0).view(3, 2) * (comm.rank + 1)
    ranks, send, receive = list(RANKS), [1, 2, 3], [comm.rank + 1] * 3
    flat = x.view(-1)
    cases = [
        (ops.ALL_REDUCE, ops.start_all_reduce, (x.t(), ranks, "max")),
        (ops.ALL_REDUCE, ops.start_all_reduce, (x > 2, ranks, "sum")),
        (ops.ALL_GATHER, ops.start_all_gather, (x.t(), ranks)),
        (ops.REDUCE_SCATTER, ops.start_reduce_scatter, (x, ranks, "sum")),
        (ops.REDUCE_SCATTER, ops.start_reduce_scatter, (x > 2, ranks, "sum")),
        (ops.ALL_TO_ALL, ops.start_all_to_all, (flat, send, receive, ranks)),
    ]
    before = x.clone()
    with ops.use_communicator(comm):
        for operator, start, args in cases:
            want = operator(*args)
            assert want.is_contiguous() and torch.equal(x, before)
            handle = start(*args)
            assert torch.equal(ops.wait(handle), want)
            assert torch.equal(ops.bind(operator, comm)(*args), want)
            handle = ops.bind(start, comm)(*args)
            assert torch.equal(ops.bind(ops.wait, comm)(handle), want)


def check_in_place(comm: Communicator) -> None:
    bucket = torch.full((4,), float(comm.rank))
    with ops.use_communicator(comm):
        handle = ops.start_all_reduce_(bucket, list(RANKS), "sum", bucket[:2], bucket[2:])
        assert ops.wait(handle) is bucket or ops.wait(handle).data_ptr() == bucket.data_ptr()
    assert torch.equal(bucket, torch.full((4,), 3.0))
    copy = torch.ones(2)
    with ops.use_communicator(comm):
        assert torch.equal(ops.wait(ops.start_all_reduce(copy, list(RANKS), "sum")), copy * 3)
    assert torch.equal(copy, torch.ones(2))


@pytest.mark.parametrize("check", [check_operators, check_in_place])
def test_kernels_on_threads(check):
    run_threads(3, check)


def test_started_collectives_of_fakes_say_what_the_result_will_be():
    with FakeTensorMode():
        x = torch.empty(2, 3).t()
        cases = [
            (ops.start_all_reduce(x, RANKS, "sum"), (3, 2)),
            (ops.start_all_gather(x, RANKS), (3, 3, 2)),
            (ops.start_reduce_scatter(x, RANKS, "sum"), (2,)),
            (ops.start_all_to_all(torch.empty(6), [1, 2, 3], [4, 0, 1], RANKS), (5,)),
        ]
        for handle, shape in cases:
            result = ops.wait(handle)
            assert result.shape == shape and result.is_contiguous()
        bucket = torch.empty(4)
        assert ops.wait(ops.start_all_reduce_(bucket, RANKS, "sum", bucket[:2])) is bucket


def test_microbatch_sum():
    x = torch.arange(6).view(2, 3).t()
    for value in (x, x.float(), x.bool()):
        got = torch.ops.autopar.microbatch_sum(value, 4)
        assert torch.equal(got, value if value.dtype == torch.bool else value * 4)
        assert got.dtype == value.dtype and got.is_contiguous()
        assert got.data_ptr() != value.data_ptr()
        assert torch.equal(
            ops.bind(ops.MICROBATCH_SUM, RecordingCommunicator(0, 2, CPU))(value, 4), got
        )
    traced = record(lambda x: torch.ops.autopar.microbatch_sum(x, 4), x)
    assert targets(traced.graph) == ["autopar.microbatch_sum.default"]
    assert not ops.is_collective(ops.MICROBATCH_SUM) and ops.is_collective(ops.ALL_GATHER)


def test_the_current_communicator_is_that_of_the_innermost_block():
    outer, inner = RecordingCommunicator(0, 2, CPU), RecordingCommunicator(1, 2, CPU)
    with ops.use_communicator(outer):
        with ops.use_communicator(inner):
            assert ops.current_communicator() is inner
        assert ops.current_communicator() is outer
    with pytest.raises(AssertionError, match="use_communicator"):
        ops.current_communicator()


def test_a_recording_communicator_answers_for_a_rank_of_a_big_job():
    comm = RecordingCommunicator(700, 1024, CPU)
    comm.prepare([(0, 1), (700, 701)])
    comm.barrier()
    assert comm.groups == {(0, 1), (700, 701)}
    assert comm.gather_objects("plan") == ["plan"] * 1024
    assert comm.receive_start((2,), torch.float32, 3).wait().shape == (2,)
    comm.send_start(torch.ones(5), 3).wait()
    assert comm.take_traffic() == {"send": 20}
    with FakeTensorMode():
        out = torch.zeros(2, 3)
        assert comm.all_gather_start(torch.ones(3), (700, 701), out).wait() is out
