"""A campaign: many random plans over many models, with coverage, and failures made small."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context

import torch

from autopar.plan.build import apply_plan, describe
from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.plan import Plan
from autopar.plan.random_plans import (
    Habits,
    check_legal,
    random_choices,
    random_storage,
    random_zero,
)
from autopar.plan.strategies import parse_constraints, split_axes
from autopar.runtime.comm import Communicator
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph, shard_graph
from tests.distributed.fuzz import NO_ZERO, State, compare, engine, run, solo
from tests.distributed.fuzz_coverage import STORAGE, Coverage, Key, choices_universe, steps_universe
from tests.distributed.fuzz_models import BUILDERS, Subject, subject
from tests.distributed.fuzz_shrink import Case, shrink

MESHES = {
    "x=2,y=2": 6, "x=4": 2, "x=2,y=2,z=2": 5, "y=2,x=4": 1, "x=3,y=2": 2, "x=2,y=3": 2,
    "x=5": 1, "x=2,y=1,z=2": 1,
}  # fmt: skip
"""User meshes and how often each is drawn."""

SHRUNK = 3
"""How many failures of a campaign are made small, which takes many runs."""

Turns = tuple[str, ...]
SHARES: tuple[tuple[int, Turns], ...] = (
    (3, ("resnet", "moe", "unet")),
    (2, ("gpt", "llama", "gpt", "t5", "gpt")),
)
"""Parts of a campaign, of about equal time: how many plans of five, and their models in turn."""


CAPTURED = ("gpt", "moe")
"""Models of which some plans run as programs: capturing a rank of a larger one takes seconds.

In a campaign they have their turns at seeds 10, 34, ...
"""


@cache
def reference(name: str) -> State:
    """What one device has, computed once."""
    return solo(subject(name))


@dataclass(slots=True)
class Campaign:
    """Outcome of many plans.

    Attributes:
        plans: Number of plans that ran.
        round_trips: Number of plans that went through their file form.
        failures: One reproducer per plan that differs.
        coverage: What was reached.
        models: Names of the models.
        seconds: Wall time.
    """

    plans: int = 0
    round_trips: int = 0
    failures: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    models: tuple[str, ...] = tuple(BUILDERS)
    seconds: float = 0.0

    def universe(self) -> set[Key]:
        """Everything there is to reach."""
        return set(steps_universe()).union(STORAGE, *map(universe, self.models))


def draw(
    held: Subject, seed: int, coverage: Coverage | None = None, mesh: Mesh | None = None
) -> tuple[Mesh, ShardedGraph]:
    """A random plan of a model: the user's mesh and the placements.

    Args:
        held: The model.
        seed: Seed of the plan.
        coverage: When given, choices that reach something new are drawn more often.
        mesh: The user's mesh; drawn as well when None.
    """
    source, name = random.Random(f"{held.name}/{seed}"), held.name
    mesh = mesh or _mesh(name, source, coverage)
    fine = split_axes(mesh)[0]
    graph, factors = held.traced.graph, held.factors
    habits = Habits(follow=source.choice((0.0, 0.3, 0.6)), eager=0.7)
    wanted = {} if coverage is None else {"prefer": coverage.prefer(held, fine, universe(name))}
    choices = random_choices(graph, factors, fine, source, habits, **wanted)
    check_legal(graph, factors, fine, choices)
    stored = random_storage(graph, factors, fine, source, source.choice((0.0, 0.5)))
    return mesh, shard_graph(graph, factors, fine, choices, stored)


def draw_zero(name: str, seed: int, mesh: Mesh) -> ZeroPlan:
    """ZeRO over some axes of a plan's own mesh, whatever ops and parameters do along these."""
    return random_zero(PipelinePlan(), mesh.names, random.Random(f"zero/{name}/{seed}"))


def _mesh(name: str, source: random.Random, coverage: Coverage | None) -> Mesh:
    """A mesh; rather one with an axis of three, the more of what is left needs uneven parts."""
    texts = dict(MESHES)
    if coverage is not None:
        left = [key[0] for key in coverage.missing(universe(name))]
        if source.random() * len(left) < left.count("special uneven"):
            texts |= {text: 4 for text in texts if "3" in text}
    return Mesh.parse(source.choices(list(texts), list(texts.values()))[0])


@cache
def universe(name: str) -> frozenset[Key]:
    """All choices and special lowerings that some op of a model has on some mesh."""
    meshes = tuple(split_axes(Mesh.parse(text))[0] for text in MESHES)
    return frozenset(choices_universe(subject(name), meshes))


