"""Names that repeat, in short: ``layers.{0..95}.mlp.up.{weight,bias}``; and rows that are alike."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
_NUMBER = re.compile(r"(?<![A-Za-z0-9_])(?:0|[1-9]\d{0,17})(?![A-Za-z0-9_])")
_Row = tuple[int, ...]
_FEW = 3
"""Numbers that are told one by one before a rule for them is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """Names that differ in numbers only.

    Attributes:
        text: What stands for them, such as ``layers.{0..95}.mlp.up.weight``.
        names: They themselves.
    """

    text: str
    names: tuple[str, ...]


def fold(names: Iterable[str]) -> list[Folded]:
    """Names that differ in numbers between separators, as patterns.

    A pattern stands for every combination of its numbers and for nothing else: names that lack one
    get several patterns.

    Args:
        names: Names such as ``layers.3.mlp.weight``.

    Returns:
        Patterns, in the order in which the first name of each came.
    """
    groups: dict[tuple[str, ...], dict[_Row, list[str]]] = {}
    for name in names:
        row = tuple(map(int, _NUMBER.findall(name)))
        groups.setdefault(tuple(_NUMBER.split(name)), {}).setdefault(row, []).append(name)
    found = []
    for pieces, rows in groups.items():
        for sets in _products(tuple(rows)):
            members = [name for row in rows if _within(row, sets) for name in rows[row]]
            text = pieces[0] + "".join(
                numbers_text(numbers) + piece
                for numbers, piece in zip(sets, pieces[1:], strict=True)
            )
            found.append(Folded(text=text, names=tuple(members)))
    return found


def _within(row: _Row, sets: tuple[tuple[int, ...], ...]) -> bool:
    return all(number in numbers for number, numbers in zip(row, sets, strict=True))


def _products(rows: tuple[_Row, ...]) -> list[tuple[tuple[int, ...], ...]]:
    """Sets of numbers, place by place, whose products are `rows`, each once."""
    if not rows[0]:
        return [()]
    rests: dict[int, list[_Row]] = {}
    for first, *rest in rows:
        rests.setdefault(first, []).append(tuple(rest))
    firsts: dict[frozenset[_Row], list[int]] = {}
    for first, rest_rows in rests.items():
        firsts.setdefault(frozenset(rest_rows), []).append(first)
    return [
        (tuple(sorted(numbers)), *sets)
        for numbers in firsts.values()
        for sets in _products(tuple(rests[numbers[0]]))
    ]


def numbers_text(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: ``7``, ``{0..95}``, ``{1,3..95}``, ``{0..3,7}``."""
    if len(numbers) == 1:
        return str(numbers[0])
    step = numbers[1] - numbers[0]
    even = all(b - a == step for a, b in itertools.pairwise(numbers))
    if even and step > 1 and len(numbers) > _FEW:
        return f"{{{numbers[0]},{numbers[1]}..{numbers[-1]}}}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(_run(run) for run in runs) + "}"


def _run(run: list[int]) -> str:
    return f"{run[0]}..{run[-1]}" if len(run) >= _FEW else ",".join(map(str, run))


def span_text(first: int, last: int) -> str:
    """Numbers from `first` to `last`: ``3`` or ``3..7``."""
    return str(first) if first == last else f"{first}..{last}"


def siblings(names: Iterable[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Names that differ in their last part only, as one.

    Args:
        names: Names such as ``up.weight`` and ``up.bias``.

    Returns:
        For each a text such as ``up.{weight,bias}``, and the places of its names.
    """
    groups: dict[str, list[tuple[str, int]]] = {}
    for place, name in enumerate(names):
        head, dot, last = name.rpartition(".")
        groups.setdefault(head + dot, []).append((last, place))
    found = []
    for head, parts in groups.items():
        last = parts[0][0] if len(parts) == 1 else f"{{{','.join(part for part, _ in parts)}}}"
        found.append((head + last, tuple(place for _, place in parts)))
    return found


def runs_of(
    items: Sequence[T],
    key: Callable[[T], Hashable],
    alike: Callable[[T, T, float], bool],
    most: int,
) -> list[tuple[T, ...]]:
    """Neighbours that are alike, together; the more of them, the less alike they must be.

    Args:
        items: The items.
        key: What must be equal.
        alike: Whether two items are alike within a tolerance.
        most: Runs that there should be at most. If keys make more, there are more.

    Returns:
        The runs; the first and the last item of each are alike.
    """
    found: list[tuple[T, ...]] = []
    for tolerance in (0.01, 0.03, 0.1, 0.3, 1.0):
        found = []
        for item in items:
            run = found[-1] if found else ()
            if run and key(run[0]) == key(item) and alike(run[0], item, tolerance):
                found[-1] = (*run, item)
            else:
                found.append((item,))
        if len(found) <= most:
            break
    return found
