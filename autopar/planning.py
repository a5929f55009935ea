"""How the public functions plan.

Which calls search, how the ranks of a job agree on a plan, and what becomes of a plan file that
meets inputs of other sizes, or another cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.cost_models.cluster import ClusterSpec, memory_is_known
from autopar.cost_models.evaluate import Evaluator, Prediction, Software
from autopar.cost_models.forecast import cluster_of, describe_cluster, forecast_of
from autopar.errors import AutoparError, PlanError
from autopar.imports.read import Resolved
from autopar.plan.adapt import adapt
from autopar.plan.build import make_plan, refuse_unruled, unruled_ops
from autopar.plan.diff import differences, lines
from autopar.plan.fingerprint import is_of
from autopar.plan.forecast import room_words
from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator
from autopar.runtime.operators import refuse_unkeyed_random
from autopar.search.asked import kept_by_search
from autopar.search.find import Found, Request, find
from autopar.search.told import forecast_found, with_changes
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced
from autopar.units import format_seconds

_LOG = logging.getLogger("autopar")


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
    mesh = given.mesh
    kept = kept_by_search(given.constraints, cluster=cluster is not None, mesh=mesh is not None)
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
    refuse_unkeyed_random(traced.graph, found.sharded.factors, found.problem.cluster.num_devices)
    forecast = forecast_found(found, optimizer, memory_known=memory_is_known(cluster))
    plan = replace(found.plan, forecast=forecast)
    return replace(found, plan=with_changes(plan, found.changes))


def fitted(
    plan: Plan, traced: Traced, *, cluster: ClusterSpec | None = None, must_fit: bool = False
) -> Plan:
    """The plan for a traced model: itself if it was made for that, or else priced anew.

    Args:
        plan: The plan.
        traced: The model, with inputs of any sizes.
        cluster: What it runs on, if that is known; what it was made for by default.
        must_fit: Whether to refuse what was priced anew and has too little memory.

    Raises:
        PlanError: If the plan is for another model, its choices cannot be made at these sizes, or
            it does not fit.
    """
    told, same = plan.forecast, is_of(plan.graph, traced.graph)
    if same and (cluster is None or told is None or _as_told(plan, cluster)):
        return plan
    made = plan if same else adapt(plan, traced.graph)[0]
    if cluster is None and told is not None:
        cluster = cluster_of(told.cluster)
    if cluster is None or traced.loss is None:
        return made
    made, found = priced(made, traced, cluster, optimizer_of(plan))
    if must_fit and memory_is_known(cluster):
        found.refuse_unless_fits()
    return made


def priced(
    plan: Plan, traced: Traced, cluster: ClusterSpec, optimizer: str
) -> tuple[Plan, Prediction]:
    """A plan with what is predicted of it on a cluster, and the prediction.

    Raises:
        PlanError: If the cluster has fewer devices than the plan ranks.
    """
    software = Software.of(cluster.hardware(0), optimizer)
    forecast, found = forecast_of(
        Evaluator(traced.graph, traced.loss, cluster, software), plan, optimizer=optimizer,
        memory_known=memory_is_known(cluster),
    )  # fmt: skip
    return replace(plan, forecast=forecast), found


def optimizer_of(plan: Plan) -> str:
    """Name of the optimizer that a plan was priced with; AdamW's if it was not."""
    return "adamw" if plan.forecast is None else plan.forecast.cost_model.optimizer


def _as_told(plan: Plan, cluster: ClusterSpec) -> bool:
    assert plan.forecast is not None
    return plan.forecast.cluster.fingerprint == describe_cluster(cluster).fingerprint


def changes(before: Plan, after: Plan) -> str:
    """What pricing a plan anew has changed, as text; empty if nothing.

    Args:
        before: The plan as it was given.
        after: What `fitted` made of it.
    """
    if before is after:
        return ""
    found = "\n".join(lines(differences(before, after)))
    head = "the plan was made for other inputs or another cluster; its choices stay"
    if after.forecast is not None and after.forecast.ranks:
        step_s, fits = after.forecast.step_s, room_words(after.forecast)
        head += f", and its step takes {format_seconds(step_s)} (predicted; {fits})"
    return f"{head}:\n{found}" if found else ""


def fitter(comm: Communicator, cluster: ClusterSpec | None) -> Callable[[Plan, Traced], Plan]:
    """How the ranks of a job take a plan file: see `fitted`; rank 0 logs what has changed."""

    def fit(plan: Plan, traced: Traced) -> Plan:
        made = fitted(plan, traced, cluster=cluster, must_fit=True)
        if comm.rank == 0 and (text := changes(plan, made)):
            _LOG.warning("%s", text)
        return made

    return fit
