"""Constraints: named strategies and factor-to-axis maps, in one normal form.

A constraint says, for every mesh axis, which factors it splits and in which order of
preference. An op takes the first of them that it has; what it has none of, it replicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import PlanError, meant
from autopar.plan.extras import (
    RESERVED,
    mesh_inside,
    pipeline_axis,
    read_pipeline,
    read_recompute,
    read_zero,
    split_text,
)
from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.placements import Wanted, read_placements
from autopar.schedules.make import SCHEDULES
from autopar.sharding.mesh import MICROBATCH, Mesh

MODEL = ("heads", "kv_heads", "group", "ffn", "vocab", "experts")
"""Factors that tensor parallelism splits, best first (Megatron-LM, arXiv 1909.08053)."""

ROLES: Mapping[str, tuple[str, ...]] = {
    "megatron": MODEL,
    "megatron_sp": (*MODEL, "seq"),
    "sequence": ("seq",),
    "features": ("hidden", "channels"),
}
"""What a tensor axis may split, by name: factors, best first. Constraint ``tensor`` names one."""

STANDARD = (*MODEL, "batch", "seq", "hidden", "channels")
"""Factors that strategies put on axes, whether or not a model has them."""

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3", "megatron", "megatron_sp", "2d")

_BY_NAME: Mapping[str, tuple[str, ...]] = {"cp": ("seq",)}
"""What mesh axes of these names (context parallelism) split under every named strategy."""

_DATA = frozenset({"batch", "seq"})
"""Factors that no parameter has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What every mesh axis splits.

    Attributes:
        strategy: The name they came by, ``custom`` for a factor map.
        order: For each axis but the pipeline's the factors it splits, best first.
        storage: Axes over which parameters are also stored split (ZeRO-3 style): they are
            gathered before use and their gradients reduce-scattered.
        explicit: Whether a factor that cannot be split as asked is an error.
        pipeline: Stages, microbatches and schedule; its cuts may be module paths.
        zero: What data-parallel ranks hold once.
        recompute: Patterns over op keys, or names of policies.
        placements: How single parameters have to lie.
    """

    strategy: str
    order: tuple[tuple[str, tuple[str, ...]], ...]
    storage: tuple[str, ...] = ()
    explicit: bool = False
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    zero: ZeroPlan = field(default_factory=ZeroPlan)
    recompute: tuple[str, ...] = ()
    placements: tuple[Wanted, ...] = ()

    def names(self, axis: str) -> tuple[str, ...]:
        """Factors that `axis` splits, best first; the axis in time splits the batch."""
        found = dict(self.order).get(axis)
        if found is None:
            return ("batch",) if axis == MICROBATCH else ()
        return found

    def data_axes(self) -> tuple[str, ...]:
        """Axes along which only data is split."""
        return tuple(axis for axis, names in self.order if names and _DATA.issuperset(names))


def strategy_name(constraints: object) -> str:
    """The strategy that constraints name, ``ddp`` if none: what `default_mesh` goes by."""
    if isinstance(constraints, Mapping):
        constraints = constraints.get("strategy", "ddp")
    return constraints if isinstance(constraints, str) else "ddp"


def default_mesh(strategy: str, num_devices: int) -> Mesh:
    """The mesh a strategy uses when none is given.

    Args:
        strategy: Name of the strategy, or constraint text that begins with one.
        num_devices: Number of ranks.
    """
    strategy = strategy.partition(",")[0].strip()
    if strategy in ("megatron", "megatron_sp"):
        tensor = math.gcd(num_devices, 8)
        return _mesh(dp=num_devices // tensor, tp=tensor)
    if strategy == "2d":
        rows = max(n for n in range(1, math.isqrt(num_devices) + 1) if num_devices % n == 0)
        return _mesh(x=rows, y=num_devices // rows)
    return Mesh((("dp", num_devices),))


def _mesh(**axes: int) -> Mesh:
    kept = tuple((name, size) for name, size in axes.items() if size > 1)
    return Mesh(kept or (("dp", 1),))


def _named(strategy: str, mesh: Mesh) -> Constraints:
    batch = ("batch",)
    order: list[tuple[str, tuple[str, ...]]] = []
    data = ("dp", "batch", "replica", *_BY_NAME)
    tensor = [name for name in mesh.names if name not in data]
    for name in mesh.names:
        if name in _BY_NAME:
            order.append((name, _BY_NAME[name]))
        elif strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3") or name not in tensor:
            order.append((name, batch))
        elif strategy == "megatron":
            order.append((name, MODEL))
        elif strategy == "megatron_sp":
            order.append((name, (*MODEL, "seq")))
        else:
            order.append((name, MODEL if name == tensor[0] else ("hidden", "channels")))
    if strategy == "2d" and len(tensor) != 2:
        raise PlanError(
            f"strategy 2d needs two tensor axes, mesh {mesh} has {len(tensor)}",
            expected='a mesh such as "x=2,y=2" or "dp=2,x=2,y=2"',
        )
    return Constraints(
        strategy=strategy,
        order=tuple(order),
        storage=mesh.names if strategy == "fsdp" else (),
    )


def parse_constraints(constraints: str | Mapping[str, object] | None, mesh: Mesh) -> Constraints:
    """Normal form of what a user passes as ``constraints=``.

    Args:
        constraints: A strategy name, perhaps followed by extras (see `autopar.plan.extras`); a map
            from factor to mesh axis (or to several axes), with extras by their reserved keys; or
            None for ``ddp``.
        mesh: The mesh the axes are looked up in.

    Raises:
        PlanError: For an unknown strategy or axis, or a value of the wrong type.
    """
    if constraints is None:
        constraints = "ddp"
    if isinstance(constraints, str):
        constraints = split_text(constraints)
    if not isinstance(constraints, Mapping):
        raise PlanError(
            f"constraints are of type {type(constraints).__name__}",
            expected='a strategy name or a map such as {"heads": "tp", "batch": "dp"}',
        )
    extras: dict[str, Any] = {k: v for k, v in constraints.items() if k in RESERVED}
    splits = {key: value for key, value in constraints.items() if key not in RESERVED}
    pipeline = read_pipeline(extras, mesh)
    rest = tensor_mesh(mesh, pipeline_axis(extras, mesh))
    base = _splits(extras, splits, mesh, rest)
    if base.strategy in ("zero1", "zero2", "zero3") and "zero" not in extras:
        extras["zero"] = int(base.strategy[-1])
    return replace(
        base,
        pipeline=pipeline,
        zero=read_zero(extras, pipeline, base.data_axes(), base.storage),
        recompute=read_recompute(extras),
        placements=read_placements(extras["placements"]) if "placements" in extras else (),
    )


def _splits(
    extras: Mapping[str, Any], splits: Mapping[Any, Any], mesh: Mesh, rest: Mesh
) -> Constraints:
    """What each axis splits: by strategy or factor by factor."""
    strategy = extras.get("strategy", "ddp")
    if splits and "strategy" in extras:
        raise PlanError(
            f"constraints give strategy {strategy!r} and put {next(iter(splits))!r} on an axis",
            expected="a strategy or a map of factors, not both; other keys are "
            + ", ".join(RESERVED),
            where=f"constraints[{next(iter(splits))!r}]",
        )
    if "tensor" in extras:
        return _role(extras, splits, mesh, rest)
    if splits or not extras:
        return _factor_map(splits, mesh, rest)
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise PlanError(
            f"unknown strategy {strategy!r}",
            expected="one of " + ", ".join(STRATEGIES) + ", or a map from factor to axis",
            fix=f"{strategy} is a schedule: say schedule={strategy}"
            if strategy in SCHEDULES
            else meant(strategy, STRATEGIES),
        )
    return _named(strategy, rest)


def read_role(value: object) -> str:
    """The name of what a tensor axis splits that constraint ``tensor`` gives.

    Raises:
        PlanError: If it is none of `ROLES`.
    """
    if not isinstance(value, str) or value not in ROLES:
        raise PlanError(
            f"a tensor axis cannot split {value!r}",
            expected="; ".join(f"{name} ({', '.join(order)})" for name, order in ROLES.items()),
            fix=meant(value, ROLES) or 'put factors on axes instead: {"heads": "tp", "ffn": "tp"}',
            where="constraints['tensor']",
        )
    return value


def no_tensor_axis(role: str, mesh: Mesh) -> PlanError:
    """That constraints say what tensor ranks split, where a mesh has none.

    Args:
        role: What they are to split.
        mesh: The mesh.
    """
    wide = {name: size for name, size in mesh.axes if size > 1} or {"dp": 2}
    most = max(wide, key=lambda name: (name != "pp", wide[name]))
    few = prime_factors(wide[most])[0]
    wide[most] //= few
    like = _mesh(**wide, tp=few)
    return PlanError(
        f"tensor={role} says what tensor ranks split, and mesh {mesh} has no tensor axis (tp=1)",
        expected=f"a mesh with an axis tp of at least 2 ranks, such as {like}",
        fix="or leave out what they split",
        where="mesh",
    )


def _role(
    extras: Mapping[str, Any], splits: Mapping[Any, Any], mesh: Mesh, rest: Mesh
) -> Constraints:
    """Constraints of axes that split data, and of tensor axes that split what is named."""
    role = read_role(extras["tensor"])
    other = next(iter(splits), "strategy" if "strategy" in extras else None)
    if other is not None:
        raise PlanError(
            f"constraints say tensor={role}, and {other!r} says what axes split, too",
            expected="one of them",
            where="constraints['tensor']",
        )
    named = _named("megatron", rest)
    if not any(own == MODEL and rest.axis_size(name) > 1 for name, own in named.order):
        raise no_tensor_axis(role, mesh)
    order = tuple((name, ROLES[role] if own == MODEL else own) for name, own in named.order)
    return Constraints(strategy=role if role in STRATEGIES else "custom", order=order)


def _factor_map(splits: Mapping[Any, Any], mesh: Mesh, rest: Mesh) -> Constraints:
    """Constraints of a map from factor to axes of `rest`, all of `mesh` but the pipeline's."""
    order: dict[str, list[str]] = {name: [] for name in rest.names}
    for factor, axes in splits.items():
        if factor == "mesh":
            raise mesh_inside(axes)
        if not isinstance(factor, str):
            raise PlanError(
                f"constraints name a factor {factor!r}",
                expected='names such as "heads", "ffn", "vocab", "batch" or "seq"',
                where=f"constraints[{factor!r}]",
            )
        for axis in axes if isinstance(axes, list | tuple) else (axes,):
            slip = meant(factor, RESERVED)
            if slip is not None and not isinstance(axis, str):
                raise PlanError(
                    f"cannot read constraint {factor!r}: {axis!r}",
                    expected="a mesh axis for a factor, or one of the keys " + ", ".join(RESERVED),
                    fix=slip,
                    where=f"constraints[{factor!r}]",
                )
            if not isinstance(axis, str) or axis not in order:
                what = "holds the pipeline" if axis in mesh.names else f"mesh {mesh} lacks"
                raise PlanError(
                    f"factor {factor!r} is put on mesh axis {axis!r}, which {what}",
                    expected="one of " + ", ".join(rest.names),
                    fix=meant(axis, rest.names) or slip,
                    where=f"constraints[{factor!r}]",
                )
            order[axis].append(factor)
    return Constraints(
        strategy="custom",
        order=tuple((name, tuple(factors)) for name, factors in order.items()),
        explicit=True,
    )


