"""Does the plan train exactly what one device would have trained?

Runs the plan on local ranks beside one device and compares the loss of every step, all gradients
of the first step, and all parameters and buffers after k optimizer steps.

Errors are relative to the tensor's own largest value, those of losses to the largest of the run (a
loss may pass through zero). Values that are zero in exact arithmetic
(the gradient of a key bias, or of a bias before a batch norm) hold only rounding noise, which no
two summation orders share; so gradients are judged relative to at least so much of the model's
largest gradient that 32 units in its last place are within the tolerance (19 were measured for a
bias before a batch norm over samples of very different size). AdamW divides a gradient
by its own size and turns that noise into steps, on one device as on many; so it runs with eps
1e-4, and in float32 parameters have their own tolerance, relative to at least the distance that
the optimizer can have moved them (steps x lr). With ``dtype="float64"`` none of this matters:
then only a wrong plan can differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.plan.build import apply_plan
from autopar.plan.microbatch import microbatch_notes
from autopar.plan.plan import Plan
from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.execution import Execution
from autopar.runtime.launch import LocalRanks
from autopar.runtime.loader import LoadedModel, load_planned
from autopar.runtime.optimizers import optimizer_factory
from autopar.runtime.reference import (
    Device,
    EagerDevice,
    GraphDevice,
    Rounds,
    batch_dims,
    settled_buffers,
    train,
)
from autopar.sharding.factors import infer_factors
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace

LEARNING_RATE = 1e-3
EPSILON = 1e-4
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": LEARNING_RATE, "eps": EPSILON},
    "sgd": {"lr": LEARNING_RATE, "momentum": 0.9},
}
"""Options of the optimizers that can take the steps."""
TOLERANCES = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}
"""Largest relative error that counts as equal, by the model's lowest dtype."""
PARAMETER_TOLERANCES = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}
"""The same for parameters after the optimizer steps."""
NOISE = 32
"""Units in the last place of the largest gradient that count as rounding noise."""
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""Distance from 1 to the next number, by dtype (IEEE 754)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One compared tensor.

    Attributes:
        kind: ``loss``, ``gradient``, ``parameter``, ``buffer`` or ``replicas``.
        name: FQN, or number of the step for losses.
        error: Relative error as the module describes; infinite when shapes or presence differ.
        difference: Largest absolute difference.
    """

    kind: str
    name: str
    error: float
    difference: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The comparison.

    Attributes:
        plan: The plan that ran.
        rows: Everything compared.
        tolerance: Largest error that counts as equal.
        parameter_tolerance: The same for parameters after the optimizer steps.
        reference: What one device ran: ``eager`` or ``graph`` (the traced graph on one device,
            when the model draws random numbers, runs in another dtype, or has microbatches of
            unequally many labels), and in how many microbatches if it matters.
        traffic: Bytes sent by rank 0 in the first step, by kind of collective.
        exact: When parameters alone differ, the worst row of the same comparison in float64:
            it tells rounding, which AdamW can magnify, from a wrong plan.
    """

    plan: Plan
    rows: tuple[Row, ...]
    tolerance: float
    parameter_tolerance: float
    reference: str
    traffic: Mapping[str, int] = field(default_factory=dict)
    exact: Row | None = None

    @property
    def worst(self) -> Row:
        """The row with the largest error."""
        return max(self.rows, key=lambda row: row.error)

    @property
    def first_difference(self) -> Row | None:
        """The first row beyond the tolerance, None if all are equal."""
        for row in self.rows:
            limit = self.parameter_tolerance if row.kind == "parameter" else self.tolerance
            if not row.error <= limit:
                return row
        return None

    @property
    def equal(self) -> bool:
        """Whether everything agrees within the tolerance, or differs by rounding only."""
        return self.first_difference is None or self.rounding_only

    @property
    def rounding_only(self) -> bool:
        """Whether what differs does so by rounding: in float64 everything agrees."""
        return self.exact is not None and self.exact.error <= TOLERANCES["float64"]

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """A table by kind, the worst tensor, and the first that differs."""
        lines = [f"{'compared':<12}{'count':>7}  {'worst relative error':<22}worst"]
        for kind in dict.fromkeys(row.kind for row in self.rows):
            rows = [row for row in self.rows if row.kind == kind]
            worst = max(rows, key=lambda row: row.error)
            name = f"step {int(worst.name) + 1}" if kind == "loss" else worst.name
            lines.append(f"{kind:<12}{len(rows):>7}  {worst.error:<22.3g}{name}")
        lines.append(
            f"reference: {self.reference} on one device; tolerance {self.tolerance:g}, "
            f"parameters {self.parameter_tolerance:g}"
        )
        bad = self.first_difference
        if bad is not None:
            lines.append(
                f"{'rounding' if self.rounding_only else 'NOT equal'}: {bad.kind} {bad.name} "
                f"differs by {bad.difference:.3g} (relative {bad.error:.3g})"
            )
        if self.exact is not None:
            lines.append(
                f"in float64 the largest relative error is {self.exact.error:.3g}, of "
                f"{self.exact.kind} {self.exact.name}"
            )
        if self.equal:
            lines.append("equal")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTask:
    """What every rank does; picklable.

    Attributes:
        target: The model as ``file.py:function``, or None when `model` is given.
        model: The model.
        args: Arguments of one call with the global batch.
        kwargs: Its keyword arguments.
        options: How to compile it.
        steps: Number of optimizer steps.
        traced: The traced model, to share it between ranks that are threads.
    """

    target: str | None = None
    model: nn.Module | None = None
    traced: Traced | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: CompileOptions
    steps: int = 3


