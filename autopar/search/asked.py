"""What a search must keep: the parts of a plan that a mesh and constraints fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import PlanError, meant
from autopar.plan.extras import (
    POLICIES,
    RESERVED,
    mesh_inside,
    read_number,
    read_recompute,
    read_texts,
    split_text,
)
from autopar.plan.placements import Wanted, read_placements
from autopar.plan.strategies import ROLES, no_tensor_axis, read_role
from autopar.schedules.make import SCHEDULES
from autopar.search.space import SYNCHRONOUS
from autopar.sharding.mesh import Mesh

OPTIONS = ("full", "selective", "none")
"""Policies of what a layer computes again, least memory first."""
FIXABLE = (
    "microbatches", "schedule", "chunks", "zero", "recompute", "cuts", "tensor", "placements",
)  # fmt: skip
"""Constraints beside a mesh that a search keeps; factors on axes are others."""
SEARCH = "search"
"""What a plan that was searched for says where others name a strategy."""
TIME, DEVICES, COST = "time", "devices", "cost"
OBJECTIVES = (TIME, DEVICES, COST)
"""What a search makes least: seconds of a step on all devices; devices; cost per token."""
MICRO_BATCH, STAGE_LAYERS = "micro_batch", "stage_layers"
"""The same in configurations of other frameworks: samples of a data rank at a time; layers of the
first and the last of so many stages, where all others have as many each."""
_SIZES = (("pp", "pipeline"), ("dp", "data"), ("tp", "tensor"))
_ABOUT_MESH = ("cuts", "tensor", "placements")
_NUMBERS = ("microbatches", "chunks", MICRO_BATCH)

Allowed = dict[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What constraints fix.

    Attributes:
        mesh: The mesh, if one is given.
        constraints: The rest, as it was given.
        allowed: Fields of points with the values that they may have, see `Space.value`.
        options: Policies of what layers may compute again, least memory first.
        recompute: What backward computes again, as patterns or policies, if that is given.
        cuts: Where stages begin, as op keys or module paths, if that is given.
        layers: Layers of the first and of the last stage, None for as many as the others have, and
            the number of stages; if that is given.
        splits: Factors that the tensor axis has to split.
        placements: How single parameters have to lie.
    """

    mesh: Mesh | None = None
    constraints: Mapping[str, Any] = field(default_factory=dict)
    allowed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    options: tuple[str, ...] = OPTIONS
    recompute: tuple[str, ...] = ()
    cuts: tuple[str, ...] = ()
    layers: tuple[int | None, int | None, int] | None = None
    splits: tuple[str, ...] = ()
    placements: tuple[Wanted, ...] = ()

    @classmethod
    def of(cls, mesh: Mesh | None, constraints: Mapping[str, Any]) -> Asked:
        """What a mesh and constraints ask for.

        Args:
            mesh: Axes ``pp``, ``dp`` and ``tp``; None to choose them.
            constraints: Some of `FIXABLE`, and factors on axes.

        Raises:
            PlanError: If something of it cannot be kept, whatever the model.
        """
        allowed: Allowed = {} if mesh is None else dict(_of_mesh(mesh))
        for name in _NUMBERS:
            if name in constraints:
                allowed[name] = (read_number(constraints, name, 1, 1),)
        if "schedule" in constraints:
            allowed["schedule"] = (_schedule(constraints["schedule"]),)
        if "zero" in constraints:
            allowed["zero"] = (_zero(constraints["zero"]),)
        cuts = read_texts(constraints, "cuts")
        if cuts:
            allowed["num_stages"] = (len(cuts) + 1,)
        layers = _layers(constraints.get(STAGE_LAYERS))
        if layers is not None and cuts:
            raise PlanError(
                f"cuts say where stages begin, and so does {STAGE_LAYERS}",
                expected="one of them",
                where="constraints['cuts']",
            )
        if layers is not None:
            allowed["num_stages"] = (layers[2],)
        again = read_recompute(constraints)
        options = OPTIONS if not again else again if again in _SINGLE else ("as asked",)
        splits = tuple(_splits(constraints))
        if "tensor" in constraints:
            allowed["role"] = (_role(constraints["tensor"], splits, mesh),)
        elif splits:
            allowed["role"] = _roles(splits)
        return cls(
            mesh=mesh,
            constraints=dict(constraints),
            allowed=allowed,
            options=options,
            recompute=again,
            cuts=cuts,
            layers=layers,
            splits=splits,
            placements=read_placements(constraints["placements"])
            if "placements" in constraints
            else (),
        )

    @property
    def pinned(self) -> bool:
        """Whether all choices along the tensor axis are given."""
        return "tensor" in self.constraints

    def texts(self) -> dict[str, str]:
        """What was asked for by name, each as text such as ``cuts=blocks.2+blocks.4``."""
        found = {} if self.mesh is None else {"mesh": f"mesh {self.mesh}"}
        for name, value in self.constraints.items():
            if name == "placements":
                text = "+".join(item.text() for item in self.placements)
            elif isinstance(value, list | tuple):
                text = "+".join(map(str, value))
            elif isinstance(value, Mapping):
                text = " ".join(f"{key} {_listed(part)}" for key, part in value.items())
            else:
                text = str(value)
            found[name] = f"{name}={text}"
        return found

    def text(self) -> str:
        """All of it in words; empty if nothing was asked for."""
        return ", ".join(self.texts().values())

    def without(self, name: str) -> Asked:
        """The same but for the mesh, or for one constraint."""
        rest = {key: value for key, value in self.constraints.items() if key != name}
        return Asked.of(None if name == "mesh" else self.mesh, rest)


