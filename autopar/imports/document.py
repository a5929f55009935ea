"""Nested configuration files with the line of every key, which know what of them was read."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from autopar.errors import InputError, meant
from autopar.imports.imported import Remark
from autopar.plan.advice import mending
from autopar.plan.shapes import shown

Path = tuple[str, ...]
MOST_NODES = 1_000_000
"""Values that YAML may stand for, aliases written out."""
MOST_TABLES = 10_000
AUTO = "auto"
"""What DeepSpeed and Hugging Face write for "decided elsewhere"."""


def at_line(where: str, line: int | None) -> str:
    """``file:line``, or the file where the line is not known."""
    return where if line is None else f"{where}:{line}"


@dataclass(slots=True)
class Document:
    """A nested document.

    Attributes:
        data: The parsed file.
        where: Its name.
        line_of: Line of a key, None if it is not known.
        seen: Keys that were read.
    """

    data: Mapping[str, Any]
    where: str
    line_of: Callable[[Path], int | None]
    seen: set[Path] = field(default_factory=set)

    def raw(self, *path: str) -> Any:
        """What stands at `path`, None if nothing does; the key counts as read."""
        value: Any = self.data
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                return None
            value = value[key]
        self.seen.add(path)
        return value

    def number(self, *path: str, least: int = 1) -> int | None:
        """A whole number; None where the file leaves it to others.

        Raises:
            InputError: If it is something else, or too small.
        """
        value = self.raw(*path)
        if value is None or value == AUTO:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or value < least:
            raise self.wrong(path, value, f"a whole number from {least}")
        return value

    def flag(self, *path: str) -> bool | None:
        """True or false; None where the file leaves it to others.

        Raises:
            InputError: If it is something else.
        """
        value = self.raw(*path)
        if value is None or value == AUTO:
            return None
        if isinstance(value, str) and value.lower() in ("true", "false", "yes", "no"):
            return value.lower() in ("true", "yes")
        if not isinstance(value, bool):
            raise self.wrong(path, value, "true or false")
        return value

    def text(self, *path: str, known: tuple[str, ...] = ()) -> str | None:
        """A word, in lower case if it must be one of some; None where the file has none.

        Raises:
            InputError: If it is something else.
        """
        value = self.raw(*path)
        if value is None or value == AUTO:
            return None
        if not isinstance(value, str) or (known and value.lower() not in known):
            expected = "one of " + ", ".join(known) if known else "a word"
            raise self.wrong(path, value, expected, meant(value, known))
        return value.lower() if known else value

    def wrong(self, path: Path, value: object, expected: str, fix: str | None = None) -> InputError:
        """The error that says what is wrong with a key, and on which line."""
        shown = json.dumps(value, default=str)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return InputError(
            f"{'.'.join(path)} is {shown}",
            expected=expected,
            fix=fix,
            where=at_line(self.where, self.line_of(path)),
        )

    def remarks(
        self, meanings: Mapping[str, str], irrelevant: tuple[str, ...]
    ) -> tuple[tuple[Remark, ...], tuple[str, ...]]:
        """What was not read: what it means, and what does not matter to a plan.

        Args:
            meanings: Patterns over dotted keys, and what the keys do.
            irrelevant: Patterns over keys that say nothing about a plan.

        Returns:
            Remarks, and the keys that do not matter.
        """
        found: list[Remark] = []
        ignored: list[str] = []
        for path, value in _leaves(self.data):
            name = ".".join(path)
            if path in self.seen or _is_off(value):
                continue
            if any(fnmatch(name, pattern) for pattern in irrelevant):
                ignored.append(name)
                continue
            meaning = next((m for pattern, m in meanings.items() if fnmatch(name, pattern)), None)
            found.append(
                Remark(
                    name=name, value=str(value), line=self.line_of(path),
                    meaning=meaning or UNKNOWN,
                )
            )  # fmt: skip
        return tuple(found), tuple(ignored)


UNKNOWN = "not known here: nothing was made of it"


def _is_off(value: object) -> bool:
    return value in (None, False, "none", "None", "no", "disabled", AUTO, "") or value in ([], {})


def _leaves(data: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, str(key)))
        else:
            yield (*path, str(key)), value


def parse_json(text: str, where: str) -> Document:
    """A JSON object.

    Raises:
        InputError: If the text is none; names the line.
    """
    try:
        data = json.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except json.JSONDecodeError as error:
        raise _unparsed("JSON", error.msg, text, where, error.lineno) from None
    except ValueError as error:  # a number of thousands of digits
        raise _unparsed("JSON", str(error), text, where, None) from None
    return _document(data, where, lambda path: _json_line(text, path))


_CHECK = "check that this is the configuration that your framework starts with"


def _unparsed(kind: str, problem: str, text: str, where: str, line: int | None) -> InputError:
    """The error about a text that its parser refuses."""
    return InputError(
        f"the file is no {kind}: {problem}",
        expected=f"a configuration in {kind}",
        fix=mending(text, line, _CHECK),
        where=at_line(where, line),
    )


def _too_deep(where: str) -> InputError:
    return InputError(
        "the file is nested too deeply", expected="a handful of levels", fix=_CHECK, where=where
    )


def _json_line(text: str, path: Path) -> int | None:
    """Line of a key: each part is looked for behind the part before it."""
    place = 0
    for part in path:
        match = re.compile(re.escape(json.dumps(part)) + r"\s*:").search(text, place)
        if match is None:
            return None
        place = match.end()
    return text.count("\n", 0, place) + 1


def parse_toml(text: str, where: str) -> Document:
    """A TOML table.

    Raises:
        InputError: If the text is none; names the line where TOML's parser does.
    """
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        place = int(line[1]) if line else None
        raise _unparsed("TOML", str(error), text, where, place) from None
    return _document(data, where, lambda path: _toml_line(text, path))


def _toml_line(text: str, path: Path) -> int | None:
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"\s*\[([^\[\]]+)\]", line)
        if head:
            table = head[1].strip()
        key = re.match(r'\s*"?([\w.-]+)"?\s*=', line)
        if key and ".".join(filter(None, (table, key[1]))) == ".".join(path):
            return number
    return None


def parse_yaml(text: str, where: str) -> Document:
    """A YAML mapping; keys become words.

    Raises:
        InputError: If the text is none; names the line.
    """
    import yaml

    lines: dict[Path, int] = {}
    noted: set[int] = set()
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        _check_size(node, {}, where)
        data = yaml.safe_load(text)
    except RecursionError:
        raise _too_deep(where) from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = str(getattr(error, "problem", None) or error)
        place = mark.line + 1 if mark is not None else None
        raise _unparsed("YAML", problem, text, where, place) from None

    def note(item: Any, path: Path) -> None:
        if isinstance(item, yaml.MappingNode) and id(item) not in noted:
            noted.add(id(item))
            for key, value in item.value:
                below = (*path, str(key.value))
                lines[below] = key.start_mark.line + 1
                note(value, below)

    note(node, ())
    return _document(data, where, lines.get)


def _check_size(node: Any, sizes: dict[int, int | None], where: str) -> int:
    """Number of nodes that one of YAML stands for, aliases written out.

    Raises:
        InputError: If it contains itself, or stands for too many.
    """
    import yaml

    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            line = node.start_mark.line + 1
            raise InputError(
                f"an alias stands for a value that it is a part of (line {line})",
                expected="values that end", where=f"{where}:{line}", fix=_CHECK,
            )  # fmt: skip
        return known
    sizes[id(node)] = None
    below = node.value if isinstance(node, yaml.CollectionNode) else ()
    items = itertools.chain.from_iterable(below) if isinstance(node, yaml.MappingNode) else below
    total = 1 + sum(_check_size(item, sizes, where) for item in items)
    if total > MOST_NODES:
        line = node.start_mark.line + 1
        raise InputError(
            f"aliases stand for more than {MOST_NODES:,} values (line {line})",
            expected="a configuration: some dozens of keys", where=f"{where}:{line}", fix=_CHECK,
        )  # fmt: skip
    sizes[id(node)] = total
    return total


def _document(data: object, where: str, line_of: Callable[[Path], int | None]) -> Document:
    if not isinstance(data, dict):
        raise InputError(
            f"the file holds {shown(data)}", expected="keys and values", where=where, fix=_CHECK
        )
    count = itertools.count()

    def words(part: Mapping[Any, Any]) -> dict[str, Any]:
        if next(count) > MOST_TABLES:  # aliases of YAML can stand for any number of them
            raise InputError(
                f"the file has more than {MOST_TABLES:,} tables", where=where, fix=_CHECK,
                expected="a configuration: some dozens of keys",
            )  # fmt: skip
        return {
            str(key): words(value) if isinstance(value, Mapping) else value
            for key, value in part.items()
        }

    try:
        return Document(words(data), where, line_of)
    except RecursionError:
        raise _too_deep(where) from None
