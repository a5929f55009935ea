"""The best shardings of a model's ops on the mesh of a plan, as overrides of that plan.

The op problem (`autopar.search.op_network`) is solved for several prices of memory: without one,
and for prices that make all bytes of the first solution worth a growing share of its seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Software
from autopar.cost_models.layout import Layout
from autopar.plan.build import constraints_of, describe, place_graph
from autopar.plan.keys import op_keys
from autopar.plan.microbatch import choose_in_time
from autopar.plan.plan import Plan
from autopar.plan.strategies import fine_axes
from autopar.search.eliminate import CELLS
from autopar.search.network import Assignment
from autopar.search.op_network import op_problem
from autopar.search.op_problem import OpProblem
from autopar.search.solve import solve

PRICES = (0.0, 1 / 64, 1 / 16, 1 / 4, 1.0)
"""What all bytes of the fastest solution cost, in parts of its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSharding:
    """How to split the ops of a model.

    Attributes:
        overrides: Choices that differ from those that the plan implies, for `Plan.overrides`.
        value: Seconds of one microbatch of the whole depth on one rank.
        price: Seconds that a byte was taken to cost.
        objective: Seconds, those of bytes included.
        bound: No sharding that was searched has a lower objective.
        exact: Whether the objective is the least.
        saved_bytes: Kept from forward to backward of one microbatch.
        held_bytes: Of parameters, gradients and optimizer states.
    """

    overrides: Mapping[str, tuple[str, ...]]
    value: float
    price: float
    objective: float
    bound: float
    exact: bool
    saved_bytes: float
    held_bytes: float


def best_overrides(
    layout: Layout,
    plan: Plan,
    loss: str | None,
    cluster: ClusterSpec,
    software: Software | None = None,
    *,
    axes: Sequence[str] | None = None,
    prices: Sequence[float] = PRICES,
    pinned: frozenset[str] = frozenset(),
    seed: int = 0,
    cells: int = CELLS,
) -> list[OpSharding]:
    """The best shardings for several prices of memory, the fastest first.

    Args:
        layout: The model.
        plan: Mesh, microbatches, ZeRO, and what the axes that are not searched split.
        loss: Name of the loss, None for a graph without.
        cluster: What it runs on.
        software: How it is carried out; this package's runtime by default.
        axes: See `autopar.search.op_network.op_problem`.
        prices: See `PRICES`.
        pinned: Names of nodes that choose as the plan says.
        seed: Of the solver.
        cells: Most cells of a table of the solver.

    Returns:
        Shardings without duplicates; at least one if `prices` has one.

    Raises:
        PlanError: If the plan does not fit the model.
    """
    problem = op_problem(
        layout, plan, loss, cluster, software, axes=axes, prices=prices, pinned=pinned
    )
    found: dict[tuple[tuple[str, tuple[str, ...]], ...], OpSharding] = {}
    known: Assignment = problem.start
    for part in sorted(prices):
        price = part * problem.unit_price
        solution = solve(problem.priced(price), seed=seed, cells=cells, start=known)
        if not solution.assignment:
            continue
        known = solution.assignment
        overrides = overrides_of(problem, known)
        found.setdefault(
            tuple(overrides.items()),
            OpSharding(
                overrides=overrides,
                value=problem.network.value(known),
                price=price,
                objective=solution.value,
                bound=solution.bound,
                exact=solution.exact,
                saved_bytes=problem.size_bytes(problem.saved_bytes, known),
                held_bytes=problem.size_bytes(problem.held_bytes, known),
            ),
        )
    return list(found.values())


def overrides_of(problem: OpProblem, assignment: Assignment) -> dict[str, tuple[str, ...]]:
    """What a plan must override to choose so, for every copy of every block.

    Args:
        problem: The problem.
        assignment: A state for every variable.
    """
    layout, plan = problem.placement.layout, problem.plan
    constraints = constraints_of(plan)
    mesh, owner = fine_axes(plan.device_mesh, plan.pipeline)
    implied = choose_in_time(layout.folded, layout.factors, mesh, owner, constraints)
    chosen = problem.choices(assignment)
    keys = op_keys(layout.graph)
    return {
        key: tuple(map(str, chosen[like]))
        for key, like in zip(keys, layout.indexes, strict=True)
        if chosen[like] != implied[like]
    }


def with_overrides(layout: Layout, plan: Plan, overrides: Mapping[str, tuple[str, ...]]) -> Plan:
    """A plan whose ops choose otherwise, with its parameters held accordingly.

    Args:
        layout: The model.
        plan: The plan.
        overrides: Choices by op key.

    Raises:
        PlanError: If the model cannot be computed so.
    """
    constraints = constraints_of(plan)
    changed = replace(plan, overrides=dict(overrides))
    sharded = place_graph(layout.graph, plan.device_mesh, constraints, plan=changed)
    found = describe(sharded, plan.device_mesh, constraints, (), plan.unruled)
    return replace(found, searched=plan.searched)
