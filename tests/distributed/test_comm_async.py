"""Asynchronous collectives and messages between two ranks, on threads and on gloo processes."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RankError
from autopar.runtime.comm import Communicator, Handle, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.comm_torch import TorchCommunicator
from autopar.runtime.launch import LocalRanks
from tests.marks import later

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
    torch.bool, torch.complex64,
]  # fmt: skip
SHAPES: list[tuple[int, ...]] = [(), (2, 3), (0,), (2, 0, 4)]
CASES = [(dtype, shape) for dtype in DTYPES for shape in SHAPES]
CASES += [(dtype, (70_000,)) for dtype in (torch.float32, torch.bfloat16, torch.bool)]


def world(comm: Communicator) -> tuple[int, ...]:
    return tuple(range(comm.world_size))


def value(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every dtype, that differ from seed to seed."""
    base = (torch.arange(torch.Size(shape).numel()) * (seed % 7 + 1) + seed) % 5
    return (base % 2 if dtype == torch.bool else base).reshape(shape).to(dtype)


def check_collectives(comm: Communicator) -> None:
    """Every started collective equals the finished one, however results are asked for."""
    ranks, count = world(comm), comm.world_size
    pending: list[tuple[Handle, torch.Tensor, torch.Tensor | None]] = []
    for dtype, shape in CASES:
        mine = value(comm.rank, shape, dtype)
        rows = value(comm.rank, (count, *shape), dtype)
        gathered, row = comm.all_gather(mine, ranks), comm.reduce_scatter(rows, ranks)
        pending.append((comm.all_gather_start(mine, ranks), gathered, None))
        pending.append((comm.reduce_scatter_start(rows, ranks), row, None))
        out = torch.empty_like(gathered)
        pending.append((comm.all_gather_start(mine, ranks, out), gathered, out))
        out = torch.empty_like(row)
        pending.append((comm.reduce_scatter_start(rows, ranks, out), row, out))
        pending.append(
            (comm.all_reduce_start(mine.clone(), ranks), comm.all_reduce(mine, ranks), None)
        )
        if not dtype.is_complex:
            highest = comm.reduce_scatter(rows, ranks, "max")
            pending.append((comm.reduce_scatter_start(rows, ranks, op="max"), highest, None))
    sizes = [other + 2 * comm.rank for other in ranks], [comm.rank + 2 * other for other in ranks]
    flat = torch.arange(sum(sizes[0])) + 100 * comm.rank
    exchanged = comm.all_to_all_flat(flat, ranks, *sizes)
    pending.append((comm.all_to_all_start(flat, ranks, *sizes), exchanged, None))
    random.Random(comm.rank).shuffle(pending)
    for handle, want, out in pending:
        got = handle.wait()
        assert torch.equal(got, want) and got.dtype == want.dtype and got.is_contiguous()
        assert out is None or got.data_ptr() == out.data_ptr()
        assert handle.wait() is got
        assert handle.done()


def check_strides(comm: Communicator) -> None:
    ranks, count = world(comm), comm.world_size
    view = value(comm.rank, (4, count, 6), torch.float64).permute(1, 2, 0)[:, ::2]
    assert not view.is_contiguous()
    assert torch.equal(comm.all_gather_start(view, ranks).wait(), comm.all_gather(view, ranks))
    row = comm.reduce_scatter(view, ranks)
    assert torch.equal(comm.reduce_scatter_start(view, ranks).wait(), row)
    to, source = (comm.rank + 1) % count, (comm.rank - 1) % count
    sent = comm.send_start(view[0], to)
    got = comm.receive_start(view[0].shape, view.dtype, source).wait()
    sent.wait()
    assert torch.equal(got, comm.all_gather(view[0], ranks)[source])
    want = comm.all_reduce(view, ranks)
    assert torch.equal(comm.all_reduce_start(view, ranks).wait(), want)
    assert torch.equal(view, want)


