"""Arguments in a shell script or a text: words that begin with ``--``, and what follows them.

A script is read, never run: variables that it sets to plain values, defaults (``${TP:-8}``) and
sums and products of whole numbers are filled in; whatever else the shell would do stays as text.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.errors import InputError, meant
from autopar.imports.document import at_line

_DEPTH = 8
_ASSIGN = re.compile(r"^\s*(?:export\s+|local\s+|readonly\s+)?([A-Za-z_]\w*)=(.*)$")
_DEFAULT = re.compile(r"^\s*:\s+\"?\$\{([A-Za-z_]\w*):?=([^}]*)\}\"?\s*$")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?[-=]([^{}]*))?\}|\$([A-Za-z_]\w*)")
_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_COMMENT = re.compile(r"(?:^|(?<=\s))#.*$")
_COMMAND = re.compile(r"\$\((?!\().*\)|`[^`]*`")
_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Flag:
    """An argument.

    Attributes:
        name: With its dashes.
        values: Words behind it.
        line: Where it stands.
    """

    name: str
    values: tuple[str, ...]
    line: int

    @property
    def value(self) -> str:
        """The words behind it as one text."""
        return " ".join(self.values)


def read_flags(text: str) -> tuple[dict[str, Flag], dict[str, str]]:
    """All arguments of a text, and the variables that it sets.

    Args:
        text: A shell script, or arguments in any layout.

    Returns:
        Arguments by name, the last where one is given again; variables with their plain values.
    """
    variables = _variables(text)
    flags: dict[str, Flag] = {}
    name, start = "", 0
    values: list[str] = []

    def close() -> None:
        if name:
            flags[name] = Flag(name, tuple(values), start)

    for number, line in enumerate(text.splitlines(), 1):
        bare = _COMMENT.sub("", line)
        continued = bare.rstrip().endswith("\\")
        for word in _words(expand(bare, variables)):
            if re.match(r"--[A-Za-z]", word):
                close()
                name, equals, value = word.partition("=")
                name = "--" + name[2:].replace("_", "-")
                values, start = ([value] if equals else []), number
            elif name and word in (")", "(", ";", "|", "&&", "fi", "then"):
                close()
                name = ""
            elif name:
                values.append(word)
        if not continued:
            close()
            name = ""
    close()
    return flags, variables


def commands(text: str) -> dict[str, tuple[int, str]]:
    """Variables that are set to what a command prints: line, and the command.

    Args:
        text: A shell script.
    """
    found: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _DEFAULT.match(line) or _ASSIGN.match(line)
        command = _COMMAND.search(match[2]) if match is not None else None
        if match is not None and command is not None:
            found.setdefault(match[1], (number, command[0]))
    return found


def _words(line: str) -> list[str]:
    found = re.sub(r"(?<![\w$}])\+?=?\(|\)\s*$", " ", line.replace("\\\n", " "))
    found = re.sub(r"[\"'`]|\\(?=\s|$)", " ", found)
    return [word for word in found.split() if word != "\\"]


def _variables(text: str) -> dict[str, str]:
    """Variables that are set to something plain; the first setting counts."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _DEFAULT.match(line) or _ASSIGN.match(line)
        if match is None:
            continue
        name, value = match[1], _COMMENT.sub("", match[2]).strip().rstrip(";").strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        elif not value.startswith(("$((", '"', "'")):
            value = re.split(r"[;\s]", value, maxsplit=1)[0]
        if name in found or value.startswith(("(", '"', "'", "`", "$(")) != value.startswith("$(("):
            continue
        found[name] = expand(value, found)
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` with variables and sums of whole numbers filled in, as far as they are known."""

    def value_of(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        if name in variables:
            return variables[name]
        return match[0] if default is None else default

    for _ in range(_DEPTH):
        before = text
        text = _SUM.sub(lambda match: _sum(match, variables), _VARIABLE.sub(value_of, text))
        if text == before or len(text) > 100_000:
            break
    return text


def _sum(match: re.Match[str], variables: Mapping[str, str]) -> str:
    words = re.sub(
        r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1].replace("$", "")
    )
    try:
        return str(_whole(ast.parse(words.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return match[0]


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        found = _OPERATORS[type(node.op)](_whole(node.left), _whole(node.right))
        if abs(found) < 10**15:
            return found
    raise ValueError(ast.dump(node))


@dataclass(slots=True)
class Flags:
    """Arguments with checked values; remembers which were asked for.

    Attributes:
        found: The arguments.
        where: Their file.
        seen: Names that were asked for.
        commands: Variables that commands set: line, and the command.
    """

    found: Mapping[str, Flag]
    where: str
    seen: set[str]
    commands: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def has(self, *names: str) -> bool:
        """Whether one of these is set: alone, or to something that is not false."""
        self.seen.update(names)
        return any(
            name in self.found and self.found[name].value.lower() not in ("false", "0", "none")
            for name in names
        )

    def number(self, *names: str, least: int = 0) -> int | None:
        """The whole number behind the first of these that is there.

        Raises:
            InputError: If something else stands there, or a variable that nobody sets.
        """
        self.seen.update(names)
        flag = next((self.found[name] for name in names if name in self.found), None)
        if flag is None or flag.value.lower() in ("none", "null"):
            return None
        word = (flag.values[0] if flag.values else "").replace("_", "")
        if not re.fullmatch(r"[+-]?\d+(\.0+)?", word) or int(float(word)) < least:
            raise self.wrong(flag, f"a whole number from {least}")
        return int(float(word))

    def word(self, *names: str, known: tuple[str, ...] = ()) -> str | None:
        """The word behind the first of these that is there.

        Raises:
            InputError: If it is none of those that are known.
        """
        self.seen.update(names)
        flag = next((self.found[name] for name in names if name in self.found), None)
        if flag is None or flag.value.lower() in ("none", "null"):
            return None
        if known and flag.value not in known:
            raise self.wrong(flag, "one of " + ", ".join(known), meant(flag.value, known))
        return flag.value

    def wrong(self, flag: Flag, expected: str, fix: str | None = None) -> InputError:
        """The error that says what is wrong with an argument, and on which line."""
        unset = re.search(r"\$\{?([A-Za-z_]\w*|\d)\}?", flag.value)
        why = ""
        if unset and unset[1] in self.commands:
            line, command = self.commands[unset[1]]
            why = f", and line {line} sets {unset[1]} by the command {command}"
            fix = f"no command is run: write {unset[1]}=N there, with the number that it prints"
        elif "$(" in flag.value:
            why = ", what a command prints"
            fix = "no command is run: write the number that it prints in its place"
        elif unset:
            why = f", and nothing sets {unset[0]}"
            named = unset[1][0].isdigit()
            fix = "write the value in its place" + ("" if named else f", or {unset[1]}=N above it")
        return InputError(
            f"{flag.name} is {flag.value or 'alone'!r}{why}",
            expected=expected,
            fix=fix,
            where=at_line(self.where, flag.line),
        )