def round_trip(mesh: Mesh, sharded: ShardedGraph) -> str | None:
    """How the plan changes on its way through its file form; None if it does not."""
    graph = sharded.graph
    plain = shard_graph(graph, sharded.factors, sharded.mesh, sharded.choices)
    plan = describe(plain, mesh, parse_constraints("megatron_sp", mesh))
    again = apply_plan(Plan.from_json(plan.to_json()), graph)
    for node, before, after in zip(graph.nodes, plain.choices, again.choices, strict=True):
        if before != after:
            return f"{node.name}: {list(map(str, before))} became {list(map(str, after))}"
    return None if again.inputs == plain.inputs else "parameters are held otherwise"


def campaign(plans: Iterable[tuple[str, int]], result: Campaign | None = None) -> Campaign:
    """Run plans, given as (model, seed).

    Every fourth is run thoroughly, a few as explicit programs, with ZeRO, every seventh also
    goes through its file form.
    """
    result = result or Campaign()
    start = time.perf_counter()
    for name, seed in plans:
        held = subject(name)
        mesh, sharded = draw(held, seed, result.coverage)
        want, thorough = reference(name), seed % 4 == 0
        programs = seed % 24 == 10 and name in CAPTURED
        zero = draw_zero(name, seed, sharded.mesh) if programs else NO_ZERO
        found, program = run(held, sharded, want, thorough=thorough, programs=programs, zero=zero)
        result.plans += 1
        if found:
            text = "\n".join(f"  {item}" for item in found[:4])
            if len(result.failures) < SHRUNK:
                case = Case(
                    subject=held, sharded=sharded, want=want, thorough=thorough,
                    programs=programs, zero=zero,
                )  # fmt: skip
                text = shrink(case)
            result.failures.append(f"{name}, seed {seed}, mesh {mesh}\n{text}")
        elif program is not None:
            result.coverage.add(held, sharded, program)
        if seed % 7 == 0:
            result.round_trips += 1
            changed = round_trip(mesh, sharded)
            if changed is not None:
                result.failures.append(f"{name}, seed {seed}, mesh {mesh}: plan file: {changed}")
    result.seconds += time.perf_counter() - start
    return result


def on_rank(comm: Communicator, name: str, seeds: tuple[int, ...]) -> list[str]:
    """Body of one process: run plans of a model on all ranks of a job, thoroughly."""
    found: list[str] = []
    for seed in seeds:
        mesh = Mesh.parse({4: "x=2,y=2", 3: "x=3"}[comm.world_size])
        _, sharded = draw(subject(name), seed, mesh=mesh)
        zero = draw_zero(name, seed, sharded.mesh) if seed == 0 else NO_ZERO
        ready = engine(subject(name), sharded, comm, programs=seed == 0, zero=zero)
        wrong = compare(ready, subject(name), reference(name), thorough=True)
        found += [f"{name}, seed {seed}, mesh {mesh}: {item}" for item in wrong]
    return found


def directed(count: int, start: int, turns: Turns, result: Campaign) -> Iterator[tuple[str, int]]:
    """(model, seed) in turn; the last third goes to the models of which most is left to reach."""
    for index in range(count):
        left = {name: len(result.coverage.missing(universe(name))) for name in result.models}
        most = max(left, key=left.__getitem__)
        in_turn = turns[index % len(turns)]
        yield (most if left[most] and 3 * index >= 2 * count else in_turn), start + index


def share(count: int, start: int, turns: Turns) -> Campaign:
    """The part of a campaign that one process runs."""
    torch.set_num_threads(1)
    result = Campaign(models=tuple(dict.fromkeys(turns)))
    for name in result.models:
        reference(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)  # see tests/conftest.py
    return campaign(directed(count, start, turns, result), result)


def on_two_processes(count: int, start: int = 0) -> Campaign:
    """A campaign of `count` plans on two cores.

    Args:
        count: Number of plans.
        start: Another start is another campaign.
    """
    total, begin = sum(cost for cost, _ in SHARES), time.perf_counter()
    counts = [count * part // total for part, _ in SHARES]
    counts[-1] = count - sum(counts[:-1])
    with ProcessPoolExecutor(len(SHARES), get_context("spawn")) as pool:
        work = [
            pool.submit(share, number, start, turns)
            for number, (_, turns) in zip(counts, SHARES, strict=True)
        ]
        parts = [item.result() for item in work]
    whole = Campaign(seconds=time.perf_counter() - begin)
    for part in parts:
        whole.plans += part.plans
        whole.round_trips += part.round_trips
        whole.failures += part.failures
        whole.coverage.counts.update(part.coverage.counts)
    return whole