def check_starts_do_not_wait(comm: Communicator) -> None:
    """Rank 1 joins only after a message that rank 0 sends after it has started them all."""
    ranks = world(comm)

    def start() -> list[Handle]:
        mine = torch.full((comm.world_size, 2), float(comm.rank))
        sizes = [2] * comm.world_size
        return [
            comm.all_reduce_start(mine.clone(), ranks),
            comm.all_gather_start(mine, ranks),
            comm.reduce_scatter_start(mine, ranks),
            comm.all_to_all_start(mine.view(-1), ranks, sizes, sizes),
        ]

    if comm.rank != 1:
        handles = start()
    if comm.rank == 0:
        assert not any(handle.done() for handle in handles)
        comm.send_start(torch.ones(1), 1).wait()
    if comm.rank == 1:
        comm.receive_start((1,), torch.float32, 0).wait()
        handles = start()
    total = float(sum(ranks))
    reduced, gathered, row, exchanged = (handle.wait() for handle in handles)
    assert torch.equal(reduced, torch.full((len(ranks), 2), total))
    assert torch.equal(gathered[:, 0, 0], torch.arange(float(len(ranks))))
    assert torch.equal(row, torch.full((2,), total))
    assert torch.equal(exchanged, torch.arange(float(len(ranks))).repeat_interleave(2))


def check_inputs_live_until_wait(comm: Communicator) -> None:
    """On processes, whose collectives read the very memory; threads copy it."""
    ranks, count = world(comm), comm.world_size
    starts: list[Callable[[torch.Tensor], Handle]] = [
        lambda x: comm.all_gather_start(x, ranks),
        lambda x: comm.reduce_scatter_start(x, ranks),
        lambda x: comm.all_to_all_start(x.view(-1), ranks, [1000] * count, [1000] * count),
    ]
    for start in starts:
        tensor = torch.ones(count, 1000)
        storage = weakref.ref(tensor.untyped_storage())
        handle = start(tensor)
        del tensor
        gc.collect()
        assert storage() is not None
        handle.wait()
        gc.collect()
        assert storage() is None


def check_messages(comm: Communicator) -> None:
    """To everybody at once, all dtypes and shapes, several in a row with each tag."""
    others = [other for other in world(comm) if other != comm.rank]
    sends, receives = [], []
    for other in others:
        for number, (dtype, shape) in enumerate(CASES):
            mine = value(comm.rank + number, shape, dtype)
            sends.append((comm.send_start(mine, other, tag=number % 3), mine))
    for other in others:
        for number, (dtype, shape) in enumerate(CASES):
            want = value(other + number, shape, dtype)
            receives.append((comm.receive_start(shape, dtype, other, tag=number % 3), want))
    random.Random(comm.rank).shuffle(receives)
    for handle, want in receives:
        got = handle.wait()
        assert got.dtype == want.dtype and torch.equal(got, want)
        assert handle.wait() is got
    for handle, mine in sends:
        assert torch.equal(handle.wait(), mine)
        assert handle.done()


def check_sends_are_seen_to_finish(comm: Communicator) -> None:
    """Without waiting for it, or senders would keep all their messages."""
    large = torch.ones(1_000_000)
    if comm.rank == 0:
        handle = comm.send_start(large, 1)
        comm.barrier()
        for _ in range(1000):
            if handle.done():
                break
            time.sleep(0.01)
        assert handle.done()
    else:
        if comm.rank == 1:
            assert torch.equal(comm.receive_start(large.shape, large.dtype, 0).wait(), large)
        comm.barrier()


def check_no_autograd(comm: Communicator) -> None:
    weight = torch.ones(comm.world_size, 3, requires_grad=True)
    ranks, sizes = world(comm), [3] * comm.world_size
    to, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    handles = [
        comm.all_gather_start(weight, ranks),
        comm.reduce_scatter_start(weight, ranks),
        comm.all_to_all_start(weight.view(-1), ranks, sizes, sizes),
        comm.all_reduce_start(weight * 1, ranks),
        comm.send_start(weight, to),
        comm.receive_start(weight.shape, weight.dtype, source),
    ]
    assert not any(handle.wait().requires_grad for handle in handles)


def traffic(comm: Communicator) -> dict[str, int]:
    ranks, count = world(comm), comm.world_size
    comm.take_traffic()
    handles = [
        comm.all_gather_start(torch.ones(5), ranks),
        comm.all_gather_start(torch.ones(5), ranks, torch.empty(count, 5)),
        comm.reduce_scatter_start(torch.ones(count, 5), ranks),
        comm.all_to_all_start(torch.ones(5 * count), ranks, [5] * count, [5] * count),
        comm.send_start(torch.ones(7, dtype=torch.float16), 1 - comm.rank),
        comm.receive_start((7,), torch.float16, 1 - comm.rank),
        comm.all_gather_start(torch.ones(1000), (comm.rank,)),
    ]
    for handle in handles:
        handle.wait()
    return comm.take_traffic()