def check_factor_names(constraints: Constraints, known: tuple[str, ...]) -> None:
    """Refuse a factor that the model does not have.

    Args:
        constraints: The constraints; only explicit ones are checked.
        known: Names of all factors that some op of the model can split.

    Raises:
        PlanError: For an unknown factor.
    """
    if not constraints.explicit:
        return
    for axis, factors in constraints.order:
        for factor in factors:
            if factor.partition(".")[0] not in known:
                raise PlanError(
                    f"the model has no factor {factor!r}",
                    expected="one of " + ", ".join(known),
                    fix=meant(factor, known),
                    where=f"constraints[{factor!r}] -> {axis!r}",
                )


def tensor_mesh(mesh: Mesh, axis: str = "pp") -> Mesh:
    """`mesh` without the axis of the pipeline: what tensors may be split over in each stage.

    Args:
        mesh: The user's mesh.
        axis: The pipeline's axis; `mesh` need not have it.
    """
    return Mesh(tuple(item for item in mesh.axes if item[0] != axis))


def fine_axes(mesh: Mesh, pipeline: PipelinePlan) -> tuple[Mesh, tuple[str, ...]]:
    """The mesh of a sharded graph: the axis in time, then prime sub-axes of the tensor mesh.

    Args:
        mesh: The user's mesh.
        pipeline: Which axis holds stages, and how many microbatches there are.

    Returns:
        The mesh, and for each of its axes the user's axis, or `MICROBATCH`.
    """
    fine, owner = split_axes(tensor_mesh(mesh, pipeline.axis))
    if pipeline.microbatches == 1:
        return fine, owner
    return Mesh(((MICROBATCH, pipeline.microbatches), *fine.axes)), (MICROBATCH, *owner)


def split_axes(mesh: Mesh) -> tuple[Mesh, tuple[str, ...]]:
    """`mesh` with every axis split into prime sub-axes.

    A factor smaller than an axis (2 kv heads over 4 ranks) can then take a part of it, and the
    next factor the rest.

    Returns:
        The finer mesh and, for each of its axes, the axis of `mesh` it belongs to.
    """
    axes: list[tuple[str, int]] = []
    owner: list[str] = []
    for name, size in mesh.axes:
        primes = prime_factors(size) or [1]
        for index, prime in enumerate(primes):
            axes.append((name if len(primes) == 1 else f"{name}_{index}", prime))
            owner.append(name)
    return Mesh(tuple(axes)), tuple(owner)


def prime_factors(number: int) -> list[int]:
    """Prime factors in ascending order, with repeats."""
    found, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            found.append(divisor)
            number //= divisor
        divisor += 1
    return found + ([number] if number > 1 else [])
