"""What an export gives: the target's text, and what of the plan it could not say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from autopar.errors import InputError
from autopar.plan.plan import Plan
from autopar.registry import Registry
from autopar.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Something of a plan that a target cannot express.

    Attributes:
        what: What the plan says.
        instead: What the exported text makes of it.
        extra_bytes: Bytes more that a rank holds by it, predicted; None if not known.
        extra_s: Seconds more that a step takes by it, predicted; None if not known.
    """

    what: str
    instead: str
    extra_bytes: int | None = None
    extra_s: float | None = None

    @property
    def cost(self) -> str:
        """The cost in words, empty if it is not known."""
        parts = []
        if self.extra_bytes is not None:
            parts.append(f"{format_bytes(self.extra_bytes)} more on a rank")
        if self.extra_s is not None:
            parts.append(f"{format_seconds(self.extra_s)} more a step")
        return f"predicted: {', '.join(parts)}" if parts else ""

    def __str__(self) -> str:
        cost = f" ({self.cost})" if self.cost else ""
        return f"{self.what}: {self.instead}{cost}"

    def as_json(self) -> dict[str, Any]:
        """The fields, as ``--json`` prints them."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in a target's words.

    Attributes:
        text: Content of the file.
        losses: What of the plan it does not hold.
        notes: What else is needed to run it: how to launch, what the model must do itself.
    """

    text: str
    losses: tuple[Loss, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that plans can be exported to.

    Attributes:
        summary: What is written, in a line.
        export: Makes it from a plan.
    """

    summary: str
    export: Callable[[Plan], Exported]


TARGETS = Registry[Target]("export target", error=InputError)
"""Filled by the modules of the targets; `autopar.export.targets` imports them all."""


def comments(exported_losses: tuple[Loss, ...], notes: tuple[str, ...], mark: str = "# ") -> str:
    """Losses and notes as comment lines that end with a newline; empty if there are none."""
    lines = [f"{mark}note: {note}" for note in notes]
    lines += [f"{mark}not expressed: {loss}" for loss in exported_losses]
    return "".join(line + "\n" for line in lines)
