"""Placements of single parameters that constraints ask for, in the words of plan files.

``{"lm_head.weight": "whole"}``: the name of a parameter, of a module (all of its parameters) or a
pattern that `fnmatch` reads, and ``whole``, ``split``, what splits it (``vocab``, or ``vocab@0``
for dim 0), or the list of words that a plan file has. They speak of what the mesh's axes split;
ZeRO divides what is whole among data ranks all the same. Where axes would split what is to be
whole, the ops that take it choose otherwise; what axes leave whole is never split for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from autopar.errors import PlanError, meant

WHOLE, SPLIT = "whole", "split"
EXPECTED = (
    'a map from parameters, modules or patterns to "whole", "split", a factor such as "vocab", or'
    " the list of words of a plan file"
)
_WORD = re.compile(r"[A-Za-z_][\w.]*(@\d+(:\d+x\d+)?)?")
_HERE = "constraints['placements']"


@dataclass(frozen=True, slots=True)
class Wanted:
    """How parameters are to lie.

    Attributes:
        pattern: Name of a parameter or a module, or a pattern over these.
        words: `WHOLE`, `SPLIT` or what splits them; several words are those of a plan file, one
            for every sub-axis.
    """

    pattern: str
    words: tuple[str, ...]

    @property
    def where(self) -> str:
        """The place of the constraint."""
        return f"{_HERE}[{self.pattern!r}]"

    @property
    def whole(self) -> bool:
        """Whether nothing may split them: ops that take them split something else, or nothing."""
        return all(word == WHOLE for word in self.words)

    def means(self, fqn: str) -> bool:
        """Whether it speaks of a parameter."""
        if any(letter in self.pattern for letter in "*?["):
            return any(fnmatchcase(fqn, self.pattern + end) for end in ("", ".*"))
        return fqn == self.pattern or fqn.startswith(self.pattern + ".")

    def holds(self, words: Sequence[str]) -> bool:
        """Whether a parameter that lies so, a word for every sub-axis, is as wanted."""
        split = [word for word in words if word != WHOLE]
        wanted = [word for word in self.words if word != WHOLE]
        if not wanted or not split:
            return bool(split) == bool(wanted)
        if len(self.words) == 1:
            return wanted[0] == SPLIT or all(_is(word, wanted[0]) for word in split)
        return len(split) == len(wanted) and all(map(_is, split, wanted))

    def text(self) -> str:
        """The constraint in a few words."""
        return f"{self.pattern}:{' '.join(self.words)}"


def _is(word: str, wanted: str) -> bool:
    """Whether a word of a plan file is as wanted."""
    factor = word.partition("@")[0]
    short = (word, word.partition(":")[0], factor, factor.partition(".")[0])
    return wanted == SPLIT or wanted in short


def read_placements(value: object) -> tuple[Wanted, ...]:
    """The placements that constraints ask for.

    Raises:
        PlanError: If the value is no such map.
    """
    if not isinstance(value, Mapping) or not value:
        raise PlanError(f"constraint 'placements' is {value!r}", expected=EXPECTED, where=_HERE)
    found = []
    for pattern, words in value.items():
        given = [words] if isinstance(words, str) else words
        if (
            not isinstance(pattern, str)
            or not pattern
            or not isinstance(given, list | tuple)
            or not given
            or not all(isinstance(word, str) and _WORD.fullmatch(word) for word in given)
        ):
            raise PlanError(
                f"parameter {pattern!r} is to lie as {words!r}",
                expected=EXPECTED,
                where=f"{_HERE}[{pattern!r}]",
            )
        found.append(Wanted(pattern, tuple(given)))
    return tuple(found)


def wanted_of(
    wanted: Iterable[Wanted], parameters: Sequence[str], factors: Sequence[str]
) -> dict[str, list[Wanted]]:
    """What is wanted of each parameter of a model, for those of which something is.

    Args:
        wanted: Of which parameters what is wanted.
        parameters: Names of all parameters of the model.
        factors: Names of its factors.

    Raises:
        PlanError: If there is no such parameter, or no such factor.
    """
    found: dict[str, list[Wanted]] = {}
    for item in wanted:
        mine = [name for name in parameters if item.means(name)]
        if not mine:
            raise PlanError(
                f"the model has no parameter {item.pattern!r}",
                expected="the name of a parameter or a module, or a pattern over names, such as "
                + repr(parameters[len(parameters) // 2])
                if parameters
                else None,
                fix=meant(item.pattern, parameters),
                where=item.where,
            )
        for word in item.words:
            factor = word.partition("@")[0].partition(".")[0]
            if factor not in (WHOLE, SPLIT, *factors) and not re.fullmatch(r"dim\d+", factor):
                raise PlanError(
                    f"the model has no factor {factor!r}",
                    expected=f"{WHOLE}, {SPLIT} or one of " + ", ".join(factors),
                    fix=meant(factor, (WHOLE, SPLIT, *factors)),
                    where=item.where,
                )
        for name in mine:
            found.setdefault(name, []).append(item)
    return found


def lies(words: Sequence[str]) -> str:
    """How a parameter lies, for people: ``whole``, or ``vocab@0``."""
    split = dict.fromkeys(word.partition(":")[0] for word in words if word != WHOLE)
    return " and ".join(split) or WHOLE


def refuse_other_placements(
    wanted: Iterable[Wanted],
    placed: Mapping[str, Sequence[str]],
    factors: Sequence[str],
) -> None:
    """Refuse placements of parameters that are not as constraints want them.

    Args:
        wanted: Of which parameters what is wanted.
        placed: For every parameter a word for every sub-axis.
        factors: Names of the model's factors.

    Raises:
        PlanError: Names the first parameter.
    """
    for name, items in wanted_of(wanted, tuple(placed), factors).items():
        for item in items:
            if not item.holds(placed[name]):
                raise PlanError(
                    f"parameter {name} is to be {' '.join(item.words)}, but what the axes split"
                    f" leaves it {lies(placed[name])}",
                    expected=f"a constraint that agrees with it, such as {lies(placed[name])!r}",
                    fix="split other factors, or let a search choose what axes split",
                    where=item.where,
                )
