"""The language of sharding rules: ``"... k, n k, n? -> ... n"``.

    rule      = operands "->" outputs          comma separated terms, one per tensor
    term      = {dim} ["?"]                    "?": the operand may be absent; "" is a scalar
    dim       = letter | "_" | "..." | "(" {letter} ")"
    letter    = name {flag}                    "(h d)": a dim made of several letters, d innermost
    flag      = "!"                            never split
              | "~"                            split needs the special lowering
              | "="                            split leaves outputs without the letter Replicate
                                               (Partial otherwise)

``_`` is a dim without a letter. ``...`` stands for any number of dims, aligned at the right and
broadcast. A dim of size 1 carries no letter, so a letter may meet size 1 anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from autopar.errors import RuleError

FLAGS = "!~="
_TOKEN = re.compile(r"\s*(?:(\.\.\.)|(_)(?!\w)|([A-Za-z]\w*)|([()]))([!~=]*)")

Entry = str | tuple[str, ...] | None
"""One dim of a tensor: a letter with its flags, several letters (outer to inner), or nothing."""


@dataclass(frozen=True, slots=True)
class Term:
    """One tensor of a rule text; `columns` holds the text column of every entry."""

    entries: tuple[Entry, ...]
    columns: tuple[int, ...]
    optional: bool = False
    column: int = 0

    @property
    def has_ellipsis(self) -> bool:
        """Whether the term has any number of leading (or middle) dims."""
        return any(_is_ellipsis(entry) for entry in self.entries)

    def expand(self, ndim: int, width: int) -> tuple[tuple[Entry, ...], tuple[int, ...]] | None:
        """Entries and columns for a tensor of `ndim` dims; None when the number does not fit.

        Args:
            ndim: Dims of the tensor.
            width: Widest ellipsis of the rule; narrower ones align at its right end.
        """
        extra = ndim - len(self.entries) + self.has_ellipsis
        if extra < 0 or (extra > 0 and not self.has_ellipsis):
            return None
        entries: list[Entry] = []
        columns: list[int] = []
        for entry, column in zip(self.entries, self.columns, strict=True):
            if _is_ellipsis(entry):
                assert isinstance(entry, str)
                entries += [f"b{width - extra + i}{entry[3:]}" for i in range(extra)]
                columns += [column] * extra
            else:
                entries.append(entry)
                columns.append(column)
        return tuple(entries), tuple(columns)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule text."""

    text: str
    operands: tuple[Term, ...]
    outputs: tuple[Term, ...]


@cache
def parse(text: str) -> Pattern:
    """Parse a rule text.

    Example:
        >>> parse("... k, n k, n? -> ... n").operands[2].optional
        True

    Raises:
        RuleError: The text is malformed; the message points at the place.
    """
    if text.count("->") != 1:
        raise syntax_error(text, 0, f"{text.count('->')} arrows", "operands -> outputs")
    arrow = text.index("->")
    operands = _terms(text, 0, arrow)
    outputs = _terms(text, arrow + 2, len(text))
    for term in outputs:
        if term.optional:
            raise syntax_error(text, term.column, "an optional output", "'?' on operands only")
    return Pattern(text, operands, outputs)


def syntax_error(text: str, column: int, what: str, expected: str) -> RuleError:
    """An error that points at a column of the rule text."""
    return RuleError(f"rule has {what}:\n    {text}\n    {' ' * column}^", expected=expected)


def _is_ellipsis(entry: Entry) -> bool:
    return isinstance(entry, str) and entry.startswith("...")


def _terms(text: str, start: int, stop: int) -> tuple[Term, ...]:
    terms = []
    for piece in text[start:stop].split(","):
        terms.append(_term(text, start, start + len(piece)))
        start += len(piece) + 1
    return tuple(terms)


def _term(text: str, start: int, stop: int) -> Term:
    end = len(text[:stop].rstrip())
    optional = end > start and text[end - 1] == "?"
    end -= optional
    entries: list[Entry] = []
    columns: list[int] = []
    group: list[str] | None = None
    at = start
    while text[at:end].strip():
        match = _TOKEN.match(text, at, end)
        if match is None:
            column = at + len(text[at:end]) - len(text[at:end].lstrip())
            raise syntax_error(
                text, column, f"an unexpected {text[column]!r}", "a letter, _ or ..."
            )
        ellipsis, blank, name, paren, flags = match.groups()
        at = match.end()
        column = next(match.start(i) for i in range(1, 5) if match.group(i))
        if paren:
            if flags or (paren == "(") != (group is None):
                raise syntax_error(text, column, f"a misplaced {paren!r}", "(outer inner)")
            if paren == ")":
                assert group is not None
                entries.append(tuple(group))
            else:
                columns.append(column)
            group = [] if paren == "(" else None
        elif group is not None:
            if not name:
                raise syntax_error(text, column, "no letter in a group", "(outer inner)")
            group.append(name + flags)
        else:
            entries.append(None if blank else (ellipsis or name) + flags)
            columns.append(column)
    if group is not None:
        raise syntax_error(text, end - 1, "an open group", "')'")
    if sum(map(_is_ellipsis, entries)) > 1:
        raise syntax_error(text, columns[-1], "two ellipses in one term", "one")
    return Term(tuple(entries), tuple(columns), optional, start)


@dataclass(slots=True)
class Sizes:
    """Sizes of letters as they become known, outermost knowledge first.

    Attributes:
        known: Size per letter name (without flags).
    """

    known: dict[str, int] = field(default_factory=dict)

    def learn(self, entry: Entry, size: int) -> str | None:
        """Take in that a dim with `entry` has `size`; the complaint when they disagree."""
        if entry is None or size == 1:
            return None
        names = [bare(name) for name in ((entry,) if isinstance(entry, str) else entry)]
        unknown = [name for name in names if name not in self.known]
        product = 1
        for name in names:
            product *= self.known.get(name, 1)
        if len(unknown) > 1:
            return f"sizes of {' and '.join(unknown)} are unknown"
        if not unknown:
            if product != size:
                label = " * ".join(names)
                return f"{label} is {size} here and {product} before"
            return None
        if product == 0 or size % product:
            return f"{size} is no multiple of {product}"
        self.known[unknown[0]] = size // product
        return None

    def learn_all(self, tensors: Sequence[tuple[Sequence[Entry], Sequence[int]]]) -> None:
        """Learn from dims with one letter, then from groups with one unknown letter left."""
        dims = [
            ((entry,) if isinstance(entry, str) else entry, size)
            for entries, shape in tensors
            for entry, size in zip(entries, shape, strict=False)
            if entry is not None and size != 1
        ]
        for names, size in dims:
            if len(names) == 1:
                self.known.setdefault(bare(names[0]), size)
        progress = True
        while progress:
            progress = False
            for names, size in dims:
                unknown = [bare(name) for name in names if bare(name) not in self.known]
                if len(unknown) == 1 and self.learn(names, size) is None:
                    progress = True


def bare(name: str) -> str:
    """Letter name without flags."""
    return name.rstrip(FLAGS)


def show(terms: Mapping[int, Sequence[Entry]] | Sequence[Sequence[Entry]]) -> str:
    """Entries as rule text, for messages."""
    rows = list(terms.values()) if isinstance(terms, Mapping) else list(terms)

    def one(entry: Entry) -> str:
        if entry is None:
            return "_"
        return entry if isinstance(entry, str) else f"({' '.join(entry)})"

    return ", ".join(" ".join(map(one, row)) for row in rows)
