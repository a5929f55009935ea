"""Products of rows with the matrix of their group, computed on rows sorted where they are.

`autopar.graph.routing` says what the op means; here is how it is done: sort the ids that are here,
gather rows by the order, one grouped product, and gather what it made by the inverse. Rows that
go from one product to the next through calls that treat rows alike stay sorted, see
`autopar.runtime.lower_routed`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.runtime.operators import resolve


def order_rows(ids: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """How to sort rows by group.

    Args:
        ids: Group of every row, shape (rows,), each below `groups`.
        groups: Number of groups.

    Returns:
        The order that sorts rows, its inverse, and the end of every group as int32.
    """
    ordered, order = torch.sort(ids, stable=True)
    line = torch.arange(ids.shape[0], device=ids.device)
    back = torch.zeros_like(order).scatter(0, order, line)
    numbers = torch.arange(groups, device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ordered, numbers, right=True, out_int32=True)
    return order, back, ends


class _Sort(torch.autograd.Function):
    """Rows by an order, each row `repeat` times; gradients come back without atomic adds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor, repeat: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.repeat = repeat
        return rows.index_select(0, order if repeat == 1 else order // repeat)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        found = gradients[0].index_select(0, back)
        if ctx.repeat > 1:
            found = found.reshape(-1, ctx.repeat, *found.shape[1:]).sum(1)
        return found, None, None, None


class _Restore(torch.autograd.Function):
    """Sorted rows in the order of the ids again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order), None, None


def sort_rows(rows: Tensor, order: Tensor, back: Tensor, repeat: int = 1) -> Tensor:
    """``repeat`` copies of each of `rows`, by `order`; `back` is its inverse."""
    result: Tensor = _Sort.apply(rows, order, back, repeat)
    return result


def restore_rows(rows: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """What `sort_rows` took, of sorted `rows`."""
    result: Tensor = _Restore.apply(rows, order, back)
    return result


def multiply(rows: Tensor, weight: Tensor, ends: Tensor, op: str) -> Tensor:
    """A grouped product of sorted rows (T, K), matrices (E, K, N) and ends of groups (E,).

    Args:
        rows: Rows, those of one group together.
        weight: A matrix per group.
        ends: Where the rows of each group end.
        op: Operator of the model. PyTorch's traces in bfloat16 alone; in other dtypes every
            group's matrix meets all rows then: for comparisons, not for speed.
    """
    if op == "aten._grouped_mm.default" and rows.dtype != torch.bfloat16:
        return _every_group(rows, weight, ends)
    result: Tensor = resolve(op)(rows, weight, ends)
    return result


def _every_group(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    place = torch.arange(rows.shape[0], device=rows.device)[:, None]
    parts = []
    for group in range(weight.shape[0]):
        mine = place < ends[group]
        if group:
            mine = mine & (place >= ends[group - 1])
        parts.append(rows.masked_fill(~mine, 0) @ weight[group])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    ids: Tensor,
    repeat: int,
    op: str,
    arrives: bool = False,
    stays: bool = False,
) -> Tensor:
    """``y[i] = rows[i // repeat] @ weight[ids[i]]``, all of it; the flags say nothing here."""
    order, back, ends = order_rows(ids, weight.shape[0])
    made = multiply(sort_rows(rows, order, back, repeat), weight, ends, op)
    return restore_rows(made, order, back)


_LIBRARY = torch.library.Library("autopar_routing", "DEF")
_LIBRARY.define(
    "grouped_mm(Tensor rows, Tensor weight, Tensor ids, int repeat, str op, "
    "bool arrives=False, bool stays=False) -> Tensor"
)
_LIBRARY.impl("grouped_mm", grouped_mm, "CompositeImplicitAutograd")
