"""Regions of routed experts are rewritten to what they mean, and nothing else is."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import autopar.runtime.special  # noqa: F401  (registers the op)
from autopar.graph.ir import Graph
from autopar.graph.routing import GROUPED, PRODUCTS, route
from autopar.trace import trace
from tests.unit.sharding.samples import as_tuple, run_node

TOKENS, TOP, EXPERTS, WIDTH = 6, 2, 4, 8
ROWS = TOKENS * TOP


def ends_of(counts: Tensor) -> Tensor:
    return torch.cumsum(counts, 0, dtype=torch.int32)


def histogram(ids: Tensor) -> Tensor:
    return torch.histc(ids.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)


class Experts(nn.Module):
    """Two products of sorted rows; how rows are sorted and restored is the caller's."""

    def __init__(self, region: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Products and sums of small whole numbers are exact in bfloat16.
        draw = functools.partial(torch.randint, -1, 2, dtype=torch.bfloat16)
        self.up = nn.Parameter(draw((EXPERTS, WIDTH, WIDTH)))
        self.down = nn.Parameter(draw((EXPERTS, WIDTH, WIDTH)))
        self.bias = nn.Parameter(draw((EXPERTS, WIDTH)))
        self.region = region

    def inner(self, rows: Tensor, ends: Tensor) -> Tensor:
        return F.grouped_mm(F.relu(F.grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)

    def forward(self, x, ids, odds):
        return self.region(self, x, ids, odds)


def by_two_sorts(self, x, ids, odds):
    flat = ids.reshape(-1)
    order = torch.argsort(flat)
    back = torch.argsort(order)
    rows = x.repeat_interleave(TOP, 0)[order]
    made = self.inner(rows, ends_of(histogram(flat)))[back] * odds.reshape(-1, 1)
    return made.view(TOKENS, TOP, WIDTH).sum(1)


def by_written_inverse(self, x, ids, odds):
    ordered, order = torch.sort(ids.reshape(-1))
    ends = ends_of(histogram(ordered))
    made = self.inner(x[order // TOP], ends) * odds.reshape(-1)[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(ROWS)
    return made[back].view(TOKENS, TOP, WIDTH).sum(1)


def by_adding_rows(self, x, ids, odds):
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    token = torch.arange(TOKENS).repeat_interleave(TOP)[order]
    ends = ends_of(F.one_hot(ids, EXPERTS).sum((0, 1)))
    made = self.inner(x.index_select(0, token), ends) * odds.flatten()[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, token, made)


def by_scattering_rows(self, x, ids, odds):
    ordered, order = ids.flatten().sort()
    token = (order // TOP)[:, None].expand(-1, WIDTH)
    ends = torch.searchsorted(ordered, torch.arange(EXPERTS), right=True).int()
    made = self.inner(x.gather(0, token), ends) * odds.flatten()[order][:, None]
    return torch.ones_like(x).scatter_add(0, token, made)


def with_bias_of_experts(self, x, ids, odds):
    ordered, order = ids.flatten().sort()
    ends = ends_of((ids.flatten()[:, None] == torch.arange(EXPERTS)).sum(0))
    wide = x[:, None].expand(-1, TOP, -1).reshape(ROWS, WIDTH)
    made = self.inner(wide[order], ends) + self.bias[ordered]
    back = torch.zeros(ROWS, WIDTH, dtype=x.dtype)
    back = back.index_put((order,), made)
    return (back.view(TOKENS, TOP, WIDTH) * odds[..., None]).sum(1)


def with_balance(self, x, ids, odds):
    counts = histogram(ids.reshape(-1))
    return by_two_sorts(self, x, ids, odds), (counts * counts).sum()


@functools.cache
def traced(region: Callable[..., Tensor]) -> tuple[nn.Module, Graph, dict[str, Tensor]]:
    model = Experts(region)
    ids = torch.zeros(TOKENS, TOP, dtype=torch.int64)
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16)
    found = trace(model, (x, ids, ids.to(x.dtype)))
    return model, found.graph, {**found.parameters, **found.constants}


def ops(graph: Graph) -> set[str]:
    return {node.op for node in graph.nodes}


def run(graph: Graph, state: dict[str, Tensor], args: tuple[Tensor, ...]) -> list[Tensor]:
    values = {
        item.value.name: args[int(item.target[5])] if item.kind == "input" else state[item.target]
        for item in graph.inputs
    }
    for node in graph.nodes:
        made = as_tuple(run_node(node, [values[name] for name in node.operands]))
        values.update((value.name, part) for value, part in zip(node.outputs, made, strict=True))
    return [values[item.value] for item in graph.outputs if item.value is not None]


REGIONS = (
    by_two_sorts, by_written_inverse, by_adding_rows, by_scattering_rows, with_bias_of_experts,
    with_balance,
)  # fmt: skip


@pytest.mark.parametrize("region", REGIONS)
def test_a_region_becomes_two_products(region: Callable[..., Tensor]):
    _, graph, _ = traced(region)
    first, second = (node for node in graph.nodes if node.op == GROUPED)
    assert not ops(graph) & PRODUCTS
    assert not any(name in op for op in ops(graph) for name in ("sort", "gather", "index_select"))
    assert first.args[3:] == (TOP, "aten._grouped_mm.default", False, True)
    assert second.args[3:5] == (1, "aten._grouped_mm.default") and second.args[5] is True
    counts = {"aten.histc.default"} if region is with_balance else set()
    assert ops(graph) & {"aten.histc.default", "aten.cumsum.default"} == counts


ROUTINGS = st.one_of(
    st.lists(st.integers(0, EXPERTS - 1), min_size=ROWS, max_size=ROWS),  # all of them, or few
    st.integers(0, EXPERTS - 1).map(lambda expert: [expert] * ROWS),  # one has them all
    st.just([3, 0] * TOKENS),  # two have none
)


@pytest.mark.parametrize("region", REGIONS)
@settings(max_examples=10)
@given(routing=ROUTINGS, seed=st.integers(0, 9))
def test_it_computes_what_the_model_does(region: Callable[..., Tensor], routing, seed):
    model, graph, state = traced(region)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-1, 2, (TOKENS, WIDTH), generator=generator).to(torch.bfloat16)
    odds = torch.randint(0, 3, (TOKENS, TOP), generator=generator).to(torch.bfloat16)
    args = x, torch.tensor(routing).view(TOKENS, TOP), odds
    with torch.no_grad():
        for have, want in zip(run(graph, state, args), as_tuple(model(*args)), strict=True):
            assert torch.equal(have, want)


def with_capacity(self, x, ids, odds):
    """Rows beyond an expert's second are dropped: which these are depends on all tokens."""
    ordered, order = ids.flatten().sort()
    counts = histogram(ordered)
    ends = ends_of(counts)
    place = torch.arange(ROWS) - (ends - counts.int())[ordered]
    made = self.inner(x[order // TOP], ends) * (place < 2)[:, None]
    return torch.zeros_like(x).index_add(0, order // TOP, made)


def with_a_second_use(self, x, ids, odds):
    """Sorted results that meet each other would have to be computed twice."""
    flat = ids.flatten()
    order = flat.argsort()
    made = self.inner(x[order // TOP], ends_of(histogram(flat)))
    return made[order.argsort()], made.cumsum(0)


def with_dropped_features(self, x, ids, odds):
    flat = ids.flatten()
    order = flat.argsort()
    made = self.inner(F.dropout(x[order // TOP], 0.5), ends_of(histogram(flat)))
    return made[order.argsort()]


def with_groups_of_other_ids(self, x, ids, odds):
    order = ids.flatten().argsort()
    made = self.inner(x[order // TOP], ends_of(histogram(ids.flatten().clamp(max=2))))
    return made[order.argsort()]


def in_falling_order(self, x, ids, odds):
    order = ids.flatten().argsort(descending=True)
    return self.inner(x[order // TOP], ends_of(histogram(ids)))[order.argsort()]


def never_restored(self, x, ids, odds):
    order = ids.flatten().argsort()
    return self.inner(x[order // TOP], ends_of(histogram(ids)))


def restored_otherwise(self, x, ids, odds):
    order, other = ids.flatten().argsort(), odds.flatten().argsort()
    return self.inner(x[order // TOP], ends_of(histogram(ids)))[other.argsort()]


@pytest.mark.parametrize(
    "region",
    [
        with_capacity, with_a_second_use, with_dropped_features, with_groups_of_other_ids,
        in_falling_order, never_restored, restored_otherwise,
    ],
)  # fmt: skip
def test_what_depends_on_other_rows_stays_as_it_is(region: Callable[..., Tensor]):
    _, graph, _ = traced(region)
    assert GROUPED not in ops(graph)
    assert "aten._grouped_mm.default" in ops(graph)


def test_a_graph_without_experts_is_not_touched():
    class Sorted(nn.Module):
        def forward(self, x):
            return x[x[:, 0].argsort()].sum()

    graph = trace(Sorted(), (torch.zeros(4, 3),)).graph
    assert route(graph) is graph
