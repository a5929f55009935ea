"""What to do about files that cannot be read: the names that were meant, the line to mend."""

from __future__ import annotations

import stat
from pathlib import Path

from autopar.errors import meant
from autopar.plan.shapes import shown


def is_endless(path: str | Path) -> bool:
    """Whether a file is a device or a pipe that nobody need ever write to; not what a shell gives.

    Raises:
        OSError: If there is no such file.
    """
    mode = Path(path).stat().st_mode
    given = str(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/self/fd/"))
    return not given and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def nearby(path: str | Path, otherwise: str) -> str:
    """What to do about a file that is not there.

    Args:
        path: Where it was looked for.
        otherwise: What to do if no file has such a name.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return "name a file in this folder"
        names = [item.name for item in path.parent.iterdir() if item.name != path.name]
    except (OSError, ValueError):
        return f"check the path: there is no folder {shown(str(path.parent))} that can be read"
    return meant(path.name, names) or otherwise


def mending(text: str, line: int | None, otherwise: str) -> str:
    """What to do about a text that cannot be parsed.

    Args:
        text: The text.
        line: Line of the fault, from 1; None if it is not known.
        otherwise: What else can be done.
    """
    lines = text.splitlines()
    if not text.strip():
        return f"the file is empty: {otherwise}"
    if line is None:
        return otherwise
    if not "".join(lines[line:]).strip() and text.count("{") + text.count("[") > text.count(
        "}"
    ) + text.count("]"):
        return f"the file ends too early: close what is open, or {otherwise}"
    at = shown(lines[line - 1].strip()) if 0 < line <= len(lines) else ""
    before = lines[line - 2].strip() if 1 < line <= len(lines) else ""
    if before.endswith(",") and at.strip("'").startswith(("}", "]")):
        return f"take the comma from the end of line {line - 1}, or {otherwise}"
    return f"mend line {line}, {at}, or {otherwise}" if at else otherwise
