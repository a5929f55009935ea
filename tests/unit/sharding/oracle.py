"""Runs a sharded call on several ranks of this process and compares with the whole call."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.comm_threads import run_threads
from autopar.runtime.mesh import MeshContext
from autopar.runtime.microbatch import set_seed
from autopar.runtime.special import bind_special
from autopar.sharding.choices import Choice, Choices, place_call
from autopar.sharding.factors import Unit
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import (
    Grid,
    Partial,
    Placements,
    Shard,
    chunk,
)
from autopar.sharding.rule import OpRule
from tests.unit.sharding.samples import Sample, as_tuple, run_node

TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}


class MismatchError(AssertionError):
    """A sharded call differs from the whole call."""


def coordinates(sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, sizes))


@cache
def owned(
    size: int, placements: Placements, dim: int, sizes: tuple[int, ...], at: tuple[int, ...]
) -> Tensor:
    """Global positions along a dim that the rank at coordinate `at` holds, by brute force."""
    parts: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            parts.setdefault((placement.stride, placement.size), []).append((sizes[axis], at[axis]))
    keep = []
    for position in range(size):
        inside = True
        for (stride, count), cuts in parts.items():
            start, length = 0, count
            for ranks, index in cuts:
                offset, length = chunk(length, ranks, index)
                start += offset
            inside = inside and start <= position // stride % count < start + length
        if inside:
            keep.append(position)
    return torch.tensor(keep, dtype=torch.int64)


def distribute(
    tensor: Tensor, placements: Placements, sizes: tuple[int, ...], salt: int
) -> list[Tensor]:
    """The local tensor of every rank; a Partial is cut into random terms."""
    generator = torch.Generator().manual_seed(salt)
    terms = {(): tensor}
    for axis, placement in enumerate(placements):
        split: dict[tuple[int, ...], Tensor] = {}
        for at, value in terms.items():
            rest = value
            for index in range(sizes[axis]):
                if not isinstance(placement, Partial):
                    split[*at, index] = value
                elif index == sizes[axis] - 1:
                    split[*at, index] = rest
                else:
                    term = _random_like(value, generator)
                    split[*at, index], rest = term, rest - term
        terms = split
    local = []
    for at, value in terms.items():
        for dim in range(value.ndim):
            value = value.index_select(dim, owned(tensor.shape[dim], placements, dim, sizes, at))
        local.append(value.clone())
    return local


def _random_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    if tensor.dtype == torch.bool:
        raise MismatchError("a boolean cannot be Partial")
    return torch.randint(-3, 3, tensor.shape, generator=generator).to(tensor.dtype)


def collect(
    parts: list[Tensor],
    shape: torch.Size,
    placements: Placements,
    sizes: tuple[int, ...],
    what: str,
) -> Tensor:
    """The global tensor that local ones stand for; replicas must agree."""
    full: dict[tuple[int, ...], Tensor] = {}
    for at, part in zip(coordinates(sizes), parts, strict=True):
        where = [owned(size, placements, d, sizes, at) for d, size in enumerate(shape)]
        if tuple(part.shape) != tuple(map(len, where)):
            raise MismatchError(
                f"{what}: local shape {tuple(part.shape)}, not {[*map(len, where)]}"
            )
        base = torch.zeros(shape, dtype=part.dtype)
        if shape:
            base[torch.meshgrid(*where, indexing="ij")] = part
        else:
            base = part.clone()
        full[at] = base
    for axis in reversed(range(len(sizes))):
        merged: dict[tuple[int, ...], list[Tensor]] = {}
        for at, value in full.items():
            merged.setdefault(at[:axis], []).append(value)
        full = {}
        for at, values in merged.items():
            if isinstance(placements[axis], (Partial, Shard)):
                wide = values[0].dtype == torch.bool
                total = sum(v.long() if wide else v for v in values)
                full[at] = total.bool() if wide else total  # type: ignore[union-attr]
            else:
                for value in values[1:]:
                    _compare(value, values[0], f"{what}: replicas")
                full[at] = values[0]
    return full[()]


def _compare(got: Tensor, want: Tensor, what: str, single: bool = False) -> None:
    """Compare; `single` when the call works in single precision somewhere."""
    if got.dtype != want.dtype:
        raise MismatchError(f"{what}: {got.dtype}, not {want.dtype}")
    exact = got.dtype == torch.float64 and not single
    tolerance = TOLERANCE if exact else {"rtol": 2e-5, "atol": 1e-5}
    if not torch.allclose(got.double(), want.double(), equal_nan=True, **tolerance):
        raise MismatchError(f"{what} differs by {(got.double() - want.double()).abs().max()}")


def whole_units(rule: OpRule) -> list[Unit]:
    """Every letter as one unit."""
    return [Unit(x.name, 1, x.size, x.name) for x in rule.letters if x.split]


def all_units(rule: OpRule) -> list[Unit]:
    """Every letter whole and, where its size has two factors, its inner and outer part."""
    units = whole_units(rule)
    for unit in list(units):
        for inner in (2, 3):
            if unit.size % inner == 0 and unit.size > inner:
                units.append(Unit(unit.letter, 1, inner, "inner"))
                units.append(Unit(unit.letter, inner, unit.size // inner, "outer"))
                break
    return units


def is_special(rule: OpRule, choices: Choices) -> bool:
    split = {choice.unit.letter for choice in choices if choice.unit is not None}
    return rule.special or any(x.special and x.name in split for x in rule.letters)


def local_call(
    case: Sample, rule: OpRule, choices: Choices, sizes: tuple[int, ...]
) -> list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """(operands, outputs) of every rank, operands as leaves that take gradients."""
    call = place_call(case.node, rule, choices)
    salt = zlib.crc32(str(choices).encode())
    locals_ = [
        distribute(t, pair.forward, sizes, salt + i)
        for i, (t, pair) in enumerate(zip(case.operands, call.operands, strict=True))
    ]
    count = math.prod(sizes)
    names = [f"a{i}" for i in range(len(sizes))]
    mesh = Mesh(tuple(zip(names, sizes, strict=True)))

    def leaves(rank: int) -> tuple[Tensor, ...]:
        return tuple(
            parts[rank].requires_grad_(case.trains(slot)) for slot, parts in enumerate(locals_)
        )

    if is_special(rule, choices):

        def body(comm: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            set_seed(7)
            context = MeshContext.create(mesh, comm)
            function = bind_special(case.node, rule, choices, call, case.spec, context)
            operands = leaves(comm.rank)
            outputs = as_tuple(function(*operands))
            return operands, _with_gradients(case, call, outputs, comm.rank, sizes)

        return list(run_threads(count, body))
    results = []
    for rank, at in enumerate(coordinates(sizes)):
        operands = leaves(rank)
        if case.reference is not None:
            outputs = as_tuple(case.reference(*operands))
        else:
            outputs = as_tuple(
                run_node(case.node, list(operands), _sizes(case, rule, call, sizes, at))
            )
        results.append((operands, _with_gradients(case, call, outputs, rank, sizes)))
    return results


def _sizes(
    case: Sample, rule: OpRule, call: Any, sizes: tuple[int, ...], at: tuple[int, ...]
) -> Any:
    if rule.size_arg is None:
        return None
    grid = Grid(sizes, at)
    shapes = [
        grid.local_shape(tuple(t.shape), pair.forward)
        for t, pair in zip(case.outputs, call.outputs, strict=True)
    ]
    if "split" in case.node.op:
        dim = case.node.args[2] if len(case.node.args) > 2 else 0
        return {rule.size_arg[1]: [shape[dim] for shape in shapes]}
    return {rule.size_arg[1]: list(shapes[0])}


def output_gradients(case: Sample) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(t.shape, generator=generator, dtype=t.dtype)
        if t.dtype.is_floating_point
        else None
        for t in case.outputs
    ]


def _with_gradients(
    case: Sample, call: Any, outputs: tuple[Tensor, ...], rank: int, sizes: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """Run backward with this rank's output gradients; the outputs."""
    pairs = []
    for i, (gradient, out, pair) in enumerate(
        zip(output_gradients(case), outputs, call.outputs, strict=True)
    ):
        if gradient is not None and out.requires_grad:
            pairs.append((out, distribute(gradient, pair.gradient, sizes, 11 + i)[rank]))
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
    return tuple(out.detach() for out in outputs)


