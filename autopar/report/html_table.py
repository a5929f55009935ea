"""Text and tables of a report; all text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autopar.report.terminal import clean


def text(value: str) -> str:
    """Text as HTML; characters that nobody sees, or that turn a line round, are written out."""
    return escape(clean(value))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, label: str) -> str:
    """A table; columns whose names begin with ``>`` are numbers.

    Args:
        columns: Their names.
        rows: Cells, as text.
        label: What the table is, for those who cannot see it.
    """
    right = [name.startswith(">") for name in columns]
    head = "".join(
        f'<th scope="col"{" class=num" if number else ""}>{text(name.removeprefix(">"))}</th>'
        for name, number in zip(columns, right, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=num' if number else ''}>{text(cell)}</td>"
            for cell, number in zip(row, right, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(label)}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
