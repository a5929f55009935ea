"""How the tests run a model under a plan: verified beside one device, or by hand on threads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor, nn

from autopar.runtime.comm import Communicator, SoloCommunicator
from autopar.runtime.comm_threads import run_threads
from autopar.runtime.compiled import CompiledModel, CompileOptions
from autopar.runtime.verify import VerifyReport, verify
from autopar.sharding.mesh import Mesh
from autopar.trace import Traced, trace

T = TypeVar("T")
Plan = tuple[str, str | Mapping[str, object]]

ALL_PLANS: tuple[Plan, ...] = (
    ("dp=3", "ddp"),
    ("dp=2", "fsdp"),
    ("tp=4", "megatron"),
    ("dp=2,tp=2", "megatron_sp"),
    ("x=2,y=2", "2d"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, one call of it, and its loss."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., Tensor] | None = None

    @functools.cached_property
    def traced(self) -> Traced:
        """The trace, made once."""
        return trace(self.model, self.args, dict(self.kwargs), self.loss)

    def with_model(self, model: nn.Module) -> Case:
        """The same call of another model."""
        return replace(self, model=model)


def compare(case: Case, mesh: str, constraints: Any, **options: Any) -> VerifyReport:
    """Verify a plan on threads; `options` as for `autopar.verify`."""
    return verify(
        case.model, case.args, case.kwargs, loss_fn=case.loss, mesh=mesh,
        constraints=constraints, threads=True, traced=case.traced, **options,
    )  # fmt: skip


def agree(case: Case, mesh: str, constraints: Any, **options: Any) -> VerifyReport:
    """Assert that a plan trains what one device trains."""
    report = compare(case, mesh, constraints, **options)
    assert report.equal, f"{mesh} {constraints}\n{report.summary()}"
    return report


def compiled_on(
    comm: Communicator, case: Case, mesh: str | None = None, constraints: Any = None, **options: Any
) -> CompiledModel:
    """One rank's compiled model, built; `options` as in `CompileOptions`."""
    chosen = CompileOptions(
        loss_fn=case.loss, mesh=Mesh.parse(mesh) if mesh else None, constraints=constraints,
        **options,
    )  # fmt: skip
    model = CompiledModel(case.model, comm, chosen, case.traced)
    model.build(case.args, case.kwargs)
    return model


def on_ranks(
    case: Case, mesh: str, constraints: Any, body: Callable[[CompiledModel], T], **options: Any
) -> list[T]:
    """``body(compiled)`` on every rank of `mesh`, ranks being threads."""
    _ = case.traced  # made here, not by all threads at once

    def rank(comm: Communicator) -> T:
        return body(compiled_on(comm, case, mesh, constraints, **options))

    return run_threads(Mesh.parse(mesh).size, rank)


def alone(case: Case, **options: Any) -> CompiledModel:
    """The model on one device, built."""
    return compiled_on(SoloCommunicator(), case, **options)


def placements(case: Case, mesh: str, constraints: Any) -> dict[str, tuple[str, ...]]:
    """How each parameter is stored: one factor name (or ``whole``) per mesh sub-axis."""
    plan = on_ranks(case, mesh, constraints, lambda compiled: compiled.plan)[0]
    return {
        item.fqn: tuple(word.partition("@")[0] for word in item.placement)
        for item in plan.parameters
    }


def losses(
    case: Case, mesh: str, constraints: Any, steps: int = 3, **options: Any
) -> list[list[Tensor]]:
    """The losses of `steps` training steps, by rank."""

    def body(compiled: CompiledModel) -> list[Tensor]:
        return [compiled.step(*case.args, **case.kwargs) for _ in range(steps)]

    return on_ranks(case, mesh, constraints, body, **options)