def whole_gradients(case: Sample) -> tuple[Tensor | None, ...]:
    """Gradients of one device."""
    leaves = [t.clone().requires_grad_(case.trains(i)) for i, t in enumerate(case.operands)]
    run = case.reference or (lambda *operands: run_node(case.node, list(operands)))
    outputs = as_tuple(run(*leaves))
    pairs = [
        (out, gradient)
        for out, gradient in zip(outputs, output_gradients(case), strict=True)
        if gradient is not None and out.requires_grad
    ]
    if not pairs:
        return (None,) * len(leaves)
    torch.autograd.backward([out for out, _ in pairs], [gradient for _, gradient in pairs])
    return tuple(leaf.grad for leaf in leaves)


def check(case: Sample, rule: OpRule, choices: Choices, sizes: tuple[int, ...]) -> None:
    """Compare outputs and gradients of a sharded call with the whole call.

    Raises:
        MismatchError: They differ.
    """
    call = place_call(case.node, rule, choices)
    single = any(t.dtype == torch.float32 for t in (*case.operands, *case.outputs))
    ranks = local_call(case, rule, choices, sizes)
    for i, (want, pair) in enumerate(zip(case.outputs, call.outputs, strict=True)):
        parts = [outputs[i] for _, outputs in ranks]
        got = collect(parts, want.shape, pair.forward, sizes, f"output {i}")
        _compare(got, want.detach(), f"output {i}", single)
    wanted = whole_gradients(case)
    for i, (gradient, pair) in enumerate(zip(wanted, call.operands, strict=True)):
        operands = [ranks_operands[i] for ranks_operands, _ in ranks]
        if gradient is None:
            continue
        parts = [t.grad if t.grad is not None else torch.zeros_like(t) for t in operands]
        parts = [part.to_dense() if part.is_sparse else part for part in parts]
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        got = collect(parts, gradient.shape, pair.gradient, sizes, f"gradient {i}")
        _compare(got, gradient, f"gradient {i}", single)


def split(unit: Unit) -> Choice:
    return Choice("split", unit)


def linear(index: int) -> Choice:
    return Choice("linear", None, index)
