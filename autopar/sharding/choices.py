"""What one op may do along one mesh axis, and what that fixes for its operands and results.

A `Choice` is made per op and mesh axis. Splitting a unit fixes everything, forward and backward:
an operand that contains it is Shard with a Shard gradient; one that lacks it is Replicate with a
Partial gradient; a result that lacks it is Partial with a Replicate gradient. Besides, every op
admits all-Replicate, every differentiable op admits Partial gradients, and linear ops admit
Partial operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.graph.ir import Node, TensorSpec
from autopar.sharding.factors import Unit
from autopar.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Pair,
    Placement,
    Shard,
)
from autopar.sharding.rule import Letter, OpRule


@dataclass(frozen=True, slots=True)
class Choice:
    """What an op does along one mesh axis.

    Attributes:
        kind: ``replicate``, ``split`` (of `unit`), ``gradient`` (Replicate forward with Partial
            gradients) or ``linear`` (Partial operands, see `index`).
        unit: The unit that is split.
        index: Which linear set of the op's rule is Partial.
    """

    kind: Literal["replicate", "split", "gradient", "linear"]
    unit: Unit | None = None
    index: int = 0

    def __str__(self) -> str:
        if self.unit is not None:
            return f"{self.unit.name}@{self.unit.letter}:{self.unit.stride}x{self.unit.size}"
        return f"linear:{self.index}" if self.kind == "linear" else self.kind


REPLICATED, GRADIENT = Choice("replicate"), Choice("gradient")
Choices = tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class CallPlacement:
    """Pairs of every operand (by slot) and output of one op."""

    operands: tuple[Pair, ...]
    outputs: tuple[Pair, ...]


def options(
    node: Node, rule: OpRule | None, units: Sequence[Unit], spec: Callable[[str], TensorSpec]
) -> tuple[Choice, ...]:
    """Everything `node` may do along one axis, sizes of axes not yet considered."""
    found = [REPLICATED]
    if any(value.spec.requires_grad for value in node.outputs):
        found.append(GRADIENT)
    if rule is None:
        return tuple(found)
    found += [Choice("split", unit) for unit in units]
    floating = all(value.spec.is_floating for value in node.outputs)
    if floating:
        found += [Choice("linear", None, index) for index in range(len(rule.linear))]
    return tuple(found)


def fits(choices: Choices, sizes: tuple[int, ...]) -> bool:
    """Whether every split unit has an element for every rank of the axes that split it."""
    parts: dict[Unit, int] = {}
    for choice, size in zip(choices, sizes, strict=True):
        if choice.unit is not None:
            parts[choice.unit] = parts.get(choice.unit, 1) * size
    return all(unit.size >= count for unit, count in parts.items())


def _place(letter: Letter, unit: Unit, slot: int, output: bool) -> Shard | None:
    for place in letter.outputs if output else letter.operands:
        if place.slot == slot:
            return Shard(place.dim, place.stride * unit.stride, unit.size)
    return None


def _letter(rule: OpRule, unit: Unit) -> Letter:
    return next(letter for letter in rule.letters if letter.name == unit.letter)


def _operand(
    rule: OpRule | None, choice: Choice, slot: int, contracted: bool
) -> tuple[Placement, Placement]:
    if choice.kind == "gradient":
        return REPLICATE, PARTIAL
    if choice.kind == "replicate" or rule is None:
        return REPLICATE, REPLICATE
    if choice.kind == "linear":
        if slot in rule.linear[choice.index]:
            return PARTIAL, REPLICATE
        return REPLICATE, PARTIAL
    assert choice.unit is not None
    shard = _place(_letter(rule, choice.unit), choice.unit, slot, output=False)
    if shard is not None:
        return shard, shard
    if slot in rule.additive and contracted:
        return PARTIAL, REPLICATE
    return REPLICATE, PARTIAL


def _output(rule: OpRule | None, choice: Choice, slot: int) -> tuple[Placement, Placement]:
    if choice.kind == "gradient":
        return REPLICATE, PARTIAL
    if choice.kind == "replicate" or rule is None:
        return REPLICATE, REPLICATE
    if choice.kind == "linear":
        return PARTIAL, REPLICATE
    assert choice.unit is not None
    letter = _letter(rule, choice.unit)
    shard = _place(letter, choice.unit, slot, output=True)
    if shard is not None:
        return shard, shard
    return (PARTIAL if letter.missing == "partial" else REPLICATE), REPLICATE


def place_call(node: Node, rule: OpRule | None, choices: Choices) -> CallPlacement:
    """Pairs of all operands and outputs of `node` under one choice per axis."""
    contracted = [
        choice.unit is not None
        and rule is not None
        and not _letter(rule, choice.unit).outputs
        and _letter(rule, choice.unit).missing == "partial"
        for choice in choices
    ]

    def pair(sides: list[tuple[Placement, Placement]]) -> Pair:
        return Pair(tuple(side[0] for side in sides), tuple(side[1] for side in sides))

    return CallPlacement(
        operands=tuple(
            pair(
                [
                    _operand(rule, choice, slot, flag)
                    for choice, flag in zip(choices, contracted, strict=True)
                ]
            )
            for slot in range(len(node.operands))
        ),
        outputs=tuple(
            pair([_output(rule, choice, slot) for choice in choices])
            for slot in range(len(node.outputs))
        ),
    )


def axis_product(choices: Choices, unit: Unit, sizes: tuple[int, ...]) -> int:
    """Number of ranks over which `unit` is split."""
    return math.prod(
        size for choice, size in zip(choices, sizes, strict=True) if choice.unit == unit
    )
