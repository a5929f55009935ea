"""Schedules that tests draw from, and an oracle that says whether one can run."""

from __future__ import annotations

import networkx as nx
from hypothesis import strategies as st

from autopar.schedules.actions import INPUT_GRADIENTS, RECEIVES, SENDS, Action, Schedule
from autopar.schedules.build import build
from autopar.schedules.make import SCHEDULES, make_schedule

Edge = tuple[int, int]


@st.composite
def made(draw, names=tuple(SCHEDULES), max_ranks: int = 6, max_microbatches: int = 14) -> Schedule:
    """A schedule of any generator."""
    name = draw(st.sampled_from(names))
    chunks = SCHEDULES[name].chunks or draw(st.integers(2, 4))
    ranks = draw(st.integers(1, max_ranks))
    return make_schedule(
        name,
        ranks,
        draw(st.integers(1, max_microbatches)),
        chunks=chunks,
        vertical_sync=SCHEDULES[name].vertical_sync and draw(st.booleans()),
    )


@st.composite
def edge_sets(draw, num_stages: int) -> tuple[frozenset[Edge], frozenset[Edge]]:
    """Edges between stages, also skipping ones, and those of them with gradients."""
    pairs = [(a, b) for b in range(num_stages) for a in range(b)]
    edges = draw(st.frozensets(st.sampled_from(pairs))) if pairs else frozenset()
    gradients = draw(st.frozensets(st.sampled_from(sorted(edges)))) if edges else frozenset()
    return edges, gradients


def dataflow(num_stages: int, microbatches: int, split: bool, edges, gradients) -> nx.DiGraph:
    """What must come before what in any schedule."""
    graph = nx.DiGraph()
    inputs = "I" if split else "B"
    for k in range(microbatches):
        for stage in range(num_stages):
            graph.add_edge(Action("F", stage, k), Action(inputs, stage, k))
            if split:
                graph.add_edge(Action("I", stage, k), Action("W", stage, k))
        for a, b in edges:
            graph.add_edge(Action("F", a, k), Action("F", b, k))
        for a, b in gradients:
            graph.add_edge(Action(inputs, b, k), Action(inputs, a, k))
    return graph


@st.composite
def by_hand(draw) -> tuple[Schedule, frozenset[Edge], frozenset[Edge]]:
    """A schedule with no system in it that can run: a random order of all that must be done."""
    num_stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    num_ranks = draw(st.integers(1, num_stages))
    ranks = draw(st.permutations([*range(num_ranks)] + [0] * (num_stages - num_ranks)))
    edges, gradients = draw(edge_sets(num_stages))
    graph = dataflow(num_stages, microbatches, draw(st.booleans()), edges, gradients)
    weights = draw(st.randoms(use_true_random=False))
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    for action in nx.lexicographical_topological_sort(graph, key=lambda _: weights.random()):
        orders[ranks[action.stage]].append(action)
    return build("by hand", orders, ranks, microbatches), edges, gradients


def can_run(schedule: Schedule, edges, gradients) -> bool:
    """Whether no action waits for itself, from a graph of everything that waits for something."""
    graph = nx.DiGraph()
    wires: dict[tuple[int, int], tuple[list[Action], list[Action]]] = {}
    for rank, row in enumerate(schedule.actions):
        nx.add_path(graph, row)
        for action in row:
            if action.kind in SENDS or action.kind in RECEIVES:
                peer = schedule.stage_ranks[action.peer]
                sends = action.kind in SENDS
                wire = wires.setdefault((rank, peer) if sends else (peer, rank), ([], []))
                wire[not sends].append(action)
    for sends, receives in wires.values():
        if [send.counterpart for send in sends] != receives:
            return False
        graph.add_edges_from(zip(sends, receives, strict=True))
    for before, after in waits(schedule, edges, gradients):
        same_rank = schedule.stage_ranks[before.stage] == schedule.stage_ranks[after.stage]
        if same_rank or not schedule.has_messages:
            graph.add_edge(before, after)
    return nx.is_directed_acyclic_graph(graph)


def waits(schedule: Schedule, edges, gradients) -> list[tuple[Action, Action]]:
    """Pairs of forwards or backwards of which the second needs a tensor of the first."""
    kinds = {(a.kind, a.stage, a.microbatch) for row in schedule.actions for a in row}
    pairs = []
    for k in range(schedule.num_microbatches):
        pairs += [(Action("F", a, k), Action("F", b, k)) for a, b in edges]
        for a, b in gradients:
            pairs += [
                (Action(early, b, k), Action(late, a, k))
                for early in INPUT_GRADIENTS
                for late in INPUT_GRADIENTS
                if (early, b, k) in kinds and (late, a, k) in kinds
            ]
    return pairs


def chain(schedule: Schedule) -> frozenset[Edge]:
    return frozenset((s, s + 1) for s in range(schedule.num_stages - 1))
