"""The public functions: compile, plan, load_plan, evaluate, verify, trace."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.cost_models.calibrate import Calibration, calibrate
from autopar.cost_models.cluster import ClusterSpec, memory_is_known
from autopar.cost_models.evaluate import Prediction, Software
from autopar.cost_models.evaluate import evaluate as price
from autopar.cost_models.forecast import cluster_of
from autopar.errors import InputError
from autopar.imports.read import resolve
from autopar.plan.adapt import adapt
from autopar.plan.build import apply_plan, make_plan
from autopar.plan.plan import Plan
from autopar.plan.strategies import default_mesh, strategy_name
from autopar.planning import find_plan, fitter, optimizer_of, planner, priced
from autopar.runtime.comm import Communicator
from autopar.runtime.comm_torch import from_environment
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.launch import LocalRanks
from autopar.runtime.measure import Machine, core_count
from autopar.runtime.measure import measure as time_machine
from autopar.runtime.operators import refuse_unkeyed_random
from autopar.runtime.optimizers import Factory
from autopar.runtime.verify import VerifyReport, verify
from autopar.search.asked import asked_of_search, kept_by_search
from autopar.search.find import Found, Request
from autopar.sharding.mesh import Mesh
from autopar.trace import trace

__all__ = [
    "CompiledModel",
    "VerifyReport",
    "compile",
    "evaluate",
    "load_plan",
    "measure",
    "plan",
    "reprice",
    "search",
    "trace",
    "verify",
]


def _mesh(mesh: Mesh | str | Mapping[str, int] | None) -> Mesh | None:
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    if isinstance(mesh, Mapping):
        return Mesh(tuple(mesh.items()))
    wrong = f"mesh is of type {type(mesh).__name__}"
    raise InputError(wrong, expected='text such as "dp=2,tp=2" or a dict')


def _cluster(cluster: ClusterSpec | str | int | None) -> ClusterSpec | None:
    if cluster is None or isinstance(cluster, ClusterSpec):
        return cluster
    if isinstance(cluster, int):
        return ClusterSpec.local(cluster)
    if not isinstance(cluster, str | Path):
        raise InputError(
            f"cluster is of type {type(cluster).__name__}",
            expected='a ClusterSpec, text such as "8x8xH100-SXM", a file, or a number of ranks',
        )
    if Path(cluster).suffix in (".yaml", ".yml", ".json"):
        return ClusterSpec.load(cluster)
    return ClusterSpec.parse(str(cluster))


def _plan(plan: Plan | str | Path | None) -> Plan | None:
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise InputError(f"plan is of type {type(plan).__name__}", expected="a Plan or a plan file")
    return Plan.load(plan)


def _check_call(args: object, kwargs: object, names: tuple[str, str]) -> None:
    """Refuse example inputs that are not a tuple and a dict."""
    if args is not None and not isinstance(args, tuple | list):
        raise InputError(
            f"{names[0]} is of type {type(args).__name__}",
            expected="a tuple of the model's positional arguments",
            fix=f"for a single argument write {names[0]}=(x,)",
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InputError(
            f"{names[1]} is of type {type(kwargs).__name__}",
            expected="a dict of the model's keyword arguments",
        )


def compile(
    model: nn.Module,
    cluster: ClusterSpec | str | int | None = None,
    *,
    example_inputs: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str | type[torch.optim.Optimizer] | Factory | None = "adamw",
    mesh: Mesh | str | Mapping[str, int] | None = None,
    constraints: str | Mapping[str, object] | None = None,
    plan: Plan | str | Path | None = None,
    strict: bool = False,
    seed: int = 0,
    check_finite: bool = True,
    comm: Communicator | None = None,
    **optimizer_options: Any,
) -> CompiledModel:
    """Prepare `model` to train under a plan on the ranks of this job.

    Lazy like torch.compile: without example inputs, the first step traces, plans and lowers.
    Started by torchrun or ``autopar run -n N`` the job has N ranks, else one.

    Args:
        model: An ordinary module; it is not modified. On the meta device it is initialised by
            the ``reset_parameters`` of its modules.
        cluster: The cluster; must have as many devices as the job has ranks. With one, and neither
            a plan, a strategy nor a mesh with factors, the best plan that keeps the constraints is
            searched for.
        example_inputs: Arguments of one call with the global batch, to compile at once.
        example_kwargs: Its keyword arguments.
        loss_fn: ``loss_fn(outputs, *args, *kwargs.values())``, when the model does not return
            its loss.
        optimizer: Name, class or factory of an elementwise optimizer; None for none.
        mesh: Mesh axes and sizes, e.g. ``"dp=2,tp=2"``; chosen by the strategy by default.
        constraints: A strategy (``ddp``, ``zero1``, ``zero2``, ``zero3``, ``fsdp``, ``megatron``,
            ``megatron_sp``, ``2d``) or a map from factor to axis, e.g. ``{"heads": "tp", "ffn":
            "tp", "batch": "dp"}``. Either may say more, as text (``"megatron,microbatches=8,
            schedule=1f1b,zero=1,recompute=selective"``) or as further keys of the map:
            ``microbatches``, ``schedule``, ``chunks``, ``zero``, ``recompute``, ``cuts``,
            ``tensor``, ``placements``, ``update_every``, ``vertical_sync``. Or a file: such a map,
            or what DeepSpeed, Megatron-LM, torchtitan or Accelerate read; notes say what no plan
            can hold.
        plan: A plan or plan file to carry out instead. One that was made for another batch,
            sequence length or cluster keeps its choices and is priced anew; what that changes is
            logged (``autopar``), and is refused if it has too little memory. One of another model
            is refused with the first difference.
        strict: Refuse ops without a sharding rule instead of replicating them.
        seed: Seed of dropout and of the initialisation of meta models.
        check_finite: Raise on all ranks when the loss is not finite.
        comm: The communicator, by default that of the job.
        **optimizer_options: Options of the optimizer, e.g. ``lr=3e-4``.

    Returns:
        The compiled model.

    Raises:
        AutoparError: For bad input; the subclass and message say which.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is of type {type(model).__name__}", expected="a torch.nn.Module")
    _check_call(example_inputs, example_kwargs, ("example_inputs", "example_kwargs"))
    if plan is not None and (mesh is not None or constraints is not None):
        raise InputError(
            "plan is given together with " + ("mesh" if mesh is not None else "constraints"),
            expected="a plan, which holds its mesh and what the axes split, or the other two",
            fix="leave one of them out",
        )
    if type(seed) is not int:
        raise InputError(f"seed is {seed!r}", expected="a whole number")
    comm = comm or from_environment()
    spec = _cluster(cluster)
    if spec is not None:
        Mesh((("cluster", spec.num_devices),)).check_world_size(comm.world_size)
    given = resolve(constraints, _mesh(mesh), spec.num_devices if spec else comm.world_size)
    compiled = CompiledModel(
        model,
        comm,
        CompileOptions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            optimizer_options=optimizer_options,
            mesh=given.mesh,
            constraints=given.constraints,
            plan=_plan(plan),
            fit=fitter(comm, spec),
            strict=strict,
            seed=seed,
            check_finite=check_finite,
            planner=None
            if plan is not None
            else planner(comm, spec, given, optimizer, strict=strict),
        ),
    )
    if example_inputs is not None or example_kwargs is not None:
        compiled.build(tuple(example_inputs or ()), dict(example_kwargs or {}))
    return compiled