def check_stress(comm: Communicator) -> None:
    """What a pipeline does: messages of several tags both ways while collectives run.

    Every rank starts and finishes its own in an order of its own, over rounds that overlap.
    """
    groups = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 1, 2, 3)]
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    comm.prepare(groups, pairs)
    own = random.Random(comm.rank)
    pending: list[tuple[Handle, torch.Tensor]] = []
    for number in range(200):
        shared = random.Random(number)  # both ends of a message draw its size
        jobs: list[Callable[[], list[tuple[Handle, torch.Tensor]]]] = []
        for (a, b), tag in product(pairs, range(3)):
            content = torch.full(
                (shared.choice([0, 1, 50, 5000]),), a * 1000.0 + tag * 300 + number
            )
            if b == comm.rank:
                jobs.append(partial(receive, comm, content, a, tag))
            if a == comm.rank:
                jobs.append(partial(send, comm, content, b, tag))
        jobs += [partial(collect, comm, g, number) for g in groups if comm.rank in g]
        own.shuffle(jobs)
        for job in jobs:
            pending.extend(job())
        own.shuffle(pending)
        for handle, _ in pending[::3]:
            handle.done()
        later = len(pending) // 3 if number < 199 else 0
        for handle, want in pending[later:]:
            assert torch.equal(handle.wait(), want), number
        del pending[later:]
    assert not pending


def send(
    comm: Communicator, content: torch.Tensor, to: int, tag: int
) -> list[tuple[Handle, torch.Tensor]]:
    return [(comm.send_start(content.clone(), to, tag), content)]


def receive(
    comm: Communicator, content: torch.Tensor, source: int, tag: int
) -> list[tuple[Handle, torch.Tensor]]:
    return [(comm.receive_start(content.shape, content.dtype, source, tag), content)]


def collect(
    comm: Communicator, ranks: tuple[int, ...], number: int
) -> list[tuple[Handle, torch.Tensor]]:
    count, total = len(ranks), float(sum(ranks) + number * len(ranks))
    tensor = torch.full((count, 300), float(comm.rank + number))
    stacked = torch.tensor(ranks).add(number).float()[:, None, None].expand(count, count, 300)
    return [
        (comm.all_reduce_start(tensor.clone(), ranks), torch.full((count, 300), total)),
        (comm.all_gather_start(tensor, ranks), stacked),
        (comm.reduce_scatter_start(tensor, ranks), torch.full((300,), total)),
    ]


CHECKS = [
    check_collectives, check_strides, check_starts_do_not_wait, check_messages,
    check_sends_are_seen_to_finish, check_no_autograd,
]  # fmt: skip


@pytest.mark.parametrize("check", [*CHECKS, check_stress], ids=lambda check: check.__name__)
def test_threads(check):
    run_threads(4, check)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check", [*CHECKS, check_stress, check_inputs_live_until_wait], ids=lambda check: check.__name__
)
def test_processes(ranks4: LocalRanks, check):
    ranks4.run(check)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [*later(check_collectives), check_messages])
def test_three_processes(ranks3: LocalRanks, check):
    ranks3.run(check)


def test_solo():
    comm = SoloCommunicator()
    check_collectives(comm)
    assert comm.traffic == {}
    for start in (
        lambda: comm.send_start(torch.ones(1), 0),
        lambda: comm.receive_start((1,), torch.float32, 0),
    ):
        with pytest.raises(RankError, match="rank 0 cannot exchange messages with rank 0"):
            start()


@pytest.mark.distributed
def test_traffic_is_what_theory_sends(ranks2: LocalRanks):
    want = {"all_gather": 2 * 20, "reduce_scatter": 20, "all_to_all": 20, "send": 14}
    assert ranks2.run(traffic) == [want] * 2
    assert run_threads(2, traffic) == [want] * 2


def disagree_on_channels(comm: Communicator) -> None:
    comm.prepare([(0, 1)], [(0, 1)] if comm.rank else [(0, 1), (1, 0)])


