"""What a sharding rule says, and the registry that finds the rule of an op.

A rule gives every dim of an op's operands and outputs one or more *letters*, einops fashion. A
letter that is split over a mesh axis fixes the placement of every tensor of the op:

    operand with the letter      Shard            gradient Shard
    operand without it           Replicate        gradient Partial
      (additive operand)         Partial          gradient Replicate
    output with the letter       Shard            gradient Shard
    output without it            Partial          gradient Replicate
      (missing="replicate")      Replicate        gradient Replicate

A linear set is the other kind of choice: its operands Partial (gradient Replicate), all other
operands Replicate (gradient Partial), the outputs Partial (gradient Replicate).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autopar.errors import RuleError
from autopar.graph.ir import Node, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a letter sits: the dim's index is ``... + i * stride`` for i in ``[0, size)``.

    Attributes:
        slot: Index into ``node.operands`` or ``node.outputs``.
        dim: Tensor dim.
        stride: Product of the sizes of the letters inside (right of) this one in the dim.
        size: Size of the letter.
    """

    slot: int
    dim: int
    stride: int = 1
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """One index of an op.

    Attributes:
        name: As in the rule text, unique in the rule.
        size: Global size, at least 2.
        operands: Places in operands.
        outputs: Places in outputs.
        split: Whether it may be sharded at all.
        missing: Forward placement of an output that lacks the letter when the letter is split.
        special: The op needs its special lowering (``runtime/special``) when this letter is split.
        hint: Factor name the op suggests for the letter, ``""`` for none.
        hint_strength: The strongest hint of a factor names it.
    """

    name: str
    size: int
    operands: tuple[Place, ...]
    outputs: tuple[Place, ...]
    split: bool = True
    missing: Literal["partial", "replicate"] = "partial"
    special: bool = False
    hint: str = ""
    hint_strength: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """All legal ways of sharding one op call over one mesh axis.

    Attributes:
        letters: The letters; dims of size 1 carry none.
        additive: Operand slots added once to the result (bias): Partial when a contracted letter
            (``missing="partial"``, absent from an output) is split.
        linear: Sets of operand slots in which the op is jointly linear, the others fixed.
        special: The op always needs its special lowering (random ops).
        size_arg: ``("args", i)``: this argument holds the output's shape (or the outputs' sizes
            along one dim) and must be rewritten to local sizes.
    """

    letters: tuple[Letter, ...]
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    special: bool = False
    size_arg: tuple[str, int] | None = None

    def __post_init__(self) -> None:
        names = [letter.name for letter in self.letters]
        assert len(set(names)) == len(names), f"letters are not unique: {names}"

    def letter(self, name: str) -> Letter:
        """The letter called `name`."""
        return next(letter for letter in self.letters if letter.name == name)

    def __str__(self) -> str:
        def term(kind: str, slot: int) -> str:
            found = [
                (place.dim, -place.stride, letter.name)
                for letter in self.letters
                for place in getattr(letter, kind)
                if place.slot == slot
            ]
            return " ".join(name for _, _, name in sorted(found)) or "-"

        def side(kind: str) -> str:
            slots = {place.slot for letter in self.letters for place in getattr(letter, kind)}
            return ", ".join(term(kind, slot) for slot in range(max(slots, default=-1) + 1))

        return f"{side('operands')} -> {side('outputs')}"


SpecOf = Callable[[str], TensorSpec]
RuleFunction = Callable[[Node, SpecOf], OpRule | None]

_RULES: dict[str, RuleFunction] = {}


def register(op: str, function: RuleFunction) -> None:
    """Add the rule of `op`.

    Raises:
        RuleError: `op` has a rule already.
    """
    if op in _RULES:
        raise RuleError(f"{op} has two sharding rules", fix="keep one of them")
    _RULES[op] = function


def registered_ops() -> tuple[str, ...]:
    """Names of all ops with a rule, sorted."""
    _load()
    return tuple(sorted(_RULES))


def rule_for(node: Node, spec: SpecOf) -> OpRule | None:
    """The sharding rule of one call.

    Args:
        node: The call.
        spec: Gives the global spec of a value by name; asked for the operands only.

    Returns:
        The rule, or None when the op has none (or none for these arguments): such a call is
        replicated and reported.

    Raises:
        RuleError: The rule does not fit the shapes; the message quotes both.
    """
    _load()
    function = _RULES.get(node.op)
    return None if function is None else function(node, spec)


def _load() -> None:
    # The families import this module to register themselves, so they load on first use.
    importlib.import_module("autopar.sharding.rules")
