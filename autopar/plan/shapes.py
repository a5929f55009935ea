"""JSON against annotated dataclasses: what a value must be, every fault with its path, the object.

The annotations of a dataclass say all: ``str``, ``bool``, ``int`` and ``float`` (neither negative,
infinite nor absurdly large, unless `Range` says otherwise), ``X | None``, ``tuple[X, ...]`` and
``tuple[A, B]`` (lists), ``Mapping[str, X]`` (objects with any keys), and other dataclasses
(objects with exactly their fields).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import meant

LARGEST = 2**63 - 1
"""The largest whole number, and the largest real one, that a file may hold."""
_SHOWN = 80


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers are allowed; for ``Annotated``."""

    low: float = 0
    high: float = LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that is wrong with a file.

    Attributes:
        path: JSON path of the value, or ``line:column`` in what is no JSON.
        what: What it is.
        expected: What would be right.
        fix: What to do.
        warning: Whether the file can be used all the same.
    """

    path: str
    what: str
    expected: str | None = None
    fix: str | None = None
    warning: bool = False


class Twice(dict[str, Any]):
    """A JSON object in which keys stand more than once; the last value counts."""

    keys_twice: tuple[str, ...] = ()


class _Bad:
    """Stands for a value that could not be read."""


BAD: Any = _Bad()
Trail = tuple[Any, ...]
"""``(trail of the container, key or index)``; empty for the root."""
Faults = list[Fault]
Reader = Callable[[Any, Trail, Faults], Any]


def path_of(trail: Trail) -> str:
    """A trail as a JSON path (RFC 9535), such as ``$.parameters[3].shape[0]``."""
    parts: list[str] = []
    while trail:
        trail, key = trail
        if isinstance(key, int):
            parts.append(f"[{key}]")
        elif key.isidentifier() and key.isascii():
            parts.append(f".{key}")
        else:
            parts.append(f"[{shown(key)}]")
    return "$" + "".join(reversed(parts))


def shown(value: object) -> str:
    """A value as text of one short line of printable characters."""
    if isinstance(value, str):
        value = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
        text = ascii(value) if unprintable(value) else repr(value)
    elif isinstance(value, dict | list):
        text = f"{_KINDS[type(value) if type(value) is list else dict]} of {len(value)} entries"
    elif value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    else:
        text = str(value)
    return text if len(text) <= 2 * _SHOWN else text[: 2 * _SHOWN] + "..."


_KINDS: dict[type, str] = {list: "a list", dict: "an object"}


def unprintable(text: str) -> str:
    """The first character that has no place in a name or a note; empty if there is none."""
    if text.isprintable():
        return ""
    for char in text:
        if char not in "\n\t" and unicodedata.category(char) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            return char
    return ""


def _wrong(data: Any, trail: Trail, faults: Faults, expected: str, fix: str | None = None) -> Any:
    what = f"is {shown(data)}"
    faults.append(Fault(path=path_of(trail), what=what, expected=expected, fix=fix))
    return BAD


def _text(data: Any, trail: Trail, faults: Faults) -> Any:
    if type(data) is not str:
        return _wrong(data, trail, faults, "a string")
    if not data.isprintable() and (char := unprintable(data)):
        expected = f"text without the character {char!a}"
        return _wrong(data, trail, faults, expected)
    return data


def _flag(data: Any, trail: Trail, faults: Faults) -> Any:
    return data if type(data) is bool else _wrong(data, trail, faults, "true or false")


def _numbers(allowed: Range, whole: bool) -> Reader:
    low, high = allowed.low, allowed.high
    kind = "a whole number" if whole else "a finite number"
    words = f"{kind} from {low:g}" if low > -LARGEST else kind
    words += "" if high == LARGEST else f" to {high:g}"

    def read(data: Any, trail: Trail, faults: Faults) -> Any:
        if type(data) is not int and (whole or type(data) is not float):
            return _wrong(data, trail, faults, words)
        if not low <= data <= high:  # also of NaN
            large = data > high == LARGEST
            return _wrong(data, trail, faults, f"{kind} up to {high}" if large else words)
        return data if whole else float(data)

    return read


def _optional(inner: Reader) -> Reader:
    def read(data: Any, trail: Trail, faults: Faults) -> Any:
        return None if data is None else inner(data, trail, faults)

    return read


def _list(inner: Reader) -> Reader:
    def read(data: Any, trail: Trail, faults: Faults) -> Any:
        if not isinstance(data, list):
            return _wrong(data, trail, faults, "a list")
        return tuple([inner(item, (trail, index), faults) for index, item in enumerate(data)])

    return read


def _pair(inner: tuple[Reader, ...], words: str) -> Reader:
    def read(data: Any, trail: Trail, faults: Faults) -> Any:
        if not isinstance(data, list) or len(data) != len(inner):
            return _wrong(data, trail, faults, f"a list [{words}]")
        pairs = zip(inner, data, strict=True)
        return tuple([part(item, (trail, i), faults) for i, (part, item) in enumerate(pairs)])

    return read


def _mapping(inner: Reader) -> Reader:
    def read(data: Any, trail: Trail, faults: Faults) -> Any:
        if not isinstance(data, dict):
            return _wrong(data, trail, faults, "an object")
        _check_twice(data, trail, faults)
        for key in data:
            if char := unprintable(key):
                expected = f"keys without the character {char!a}"
                return _wrong(key, (trail, key), faults, expected)
        return {key: inner(item, (trail, key), faults) for key, item in data.items()}

    return read


def _check_twice(data: Mapping[str, Any], trail: Trail, faults: Faults) -> None:
    if type(data) is Twice:
        for key in data.keys_twice:
            faults.append(
                Fault(
                    path=path_of((trail, key)),
                    what="stands more than once in its object",
                    expected="every key once",
                    fix="leave all but one of them out",
                )
            )


def _record(kind: Any) -> Reader:
    readers = {name: reader(hint) for name, hint in hints_of(kind).items()}

    def read(data: Any, trail: Trail, faults: Faults) -> Any:
        if not isinstance(data, dict):
            return _wrong(data, trail, faults, "an object with the keys " + ", ".join(readers))
        before = len(faults)
        values = read_fields(readers, data, trail, faults)
        return BAD if len(faults) > before else kind(**values)

    return read


def read_fields(
    readers: Mapping[str, Reader], data: Mapping[str, Any], trail: Trail, faults: Faults
) -> dict[str, Any]:
    """Fields of an object: every one of `readers`, and no other.

    Returns:
        What could be read; `BAD` for what could not.
    """
    _check_twice(data, trail, faults)
    values: dict[str, Any] = {}
    for name, read in readers.items():
        if name in data:
            values[name] = read(data[name], (trail, name), faults)
    if len(values) == len(data) == len(readers):
        return values
    missing = [name for name in readers if name not in data]
    for name in data:
        if name not in readers:
            faults.append(
                Fault(
                    path=path_of((trail, name)),
                    what="is not known here",
                    expected="one of the fields " + ", ".join(readers),
                    fix=meant(name, missing or readers) or "leave it out",
                )
            )
    for name in missing:
        values[name] = BAD
        faults.append(
            Fault(
                path=path_of((trail, name)),
                what="is missing",
                expected="a value",
                fix="add the field",
            )
        )
    return values


@functools.cache
def hints_of(kind: type) -> dict[str, Any]:
    """Annotations of the fields of a dataclass."""
    found = typing.get_type_hints(kind, include_extras=True)
    return {item.name: found[item.name] for item in dataclasses.fields(kind)}


@functools.cache
def reader(hint: Any) -> Reader:
    """What checks a JSON value against an annotation, and makes the object that it stands for."""
    allowed = Range()
    if typing.get_origin(hint) is typing.Annotated:
        hint, allowed = typing.get_args(hint)
    if hint in (int, float):
        return _numbers(allowed, hint is int)
    if hint is str:
        return _text
    if hint is bool:
        return _flag
    if dataclasses.is_dataclass(hint):
        return _record(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (item for item in arguments if item is not type(None))
        return _optional(reader(inner))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return _list(reader(arguments[0]))
        words = ", ".join(_word(item) for item in arguments)
        return _pair(tuple(map(reader, arguments)), words)
    assert origin is Mapping, hint
    return _mapping(reader(arguments[1]))


def _word(hint: Any) -> str:
    names = {str: "string", int: "whole number", float: "number", bool: "true or false"}
    return names.get(hint, "list")


def finite(value: float) -> float | None:
    """A number that JSON has; None for infinity and NaN."""
    return value if math.isfinite(value) else None


def dump(value: Any, *, width: int = 100, indent: str = "") -> str:
    """JSON text in which what is short stays on one line.

    Args:
        value: Dicts, lists, tuples, strings, numbers, True, False and None.
        width: Most characters of such a line.
        indent: What lines begin with.
    """
    return "".join(_pieces(value, width, indent))


def _pieces(value: Any, width: int, indent: str) -> Iterator[str]:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list | tuple) or len(text) + len(indent) <= width:
        yield text
        return
    inner = indent + " "
    marks = "{}" if isinstance(value, dict) else "[]"
    items = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    yield marks[0]
    for number, (key, item) in enumerate(items):
        yield f"{',' if number else ''}\n{inner}"
        if key is not None:
            yield json.dumps(key, ensure_ascii=False) + ": "
        yield from _pieces(item, width, inner)
    yield f"\n{indent}{marks[1]}"
