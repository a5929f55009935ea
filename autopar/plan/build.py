"""From a graph and constraints to a plan, and from a plan back to placements of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import PlanError, meant
from autopar.graph.ir import Graph, Node, TensorSpec
from autopar.plan.assign import store_split
from autopar.plan.fingerprint import fingerprint, is_of, structure
from autopar.plan.keys import op_keys
from autopar.plan.microbatch import (
    check_batch,
    check_microbatches,
    choose_in_time,
    has_time,
    microbatch_notes,
    place_in_time,
)
from autopar.plan.parts import PipelinePlan, check_pipeline, check_zero
from autopar.plan.placements import refuse_other_placements
from autopar.plan.plan import ParameterPlan, Plan, UnruledOp
from autopar.plan.recompute import recompute_patterns, resolve_recompute
from autopar.plan.remarks import remarks, stage_remarks
from autopar.plan.stages import Stages, assign_stages, cut_keys, given_keys
from autopar.plan.strategies import (
    STANDARD,
    Constraints,
    check_factor_names,
    fine_axes,
    parse_constraints,
    tensor_mesh,
)
from autopar.schedules.make import SCHEDULES
from autopar.sharding.choices import Choices, fits, options
from autopar.sharding.factors import Factors, infer_factors
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import REPLICATE, Placements, Shard
from autopar.sharding.sharded import ShardedGraph, shard_graph
from autopar.units import counted


def _choices_from_overrides(
    graph: Graph, factors: Factors, mesh: Mesh, base: tuple[Choices, ...], plan: Plan
) -> tuple[Choices, ...]:
    keys = {key: index for index, key in enumerate(op_keys(graph))}
    picked = list(base)
    for key, words in plan.overrides.items():
        where = f"overrides[{key!r}]"
        if key not in keys:
            raise PlanError("the plan names an op that the model lacks", where=where)
        node = graph.nodes[keys[key]]
        rule, units = factors.rules[keys[key]], factors.units[keys[key]]
        allowed = {str(c): c for c in options(node, rule, units, graph.spec)}
        if len(words) != len(mesh.shape):
            raise PlanError(
                f"{counted(len(words), 'choice')} for {len(mesh.shape)} mesh axes",
                expected="one choice for each of " + ", ".join(mesh.names),
                where=where,
            )
        for word in words:
            if word not in allowed:
                raise PlanError(
                    f"{node.op} cannot do {word!r}",
                    expected="one of " + ", ".join(allowed),
                    where=where,
                )
        choices = tuple(allowed[word] for word in words)
        if not fits(choices, mesh.shape):
            raise PlanError("a factor is split into more parts than it has", where=where)
        picked[keys[key]] = choices
    return tuple(picked)


def _storage(
    sharded: ShardedGraph, owner: tuple[str, ...], storage: tuple[str, ...]
) -> dict[str, Placements]:
    axes = tuple(index for index, name in enumerate(owner) if name in storage)
    stored = {}
    for item in sharded.graph.parameters():
        forward = sharded.inputs[item.value.name].forward
        if has_time(sharded):
            forward = (REPLICATE, *forward[1:])  # a parameter is there at all times
        stored[item.value.name] = store_split(forward, item.value.spec.shape, axes, sharded.mesh)
    return stored


def place_graph(
    graph: Graph,
    mesh: Mesh,
    constraints: Constraints,
    factors: Factors | None = None,
    plan: Plan | None = None,
) -> ShardedGraph:
    """Placements of everything under the constraints, with a plan's overrides applied.

    Raises:
        PlanError: If a constraint or an override does not fit the graph.
    """
    factors = factors or infer_factors(graph)
    check_factor_names(constraints, factors.names())
    fine, owner = fine_axes(mesh, constraints.pipeline)
    sharded = place_in_time(graph, factors, fine, owner, constraints)
    if plan is not None and plan.overrides:
        choices = _choices_from_overrides(graph, factors, fine, sharded.choices, plan)
        sharded = shard_graph(graph, factors, fine, choices)
    if constraints.storage or has_time(sharded):
        sharded = sharded.stored(_storage(sharded, owner, constraints.storage))
    check_microbatches(sharded)
    return sharded


def _word(sharded: ShardedGraph, name: str, placement: object) -> str:
    if not isinstance(placement, Shard):
        return "whole"
    for factor, stride, size in sharded.factors.dims(name, placement.dim):
        if (stride, size) == (placement.stride, placement.size):
            return f"{factor}@{placement.dim}:{stride}x{size}"
    return f"dim{placement.dim}@{placement.dim}:{placement.stride}x{placement.size}"


def words_of(sharded: ShardedGraph, name: str) -> tuple[str, ...]:
    """How a parameter is stored, a word for every axis but the one in time."""
    forward = sharded.inputs[name].forward
    return tuple(_word(sharded, name, item) for item in forward[has_time(sharded) :])


def _pipeline(
    graph: Graph, factors: Factors, mesh: Mesh, pipeline: PipelinePlan
) -> tuple[PipelinePlan, Stages]:
    """`pipeline` with its cuts as op keys, those given or the best, and its stages.

    Raises:
        PlanError: If a given cut is wrong, or the graph has too few ops.
    """
    count = pipeline.stages(mesh.axes)
    where = "constraints['cuts']"
    stages = assign_stages(graph, factors, count, pipeline.cuts, where=where)
    _check_shared(graph, pipeline, stages, "constraints['schedule']")
    if pipeline.cuts:
        return replace(pipeline, cuts=given_keys(graph, pipeline.cuts)), stages
    return replace(pipeline, cuts=cut_keys(graph, stages)), stages


def plan_stages(plan: Plan, graph: Graph, factors: Factors) -> Stages:
    """The stages that `plan` cuts `graph` into.

    Raises:
        PlanError: If its cuts or its schedule do not fit the graph.
    """
    where = "plan: pipeline.cuts"
    stages = assign_stages(graph, factors, plan.num_stages, plan.pipeline.cuts, where=where)
    _check_shared(graph, plan.pipeline, stages, "plan: pipeline.schedule")
    return stages


def _check_shared(graph: Graph, pipeline: PipelinePlan, stages: Stages, where: str) -> None:
    """Refuse updates at different times of a parameter that several stages have."""
    if not SCHEDULES[pipeline.schedule].asynchronous:
        return
    for item in graph.parameters():
        users = stages.shared.get(item.value.name)
        if users and item.value.spec.requires_grad:
            raise PlanError(
                f"stages {', '.join(map(str, users))} share parameter {item.target}, but with "
                f"schedule {pipeline.schedule} each stage updates its own weights at its own time",
                expected="a schedule that updates all stages once a step, such as 1f1b, or "
                "parameters of one stage each",
                fix="take schedule=1f1b, untie the parameter in the model, or choose cuts that "
                "leave all its uses in one stage",
                where=where,
            )


def unruled_ops(graph: Graph, factors: Factors) -> tuple[UnruledOp, ...]:
    """Ops without a rule, which run replicated."""

    def whole_bytes(node: Node) -> int:
        specs = [graph.spec(name) for name in node.operands] + [v.spec for v in node.outputs]
        return sum(spec.size_bytes for spec in specs)

    return tuple(
        UnruledOp(op=node.op, module=node.module, source=node.source, size_bytes=whole_bytes(node))
        for node, rule in zip(graph.nodes, factors.rules, strict=True)
        if rule is None
    )


def make_plan(
    graph: Graph,
    mesh: Mesh,
    constraints: str | Mapping[str, object] | None = None,
    *,
    strict: bool = False,
    notes: tuple[str, ...] = (),
    factors: Factors | None = None,
) -> tuple[Plan, ShardedGraph]:
    """Plan `graph` on `mesh` under `constraints`.

    Args:
        graph: A canonical graph.
        mesh: The mesh, in the user's axes.
        constraints: See `parse_constraints`.
        strict: Refuse ops without a rule instead of replicating them.
        notes: Notes of the trace.
        factors: Factors of the graph, if already inferred.

    Returns:
        The plan and the placements it stands for.

    Raises:
        PlanError: For bad constraints, or an op without a rule under `strict`.
    """
    normal = parse_constraints(constraints, mesh)
    sharded = place_graph(graph, mesh, normal, factors)
    unruled = unruled_ops(graph, sharded.factors)
    if strict:
        refuse_unruled(unruled)
    plan = describe(sharded, mesh, normal, notes, unruled)
    placed = {item.fqn: item.placement for item in plan.parameters}
    refuse_other_placements(normal.placements, placed, sharded.factors.names())
    return plan, sharded


def refuse_unruled(unruled: tuple[UnruledOp, ...]) -> None:
    """Refuse ops without a rule.

    Raises:
        PlanError: Names the first of them.
    """
    if unruled:
        raise PlanError(
            f"{unruled[0].op} has no sharding rule and would run replicated "
            f"({unruled[0].size_bytes:,} bytes on every rank)"
            + (f"; so would {counted(len(unruled) - 1, 'more op')}" if len(unruled) > 1 else ""),
            where=f"module {unruled[0].module or '(root)'} {unruled[0].source}".rstrip(),
            fix="plan without strict=True, or register a rule for the op",
        )


def describe(
    sharded: ShardedGraph,
    mesh: Mesh,
    constraints: Constraints,
    notes: tuple[str, ...] = (),
    unruled: tuple[UnruledOp, ...] = (),
) -> Plan:
    """The plan that stands for `sharded`, with overrides where the constraints imply less."""
    graph = sharded.graph
    fine, owner = fine_axes(mesh, constraints.pipeline)
    rest = tensor_mesh(mesh, constraints.pipeline.axis)
    free = replace(constraints, placements=())  # a plan has what follows from them as overrides
    implied = choose_in_time(graph, sharded.factors, fine, owner, free)
    overrides = {
        key: tuple(map(str, choices))
        for key, choices, base in zip(op_keys(graph), sharded.choices, implied, strict=True)
        if choices != base
    }
    pipeline, stages = _pipeline(graph, sharded.factors, mesh, constraints.pipeline)
    return Plan(
        mesh=mesh.axes,
        strategy=constraints.strategy,
        order=constraints.order,
        storage=constraints.storage,
        explicit=constraints.explicit,
        overrides=overrides,
        pipeline=pipeline,
        zero=constraints.zero,
        recompute=recompute_patterns(graph, constraints.recompute),
        parameters=tuple(
            ParameterPlan(
                fqn=item.target,
                shape=item.value.spec.shape,
                dtype=item.value.spec.dtype,
                placement=words_of(sharded, item.value.name),
            )
            for item in graph.parameters()
        ),
        graph=fingerprint(graph),
        structure=structure(graph),
        inputs=tuple(
            (item.target, _shape_text(item.value.spec))
            for item in graph.inputs
            if item.kind == "input"
        ),
        unruled=unruled,
        notes=(
            *notes,
            *stage_remarks(graph, stages),
            *remarks(sharded, rest, owner, constraints),
            *microbatch_notes(sharded),
        ),
    )


def _shape_text(spec: TensorSpec) -> str:
    return str(TensorSpec(spec.shape, spec.dtype))


def constraints_of(plan: Plan) -> Constraints:
    """The constraints that a plan came from."""
    return Constraints(
        strategy=plan.strategy,
        order=plan.order,
        storage=plan.storage,
        explicit=plan.explicit,
        pipeline=plan.pipeline,
        zero=plan.zero,
        recompute=plan.recompute,
    )


def apply_plan(plan: Plan, graph: Graph) -> ShardedGraph:
    """The placements `plan` stands for on `graph`.

    Raises:
        PlanError: If the plan was made for another model or other inputs; says the first
            difference.
    """
    _check_same_model(plan, graph)
    constraints = constraints_of(plan)
    factors = infer_factors(graph)
    _check_order(plan, factors)
    _check_parts(plan, graph, factors, constraints)
    sharded = place_graph(graph, plan.device_mesh, constraints, factors, plan)
    for planned, item in zip(plan.parameters, graph.parameters(), strict=True):
        name = item.value.name
        words = words_of(sharded, name)
        if words != planned.placement:
            raise PlanError(
                f"the plan stores {planned.fqn} as {list(planned.placement)}, but its choices "
                f"imply {list(words)}",
                fix="change what the axes split (order) or the ops (overrides), not the result",
                where=f"plan: parameters[{planned.fqn!r}].placement",
            )
    return sharded


def _check_parts(plan: Plan, graph: Graph, factors: Factors, constraints: Constraints) -> None:
    """Refuse a pipeline, ZeRO or recompute that does not fit mesh and graph."""
    check_pipeline(plan.pipeline, plan.mesh, "plan: pipeline.")
    data, storage = constraints.data_axes(), plan.storage
    check_zero(plan.zero, plan.pipeline, data, storage, "plan: zero")
    resolve_recompute(graph, plan.recompute, where="plan: recompute")
    if plan.pipeline.microbatches > 1:
        where = "plan: pipeline.microbatches"
        check_batch(graph, factors, plan.pipeline.microbatches, where)
    plan_stages(plan, graph, factors)


def _check_order(plan: Plan, factors: Factors) -> None:
    """Refuse an order or a storage that does not speak of the mesh's axes and known factors."""
    axes = tuple(name for name, _ in plan.tensor_axes)
    ordered = [axis for axis, _ in plan.order]
    for axis in (*ordered, *plan.storage):
        if axis not in axes:
            raise PlanError(
                f"the plan splits over axis {axis!r}, which "
                + ("holds its pipeline" if axis in plan.device_mesh.names else "its mesh lacks"),
                expected="one of " + ", ".join(axes),
                where="plan: order" if axis in ordered else "plan: storage",
            )
    if sorted(ordered) != sorted(axes):
        raise PlanError(
            f"the plan says what the axes {ordered} split, its mesh has {list(axes)}",
            expected="every axis of the mesh once, but not that of a pipeline",
            where="plan: order",
        )
    known = {*factors.names(), *STANDARD}
    for axis, names in plan.order:
        for name in names:
            if name.partition(".")[0] not in known:
                raise PlanError(
                    f"the model has no factor {name!r}",
                    expected="one of " + ", ".join(factors.names()),
                    fix=meant(name, sorted(known)),
                    where=f"plan: order[{axis!r}]",
                )


