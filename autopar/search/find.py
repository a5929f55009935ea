"""The door to the search: from a graph and a cluster to the best plan, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Prediction, Software
from autopar.errors import InputError, PlanError, meant
from autopar.graph.ir import Graph
from autopar.plan.plan import Plan
from autopar.registry import Registry
from autopar.search import dp, exact, exhaustive, expert, ilp, mcmc, rl
from autopar.search.asked import OBJECTIVES, TIME, Asked
from autopar.search.finish import certificate_note, finish, shortfall_notes
from autopar.search.infeasible import LIMIT_S, alone, explain_infeasible
from autopar.search.objective import changes, choose
from autopar.search.others import with_others
from autopar.search.problem import Problem
from autopar.search.result import Interruptible, SearchResult
from autopar.search.whatif import Change
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.sharded import ShardedGraph
from autopar.units import format_seconds

GAPS = {"normal": 0.01, "high": 0.005}
"""Proven distance from the optimum at which a search stops, by effort."""
LIMITS_S = {"normal": 60.0, "high": 180.0}
"""Seconds after which a search stops anyway, by effort."""
FOR_PARTS = 4.0
"""How many times as long it may take to search parts of a cluster, too."""
SMALL = 64
"""Devices up to which a search of normal effort improves the best plan op by op."""
HALVES = frozenset(("bfloat16", "float16"))
TRAINED = frozenset(("fp32", "tf32", "bf16", "fp16"))
"""Formats of products that a model can be trained in as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """How to search.

    Attributes:
        strategy: Name of a strategy.
        effort: A key of `GAPS`.
        time_limit_s: Seconds after which to stop with what there is; by effort by default.
        seed: Of strategies that draw numbers.
        on_progress: Called with a line about what is going on.
        ahead: Whether a second process may work out what the search will need, if there is a core.
        objective: What is to be least, one of `OBJECTIVES`: ``time`` of a step on all devices,
            ``devices``, or ``cost`` per token.
        step_within_s: Seconds that a step may take at most where it is not to be least.
        top: Other plans that are wanted, beyond those that the search has priced anyway.
        below_s: Seconds from which on a plan is of no use.
    """

    strategy: str = "exact"
    effort: str = "normal"
    time_limit_s: float | None = None
    seed: int = 0
    on_progress: Callable[[str], None] | None = None
    ahead: bool = False
    objective: str = TIME
    step_within_s: float | None = None
    top: int = 0
    below_s: float = math.inf

    def refuse_wrong(self) -> None:
        """Refuse what is no request.

        Raises:
            InputError: If a value is none of those that it may have.
        """
        if self.effort not in GAPS:
            raise InputError(
                f"effort {self.effort!r}",
                expected="one of " + ", ".join(GAPS),
                fix=meant(self.effort, GAPS),
                where="effort (--effort)",
            )
        if self.objective not in OBJECTIVES:
            raise InputError(
                f"objective {self.objective!r}",
                expected="one of " + ", ".join(OBJECTIVES),
                fix=meant(self.objective, OBJECTIVES),
                where="objective (--objective)",
            )
        limit_s, within_s = self.time_limit_s, self.step_within_s
        if limit_s is not None and not limit_s >= 0:
            raise InputError(
                f"time limit {limit_s}", expected="seconds from 0",
                where="time_limit_s (--time-limit)",
            )  # fmt: skip
        if within_s is not None and not within_s > 0:
            raise InputError(
                f"a step within {within_s} s", expected="more than 0 seconds",
                where="step_within_s (--step-within)",
            )  # fmt: skip
        if within_s is not None and self.objective == TIME:
            raise InputError(
                "a limit for the step, and the step is to be as short as possible anyway",
                fix="leave it out, or ask for the fewest devices or the least cost within it"
                " (objective, --objective devices or cost)",
                where="step_within_s (--step-within)",
            )


STRATEGIES = Registry[Callable[[Problem, Request], SearchResult]](
    "search strategy", error=InputError
)


def _limit_s(request: Request) -> float:
    if request.time_limit_s is not None:
        return request.time_limit_s
    return LIMITS_S[request.effort] * (1.0 if request.objective == TIME else FOR_PARTS)


def _exact(problem: Problem, request: Request) -> SearchResult:
    small = problem.space.num_devices <= SMALL
    return exact.search(
        problem,
        gap=GAPS[request.effort],
        op_level=small or request.effort == "high",
        time_limit_s=_limit_s(request),
        below_s=request.below_s,
        on_progress=request.on_progress,
        ahead=request.ahead,
    )