def _state(compiled: CompiledModel, comm: Communicator, task: VerifyTask) -> dict[str, Any]:
    """Losses, gradients, parameters and buffers of `task.steps` steps."""
    engine = compiled.build(task.args, task.kwargs)
    comm.take_traffic()
    loss = engine.backward(compiled.inputs(task.args, task.kwargs))
    traffic = comm.take_traffic()
    gradients, buffers = engine.full_gradients(), engine.full_buffers()
    engine.update()
    losses = [loss]
    for _ in range(task.steps - 1):
        losses.append(compiled.step(*task.args, **task.kwargs))
    state: dict[str, Any] = {
        "loss": {str(step): value for step, value in enumerate(losses)},
        "gradient": gradients,
        "parameter": engine.full_parameters(),
        "buffer": settled_buffers(buffers, engine.full_buffers()),
        "replicas": engine.replicas_differ(),
        "estimated": any(unit.programs.joint.estimated for unit in engine.units.values()),
        "plan": compiled.plan,
        "traffic": traffic,
    }
    return state


def _load(target: str, plan: Plan | None) -> LoadedModel:
    """The model of a target, with the same random weights in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return load_planned(target, plan)


def verify_on_rank(comm: Communicator, task: VerifyTask) -> dict[str, Any] | None:
    """Body of one rank; rank 0 returns the state, the others None."""
    if task.target is not None:
        loaded = _load(task.target, task.options.plan)
        options = replace(task.options, loss_fn=loaded.loss_fn)
        task = replace(
            task, model=loaded.model, args=loaded.args, kwargs=loaded.kwargs, options=options
        )
    assert task.model is not None
    compiled = CompiledModel(task.model, comm, task.options, task.traced)
    state = _state(compiled, comm, task)
    state["replicas"] = next((n for n in comm.gather_objects(state["replicas"]) if n), None)
    state["estimated"] = any(comm.gather_objects(state["estimated"]))
    return state if comm.rank == 0 else None


def _compare(task: VerifyTask, want: dict[str, Any], have: dict[str, Any], dtype: str) -> list[Row]:
    """Rows of everything both sides hold."""
    largest = max(
        (float(g.abs().max()) for g in want["gradient"].values() if g is not None and g.numel()),
        default=0.0,
    )
    noise = min(1.0, NOISE * EPS[dtype] / TOLERANCES[dtype]) * largest
    losses = [abs(float(loss)) for loss in want["loss"].values()]
    floors = {"loss": max(losses, default=0.0), "gradient": noise, "buffer": 0.0}
    floors["parameter"] = LEARNING_RATE * task.steps
    rows: list[Row] = []
    for kind in ("loss", "gradient", "buffer", "parameter"):
        for name, expected in want[kind].items():
            if name not in have[kind]:
                if kind == "loss":
                    rows.append(Row(kind=kind, name=name, error=math.inf, difference=math.inf))
                continue
            rows.append(_row(kind, name, expected, have[kind][name], floors[kind]))
    if have["replicas"]:
        rows.append(
            Row(kind="replicas", name=have["replicas"], error=math.inf, difference=math.inf)
        )
    return rows


def _row(kind: str, name: str, want: Tensor | None, have: Tensor | None, floor: float) -> Row:
    if want is None or have is None:
        other = have if want is None else want
        empty = other is None or float(other.abs().max()) == 0.0
        error = 0.0 if empty else math.inf
        return Row(kind=kind, name=name, error=error, difference=error)
    if want.shape != have.shape:
        return Row(kind=kind, name=name, error=math.inf, difference=math.inf)
    if not want.numel():
        return Row(kind=kind, name=name, error=0.0, difference=0.0)
    a, b = want.detach().double().cpu(), have.detach().double().cpu()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = float(torch.where(same, 0.0, (a - b).abs()).max())
    finite = a[a.isfinite()]
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, floor)
    error = difference / scale if scale else (0.0 if difference == 0.0 else math.inf)
    return Row(kind=kind, name=name, error=math.inf if math.isnan(error) else error,
               difference=difference)  # fmt: skip


def verify(
    model: nn.Module | str,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mesh: Mesh | str | Mapping[str, int] | None = None,
    constraints: str | Mapping[str, object] | None = None,
    plan: Plan | None = None,
    steps: int = 3,
    dtype: str | None = None,
    optimizer: str = "adamw",
    tolerance: float | None = None,
    ranks: LocalRanks | None = None,
    threads: bool = False,
    traced: Traced | None = None,
) -> VerifyReport:
    """Run a plan on local CPU ranks beside one device and compare.

    Args:
        model: The model (picklable), or ``file.py:function`` that builds it.
        args: Arguments of one call with the global batch.
        kwargs: Its keyword arguments.
        loss_fn: See `autopar.compile`.
        mesh: See `autopar.compile`; with `plan`, the plan's.
        constraints: See `autopar.compile`.
        plan: The plan to verify instead of one made from `constraints`.
        steps: Number of optimizer steps.
        dtype: ``"float64"`` to run the traced graph with every floating dtype replaced by
            float64 on both sides: then only a wrong plan can differ.
        optimizer: ``"adamw"``, or ``"sgd"`` with momentum.
        tolerance: Largest relative error that counts as equal; by dtype when None.
        ranks: A pool of local ranks to use; one is started for the call when None.
        threads: Let ranks be threads of this process instead of processes.
        traced: The model as `trace` gave it for these inputs, to compare several plans of it.

    Returns:
        The report.

    Raises:
        AutoparError: If the model cannot be traced, planned or run.
    """
    _check_call(args, kwargs, steps)
    if isinstance(model, str):
        loaded = _load(model, plan)
        source, target = loaded.model, model
        args, kwargs, loss_fn = loaded.args, loaded.kwargs, loaded.loss_fn
    else:
        source, target = model, None
    if dtype not in (None, "float64"):
        raise InputError(f"verify in dtype {dtype!r}", expected="float64, or None for the model's")
    if optimizer not in OPTIMIZERS:
        raise InputError(f"verify with {optimizer!r}", expected="one of " + ", ".join(OPTIMIZERS))
    axes = plan.device_mesh if plan is not None else _as_mesh(mesh)
    options = CompileOptions(
        loss_fn=loss_fn, optimizer=optimizer, mesh=axes, constraints=constraints, plan=plan,
        optimizer_options=OPTIMIZERS[optimizer], float64=dtype == "float64",
    )  # fmt: skip
    task = VerifyTask(
        model=source, args=tuple(args), kwargs=dict(kwargs or {}), options=options, steps=steps
    )
    traced = traced or trace(source, task.args, dict(task.kwargs), loss_fn)
    if threads:
        task = replace(task, traced=traced)
    have = _run(task, target, axes.size, ranks, threads)
    device, rounds, kind = _reference(task, traced, have["plan"], have["estimated"])
    factory = optimizer_factory(options.optimizer, options.optimizer_options)
    want = train(device, rounds, steps, factory)
    lowest = dtype or _lowest_dtype(traced)
    report = VerifyReport(
        plan=have["plan"],
        rows=tuple(_compare(task, want, have, lowest)),
        tolerance=tolerance if tolerance is not None else TOLERANCES[lowest],
        parameter_tolerance=tolerance if tolerance is not None else PARAMETER_TOLERANCES[lowest],
        reference=rounds.describe(kind),
        traffic=have["traffic"],
    )
    bad = report.first_difference
    if bad is None or bad.kind != "parameter" or dtype is not None or tolerance is not None:
        return report
    again = verify(
        target or source, args, kwargs, loss_fn=loss_fn, mesh=mesh, constraints=constraints,
        plan=plan, steps=steps, dtype="float64", optimizer=optimizer, ranks=ranks, threads=threads,
        traced=traced,
    )  # fmt: skip
    return replace(report, exact=again.worst)


def _reference(
    task: VerifyTask, traced: Traced, plan: Plan, estimated: bool
) -> tuple[Device, Rounds, str]:
    """The model on one device, what it does in a step, and whether that is eager or the graph."""
    assert task.model is not None
    sharded = apply_plan(plan, traced.graph)
    execution = Execution.of_plan(plan, sharded, traced.loss)
    rounds = Rounds.of_plan(plan, execution, estimated or bool(microbatch_notes(sharded)))
    count, arguments = rounds.microbatches, (task.args, dict(task.kwargs))
    options = replace(task.options, plan=None, mesh=None, constraints={"microbatches": count})

    def graph() -> GraphDevice:
        assert task.model is not None
        compiled = CompiledModel(task.model, SoloCommunicator(), options, traced)
        return GraphDevice(compiled, arguments)

    if task.options.float64 or _draws_numbers(traced) or _on_meta(task.model):
        return graph(), rounds, "graph"
    dims = batch_dims(sharded) if count > 1 else {}
    eager = EagerDevice(task.model, arguments, task.options.loss_fn, traced, dims, count)
    # Only the graph knows how many of all labels are in a microbatch.
    if eager.weigh() and (count == 1 or graph().counts_alike()):
        return eager, rounds, "eager"
    return graph(), rounds, "graph"


def _draws_numbers(traced: Traced) -> bool:
    """Whether the model has random ops, whose numbers eager torch draws otherwise."""
    rules = infer_factors(traced.graph).rules
    return any(rule is not None and rule.special for rule in rules)


def _check_call(args: Any, kwargs: Any, steps: Any) -> None:
    if not isinstance(args, tuple | list):
        raise InputError(
            f"args is of type {type(args).__name__}", expected="a tuple of arguments, e.g. (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(f"kwargs is of type {type(kwargs).__name__}", expected="a dict, or None")
    if type(steps) is not int or steps < 1:
        raise InputError(f"steps is {steps!r}", expected="a whole number from 1")


def _as_mesh(mesh: Mesh | str | Mapping[str, int] | None) -> Mesh:
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        return Mesh((("dp", 2),))
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    if isinstance(mesh, Mapping):
        return Mesh(tuple(mesh.items()))
    raise InputError(
        f"mesh is of type {type(mesh).__name__}", expected='text such as "dp=2,tp=2" or a dict'
    )


def _on_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _lowest_dtype(traced: Traced) -> str:
    """The least precise dtype that a gradient flows through."""
    graph = traced.graph
    values = [item.value for item in graph.inputs if item.kind == "parameter"]
    values += [value for node in graph.nodes for value in node.outputs if value.spec.requires_grad]
    found = {value.spec.dtype for value in values}
    return max(found & TOLERANCES.keys(), key=TOLERANCES.__getitem__, default="float32")


def _run(
    task: VerifyTask, target: str | None, world_size: int, ranks: LocalRanks | None, threads: bool
) -> dict[str, Any]:
    if threads:
        results = run_threads(world_size, lambda comm: verify_on_rank(comm, task))
        return next(item for item in results if item is not None)
    if target is not None:
        options = replace(task.options, loss_fn=None)
        task = VerifyTask(target=target, options=options, steps=task.steps)
    if ranks is not None:
        results = ranks.run(verify_on_rank, task)
    else:
        with LocalRanks(world_size) as pool:
            results = pool.run(verify_on_rank, task)
    return next(item for item in results if item is not None)