@pytest.mark.distributed
def test_ranks_that_disagree_on_channels(ranks2: LocalRanks):
    with pytest.raises(RankError, match="ask for different groups"):
        ranks2.run(disagree_on_channels)
    fails("different collectives", 2, disagree_on_channels)


def check_channels_of_gpus(comm: Communicator) -> None:
    """Each direction has a group of its own; that nothing here computes on a GPU is no matter."""
    both = TorchCommunicator(torch.device("cuda"))
    for _ in range(2):
        both.prepare([], [(1, 0), (0, 1)])
    there, back = both._channel(0, 1), both._channel(1, 0)
    assert both._channel(0, 1) is there
    assert comm.rank == 2 or there is not back
    with pytest.raises(RankError, match="messages from rank 0 to rank 2 were not prepared"):
        both._channel(0, 2)
    for source, group in ((0, there), (1, back)):
        if comm.rank == source:
            dist.isend(torch.full((3,), float(source)), 1 - source, group=group).wait()
        elif comm.rank == 1 - source:
            received = torch.empty(3)
            dist.irecv(received, source, group=group).wait()
            assert torch.equal(received, torch.full((3,), float(source)))


@pytest.mark.distributed
def test_channels_of_gpus(ranks3: LocalRanks):
    ranks3.run(check_channels_of_gpus)


def receive_from_the_dead(comm: Communicator) -> None:
    if comm.rank == 1:
        os._exit(3)
    comm.receive_start((1,), torch.float32, 1).wait()


@pytest.mark.distributed
def test_a_receiver_hears_of_a_dead_sender():
    with LocalRanks(2, timeout_s=60.0, threads=1) as pool:
        start = time.monotonic()
        with pytest.raises(RankError, match="rank 1 died: exit code 3"):
            pool.run(receive_from_the_dead)
        assert time.monotonic() - start < 50.0


def fails(
    message: str, ranks: int, function: Callable[[Communicator], Any], **options: Any
) -> None:
    with pytest.raises(RankError, match=message):
        run_threads(ranks, function, **options)


def test_threads_report_messages_that_differ():
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send_start(torch.ones(2, 3), 1, tag=4)
        else:
            comm.receive_start((3, 2), torch.float32, 0, tag=4).wait()

    fails(r"with tag 4 is a torch.float32 of shape \(2, 3\), but rank 1 expects", 2, run)


def test_threads_report_a_message_nobody_sends():
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.receive_start((3,), torch.float32, 0).wait()

    fails("rank 1 waited for message 0 of rank 0 to rank 1 with tag 0", 2, run)


def test_threads_report_a_message_that_comes_too_late():
    def run(comm: Communicator) -> None:
        if comm.rank == 1:
            comm.receive_start((3,), torch.float32, 0).wait()
        else:
            time.sleep(1.0)

    fails(r"did not send before it finished or within 0\.1 s", 2, run, timeout_s=0.1)


def test_threads_report_a_message_nobody_receives():
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send_start(torch.ones(1), 1, tag=1)
            comm.send_start(torch.ones(1), 1, tag=2)
        else:
            comm.receive_start((1,), torch.float32, 0, tag=2).wait()

    fails("message 0 of rank 0 to rank 1 with tag 1 was never received by rank 1", 2, run)


def test_threads_stop_receivers_when_a_rank_fails():
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            raise ZeroDivisionError("by design")
        comm.receive_start((1,), torch.float32, 0).wait()

    start = time.monotonic()
    fails("rank 0 failed: ZeroDivisionError", 3, run)
    assert time.monotonic() - start < 30.0


@pytest.mark.parametrize("other", [0, 2, -1])
def test_messages_to_nobody_are_refused(other):
    def run(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.send_start(torch.ones(1), other)

    fails(f"rank 0 cannot exchange messages with rank {other}", 2, run)


def test_out_must_fit():
    def run(comm: Communicator) -> None:
        for out in (torch.empty(2, 4), torch.empty(2, 3).half(), torch.empty(3, 2).t()):
            with pytest.raises(AssertionError):
                comm.all_gather_start(torch.ones(3), (0, 1), out)
            with pytest.raises(AssertionError):
                comm.reduce_scatter_start(torch.ones(2, 2, 3), (0, 1), out)

    run_threads(2, run)