def search(
    model: nn.Module,
    cluster: ClusterSpec | str | int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mesh: Mesh | str | Mapping[str, int] | None = None,
    constraints: str | Mapping[str, object] | None = None,
    optimizer: str = "adamw",
    strategy: str = "exact",
    effort: str = "normal",
    time_limit_s: float | None = None,
    objective: str = "time",
    step_within_s: float | None = None,
    top: int = 0,
    seed: int = 0,
    on_progress: Callable[[str], None] | None = None,
) -> Found:
    """Search for the best plan of `model` on a cluster one need not have.

    Args:
        model: The module; its parameters may be on the meta device.
        cluster: The cluster.
        args: Arguments of one call with the global batch.
        kwargs: Its keyword arguments.
        loss_fn: See `compile`.
        mesh: A mesh of axes ``pp``, ``dp`` and ``tp`` to keep; chosen by default.
        constraints: What else to keep, as in `compile`, or a configuration's file.
        optimizer: Name of the optimizer.
        strategy: ``exact``, ``expert``, ``mcmc``, ``rl`` or, for small problems, ``exhaustive``.
        effort: ``normal`` stops at a proven gap of 1 %, ``high`` at 0.5 %.
        time_limit_s: Seconds after which to stop with what there is.
        objective: Least is a step's ``time`` or, on part of the cluster, ``devices`` or ``cost``.
        step_within_s: Seconds that a step may take at most where it is not to be least.
        top: Runners-up that are wanted, beyond those that the search has priced anyway.
        seed: Of strategies that draw numbers.
        on_progress: Called with a line about what is going on.

    Returns:
        The plan, what it takes, the runners-up, and a certificate of how good it is.

    Raises:
        PlanError: If no plan fits, with what would.
    """
    _check_call(args, kwargs, ("args", "kwargs"))
    traced = trace(model, tuple(args), dict(kwargs or {}), loss_fn)
    spec = _cluster(cluster)
    assert spec is not None
    given = resolve(constraints, _mesh(mesh), spec.num_devices, search=True, call=(args, kwargs))
    kept = asked_of_search(given.constraints)
    request = Request(
        strategy=strategy, effort=effort, time_limit_s=time_limit_s, objective=objective,
        step_within_s=step_within_s, top=top, seed=seed, on_progress=on_progress, ahead=True,
    )  # fmt: skip
    traced = replace(traced, notes=(*traced.notes, *given.notes))
    return find_plan(traced, spec, given.mesh, kept, optimizer, request)


