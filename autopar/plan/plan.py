"""The plan: a JSON file that people read, edit and keep, and the runtime carries out.

A plan speaks in FQNs, module paths, factors and mesh axes, never in node names. It records what
the model's parameters were (so that another model is refused with its first difference), how each
of them is stored, what each axis splits, and every op whose choice differs from what the axes'
factors imply. It loads without torch and holds no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.plan.parts import PipelinePlan, ZeroPlan, check_pipeline, part_lines, read_part
from autopar.plan.strategies import prime_factors
from autopar.sharding.mesh import Mesh

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """How one parameter is stored.

    Attributes:
        fqn: Fully qualified name.
        shape: Global shape.
        dtype: Dtype name.
        placement: One word per mesh sub-axis: ``whole`` or ``factor@dim:stride x size``.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    placement: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnruledOp:
    """An op that runs replicated because it has no sharding rule.

    Attributes:
        op: The operator.
        module: Path of the module that calls it.
        source: ``file:line``.
        size_bytes: Bytes of operands every rank must hold whole for it.
    """

    op: str
    module: str
    source: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A parallelisation of one model on one mesh.

    Attributes:
        mesh: ``((axis, size), ...)``, outermost first.
        strategy: Name of the constraints it came from.
        order: What every axis but the pipeline's splits, best first.
        storage: Axes over which parameters are stored split as well.
        explicit: Whether `order` was given factor by factor (a factor that cannot be split as
            asked is then an error).
        overrides: Choices that differ from what `order` implies: op key to one choice per
            sub-axis.
        parameters: How each parameter is stored.
        pipeline: Stages, microbatches and their schedule.
        zero: What data-parallel ranks hold once.
        recompute: Patterns (as `fnmatch` reads them) over op keys: what backward computes again
            instead of keeping it; one that begins with ``!`` takes ops out again.
        graph: Fingerprint of the graph's structure.
        inputs: ``(path, text of the spec)`` of every user input.
        unruled: Ops that run replicated.
        searched: Whether a search chose the plan.
        notes: What people should know.
    """

    mesh: tuple[tuple[str, int], ...]
    strategy: str
    order: tuple[tuple[str, tuple[str, ...]], ...]
    storage: tuple[str, ...] = ()
    explicit: bool = False
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parameters: tuple[ParameterPlan, ...] = ()
    pipeline: PipelinePlan = field(default_factory=PipelinePlan)
    zero: ZeroPlan = field(default_factory=ZeroPlan)
    recompute: tuple[str, ...] = ()
    graph: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    unruled: tuple[UnruledOp, ...] = ()
    searched: bool = False
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    @property
    def device_mesh(self) -> Mesh:
        """The mesh as an object."""
        return Mesh(self.mesh)

    @property
    def tensor_axes(self) -> tuple[tuple[str, int], ...]:
        """Axes of the mesh that split tensors: all but the pipeline's."""
        return tuple(item for item in self.mesh if item[0] != self.pipeline.axis)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline.stages(self.mesh)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan.

        Args:
            text: JSON text.
            where: Name of the source, for errors.

        Raises:
            PlanError: If the text is no plan; names the field.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"the plan is not JSON: {error.msg}",
                where=f"{where}:{error.lineno}:{error.colno}",
            ) from None
        return _plan(data, where)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: If the file is missing or no plan.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan file: {error}", where=str(path)) from None
        return cls.from_json(text, str(path))

    def _placed(self, placement: tuple[str, ...]) -> str:
        """Words such as ``heads (dim 0) over tp``."""
        axes = [
            name for name, size in self.tensor_axes for _ in range(len(prime_factors(size)) or 1)
        ]
        split: dict[str, list[str]] = {}
        for axis, word in zip(axes, placement, strict=True):
            if word != "whole":
                factor, _, where = word.partition("@")
                key = f"{factor} (dim {where.partition(':')[0]})"
                split.setdefault(key, []).append(axis)
        parts = [
            f"{what} over {' and '.join(dict.fromkeys(names))}" for what, names in split.items()
        ]
        return ", ".join(parts) or "whole"

    def summary(self) -> str:
        """A few lines for people: mesh, what is split over what, what is not."""
        lines = [
            f"mesh      {Mesh(self.mesh)}  ({Mesh(self.mesh).size} ranks)",
            f"strategy  {self.strategy}" + ("" if self.searched else "  (not searched)"),
        ]
        for axis, factors in self.order:
            extra = ", parameters stored split" if axis in self.storage else ""
            lines.append(f"  {axis:<8}splits {', '.join(factors) or 'nothing'}{extra}")
        lines += part_lines(self.pipeline, self.zero, self.recompute, self.mesh)
        if self.overrides:
            lines.append(f"  {len(self.overrides)} ops chosen one by one")
        groups: dict[str, list[ParameterPlan]] = {}
        for item in self.parameters:
            groups.setdefault(self._placed(item.placement), []).append(item)
        lines.append("parameters")
        for text, items in groups.items():
            names = ", ".join(item.fqn for item in items[:3]) + (", ..." if len(items) > 3 else "")
            lines.append(f"  {len(items):>4} {text}: {names}")
        for unruled in self.unruled:
            place = unruled.module or "(root)"
            lines.append(
                f"no rule   {unruled.op} in {place}: replicated, {unruled.size_bytes:,} bytes"
            )
        lines += [f"note      {note}" for note in self.notes]
        return "\n".join(lines)