_SINGLE = tuple((name,) for name in POLICIES)


def _listed(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _of_mesh(mesh: Mesh) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Sizes and order of the axes of a mesh."""
    sizes = dict(mesh.axes)
    unknown = sorted(set(sizes) - {"pp", "dp", "tp"})
    if unknown:
        raise PlanError(
            f"a search cannot fill mesh axis {unknown[0]!r}",
            expected="axes pp, dp and tp, or constraints that say what each axis splits",
            where="mesh",
        )
    for axis, name in _SIZES:
        yield name, (sizes.get(axis, 1),)
    names = [name for name, size in mesh.axes if size > 1]
    if "tp" in names[:-1]:
        usual = [item for item in mesh.axes if item[0] != "tp"] + [("tp", sizes["tp"])]
        raise PlanError(
            f"a search cannot keep the order of mesh {mesh}: the first axis is outermost, and"
            " tensor ranks are neighbours in all plans that are searched",
            expected="tp last; pp and dp in either order before it",
            fix=f"write {Mesh(tuple(usual))}, or say what each axis splits (a strategy or factors)",
            where="mesh",
        )
    if "pp" in names and "dp" in names:
        yield "data_outside", (names.index("dp") < names.index("pp"),)


def _zero(value: Any) -> int:
    """The ZeRO stage, of a number or of a stage with axes."""
    axes: Any = None
    if isinstance(value, Mapping) and "stage" in value and set(value) <= {"stage", "axes"}:
        value, axes = value["stage"], value.get("axes")
    if type(value) is not int or not 0 <= value <= 3:
        raise PlanError(
            f"constraint 'zero' is {value!r}",
            expected=RESERVED["zero"],
            where="constraints['zero']",
        )
    if axes and (not value or axes not in ("dp", ["dp"], ("dp",))):
        raise PlanError(
            f"ZeRO {value} of a search cannot divide over axes {axes!r}",
            expected="dp, the only axis of data of its plans; of ZeRO 0 none",
            where="constraints['zero']",
        )
    return value


def _layers(value: object) -> tuple[int | None, int | None, int] | None:
    """Layers of the first and of the last stage, and the number of stages."""
    if value is None:
        return None
    names = ("first", "last", "stages")
    if isinstance(value, Mapping) and set(value) == set(names):
        first, last, stages = (value[name] for name in names)
        whole = all(type(n) is int and n > 0 for n in (first, last) if n is not None)
        if whole and type(stages) is int and stages > 1:
            return first, last, stages
    raise PlanError(
        f"constraint {STAGE_LAYERS!r} is {value!r}",
        expected="a map of first and last, layers or none, and stages, a number from 2",
        where=f"constraints[{STAGE_LAYERS!r}]",
    )


def _schedule(value: object) -> str:
    if not isinstance(value, str) or value not in SCHEDULES:
        raise PlanError(
            f"unknown schedule {value!r}",
            expected=RESERVED["schedule"],
            fix=meant(value, SYNCHRONOUS) or meant(value, SCHEDULES),
            where="constraints['schedule']",
        )
    if value not in SYNCHRONOUS:
        raise PlanError(
            f"no search covers schedule {value}, "
            + ("which trains with weights that are some updates old"
               if SCHEDULES[value].asynchronous
               else "which takes as long as 1f1b and more memory"),
            expected="one of " + ", ".join(SYNCHRONOUS),
            fix="state a plan that has it: a strategy and a mesh with stages, such as --strategy "
            f"ddp --mesh pp=2,dp=2 --schedule {value} --microbatches 4",
            where="constraints['schedule']",
        )  # fmt: skip
    return value


def _role(value: object, splits: tuple[str, ...], mesh: Mesh | None) -> str:
    role = read_role(value)
    if mesh is not None and dict(mesh.axes).get("tp", 1) == 1:
        raise no_tensor_axis(role, mesh)
    if splits:
        raise PlanError(
            f"constraints say tensor={role}, and {splits[0]!r} says what axes split, too",
            expected="one of them",
            where="constraints['tensor']",
        )
    return role


def _splits(constraints: Mapping[Any, Any]) -> Iterator[str]:
    """Factors that are put on the tensor axis; those of other axes are only looked at."""
    for factor, axes in constraints.items():
        if factor in (*FIXABLE, MICRO_BATCH, STAGE_LAYERS):
            continue
        if factor == "mesh":
            raise mesh_inside(axes)
        given = axes if isinstance(axes, list | tuple) else (axes,)
        if (
            factor in RESERVED
            or not isinstance(factor, str)
            or not given
            or not all(isinstance(axis, str) for axis in given)
        ):
            raise PlanError(
                f"a search cannot keep constraint {factor!r}",
                expected="a mesh, factors on axes dp and tp, or some of " + ", ".join(FIXABLE),
                fix=meant(factor, FIXABLE),
                where=f"constraints[{factor!r}]",
            )
        for axis in given:
            if axis == "tp" and factor.partition(".")[0] != "batch":
                yield factor
            elif axis != "dp" or factor.partition(".")[0] != "batch":
                raise PlanError(
                    f"a search cannot put factor {factor!r} on axis {axis!r}",
                    expected="batch on dp, or another factor on tp"
                    if axis in ("pp", "dp")
                    else "axis dp or tp",
                    fix="the axis pp holds stages: say cuts=[...]" if axis == "pp" else None,
                    where=f"constraints[{factor!r}]",
                )


def _roles(splits: tuple[str, ...]) -> tuple[str, ...]:
    """What a tensor axis may split if it has to split these factors."""
    names = {factor.partition(".")[0] for factor in splits}
    found = tuple(role for role, order in ROLES.items() if names <= set(order))
    if not found:
        raise PlanError(
            f"no tensor axis that a search knows splits {' and '.join(splits)}",
            expected="; ".join(f"{role} splits {', '.join(own)}" for role, own in ROLES.items()),
            fix="plan without a search: a mesh, and every factor on an axis of it",
            where=f"constraints[{splits[0]!r}]",
        )
    return found


def kept_by_search(
    constraints: str | Mapping[str, object] | None,
    *,
    cluster: bool = True,
    mesh: bool = False,
    search: bool = False,
) -> dict[str, Any] | None:
    """Constraints that a search keeps; None if they say how to plan without one.

    Args:
        constraints: As users give them.
        cluster: Whether a cluster is given.
        mesh: Whether a mesh is given. With one, factors on its axes say how to plan; without,
            factors on ``tp``, and stages, are parts of a plan of which a search chooses the mesh.
        search: Whether a search is asked for.
    """
    if isinstance(constraints, str):
        constraints = split_text(constraints)
    given = dict(constraints or {})
    named = given.pop("strategy", None)
    about_mesh = "tp" in map(str, given.values()) or not set(given).isdisjoint(_ABOUT_MESH)
    part = set(given) <= set(FIXABLE) or (not mesh and about_mesh)
    if named == SEARCH or (named is None and (search or (cluster and part))):
        return given
    return None


def asked_of_search(
    constraints: str | Mapping[str, object] | None,
) -> dict[str, Any]:
    """Constraints that a search keeps, where one is asked for.

    Raises:
        PlanError: If they say how to plan without one.
    """
    kept = kept_by_search(constraints, search=True)
    if kept is None:
        raise PlanError(
            "the constraints name a strategy, and leave nothing to search",
            expected="factors on axes, or some of " + ", ".join(FIXABLE),
            fix="say what tensor axes split with tensor=...",
            where="constraints",
        )
    return kept
