"""A plan for another batch or sequence length: the same choices on other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import PlanError
from autopar.graph.ir import Graph
from autopar.plan.build import check_parameters, constraints_of, describe, place_graph, refuse_model
from autopar.plan.fingerprint import is_of, structure
from autopar.plan.keys import op_keys
from autopar.plan.plan import Plan
from autopar.sharding.choices import options
from autopar.sharding.factors import Factors, infer_factors
from autopar.sharding.sharded import ShardedGraph
from autopar.units import counted


def adapt(plan: Plan, graph: Graph) -> tuple[Plan, ShardedGraph]:
    """The plan's choices on `graph`: the same model, perhaps with inputs of other sizes.

    Args:
        plan: The plan.
        graph: The graph.

    Returns:
        The plan for it, without a forecast, and the placements that it stands for.

    Raises:
        PlanError: If the plan is for another model, or its choices cannot be made at these sizes;
            says the first difference.
    """
    check_parameters(plan, graph)
    if plan.structure and plan.structure != structure(graph):
        raise refuse_model("the parameters agree, but the computation differs", "structure")
    if not plan.structure and not is_of(plan.graph, graph):
        raise refuse_model("the computation, or the sizes of its inputs, differ", "graph")
    factors = infer_factors(graph)
    overrides, dropped = _resized(plan.overrides, graph, factors)
    light = replace(plan, overrides=overrides, forecast=None)
    constraints = constraints_of(light)
    sharded = place_graph(graph, plan.device_mesh, constraints, factors, light)
    notes = (
        ((f"choices of {counted(dropped, 'op')} were left out, as sizes differ"),)
        if dropped
        else ()
    )
    made = describe(sharded, plan.device_mesh, constraints, notes, plan.unruled)
    if len(made.inputs) != len(plan.inputs):
        raise refuse_model("it takes other inputs", "inputs")
    return replace(made, searched=plan.searched), sharded


def _resized(
    overrides: Mapping[str, tuple[str, ...]], graph: Graph, factors: Factors
) -> tuple[dict[str, tuple[str, ...]], int]:
    """Choices of ops with the sizes that their factors have now, and how many have none."""
    keys = {key: index for index, key in enumerate(op_keys(graph))}
    found: dict[str, tuple[str, ...]] = {}
    for key, words in overrides.items():
        if key not in keys:
            raise PlanError(
                "the plan names an op that the model lacks", where=f"plan: overrides[{key!r}]"
            )
        index = keys[key]
        node, rule, units = graph.nodes[index], factors.rules[index], factors.units[index]
        allowed = [str(choice) for choice in options(node, rule, units, graph.spec)]
        made = [_like(word, allowed) for word in words]
        if None not in made:
            found[key] = tuple(word for word in made if word is not None)
    return found, len(overrides) - len(found)


def _like(word: str, allowed: list[str]) -> str | None:
    """The choice of the same factor at whatever size, if there is just one."""
    if word in allowed:
        return word
    unit = word.rpartition(":")[0]
    like = [item for item in allowed if "@" in item and item.rpartition(":")[0] == unit]
    return like[0] if len(like) == 1 else None
