"""Cuts against brute force; bounds against simulated steps."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost_models.compute import race
from autopar.cost_models.pricing import ProgramCost, Speed
from autopar.cost_models.simulate import Task, simulate
from autopar.schedules.make import make_schedule
from autopar.search.chain_bounds import Chain, least_chain, stage_bound
from autopar.search.seconds import durations, program_seconds
from autopar.search.stage_cut import Intervals, cheapest_sum, fill, least_bottleneck


def intervals_of(seconds: np.ndarray, saved: np.ndarray, static: np.ndarray) -> Intervals:
    """All intervals of units.

    Args:
        seconds: Of F and B, shape (options, 2, units).
        saved: Shape (options, units).
        static: Shape (units,).
    """
    options, _, units = seconds.shape
    start, stop = np.triu_indices(units + 1, 1)

    def ranges(values: np.ndarray) -> np.ndarray:
        prefix = np.concatenate([np.zeros((*values.shape[:-1], 1)), values.cumsum(-1)], -1)
        return prefix[..., stop] - prefix[..., start]

    sums = np.zeros((options, 3, 5, len(start)))
    sums[:, :2, 0] = ranges(seconds)
    return Intervals(
        start=start,
        stop=stop,
        sums=sums,
        saved=ranges(saved),
        layers=(stop - start).astype(float),
        alike=np.ones(len(start), bool),
        static=ranges(static),
        tail_s=np.zeros(len(start)),
        sync_s=np.zeros(len(start)),
        edge_bytes=np.ones(len(start)),
        num_units=units,
    )


@st.composite
def chains(draw: st.DrawFn) -> tuple[Intervals, int]:
    units = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(units, 4)))
    seconds = draw(
        st.lists(st.floats(0.01, 5), min_size=2 * units, max_size=2 * units).map(np.array)
    ).reshape(1, 2, units)
    return intervals_of(seconds, np.ones((1, units)), np.zeros(units)), stages


def chain_of(microbatches: int, forward: np.ndarray, backward: np.ndarray, message: float) -> Chain:
    """A step of units that all wait for one another; prefix sums of their seconds."""
    both = forward + backward
    return Chain(
        microbatches=microbatches, before=(forward, backward), after=both[-1] - both,
        side=np.zeros(len(both), np.int64), hop_s=message,
    )  # fmt: skip


def all_cuts(intervals: Intervals, stages: int) -> list[tuple[int, ...]]:
    """Numbers of the candidates of every way to cut."""
    pairs = zip(intervals.start.tolist(), intervals.stop.tolist(), strict=True)
    number = {pair: place for place, pair in enumerate(pairs)}
    units = intervals.num_units
    found = []
    for edges in combinations(range(1, units), stages - 1):
        bounds = (0, *edges, units)
        found.append(tuple(number[pair] for pair in pairwise(bounds)))
    return found


@settings(max_examples=60)
@given(chains())
def test_cuts_are_the_best_of_all(chain: tuple[Intervals, int]):
    intervals, stages = chain
    forward, backward = durations(intervals.sums[0], Speed())
    weights = [forward + backward] * stages
    cuts = all_cuts(intervals, stages)
    least, _ = least_bottleneck(intervals, weights)
    assert least == pytest.approx(min(max(weights[0][k] for k in cut) for cut in cuts))
    costs = [forward * (stage + 1) for stage in range(stages)]
    limit = sorted(max(costs[s][k] for s, k in enumerate(cut)) for cut in cuts)[len(cuts) // 2]
    found = cheapest_sum(intervals, costs, [backward] * stages, limit)
    fitting = [cut for cut in cuts if all(costs[s][k] <= limit for s, k in enumerate(cut))]
    assert found is not None
    assert found.value == pytest.approx(min(sum(backward[k] for k in cut) for cut in fitting))
    assert sum(backward[k] for k in found.chosen) == pytest.approx(found.value)
    assert cheapest_sum(intervals, costs, [backward] * stages, 0.0) is None


@settings(max_examples=80)
@given(chains(), st.integers(1, 9), st.floats(0, 0.5))
def test_no_step_is_faster_than_its_bound(
    chain: tuple[Intervals, int], microbatches: int, message: float
):
    intervals, stages = chain
    filled = fill(intervals, Speed(), 1, 1e9, relaxed=True)
    units = [
        int(np.flatnonzero((intervals.start == u) & (intervals.stop == u + 1))[0])
        for u in range(intervals.num_units)
    ]
    forward, backward = (
        np.concatenate(([0.0], np.cumsum(values[units])))
        for values in (filled.forward_s, filled.backward_s)
    )
    step = chain_of(microbatches, forward, backward, message)
    least = np.inf
    for cut in all_cuts(intervals, stages):
        tasks = {
            (kind, stage): Task(compute_s=float(values[k]))
            for kind, values in (("F", filled.forward_s), ("B", filled.backward_s))
            for stage, k in enumerate(cut)
        }
        took = simulate(
            make_schedule("1f1b", stages, microbatches),
            lambda action, tasks=tasks: tasks.get((action.kind, action.stage), Task()),
            lambda action: message,
        ).step_s
        bounds = [
            stage_bound(filled, intervals, step, stage, stages)[k] for stage, k in enumerate(cut)
        ]
        assert max(bounds) <= took * (1 + 1e-9)
        least = min(least, took)
    bound = least_chain(
        [intervals] * stages, [filled] * stages, step, lambda stage, sizes: message + 0 * sizes, 1e9
    )
    assert bound <= least * (1 + 1e-9)


@pytest.mark.parametrize("message", [0.0, 0.25])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [8, 32])
def test_the_bound_of_even_stages_is_the_step(stages: int, microbatches: int, message: float):
    seconds = np.stack([np.full(stages, 1.0), np.full(stages, 2.0)])[None]
    intervals = intervals_of(seconds, np.ones((1, stages)), np.zeros(stages))
    filled = fill(intervals, Speed(), 1, 1e9, relaxed=True)
    step = chain_of(microbatches, np.arange(stages + 1.0), 2 * np.arange(stages + 1.0), message)
    found = least_chain(
        [intervals] * stages, [filled] * stages, step, lambda stage, sizes: message + 0 * sizes, 1e9
    )
    took = simulate(
        make_schedule("1f1b", stages, microbatches),
        lambda action: Task(compute_s={"F": 1.0, "B": 2.0}.get(action.kind, 0.0)),
        lambda action: message,
    ).step_s
    assert (0.9 if message else 0.99) * took <= found <= took * (1 + 1e-9)
    if not message:
        assert found == pytest.approx(3.0 * (microbatches + stages - 1))


@settings(max_examples=60)
@given(layers=st.integers(1, 4), room=st.floats(0, 40), under_way=st.integers(1, 3), data=st.data())
def test_options_are_the_best_that_fit(
    layers: int, room: float, under_way: int, data: st.DataObject
):
    number = st.floats(0.1, 4)
    backward = sorted((data.draw(number) for _ in range(3)), reverse=True)
    saved = sorted(data.draw(number) for _ in range(3))
    static = data.draw(number)
    seconds = np.zeros((3, 2, layers))
    seconds[:, 0], seconds[:, 1] = 1.0, np.array(backward)[:, None]
    intervals = intervals_of(
        seconds, np.array(saved)[:, None] * np.ones(layers), np.full(layers, static)
    )
    whole = int(np.flatnonzero((intervals.start == 0) & (intervals.stop == layers))[0])
    filled = fill(intervals, Speed(), under_way, room, relaxed=False)
    relaxed = fill(intervals, Speed(), under_way, room, relaxed=True)
    costs = [
        layers + sum(backward[option] for option in mix)
        for mix in product(range(3), repeat=layers)
        if static * layers + under_way * sum(saved[option] for option in mix) <= room
    ]
    best = min(costs, default=np.inf)
    got = filled.forward_s[whole] + filled.backward_s[whole]
    assert relaxed.forward_s[whole] + relaxed.backward_s[whole] <= best * (1 + 1e-9)
    assert np.isfinite(got) == np.isfinite(best)
    assert got >= best * (1 - 1e-9) or not np.isfinite(best)
    if layers == 1 and np.isfinite(best):
        assert got == pytest.approx(best)


@settings(max_examples=60)
@given(
    parts=st.lists(st.floats(0, 3), min_size=4, max_size=4),
    pieces=st.integers(1, 5),
    overlap=st.floats(0, 1),
    slowdown=st.floats(0, 0.5),
)
def test_a_program_takes_what_a_simulation_says(
    parts: list[float], pieces: int, overlap: float, slowdown: float
):
    compute, inline, beside, host = parts
    speed = Speed(overlap=overlap, slowdown=slowdown)
    late = float(race(compute + inline, host)) - compute - inline
    cost = ProgramCost(
        kernels={"matmul": compute, "late": late}, inline={"tp": inline}, beside={"dp": beside},
        parts=pieces if beside else 0,
    )  # fmt: skip
    task = cost.task(overlap, joins=True)
    took = simulate(
        make_schedule("1f1b", 1, 1),
        lambda action: task if action.kind == "F" else Task(),
        lambda action: 0.0,
        slowdown=slowdown,
    ).step_s
    column = np.array([[compute], [inline], [beside], [pieces if beside else 0], [host]])
    assert program_seconds(column, speed)[0] == pytest.approx(took, rel=1e-9, abs=1e-12)