_FIELDS = {item.name for item in fields(Plan)}


def _fail(where: str, path: str, got: object, expected: str) -> PlanError:
    return PlanError(
        f"plan field {path} is {got!r}"[:300], expected=expected, where=f"{where}: {path}"
    )


def _strings(data: Any, where: str, path: str) -> tuple[str, ...]:
    if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
        raise _fail(where, path, data, "a list of strings")
    return tuple(data)


def _pairs(data: Any, where: str, path: str) -> list[tuple[str, Any]]:
    good = isinstance(data, list) and all(
        isinstance(item, list) and len(item) == 2 and isinstance(item[0], str) for item in data
    )
    if not good:
        raise _fail(where, path, data, "a list of [name, value] pairs")
    return [(item[0], item[1]) for item in data]


def _records(data: Any, where: str, path: str, kind: type, types: Mapping[str, type]) -> list[Any]:
    if not isinstance(data, list):
        raise _fail(where, path, data, "a list of objects")
    found = []
    for index, item in enumerate(data):
        here = f"{path}[{index}]"
        if not isinstance(item, dict) or set(item) != set(types):
            raise _fail(where, here, item, "an object with the keys " + ", ".join(types))
        for key, wanted in types.items():
            if not isinstance(item[key], wanted) or (wanted is int and isinstance(item[key], bool)):
                raise _fail(where, f"{here}.{key}", item[key], f"a {wanted.__name__}")
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
        found.append(kind(**values))
    return found


_TYPES: dict[str, tuple[type, str]] = {
    "strategy": (str, "a string"),
    "graph": (str, "a string"),
    "explicit": (bool, "true or false"),
    "searched": (bool, "true or false"),
    "overrides": (dict, "an object from op key to choices"),
}


def _check_fields(data: Any, where: str) -> None:
    """Refuse JSON that has other fields than a plan, or scalars of the wrong type."""
    if not isinstance(data, dict):
        raise _fail(where, "$", type(data).__name__, "an object")
    version = data.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise _fail(where, "schema_version", version, f"{SCHEMA_VERSION}, the only version so far")
    for name in data:
        if name not in _FIELDS:
            raise _fail(where, name, data[name], "one of the fields " + ", ".join(sorted(_FIELDS)))
    for name in sorted(_FIELDS - set(data)):
        raise PlanError(f"plan field {name} is missing", where=f"{where}: {name}")
    for name, (kind, words) in _TYPES.items():
        if not isinstance(data[name], kind):
            raise _fail(where, name, data[name], words)


def _plan(data: Any, where: str) -> Plan:
    """Check and build a plan from parsed JSON."""
    _check_fields(data, where)
    mesh = _pairs(data["mesh"], where, "mesh")

    def fail(path: str, got: object, expected: str) -> PlanError:
        return _fail(where, path, got, expected)

    pipeline: PipelinePlan = read_part(data["pipeline"], PipelinePlan, fail, "pipeline")
    zero: ZeroPlan = read_part(data["zero"], ZeroPlan, fail, "zero")
    try:
        axes = Mesh(tuple(mesh)).axes
        check_pipeline(pipeline, axes, f"{where}: pipeline.")
        count = sum(len(prime_factors(n)) or 1 for name, n in axes if name != pipeline.axis)
    except PlanError as error:
        here = error.where or f"{where}: mesh"
        raise PlanError(error.what, expected=error.expected, fix=error.fix, where=here) from None
    parameters = _records(
        data["parameters"], where, "parameters", ParameterPlan,
        {"fqn": str, "shape": list, "dtype": str, "placement": list},
    )  # fmt: skip
    for index, item in enumerate(parameters):
        path = f"parameters[{index}].placement"
        if len(_strings(list(item.placement), where, path)) != count:
            raise _fail(
                where, path, list(item.placement), f"{count} words, one per sub-axis of the mesh"
            )
    unruled = _records(
        data["unruled"], where, "unruled", UnruledOp,
        {"op": str, "module": str, "source": str, "size_bytes": int},
    )  # fmt: skip
    inputs = _pairs(data["inputs"], where, "inputs")
    for index, (_, text) in enumerate(inputs):
        if not isinstance(text, str):
            raise _fail(where, f"inputs[{index}][1]", text, "a string")
    return Plan(
        mesh=tuple(mesh),
        strategy=data["strategy"],
        order=tuple(
            (axis, _strings(factors, where, f"order[{index}][1]"))
            for index, (axis, factors) in enumerate(_pairs(data["order"], where, "order"))
        ),
        storage=_strings(data["storage"], where, "storage"),
        explicit=data["explicit"],
        overrides={
            key: _strings(value, where, f"overrides[{key!r}]")
            for key, value in data["overrides"].items()
        },
        parameters=tuple(parameters),
        pipeline=pipeline,
        zero=zero,
        recompute=_strings(data["recompute"], where, "recompute"),
        graph=data["graph"],
        inputs=tuple(inputs),
        unruled=tuple(unruled),
        searched=data["searched"],
        notes=_strings(data["notes"], where, "notes"),
    )
