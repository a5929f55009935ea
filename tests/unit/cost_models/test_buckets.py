"""Buckets as the runtime lays them out; what is communicated at each stage of ZeRO."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.buckets import LocalParameter, make_buckets, sync_moves
from autopar.cost_models.ops.call import Rank
from autopar.runtime.comm import SoloCommunicator
from autopar.runtime.parameters import Item, Parameters
from autopar.runtime.programs import buckets as real
from autopar.runtime.unit import _buckets as runtime_buckets
from autopar.sharding.mesh import Mesh

RANK = Rank.of(Mesh.parse("dp=4,tp=2"))


def parameter(
    name: str,
    numel: int,
    *,
    dtype: str = "float32",
    axes: tuple[int, ...] = (0,),
    zero_axes: tuple[int, ...] = (0,),
    users: int = 1,
) -> LocalParameter:
    return LocalParameter(
        name=name, numel=numel, dtype=dtype, trainable=True, made_by="B", axes=axes,
        zero_axes=zero_axes, users=users, places=users,
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3000), st.sampled_from(["float32", "bfloat16"]), st.booleans()),
        min_size=1,
        max_size=20,
    )
)
def test_buckets_are_those_of_the_runtime(drawn: list[tuple[int, str, bool]]) -> None:
    names = [f"p{number}" for number in range(len(drawn))]
    made = [
        parameter(name, numel, dtype=dtype, axes=(0,) if alone else (0, 1))
        for name, (numel, dtype, alone) in zip(names, drawn, strict=True)
    ]
    mine = make_buckets(made, names[::-1], 0, RANK, first_bytes=1024, limit_bytes=16384)
    theirs = real.make_buckets(
        names,
        {item.name: (item.numel,) for item in made},
        {item.name: getattr(torch, item.dtype) for item in made},
        {item.name: tuple(range(RANK.group(item.axes))) for item in made},
        first_bytes=1024,
        limit_bytes=16384,
        small_end=True,
    )
    assert [([m.name for m in b.members], list(b.offsets), b.numel) for b in mine] == [
        ([m.name for m in b.members], [m.offset for m in b.members], b.numel) for b in theirs
    ]
    for bucket, other in zip(mine, theirs, strict=True):
        assert bucket.group == len(other.ranks)
        held = Counter[str]()
        for position in range(bucket.group):
            for item, numel in bucket.cuts(position):
                held[item.name] += numel
        assert held == {item.name: item.numel for item in bucket.members}


AXES = ((), (0,), (1,), (0, 1))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 3),
    st.lists(
        st.tuples(st.integers(1, 200), st.sampled_from(AXES), st.booleans()),
        min_size=1,
        max_size=12,
    ),
)
def test_zero_divides_and_sums_as_the_runtime_does(
    zero: int, drawn: list[tuple[int, tuple[int, ...], bool]]
) -> None:
    mesh = Mesh(tuple(zip(RANK.names, RANK.grid.sizes, strict=True)))

    def ranks(axes: tuple[int, ...]) -> tuple[int, ...]:
        return mesh.ranks_along(tuple(mesh.names[axis] for axis in axes), 0)

    # ZeRO divides over dp, never over tp.
    made, items = [], {}
    for number, (numel, axes, shared) in enumerate(drawn):
        name, divided = f"p{number}", tuple(axis for axis in axes if axis == 0)
        made.append(parameter(name, numel, axes=axes, zero_axes=divided, users=2 if shared else 1))
        items[name] = Item(
            name=name, fqn=name, shape=(numel,), dtype=torch.float32, trainable=True,
            ranks=ranks(axes), zero_ranks=ranks(divided),
            rest_ranks=ranks(tuple(axis for axis in axes if axis != 0)),
            alone=(0,), shared=shared,
        )  # fmt: skip
    mine = make_buckets(made, list(items)[::-1], zero, RANK)
    theirs = runtime_buckets(list(items), items, zero, "")
    holder = Parameters(
        items.values(), {n: torch.zeros(i.shape) for n, i in items.items()}, theirs, (), zero,
        SoloCommunicator(),
    )  # fmt: skip
    assert [([m.name for m in b.members], b.numel) for b in mine] == [
        ([m.name for m in b.members], b.numel) for b in theirs
    ]
    # They start one after the other: none waits for one that is full later.
    ends = [list(items).index(bucket.members[-1].name) for bucket in theirs]
    assert ends == sorted(ends)
    summed: set[str] = set()
    for bucket, held in zip(mine, holder.held.values(), strict=True):
        assert (bucket.group, bucket.zero) == (len(held.bucket.ranks), held.zero)
        assert ranks(bucket.rest_axes) == held.rest
        for item in bucket.members:
            assert item.users > 1 or set(item.axes) == {*bucket.axes, *bucket.rest_axes}
            summed.add(item.name)
    assert {item.name for item in made if item.users == 1} <= summed


def moved(zero: int, *, rest: bool = False) -> dict[tuple[str, str], int]:
    axes = (0, 1) if rest else (0,)
    made = [parameter(f"p{number}", 640, axes=axes) for number in range(4)]
    buckets = make_buckets(made, [item.name for item in made], zero, RANK)
    found: Counter[tuple[str, str]] = Counter()
    for move in sync_moves(made, buckets, RANK):
        assert move.group == {("dp",): 4, ("tp",): 2, ("dp", "tp"): 8}[move.axes]
        found[move.kind, move.per] += move.size_bytes
    return dict(found)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        (0, {("all_reduce", "step"): 1}),
        (1, {("reduce_scatter", "step"): 1, ("all_gather", "step"): 1}),
        (2, {("reduce_scatter", "microbatch"): 1, ("all_gather", "step"): 1}),
        (3, {("reduce_scatter", "microbatch"): 1, ("all_gather", "microbatch"): 2}),
    ],
)
def test_stages_of_zero_communicate(zero: int, expected: dict[tuple[str, str], int]) -> None:
    """arXiv 1910.02054, section 7: as much as data parallelism; half as much again at stage 3."""
    size = 4 * 640 * 4
    assert moved(zero) == {key: times * size for key, times in expected.items()}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_zero_does_not_divide_is_summed_once_a_step(zero: int) -> None:
    made = [parameter(f"p{number}", 640, axes=(1,), zero_axes=()) for number in range(4)]
    buckets = make_buckets(made, [item.name for item in made], zero, RANK)
    [move] = sync_moves(made, buckets, RANK)
    assert (move.kind, move.axes, move.group, move.per) == ("all_reduce", ("tp",), 2, "step")
    assert move.size_bytes == 4 * 640 * 4


def test_ranks_with_equal_shards_add_them_up() -> None:
    assert moved(1, rest=True)["all_reduce", "step"] == 4 * 640 * 4 // 4
    assert moved(0, rest=True) == {("all_reduce", "step"): 4 * 640 * 4}


def test_what_several_stages_use_is_summed_over_them() -> None:
    tied = parameter("tied", 100, users=2)
    [move] = sync_moves([tied], make_buckets([tied], ["tied"], 0, RANK), RANK)
    assert (move.kind, move.axes, move.group, move.per) == ("all_reduce", ("pp", "dp"), 8, "step")
