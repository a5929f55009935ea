"""Random constraints of small search problems, and whether plans keep them.

They are drawn from a plan of the free problem, so that something is left. What is left is told
twice: by the search, and by looking at every plan of the free problem.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from autopar.plan.build import make_plan
from autopar.plan.keys import op_keys
from autopar.plan.plan import Plan
from autopar.plan.recompute import recompute_patterns
from autopar.plan.strategies import ROLES
from autopar.search.asked import Asked
from autopar.search.exhaustive import candidates
from autopar.search.finish import finish
from autopar.search.problem import Candidate
from autopar.search.space import Point
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from tests.unit.search.problems import Remembered, Small

KINDS = ("cuts", "tensor", "factors", "placements", "recompute", "mesh", "zero", "micro_batch")


def constrained(problem: Small, seed: int) -> tuple[Small, list[str]]:
    """A problem with constraints, and where the plans that it has are not those that keep them.

    Args:
        problem: A free problem.
        seed: Of the constraints.
    """
    rng, free = random.Random(f"constraints {seed}"), problem.problem
    kinds = rng.sample(KINDS, rng.choice((1, 1, 2, 3)))
    points = list(free.space.points())
    point = rng.choice([item for item in points if _speaks(item, kinds)] or points)
    mesh = Mesh(point.mesh) if "mesh" in kinds else None
    given: dict[str, Any] = {}
    edges: tuple[int, ...] | None = None
    if "cuts" in kinds and point.num_stages > 1:
        edges = tuple(sorted(rng.sample(range(1, free.units.count), point.num_stages - 1)))
        given["cuts"] = [_name(free, edge, rng) for edge in edges]
    given |= _of_tensor_axis(free, point, kinds, rng)
    if "recompute" in kinds:
        given["recompute"] = _patterns(free, rng)
    if "zero" in kinds:
        given["zero"] = {"stage": point.zero, "axes": ["dp"]} if point.zero == 2 else point.zero
    if "micro_batch" in kinds and free.space.batch % (point.data * point.microbatches) == 0:
        given["micro_batch"] = free.space.batch // (point.data * point.microbatches)
    asked = Remembered(
        free.graph, free.loss, free.cluster, software=free.software, options=free.options,
        allowed=free.space.allowed, asked=Asked.of(mesh, given), memory_bytes=free.memory_bytes,
    )  # fmt: skip
    plans = {
        point: tuple(candidates(asked, point))
        for point in asked.space.points()
        if point.schedule == "1f1b"
    }
    small = Small(
        name=f"{problem.name}, {asked.asked.text()}", problem=asked, plans=plans
    )  # fmt: skip
    return small, _different(problem, small, mesh, given, edges)


def _speaks(point: Point, kinds: list[str]) -> bool:
    """Whether a point has what constraints of some kinds are about."""
    staged = point.num_stages > 1 or "cuts" not in kinds
    return staged and (point.tensor > 1 or not {"tensor", "factors"}.intersection(kinds))


def _name(free: Remembered, edge: int, rng: random.Random) -> str:
    """What a border is called: an op key, or the path of a module that begins there."""
    keys, first = op_keys(free.graph), free.units.nodes[edge][0]
    path = free.graph.nodes[first].module
    begins = all(
        node.module != path and not node.module.startswith(path + ".")
        for node in free.graph.nodes[:first]
    )
    return path if path and begins and rng.random() < 0.7 else keys[first]


def _of_tensor_axis(
    free: Remembered, point: Point, kinds: list[str], rng: random.Random
) -> dict[str, Any]:
    """What the tensor axis of a point splits, and how it lays a parameter."""
    found: dict[str, Any] = {}
    if "tensor" in kinds and point.role:
        found["tensor"] = point.role
    elif "factors" in kinds and point.role:
        names = set(free.layout.factors.names())
        usual = [factor for factor in ROLES[point.role] if factor in names]
        found |= dict.fromkeys(rng.sample(usual, min(len(usual), rng.choice((1, 2)))), "tp")
    if "placements" in kinds:
        plan = _plan(free, _whole(point))
        parameter = rng.choice(plan.parameters)
        split = [word for word in parameter.placement if word != "whole"]
        words: Any = "whole"
        if split:
            one = split[0].partition("@")[0]
            words = rng.choice(("whole", "whole", "split", one, list(parameter.placement)))
        found["placements"] = {parameter.fqn: words}
    return found


def _patterns(free: Remembered, rng: random.Random) -> list[str]:
    """Patterns of recomputation that treat layers unlike."""
    keys = op_keys(free.graph)
    trained = [key for key in keys if "/" in key and not key.startswith("/")]
    some = [key.partition("/")[0] + "/*" for key in rng.sample(trained, min(2, len(trained)))]
    begun = rng.choice((["full"], ["selective"], ["*"], []))
    return [*begun, *(f"!{item}" if begun and rng.random() < 0.7 else item for item in some)]


def _whole(point: Point) -> Candidate:
    """A plan of one stage whose tensor axis is that of a point."""
    return Candidate(point=Point(tensor=point.tensor, role=point.role), low=(0,), high=(0,))


def _plan(problem: Remembered, candidate: Candidate) -> Plan:
    return finish(problem, candidate, infer_factors(problem.graph))[0]


def _different(
    free: Small,
    small: Small,
    mesh: Mesh | None,
    given: Mapping[str, Any],
    edges: tuple[int, ...] | None,
) -> list[str]:
    """Stages that one of both problems has, and the other should."""
    lies: dict[tuple[int, str], bool] = {}

    def keeps(candidate: Candidate) -> bool:
        point = candidate.point
        if edges is not None and candidate.edges != edges:
            return False
        if mesh is not None and point.mesh != mesh.axes:
            return False
        zero = given.get("zero", point.zero)
        each = free.problem.space.batch / (point.data * point.microbatches)
        stage = zero["stage"] if isinstance(zero, Mapping) else zero
        if stage != point.zero or given.get("micro_batch", each) != each:
            return False
        key = (point.tensor, point.role)
        if key not in lies:
            lies[key] = _lies(free.problem, point, given)
        return lies[key]

    have = {(item.point, item.edges) for mine in small.plans.values() for item in mine}
    should = {
        (item.point, item.edges) for mine in free.plans.values() for item in mine if keeps(item)
    }
    return [f"stages that are not asked for: {small.name}: {item}" for item in have - should] + [
        f"stages that are missing: {small.name}: {item}" for item in should - have
    ]


def _lies(free: Remembered, point: Point, given: Mapping[str, Any]) -> bool:
    """Whether a tensor axis splits what it has to, and lays parameters so."""
    factors = [name for name, axis in given.items() if axis == "tp"]
    if given.get("tensor", point.role) != point.role:
        return False
    if factors:
        try:
            make_plan(free.graph, Mesh((("tp", point.tensor),)), dict.fromkeys(factors, "tp"))
        except Exception:
            return False
        if point.tensor == 1 or not set(factors) <= set(ROLES[point.role]):
            return False
    wanted = given.get("placements", {})
    if not wanted:
        return True
    plan = _plan(free, _whole(point))
    placed = {item.fqn: [word for word in item.placement if word != "whole"]
              for item in plan.parameters}  # fmt: skip
    for name, words in wanted.items():
        mine = placed[name]
        if words == "whole":  # ops choose otherwise if need be
            continue
        if isinstance(words, list):
            good = mine == [word for word in words if word != "whole"]
        elif words == "split":
            good = bool(mine)
        else:
            good = bool(mine) and all(word.startswith(f"{words}@") for word in mine)
        if not good:
            return False
    return True


def not_as_asked(small: Small, candidate: Candidate) -> list[str]:
    """Where the file of a plan does not show what was asked for, or stands for other placements."""
    problem = small.problem
    plan, given = _plan(problem, candidate), problem.asked.constraints
    point, wrong = candidate.point, []
    if "cuts" in given:
        keys = set(given["cuts"])
        at = [key for key in plan.pipeline.cuts if key not in keys]
        paths = [path for path in given["cuts"] if path not in plan.pipeline.cuts]
        if not all(key.startswith(path) for key, path in zip(at, paths, strict=True)):
            wrong.append(f"cuts {plan.pipeline.cuts}")
    if "recompute" in given and plan.recompute != recompute_patterns(
        problem.graph, given["recompute"]
    ):
        wrong.append(f"recompute {plan.recompute}")
    if problem.asked.mesh is not None and plan.mesh != problem.asked.mesh.axes:
        wrong.append(f"mesh {plan.mesh}")
    zero = {"stage": point.zero, "axes": ["dp"] if point.zero else []}
    said: dict[str, Any] = {
        **({"tensor": point.role} if point.role else {"strategy": "ddp"}),
        "microbatches": point.microbatches,
        "schedule": point.schedule, "chunks": point.chunks, "zero": zero,
        "recompute": list(plan.recompute), "cuts": list(plan.pipeline.cuts),
    }  # fmt: skip
    if "placements" in given:
        said["placements"] = given["placements"]
    again, _ = make_plan(problem.graph, Mesh(plan.mesh), said)
    for name in ("order", "parameters", "pipeline", "zero", "recompute", "overrides"):
        if getattr(again, name) != getattr(plan, name):
            wrong.append(f"{name}: {getattr(plan, name)}, and said so {getattr(again, name)}")
    placed = {item.fqn: set(item.placement) for item in plan.parameters}
    for name, words in given.get("placements", {}).items():
        if words == "whole" and not placed[name] <= {"whole"}:
            wrong.append(f"{name} is {placed[name]}")
    return [f"{what}: {small.name}" for what in wrong]
