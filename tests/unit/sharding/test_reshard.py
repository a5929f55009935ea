"""Reshards against full tensors: any placement to any placement, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.runtime.comm import Communicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.mesh import MeshContext
from autopar.runtime.reshard import Reshard, bind_steps, run_steps
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Grid,
    Pair,
    Placements,
    Shard,
    chunk,
    format_placements,
    legal,
    nested_chunk,
    parse_placements,
)
from autopar.sharding.reshard import plan_steps

SHAPE = (12, 5, 6)
FACTORS = [Shard(0, 1, 12), Shard(0, 4, 3), Shard(0, 2, 2), Shard(0, 1, 4), Shard(0, 2, 6),
           Shard(0, 1, 2), Shard(1, 1, 5), Shard(2, 1, 6), Shard(2, 3, 2)]  # fmt: skip
MESHES = [(2,), (3,), (2, 2), (3, 2), (2, 2, 2)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Placements, Placements]:
    sizes = draw(st.sampled_from(MESHES))
    placement = st.sampled_from([REPLICATE, PARTIAL, *FACTORS])

    def side() -> Placements:
        picked = tuple(draw(placement) for _ in sizes)
        while legal(picked, SHAPE, sizes) is not None:
            picked = tuple(draw(placement) for _ in sizes)
        return picked

    return sizes, side(), side()


def held(
    full: torch.Tensor, placements: Placements, grid: Grid, sizes: tuple[int, ...]
) -> torch.Tensor:
    """Local value of `full`: index selection, then a rank-dependent part of each partial sum."""
    out = full
    for dim, size in enumerate(full.shape):
        index = torch.arange(size)
        keep = torch.ones(size, dtype=torch.bool)
        for shard in {p for p in placements if isinstance(p, Shard) and p.dim == dim}:
            axes = tuple(a for a, p in enumerate(placements) if p == shard)
            start, length = nested_chunk(
                shard.size,
                tuple(sizes[a] for a in axes),
                tuple(grid.coordinate[a] for a in axes),
            )
            position = index // shard.stride % shard.size
            keep &= (position >= start) & (position < start + length)
        out = out.index_select(dim, index[keep])
    for axis, placement in enumerate(placements):
        if placement == PARTIAL:
            weights = torch.arange(1, sizes[axis] + 1, dtype=full.dtype)
            out = out * (weights[grid.coordinate[axis]] / weights.sum())
    return out


def flip(placements: Placements) -> Placements:
    """Gradient placements that may go with forward ones: Partial where those are Replicate."""
    swap = {REPLICATE: PARTIAL, PARTIAL: REPLICATE}
    return tuple(swap.get(placement, placement) for placement in placements)


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_reshard_equals_the_full_tensor(case) -> None:
    sizes, source, target = case
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    full = torch.arange(math.prod(SHAPE), dtype=torch.float64).reshape(SHAPE) + 1
    gradient = full.flip(0) * 0.5

    def body(comm: Communicator) -> None:
        context = MeshContext.create(mesh, comm)
        grid = context.grid
        mine = held(full, source, grid, sizes)
        assert tuple(mine.shape) == grid.local_shape(SHAPE, source)
        out = run_steps(bind_steps(source, target, SHAPE, context), mine)
        back = run_steps(bind_steps(target, (REPLICATE,) * len(sizes), SHAPE, context), out)
        assert tuple(out.shape) == grid.local_shape(SHAPE, target)
        torch.testing.assert_close(back, full)
        if PARTIAL not in target:
            torch.testing.assert_close(out, held(full, target, grid, sizes))
        have, want = Pair(source, flip(source)), Pair(target, flip(target))
        leaf = mine.clone().requires_grad_()
        got = Reshard(have, want, SHAPE, context)(leaf)
        (grad,) = torch.autograd.grad(got, leaf, held(gradient, want.gradient, grid, sizes))
        everywhere = (REPLICATE,) * len(sizes)
        whole = run_steps(bind_steps(have.gradient, everywhere, SHAPE, context), grad)
        torch.testing.assert_close(whole, gradient)

    run_threads(mesh.size, body)


def test_megatron_patterns_take_one_collective() -> None:
    seq = Shard(0, 1, 12)
    assert [s.kind for s in plan_steps((PARTIAL,), (seq,))] == ["reduce_scatter"]
    assert [s.kind for s in plan_steps((seq,), (REPLICATE,))] == ["all_gather"]
    assert [s.kind for s in plan_steps((seq,), (Shard(2, 1, 6),))] == ["all_to_all"]
    assert [s.kind for s in plan_steps((PARTIAL, PARTIAL), (REPLICATE, REPLICATE))] == [
        "all_reduce"
    ]
    assert [s.kind for s in plan_steps((seq, seq), (REPLICATE, REPLICATE))] == ["all_gather"]


@given(st.integers(1, 50), st.integers(1, 9))
def test_chunks_are_balanced_and_cover(size: int, parts: int) -> None:
    chunks = [chunk(size, parts, index) for index in range(parts)]
    assert sum(length for _, length in chunks) == size
    assert [start for start, _ in chunks] == [sum(n for _, n in chunks[:i]) for i in range(parts)]
    assert max(n for _, n in chunks) - min(n for _, n in chunks) <= 1


@given(st.lists(st.sampled_from([REPLICATE, PARTIAL, *FACTORS]), max_size=4))
def test_text_form_round_trips(placements: list) -> None:
    assert parse_placements(format_placements(tuple(placements))) == tuple(placements)


@pytest.mark.parametrize("text", ["R, S", "[S(1,2)]", "[X]", "[R P"])
def test_bad_text_is_refused(text: str) -> None:
    from autopar.errors import PlanError

    with pytest.raises(PlanError, match="cannot read the placements"):
        parse_placements(text)
