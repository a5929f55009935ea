"""The op problem: what it finds runs, and its costs are those of the evaluator."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Evaluator, Software
from autopar.cost_models.layout import Layout
from autopar.cost_models.stages import stage_models
from autopar.cost_models.static import static_memory
from autopar.graph.ir import Graph
from autopar.plan.build import make_plan
from autopar.plan.plan import Plan
from autopar.presets.config import DecoderConfig
from autopar.presets.registry import build_decoder
from autopar.runtime.verify import verify
from autopar.search.network import Assignment
from autopar.search.op_network import op_problem
from autopar.search.op_problem import OpProblem
from autopar.search.op_search import best_overrides, overrides_of, with_overrides
from autopar.search.solve import solve
from autopar.sharding.mesh import Mesh
from autopar.trace import trace
from tests.unit.cost_models.models import MODELS, layout, traced

CLUSTER = ClusterSpec.parse("1x8xH100-SXM")
LARGE = {
    "gpt": DecoderConfig(layers=4, hidden=12288, heads=96, vocab=51200, fused_qkv=True),
    "llama": DecoderConfig(
        layers=4, hidden=4096, heads=32, ffn=14336, kv_heads=8, vocab=128256, positions="rope",
        norm="rms", gated=True, bias=False, tied=False,
    ),
}  # fmt: skip


@functools.cache
def large(name: str, batch: int = 1) -> tuple[Graph, str, Layout]:
    model, args, kwargs = build_decoder(LARGE[name], batch=batch, seq=2048)
    found = trace(model, args, kwargs, None)
    assert found.loss is not None
    return found.graph, found.loss, Layout.of(found.graph)


def plan_of(
    mesh: str, constraints: object, name: str = "gpt", batch: int = 1
) -> tuple[Plan, str, Layout]:
    graph, loss, folded = large(name, batch)
    return make_plan(graph, Mesh.parse(mesh), constraints)[0], loss, folded  # type: ignore[arg-type]


def without_overlap() -> Software:
    """Software whose time is the sum of its parts, as the network's is."""
    found = Software.of(CLUSTER.hardware(0))
    return replace(found, speed=replace(found.speed, overlap=0.0))


def mutated(problem: OpProblem, random: np.random.Generator, share: float) -> Assignment:
    """The start with some ops at random, and all else as is best for them."""
    network = problem.network
    allowed = [np.flatnonzero(np.isfinite(costs)) for costs in network.unary]
    while True:
        keep = list(allowed)
        for number in range(len(problem.states)):
            moved = random.random() < share
            state = random.choice(allowed[number]) if moved else problem.start[number]
            keep[number] = np.array([state])
        found = solve(network.kept(keep))
        if found.assignment:  # what several ops take may rule out some of what they want
            return tuple(int(own[x]) for own, x in zip(keep, found.assignment, strict=True))