def plan(
    model: nn.Module,
    cluster: ClusterSpec | str | int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mesh: Mesh | str | Mapping[str, int] | None = None,
    constraints: str | Mapping[str, object] | None = None,
    strict: bool = False,
) -> Plan:
    """Plan `model` for a cluster one need not have.

    Args:
        model: The module; its parameters may be on the meta device.
        cluster: The cluster; by default as many devices as `mesh` has ranks, or one. With one, and
            neither a strategy nor a mesh with factors, the best plan is searched for (`search`).
        args: Arguments of one call with the global batch.
        kwargs: Its keyword arguments.
        loss_fn: See `compile`.
        mesh: See `compile`.
        constraints: See `compile`.
        strict: See `compile`.

    Returns:
        The plan; no process group is needed.

    Raises:
        PlanError: If a cluster is given and a device has too little memory for the plan; names
            what is too large, and by how much. Of CPUs only measured clusters are judged.
    """
    made, found = plan_and_predict(
        model, cluster, args, kwargs,
        loss_fn=loss_fn, mesh=mesh, constraints=constraints, strict=strict,
    )  # fmt: skip
    if found is not None:
        found.refuse_unless_fits()
    return made


def plan_and_predict(
    model: nn.Module,
    cluster: ClusterSpec | str | int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    mesh: Mesh | str | Mapping[str, int] | None = None,
    constraints: str | Mapping[str, object] | None = None,
    strict: bool = False,
) -> tuple[Plan, Prediction | None]:
    """`plan`, and what the plan takes if a cluster is given and the model has a loss.

    Returns:
        The plan with its forecast, also if it does not fit, and the prediction. None where it
        cannot be judged whether it fits: for CPUs whose memory is not measured.
    """
    _check_call(args, kwargs, ("args", "kwargs"))
    traced = trace(model, tuple(args), dict(kwargs or {}), loss_fn)
    spec, axes = _cluster(cluster), _mesh(mesh)
    given = resolve(constraints, axes, spec.num_devices if spec else None, call=(args, kwargs))
    axes, constraints = given.mesh, given.constraints
    traced = replace(traced, notes=(*traced.notes, *given.notes))
    kept = kept_by_search(constraints, cluster=spec is not None, mesh=axes is not None)
    if kept is not None and traced.loss is not None:
        spec = spec or ClusterSpec.local(axes.size if axes is not None else 1)
        found = find_plan(traced, spec, axes, kept, "adamw", Request(), strict=strict)
        return found.plan, found.prediction if memory_is_known(spec) else None
    if axes is None:
        axes = default_mesh(strategy_name(constraints), spec.num_devices if spec else 1)
    elif spec is not None:
        axes.check_devices(spec.num_devices)
    made, sharded = make_plan(traced.graph, axes, constraints, strict=strict, notes=traced.notes)
    refuse_unkeyed_random(traced.graph, sharded.factors, axes.size)
    if spec is None or traced.loss is None:
        return made, None
    made, priced_so = priced(made, traced, spec, "adamw")
    return made, priced_so if memory_is_known(spec) else None


