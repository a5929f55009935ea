"""Text for terminals that keeps to a width: headings, facts, tables, trees, bars.

Colour is there only where it can be shown. Text from plan files is shown, never obeyed: what a
terminal could take for a command is written out.
"""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autopar.errors import InputError

LEAST_WIDTH, PIPED_WIDTH, MOST_WIDTH = 40, 100, 1000
"""Columns: least that are allowed, those of a pipe, and most that are allowed."""
LABEL = 11
"""Columns of the names of facts."""
Cell = str | Text


def check_width(asked: int | None) -> int:
    """Columns there are: those asked for, or the terminal's, or those of a pipe.

    Args:
        asked: ``--width``; None if it was not given.

    Raises:
        InputError: If it is no usable width.
    """
    if asked is None:
        found = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns
        return min(max(found, LEAST_WIDTH), MOST_WIDTH)
    if not LEAST_WIDTH <= asked <= MOST_WIDTH:
        raise InputError(
            f"--width {asked}", expected=f"a number from {LEAST_WIDTH} to {MOST_WIDTH}"
        )
    return asked


def in_colour() -> bool:
    """Whether standard output is a terminal that shows colours."""
    return sys.stdout.isatty() and not Console().no_color


def clean(text: str) -> str:
    """`text` with everything that is no printable character written out."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class Page:
    """Text that grows line by line.

    Args:
        width: Columns that no line goes beyond.
        colour: Whether the text holds codes for colours.
    """

    def __init__(self, width: int, *, colour: bool = False) -> None:
        self.width, self.colour = width, colour
        self._file = io.StringIO()
        self._console = Console(
            file=self._file, width=width, force_terminal=colour, legacy_windows=False,
            color_system="standard" if colour else None, highlight=False, markup=False, emoji=False,
        )  # fmt: skip

    @property
    def text(self) -> str:
        """Everything so far, without a newline at the end."""
        found = self._file.getvalue()
        if not self.colour:
            found = "\n".join(line.rstrip() for line in found.split("\n"))
        return found.rstrip("\n")

    def blank(self) -> None:
        """An empty line."""
        self._file.write("\n")

    def heading(self, text: str) -> None:
        """A line that begins a part."""
        self.blank()
        self._console.print(Text(clean(text), "bold"))

    def fact(self, name: str, value: Cell) -> None:
        """A name and what it is; goes on below itself if it is long."""
        grid = Table.grid(padding=(0, 1, 0, 0))
        grid.add_column(width=LABEL - 1, no_wrap=True, style="cyan")
        grid.add_column(overflow="fold")
        grid.add_row(Text(clean(name)), _cell(value))
        self._console.print(grid)

    def cut(self, text: str, lines: int) -> str:
        """The beginning of a fact that would be longer than so many lines."""
        most = lines * (self.width - LABEL - 1)
        return text if len(text) <= most else f"{text[: most - LABEL].rsplit(' ', 1)[0]} ..."

    def note(self, value: Cell, indent: int = 2) -> None:
        """A paragraph."""
        self._console.print(Padding(_cell(value), (0, 0, 0, indent)))

    def line(self, value: Cell) -> None:
        """One line, cut off where the width ends."""
        self._console.print(_cell(value), no_wrap=True, overflow="ellipsis")

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        gives: int = 0,
        wrap: bool = False,
        indent: int = 2,
    ) -> None:
        """Rows below names of columns.

        Args:
            columns: Their names; one that begins with ``>`` is of numbers, on the right. Without
                any name there is no line of names.
            rows: Cells.
            gives: Place of the column that is made smaller where the width is too small.
            wrap: Whether that column's cells go on below in place of being cut off.
            indent: Columns before it.
        """
        table = Table(
            box=None, show_header=any(name.strip(">") for name in columns), padding=(0, 2, 0, 0),
            pad_edge=False, header_style="dim",
        )  # fmt: skip
        for place, name in enumerate(columns):
            table.add_column(
                Text(name.removeprefix(">")),
                justify="right" if name.startswith(">") else "left",
                no_wrap=place != gives,
                overflow="fold" if wrap else "ellipsis",
            )
        for row in rows:
            cells = [_cell(cell) for cell in row]
            cells[gives].no_wrap = not wrap
            table.add_row(*cells)
        self._console.print(Padding(table, (0, 0, 0, indent)))


def _cell(value: Cell) -> Text:
    return Text(clean(value)) if isinstance(value, str) else value


STYLES: Mapping[str, str] = {
    "P": "blue", "G": "magenta", "O": "yellow", "A": "green", "t": "cyan", "r": "dim",
    "#": "green", "!": "bold red",
}  # fmt: skip
"""Colours of the letters of bars."""


def bar(shares: Iterable[tuple[str, float]], whole: float, width: int, limit: float = 0.0) -> Text:
    """A bar of letters.

    Args:
        shares: Letters and how much each stands for, in order.
        whole: What the whole width stands for.
        width: Columns.
        limit: Where a line is drawn through it, if what is beyond the whole is shown.

    Returns:
        ``PPPPGGOOOOAAAAA.....``: every letter in proportion, the sum rounded, dots for the rest.
    """
    text, done, total = Text(), 0, 0.0
    for letter, value in shares:
        total += value
        end = min(width, round(total / whole * width)) if whole > 0 else 0
        text.append(letter * (end - done), STYLES.get(letter, ""))
        done = max(done, end)
    text.append("." * (width - done), "dim")
    if limit > 0 and whole > limit:
        place = min(width - 1, round(limit / whole * width))
        before, after = text[:place], text[place + 1 :]
        text = Text.assemble(before, ("|", STYLES["!"]), after)
    return text


def percent(part: float, whole: float) -> str:
    """A share, such as ``12.3 %``; nothing if there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole > 0 else ""