def check_runs(name: str, mesh: str, constraints: str, seed: int, *, best: bool) -> None:
    """A random solution, or the best one, trains what one device trains."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    found = traced(name)
    plan, _ = make_plan(found.graph, Mesh.parse(mesh), constraints)
    prices = (0.0, 1.0) if best else ()
    if best:
        overrides = best_overrides(layout(name), plan, found.loss, CLUSTER, prices=prices)
        chosen = [item.overrides for item in overrides]
    else:
        problem = op_problem(layout(name), plan, found.loss, CLUSTER, prices=prices)
        assignment = mutated(problem, np.random.default_rng(seed), 0.4)
        chosen = [overrides_of(problem, assignment)]
    for overrides in chosen:
        changed = with_overrides(layout(name), plan, overrides)
        report = verify(
            model, args, kwargs, plan=changed, threads=True, dtype="float64", steps=1,
            traced=found,
        )  # fmt: skip
        assert report.equal, report.summary()


def test_any_solution_trains_what_one_device_trains() -> None:
    check_runs("gpt", "tp=2", "megatron", 1, best=False)


@pytest.mark.long
@pytest.mark.parametrize("best", [False, True])
@pytest.mark.parametrize(
    ("name", "mesh", "constraints"),
    [
        ("gpt", "tp=2", "megatron"),
        ("gpt", "dp=2,tp=2", "megatron_sp,microbatches=2"),
        ("deep_gpt", "dp=2,tp=2", "megatron,zero=1,microbatches=2"),
        ("llama", "tp=4", "megatron"),
        ("llama", "dp=2,tp=2", "megatron_sp"),
        ("resnet", "dp=2,tp=2", "megatron"),
        ("resnet", "tp=4", "ddp"),
    ],
)
def test_solutions_of_many_models_train_what_one_device_trains(
    name: str, mesh: str, constraints: str, best: bool
) -> None:
    for seed in range(1 if best else 3):
        check_runs(name, mesh, constraints, seed, best=best)


def check_costs(
    name: str, mesh: str, constraints: str, batch: int, shares: Sequence[float], error: float
) -> None:
    """The costs of random solutions are ranked as the evaluator ranks them, and nearly equal."""
    plan, loss, folded = plan_of(mesh, constraints, name, batch)
    software = without_overlap()
    evaluator = Evaluator(folded.graph, loss, CLUSTER, software)
    problem = op_problem(folded, plan, loss, CLUSTER, software)
    random = np.random.default_rng(0)
    rows = []
    for share in (0.0, *shares):
        assignment = mutated(problem, random, share)
        changed = with_overrides(folded, plan, overrides_of(problem, assignment))
        value = problem.network.value(assignment) * plan.pipeline.microbatches
        rows.append((value, evaluator.evaluate(changed).step_s))
    values, steps = np.array(rows).T
    assert abs(values[0] / steps[0] - 1) <= 0.03
    assert np.abs(values / steps - 1).max() <= error
    order = np.corrcoef(values.argsort().argsort(), steps.argsort().argsort())[0, 1]
    assert order >= 0.98


def test_costs_follow_the_evaluator() -> None:
    check_costs("gpt", "tp=4", "megatron_sp", 1, (0.1, 0.2, 0.4, 0.8), 0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "constraints", "batch", "error"),
    [
        ("gpt", "tp=4", "megatron_sp", 1, 0.1),
        ("gpt", "dp=2,tp=2", "megatron_sp,microbatches=4,zero=1", 8, 0.1),
        ("llama", "tp=4", "megatron", 1, 0.2),
    ],
)
def test_costs_of_many_models_follow_the_evaluator(
    name: str, mesh: str, constraints: str, batch: int, error: float
) -> None:
    shares = (0.05, 0.05, 0.1, 0.1, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6, 1.0, 1.0)
    check_costs(name, mesh, constraints, batch, shares, error)


def test_tensor_and_sequence_parallelism_come_out_unasked() -> None:
    """Columns, then rows, by heads and by inner features; norms and sums by positions."""
    plan, loss, folded = plan_of("tp=4", "ddp")
    best = best_overrides(folded, plan, loss, CLUSTER, prices=(0.0,))[0]
    assert best.exact
    assert best.bound == best.value == best.objective
    expected = {
        "attention.qkv/aten.linear.default#0": "heads@n",
        "attention/aten.scaled_dot_product_attention.default#0": "heads@h",
        "attention.out/aten.linear.default#0": "heads@k",
        "mlp_norm/aten.layer_norm.default#0": "seq@d1",
        "mlp.up/aten.linear.default#0": "ffn@n",
        "mlp/aten.gelu.default#0": "ffn@d2",
        "mlp.down/aten.linear.default#0": "ffn@k",
    }
    for layer in range(4):
        for key, word in expected.items():
            found = best.overrides[f"blocks.{layer}.{key}"]
            assert [choice.partition(":")[0] for choice in found] == [word, word]


def test_a_price_of_memory_buys_memory() -> None:
    plan, loss, folded = plan_of("tp=4", "megatron")
    found = best_overrides(folded, plan, loss, CLUSTER)
    assert len(found) > 1
    values = [item.value for item in found]
    sizes = [item.saved_bytes + item.held_bytes for item in found]
    assert values == sorted(values)
    assert sizes == sorted(sizes, reverse=True)
    assert all(item.bound <= item.objective for item in found)


def test_dropping_states_loses_nothing() -> None:
    plan, loss, folded = plan_of("tp=2", "megatron")
    few = op_problem(folded, plan, loss, CLUSTER)
    every = op_problem(folded, plan, loss, CLUSTER, prices=())
    assert sum(few.network.sizes) < sum(every.network.sizes)
    one, other = solve(few.network), solve(every.network)
    assert one.exact
    assert other.exact
    assert one.value == pytest.approx(other.value, rel=1e-9)


def test_predicted_bytes_are_those_of_the_stage() -> None:
    plan, loss, folded = plan_of("tp=4", "megatron_sp")
    problem = op_problem(folded, plan, loss, CLUSTER, prices=())
    chosen = [np.array([item.plan]) for item in problem.states]
    hubs = [np.arange(size) for size in problem.network.sizes[len(chosen) :]]
    found = solve(problem.network.kept([*chosen, *hubs]))
    keep = [*chosen, *hubs]
    assignment = tuple(int(own[x]) for own, x in zip(keep, found.assignment, strict=True))
    software = Software.of(CLUSTER.hardware(0))
    (stage,) = stage_models(folded.place(plan), plan, loss, software.implementation)
    saved = problem.size_bytes(problem.saved_bytes, assignment)
    assert saved == pytest.approx(stage.work.saved_bytes, rel=0.15)
    held = static_memory(stage.parameters, stage.buckets, software.optimizer)
    whole = held.parameters + held.gradients + held.optimizer
    assert problem.size_bytes(problem.held_bytes, assignment) == pytest.approx(whole, rel=0.02)