def evaluate(
    plan: Plan | str | Path,
    model: nn.Module,
    cluster: ClusterSpec | str | int,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str = "adamw",
) -> Prediction:
    """What a plan takes on a cluster one need not have: seconds of a step, bytes of every rank.

    Args:
        plan: The plan or plan file.
        model: The module; its parameters may be on the meta device.
        cluster: The cluster.
        args: Arguments of one call with the global batch.
        kwargs: Its keyword arguments.
        loss_fn: See `compile`.
        optimizer: Name of the optimizer.

    Returns:
        The prediction; `autopar.cost_models.explain` says where it comes from.

    Raises:
        AutoparError: If the plan does not fit the model or has more ranks than the cluster devices.
    """
    _check_call(args, kwargs, ("args", "kwargs"))
    traced = trace(model, tuple(args), dict(kwargs or {}), loss_fn)
    spec, made = _cluster(cluster), _plan(plan)
    for name, value in (("cluster", spec), ("plan", made)):
        if value is None:
            raise InputError(f"{name} is None", expected=f"a {name}, to price a plan on it")
    assert spec is not None and made is not None
    if traced.loss is None:
        raise _no_loss()
    apply_plan(made, traced.graph)  # says what does not fit
    software = Software.of(spec.hardware(0), optimizer)
    return price(made, traced.graph, spec, loss=traced.loss, software=software)


def reprice(
    plan: Plan | str | Path,
    model: nn.Module,
    cluster: ClusterSpec | str | int | None = None,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: str | None = None,
) -> tuple[Plan, Prediction]:
    """The choices of a plan on another cluster, batch size or sequence length, predicted anew.

    Args:
        plan: The plan or plan file.
        model: The module that it was made for; its parameters may be on the meta device.
        cluster: The cluster; that which the plan was made for by default.
        args: Arguments of one call with the global batch, of any size.
        kwargs: Its keyword arguments.
        loss_fn: See `compile`.
        optimizer: Name of the optimizer; the one that was priced by default, or AdamW.

    Returns:
        The plan with its forecast, also if it does not fit, and the prediction; `Plan.forecast` and
        `autopar.plan.diff.differences` say what changed.

    Raises:
        PlanError: If the plan is for another model, with the first difference.
    """
    _check_call(args, kwargs, ("args", "kwargs"))
    made = _plan(plan)
    if made is None:
        raise InputError("plan is None", expected="a plan, to price it")
    told, spec = made.forecast, _cluster(cluster)
    if spec is None:
        if told is None:
            raise InputError(
                "no cluster is given, and the plan does not say what it was made for",
                expected='a cluster, such as "8x8xH100-SXM"',
                where="cluster",
            )
        spec = cluster_of(told.cluster)
    traced = trace(model, tuple(args), dict(kwargs or {}), loss_fn)
    if traced.loss is None:
        raise _no_loss()
    adapted, _ = adapt(made, traced.graph)
    return priced(adapted, traced, spec, optimizer or optimizer_of(made))


def _no_loss() -> InputError:
    return InputError(
        "a prediction needs the model's loss: without one there is no backward to price",
        expected="a model that returns a scalar, or loss_fn",
        fix="pass loss_fn=...",
        where="loss_fn",
    )


def measure(
    ranks: LocalRanks | int | None = None,
    *,
    quick: bool = False,
    comm: Communicator | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Calibration:
    """Measure this machine: kernels and collectives while all ranks work, and figures that fit.

    Args:
        ranks: A pool, or how many local ranks to start; one per core by default.
        quick: Take less time, and fewer samples.
        comm: The ranks of a job that is running instead; all of them call. On CUDA there is one
            per device.
        on_progress: Called with what is being timed, how much is done, and of how much.

    Returns:
        The machine as a cluster, `cluster`, and how well it fits what was timed.

    Raises:
        InputError: For fewer than one rank.
        ClusterError: If the catalogue does not have the device.

    Example:
        >>> found = measure(2)                                             # doctest: +SKIP
        >>> found.cluster.save("cluster.yaml")                             # doctest: +SKIP
    """
    machine = _timed(ranks, comm, quick, on_progress)
    today = datetime.date.today().isoformat()
    return calibrate(machine, source=f"measured by autopar profile on {today}")


def _timed(
    ranks: LocalRanks | int | None,
    comm: Communicator | None,
    quick: bool,
    on_progress: Callable[[str, int, int], None] | None,
) -> Machine:
    def told(rank: int, value: Any) -> None:
        if rank == 0 and on_progress is not None:
            on_progress(*value)

    if comm is not None:
        before, comm.report = comm.report, lambda value: told(comm.rank, value)
        try:
            return time_machine(comm, quick)
        finally:
            comm.report = before
    if isinstance(ranks, LocalRanks):
        pool: list[Machine] = ranks.run(time_machine, quick, on_report=told)
        return pool[0]
    with LocalRanks(core_count() if ranks is None else ranks) as started:
        return _timed(started, None, quick, on_progress)


def load_plan(path: str | Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: If it is missing or no plan.
    """
    return Plan.load(path)
