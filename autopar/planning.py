"""How the public functions search: which calls do, and how the ranks of a job agree on a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.cost_models.cluster import ClusterSpec
from autopar.errors import AutoparError, PlanError
from autopar.imports.read import Resolved
from autopar.plan.build import make_plan, refuse_unruled, unruled_ops
from autopar.plan.extras import split_text
from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator
from autopar.runtime.operators import refuse_unkeyed_random
from autopar.search.find import FIXABLE, Found, Request, find
from autopar.search.finish import STRATEGY as SEARCH
from autopar.search.told import forecast_found
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced


def kept_by_search(
    cluster: ClusterSpec | None, constraints: str | Mapping[str, object] | None
) -> dict[str, Any] | None:
    """Constraints that a search keeps; None if they say how to plan without one."""
    if isinstance(constraints, str):
        constraints = split_text(constraints)
    given = dict(constraints or {})
    named = given.pop("strategy", None)
    if named == SEARCH or (named is None and cluster is not None and set(given) <= set(FIXABLE)):
        return given
    return None


def planner(
    comm: Communicator,
    cluster: ClusterSpec | None,
    given: Resolved,
    optimizer: object,
    *,
    strict: bool = False,
) -> Callable[[Traced], Plan] | None:
    """How ranks agree on a plan that is searched for, or comes from a framework's configuration.

    Returns:
        What makes the plan; None if it is made from constraints alone.
    """
    kept, mesh = kept_by_search(cluster, given.constraints), given.mesh
    if kept is None:
        return _as_configured(given, strict) if given.notes else None

    def search_once(traced: Traced) -> Plan:
        spec = cluster or ClusterSpec.local(comm.world_size)
        made: Any = None
        if comm.rank == 0:  # a search that runs out of time ends elsewhere on every rank
            try:
                name = optimizer if isinstance(optimizer, str) else "adamw"
                found = find_plan(traced, spec, mesh, kept, name, Request(), strict=strict)
                made = ("plan", found.plan.to_json())
            except AutoparError as error:
                made = ("error", error)
            except Exception as error:  # the others must not wait for what will not come
                text = f"the search failed on rank 0: {type(error).__name__}: {error}"
                comm.gather_objects(("error", PlanError(text, where="autopar.search")))
                raise
        kind, value = comm.gather_objects(made)[0]
        if kind == "error":
            raise value
        return Plan.from_json(value)

    return search_once


def _as_configured(given: Resolved, strict: bool) -> Callable[[Traced], Plan]:
    """Make the plan that a configuration asks for, with what it cannot hold among its notes."""
    assert given.mesh is not None, given
    mesh = given.mesh

    def make(traced: Traced) -> Plan:
        notes = (*traced.notes, *given.notes)
        return make_plan(traced.graph, mesh, given.constraints, strict=strict, notes=notes)[0]

    return make


def find_plan(
    traced: Traced,
    cluster: ClusterSpec,
    mesh: Mesh | None,
    kept: Mapping[str, Any],
    optimizer: str,
    request: Request,
    *,
    strict: bool = False,
) -> Found:
    """Search for the best plan of a traced model; see `autopar.api.search`.

    Raises:
        PlanError: If the model has no loss, or no plan fits.
    """
    if traced.loss is None:
        raise PlanError(
            "a search needs the model's loss",
            expected="a model that returns a scalar, or loss_fn",
            fix="pass loss_fn, or name a strategy such as constraints='ddp'",
            where="loss_fn",
        )
    if strict:
        refuse_unruled(unruled_ops(traced.graph, infer_factors(traced.graph)))
    found = find(
        traced.graph,
        traced.loss,
        cluster,
        mesh=mesh,
        constraints=kept,
        request=request,
        optimizer=optimizer,
        memory_known=memory_is_known(cluster),
        notes=traced.notes,
    )
    refuse_unkeyed_random(traced.graph, found.sharded.factors, cluster.num_devices)
    forecast = forecast_found(found, optimizer, memory_known=memory_is_known(cluster))
    return replace(found, plan=replace(found.plan, forecast=forecast))


def memory_is_known(cluster: ClusterSpec) -> bool:
    """Whether the memory of devices is more than a guess."""
    measured = ("memory.memory_gib" in dict(group.figures) for group in cluster.groups)
    return all(
        group.hardware.kind != "cpu" or known
        for group, known in zip(cluster.groups, measured, strict=True)
    )