def _random(
    search: Callable[..., SearchResult], problem: Problem, request: Request
) -> SearchResult:
    return search(problem, seed=request.seed, time_limit_s=_limit_s(request))


STRATEGIES.add("exact", _exact)
STRATEGIES.add("expert", lambda problem, r: expert.search(problem, time_limit_s=_limit_s(r)))
STRATEGIES.add(
    "exhaustive", lambda problem, r: exhaustive.search(problem, time_limit_s=_limit_s(r))
)
STRATEGIES.add("dp", lambda problem, r: dp.search(problem, time_limit_s=_limit_s(r)))
STRATEGIES.add("ilp", lambda problem, r: ilp.search(problem, time_limit_s=_limit_s(r)))
STRATEGIES.add("mcmc", partial(_random, mcmc.search))
STRATEGIES.add("rl", partial(_random, rl.search))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A plan that was searched for.

    Attributes:
        plan: The plan.
        sharded: The placements that it stands for.
        prediction: What it takes.
        result: The search.
        problem: What was searched.
        changes: What the best plans on other parts of the cluster take, where parts were searched.
    """

    plan: Plan
    sharded: ShardedGraph
    prediction: Prediction
    result: SearchResult
    problem: Problem
    changes: tuple[Change, ...] = ()


def find(
    graph: Graph,
    loss: str | None,
    cluster: ClusterSpec,
    *,
    mesh: Mesh | None = None,
    constraints: Mapping[str, Any] | None = None,
    request: Request | None = None,
    optimizer: str = "adamw",
    memory_known: bool = True,
    notes: tuple[str, ...] = (),
) -> Found:
    """Search for the best plan.

    Args:
        graph: A canonical graph.
        loss: Name of its loss.
        cluster: The cluster; all its devices are used.
        mesh: A mesh of axes ``pp``, ``dp`` and ``tp`` to keep; chosen by default.
        constraints: What else to keep, see `autopar.search.asked`; the rest is chosen.
        request: How to search.
        optimizer: Name of the optimizer.
        memory_known: Whether the cluster's memory is more than a guess, and so a limit.
        notes: Notes of the trace, for the plan.

    Raises:
        PlanError: If no plan fits, with what would; or if a constraint cannot be kept.
    """
    request = request or Request()
    request.refuse_wrong()
    strategy = STRATEGIES[request.strategy]
    asked = Asked.of(mesh, constraints or {})
    problem = Problem(
        graph,
        loss,
        cluster,
        software=Software.of(cluster.hardware(0), optimizer),
        asked=asked,
        memory_bytes=None if memory_known else _UNKNOWN_BYTES,
    )
    if request.objective != TIME:
        return _on_a_part(problem, request, notes)
    if not any(True for _ in problem.space.points()):
        raise _empty(problem)
    result = strategy(problem, request)
    if result.best is None:
        raise explain_infeasible(problem, result)
    result = with_others(problem, result, request.top)
    limit_s = _limit_s(request)
    told = (
        *shortfall_notes(result, GAPS[request.effort], limit_s),
        *notes,
        *format_notes(graph, cluster),
        *_idle_notes(problem, result, limit_s),
    )
    return _found(problem, result, told)


def _on_a_part(problem: Problem, request: Request, notes: tuple[str, ...]) -> Found:
    """The best plan on the best part of a cluster."""
    if problem.asked.mesh is not None:
        raise InputError(
            f"mesh {problem.asked.mesh} says how many devices there are, and a search is to say it",
            expected=f"one of them: no mesh, or objective {TIME!r}",
            where="objective (--objective)",
        )
    strategy = STRATEGIES[request.strategy]

    def run(part: Problem, below_s: float, limit_s: float) -> SearchResult:
        tell = request.on_progress
        asked = replace(
            request, objective=TIME, step_within_s=None, below_s=below_s, time_limit_s=limit_s,
            on_progress=None if tell is None else lambda line: tell(f"{part.cluster}: {line}"),
        )  # fmt: skip
        return strategy(part, asked)

    within_s = math.inf if request.step_within_s is None else request.step_within_s
    chosen = choose(
        problem, run, request.objective,
        within_s=within_s, limit_s=_limit_s(request), gap=GAPS[request.effort],
    )  # fmt: skip
    result = with_others(chosen.problem, chosen.result, request.top)
    told = (
        *shortfall_notes(result, GAPS[request.effort], chosen.limit_s),
        *notes,
        *format_notes(problem.graph, chosen.problem.cluster),
        *chosen.notes,
    )
    return replace(_found(chosen.problem, result, told), changes=tuple(changes(chosen)))


def _found(problem: Problem, result: SearchResult, notes: tuple[str, ...]) -> Found:
    """What was found, with the plan that stands for it."""
    assert result.best is not None
    candidate = result.best.candidate
    plan, sharded = finish(
        problem, candidate, infer_factors(problem.graph), (*notes, certificate_note(result))
    )
    return Found(
        plan=plan,
        sharded=sharded,
        prediction=problem.predict(candidate),
        result=result,
        problem=problem,
    )


_UNKNOWN_BYTES = 2**60


def _idle_notes(problem: Problem, result: SearchResult, limit_s: float) -> list[str]:
    """On which nodes of an unequal cluster a step is faster if the others are left idle.

    Args:
        problem: The problem.
        result: The search.
        limit_s: Seconds that it might have taken; what is left of them may be spent here.
    """
    assert result.best is not None
    left = (limit_s - result.seconds) / len(problem.cluster.groups)
    found = list[str]()
    if left <= 0 or not result.certificate.complete:
        return found
    with Interruptible(lambda: True):  # the plan is there
        found += [
            f"{cluster} alone is faster: {format_seconds(best.step_s)} per step (predicted,"
            f" {best.candidate.point.text()}); a search uses all devices that it is given"
            for cluster, best in alone(problem, min(left, LIMIT_S))
            if best.step_s < result.best.step_s
        ]
    return found


def format_notes(graph: Graph, cluster: ClusterSpec) -> tuple[str, ...]:
    """What people should know of number formats that devices lack.

    Args:
        graph: The model.
        cluster: The devices.
    """
    dtypes = sorted({item.value.spec.dtype for item in graph.parameters()} & HALVES)
    devices = {group.hardware.name: group.hardware for group in cluster.groups}
    found = []
    for dtype in dtypes:
        for name, device in devices.items():
            wanted, used = device.computes_in(dtype)
            if used != wanted and device.kind != "cpu":
                rates = device.peak_flops_per_s
                best = max(TRAINED.intersection(rates), key=lambda key: rates[key])
                found.append(
                    f"{name} has no {dtype}: products run at {rates[used] / 1e12:.4g} TFLOP/s, the"
                    f" rate of {used}; cast the model to {best} for {rates[best] / 1e12:.4g}"
                )
    return tuple(found)


_SAID = {
    "pipeline": "mesh axis pp", "data": "mesh axis dp", "tensor": "mesh axis tp",
    "data_outside": "an order of mesh axes", "role": "tensor",
    "micro_batch": "samples of a data rank at a time", "sharding": "a tensor axis",
}  # fmt: skip
"""Parts of points in the words of constraints, where these differ."""
_WHERE = {
    "pipeline": "mesh", "data": "mesh", "tensor": "mesh", "data_outside": "mesh",
    "num_stages": "constraints['cuts']", "sharding": "constraints", "role": "constraints['tensor']",
}  # fmt: skip


def _empty(problem: Problem) -> PlanError:
    """Why no point is left."""
    space, mesh = problem.space, problem.asked.mesh
    if mesh is not None:
        mesh.check_devices(space.num_devices)
    kept: dict[str, tuple[object, ...]] = {}
    for name, values in space.allowed.items():
        rest = tuple(replace(space, allowed=kept).points())
        kept[name] = values
        if rest and not any(True for _ in replace(space, allowed=kept).points()):
            beside = problem.asked.text()
            found = sorted({space.value(point, name) for point in rest}, key=str)
            if all(isinstance(value, int | float) for value in found):
                found.sort()
            what = f"{_SAID.get(name, name)} {' or '.join(map(_shown, values))}"
            if name == "num_stages":
                what = f"the {values[0]} stages that its cuts make"
            return PlanError(
                f"no plan on {problem.cluster} of global batch {space.batch} has {what}"
                + (f" with {beside}" if len(problem.asked.texts()) > 1 else ""),
                expected="one of " * (len(found) > 1) + ", ".join(map(_shown, found[:20])),
                where=_WHERE.get(name, f"constraints[{name!r}]"),
            )
    return PlanError(
        f"{space.num_devices} devices cannot share a global batch of {space.batch} samples",
        expected="at most as many data-parallel ranks as samples",
        fix="take a larger batch or fewer devices",
        where="cluster",
    )


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "dp before pp" if value else "pp before dp"
    if isinstance(value, tuple):
        tensor, role = value
        return f"tp={tensor} {role}".rstrip()
    if isinstance(value, float):
        return f"{value:g}"
    return value or "no tensor axis" if isinstance(value, str) else str(value)


__all__ = ["GAPS", "LIMITS_S", "STRATEGIES", "Found", "Request", "find"]
