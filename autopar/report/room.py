"""How much of a plan is shown: all of it, or what keeps it on a screen."""

from __future__ import annotations

from dataclasses import dataclass

MOST_LINES = 60
"""Lines of a plan that is shown, unless everything is wanted."""
_ALL = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The most of each part that is shown.

    Attributes:
        parameters: Rows of parameters.
        notes: Notes.
        note_lines: Lines of a note.
        patterns: Patterns of what is computed again.
        runs: Lines of pipeline ranks.
        drawn: Pipeline ranks that are drawn.
        actions: Actions of a step that are simulated for the drawing.
        layers: Whether a narrow page has a table of layers.
    """

    parameters: int
    notes: int
    note_lines: int
    patterns: int
    runs: int
    drawn: int
    actions: int = 40_000
    layers: bool = True


EVERYTHING = Room(
    parameters=_ALL, notes=_ALL, note_lines=_ALL, patterns=3, runs=_ALL, drawn=_ALL, actions=_ALL**2
)  # fmt: skip
ROOMS = (
    Room(parameters=20, notes=4, note_lines=_ALL, patterns=3, runs=10, drawn=6),
    Room(parameters=20, notes=3, note_lines=3, patterns=2, runs=10, drawn=4),
    Room(parameters=16, notes=3, note_lines=2, patterns=1, runs=5, drawn=4),
    Room(parameters=14, notes=2, note_lines=2, patterns=1, runs=3, drawn=3),
    Room(parameters=8, notes=1, note_lines=2, patterns=1, runs=3, drawn=2, layers=False),
)
"""From roomy to tight: the first is taken with which a plan is at most `MOST_LINES` long."""
