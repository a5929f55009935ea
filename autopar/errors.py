"""Every error autopar raises on purpose.

One sentence says what was wrong; `expected`, `fix` and `where` say the rest, so that a
message never leaves its reader guessing.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class AutoparError(Exception):
    """Base of all errors a user can cause.

    Args:
        what: What was wrong, one sentence with the offending value.
        expected: What would have been right.
        fix: What the reader can do about it.
        where: Module path, plan field, file and line.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        fix: str | None = None,
        where: str | None = None,
    ) -> None:
        self.what, self.expected, self.fix, self.where = what, expected, fix, where
        lines = [what]
        if where:
            lines.append(f"  where:    {where}")
        if expected:
            lines.append(f"  expected: {expected}")
        if fix:
            lines.append(f"  fix:      {fix}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Keep all four parts when an error crosses a process border."""
        return _rebuild, (type(self), self.what, self.expected, self.fix, self.where)


def _rebuild(
    kind: type[AutoparError],
    what: str,
    expected: str | None,
    fix: str | None,
    where: str | None,
) -> AutoparError:
    return kind(what, expected=expected, fix=fix, where=where)


def meant(word: object, known: Iterable[str]) -> str | None:
    """The question after the name that was probably meant, as a `fix`; None if none is like it.

    Args:
        word: What was given.
        known: The names that there are.
    """
    names = {str(name).lower(): name for name in known}
    close = get_close_matches(str(word).lower(), names, 1)
    return f"did you mean {names[close[0]]!r}?" if close else None


class TraceError(AutoparError):
    """The model cannot be captured as one graph."""


class RuleError(AutoparError):
    """A sharding rule is malformed or does not fit the shapes it is applied to."""


class PlanError(AutoparError):
    """A plan or a constraint is malformed, or belongs to another model or cluster."""


class ClusterError(AutoparError):
    """A cluster description is malformed or does not match the running job."""


class InputError(AutoparError):
    """An input differs from what the model was traced with."""


class NonFiniteError(AutoparError):
    """The loss is NaN or infinite."""


class RankError(AutoparError):
    """A rank failed, died or stopped answering."""