def refuse_model(text: str, where: str, fix: str | None = None) -> PlanError:
    """That a plan is for another model, and the first difference."""
    return PlanError(
        f"the plan is for another model: {text}",
        fix=fix
        or "plan this model anew (autopar plan), or compile the model the plan was made for",
        where=f"plan: {where}",
    )


def check_parameters(plan: Plan, graph: Graph) -> None:
    """Refuse a plan whose parameters are not those of `graph`.

    Raises:
        PlanError: Says the first difference.
    """
    have = {item.target: item.value.spec for item in graph.parameters()}
    for planned in plan.parameters:
        spec = have.pop(planned.fqn, None)
        where = f"parameters[{planned.fqn!r}]"
        if spec is None:
            text = f"it has a parameter {planned.fqn}, this model has none"
            fix = None
            if is_of(plan.graph, graph):
                missing = {item.fqn for item in plan.parameters}
                new = next((name for name in have if name not in missing), "")
                text += f"; they compute the same, so it may be called {new} here"
                fix = "rename the parameters in the plan file, or plan this model anew"
            raise refuse_model(text, where, fix)
        if (spec.shape, spec.dtype) != (planned.shape, planned.dtype):
            raise refuse_model(
                f"{planned.fqn} is {planned.dtype}{list(planned.shape)} in the plan and "
                f"{spec.dtype}{list(spec.shape)} in this model",
                where,
            )
    if have:
        name = next(iter(have))
        raise refuse_model(f"this model has a parameter {name} that the plan lacks", "parameters")


def _check_same_model(plan: Plan, graph: Graph) -> None:
    check_parameters(plan, graph)
    inputs = {i.target: _shape_text(i.value.spec) for i in graph.inputs if i.kind == "input"}
    planned_inputs = dict(plan.inputs)
    for path in dict.fromkeys((*planned_inputs, *inputs)):
        there, here = planned_inputs.get(path, "absent"), inputs.get(path, "absent")
        if there != here:
            sizes = path in planned_inputs and path in inputs
            raise refuse_model(
                f"input {path} is {there} in the plan and {here} here",
                f"inputs[{path!r}]",
                "`autopar reprice` fits a plan to another batch or sequence length"
                if sizes
                else "",
            )
    if not is_of(plan.graph, graph):
        raise refuse_model("parameters and inputs agree, but the computation differs", "graph")
