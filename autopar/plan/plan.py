"""The plan: a JSON file that people read, edit and keep, and the runtime carries out.

A plan speaks in FQNs, module paths, factors and mesh axes, never in node names. It records what
the model's parameters were (so that another model is refused with its first difference), how each
of them is stored, what each axis splits, and every op whose choice differs from what the axes'
factors imply. Beside its choices it may hold what was predicted of them. It loads without torch
and holds no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autopar.errors import PlanError
from autopar.plan.forecast import Forecast
from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.shapes import dump
from autopar.plan.strategies import prime_factors
from autopar.sharding.mesh import Mesh

SCHEMA_VERSION = 2
"""Version of the files that are written; `autopar.plan.migrate` reads those before it."""


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
        graph: Fingerprint of the graph: its operators, wiring and sizes, whatever it calls them.
        structure: The same without sizes: that of the model for any batch and sequence length.
        inputs: ``(path, text of the spec)`` of every user input.
        unruled: Ops that run replicated.
        searched: Whether a search chose the plan.
        notes: What people should know.
        forecast: What was predicted of the plan; None if nothing was.
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
    structure: str = ""
    inputs: tuple[tuple[str, str], ...] = ()
    unruled: tuple[UnruledOp, ...] = ()
    searched: bool = False
    notes: tuple[str, ...] = ()
    forecast: Forecast | None = None
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
        data = asdict(self)
        return dump({"schema_version": data.pop("schema_version"), **data}) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to `path` as JSON.

        Raises:
            PlanError: If that is not possible.
        """
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"cannot write the plan file: {error.strerror}",
                expected="a file in a folder that can be written to",
                where=str(path),
            ) from None

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """Read a plan.

        Args:
            text: JSON text.
            where: Name of the source, for errors.

        Raises:
            PlanError: If the text is no plan; says the first fault, with its JSON path.
                `autopar.plan.lint` says all of them.
        """
        from autopar.plan.codec import read_plan, refuse

        plan, faults = read_plan(text)
        return refuse(faults, where) if plan is None else plan

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan file.

        Raises:
            PlanError: If the file is missing or no plan.
        """
        from autopar.plan.codec import read_text, refuse

        text, faults = read_text(path)
        return refuse(faults, str(path)) if faults else cls.from_json(text, str(path))

    def placed(self, placement: tuple[str, ...]) -> str:
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
