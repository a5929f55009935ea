"""What random plans have reached, and what there is to reach.

Everything that can be reached is derived: choices from the rules of the models' ops, reshard steps
and their successions from all transitions between placements on three axes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise, product

from autopar.plan.random_plans import Prefer
from autopar.runtime.lower import LocalForward
from autopar.runtime.reshard import Reshard, StepRunner
from autopar.sharding.choices import Choice, Choices, fits, options
from autopar.sharding.mesh import Mesh
from autopar.sharding.placement import (
    PARTIAL,
    REPLICATE,
    Placement,
    Placements,
    Shard,
    dim_factors,
    legal,
)
from autopar.sharding.reshard import Step, plan_steps
from autopar.sharding.rule import OpRule
from autopar.sharding.sharded import ShardedGraph
from tests.distributed.fuzz_models import Subject

Key = tuple[str, ...]

MOVES = frozenset({"slice", "reduce_scatter", "all_gather", "all_to_all"})
"""Steps that cut or join along a factor; only these can be strided, nested or uneven."""


@cache
def text(rule: OpRule | None) -> str:
    """Text of a rule."""
    return str(rule)


def choice_key(op: str, rule: OpRule | None, choice: Choice) -> Key:
    """Op, rule and what is done: whole letters and inner factors of letters count apart."""
    word = choice.kind if choice.kind != "linear" else f"linear {choice.index}"
    if choice.unit is not None:
        assert rule is not None
        whole = rule.letter(choice.unit.letter).size == choice.unit.size
        word = choice.unit.letter + ("" if whole else " (factor)")
    return ("choice", op, text(rule), word)


def special_keys(op: str, rule: OpRule | None, picked: Choices, mesh: Mesh) -> Iterator[Key]:
    """The letters that the special lowering of a call sees split, alone, in pairs and unevenly."""
    units = dict.fromkeys(choice.unit for choice in picked if choice.unit is not None)
    letters = sorted({unit.letter for unit in units})
    if rule is None or not _is_special(rule, letters):
        return
    for letter in letters or ["none"]:
        yield ("special", op, text(rule), letter)
    for first, second in product(letters, letters):
        if first < second:
            yield ("special pair", op, text(rule), f"{first} {second}")
    for unit in units:
        parts = math.prod(
            size for choice, size in zip(picked, mesh.shape, strict=True) if choice.unit == unit
        )
        if unit.size % parts and (rule.special or rule.letter(unit.letter).special):
            yield ("special uneven", op, text(rule), unit.letter)


def _is_special(rule: OpRule, letters: Iterable[str]) -> bool:
    return rule.special or any(rule.letter(name).special for name in letters)


def step_keys(steps: tuple[StepRunner, ...], way: str, sizes: tuple[int, ...]) -> Iterator[Key]:
    """Kinds of steps, how they cut, and which follow each other."""
    for runner in steps:
        yield ("step", way, runner.step.kind, "any")
        for flavour in _flavours(runner.step, sizes):
            yield ("step", way, runner.step.kind, flavour)
    for first, second in pairwise(steps):
        yield ("succession", way, first.step.kind, second.step.kind)


def _flavours(step: Step, sizes: tuple[int, ...]) -> Iterator[str]:
    if len(step.axes) > 1:
        yield "several axes"
    if step.kind not in MOVES:
        return
    for shard, state in ((step.source, step.before), (step.target, step.after)):
        if shard is None:
            continue
        if shard.stride > 1:
            yield "strided"
        for factor in dim_factors(state, shard.dim):
            if (factor.stride, factor.size) == (shard.stride, shard.size):
                if len(factor.axes) > len(step.axes):
                    yield "nested"
                if factor.size % math.prod(sizes[axis] for axis in factor.axes):
                    yield "uneven"
            elif factor.stride < shard.stride:
                yield "split below"
            else:
                yield "split above"


def storage_keys(placements: Placements, gradient: Placements, sizes: tuple[int, ...]) -> set[str]:
    """How a parameter is held."""
    found = {"gradient partial"} if PARTIAL in gradient else set()
    for dim in {p.dim for p in placements if isinstance(p, Shard)}:
        factors = dim_factors(placements, dim)
        found |= {"two factors of a dim"} if len(factors) > 1 else set()
        for factor in factors:
            found.add("split" if factor.stride == 1 else "strided")
            parts = math.prod(sizes[axis] for axis in factor.axes)
            found |= {"uneven"} if factor.size % parts else set()
            found |= {"several axes"} if len(factor.axes) > 1 else set()
    return found or {"whole"}


class Coverage:
    """Counts what plans have reached."""

    def __init__(self) -> None:
        self.counts: Counter[Key] = Counter()

    def add(self, subject: Subject, sharded: ShardedGraph, program: LocalForward) -> None:
        """Count a plan that ran."""
        ran = set(program.origins.values())
        sizes = sharded.mesh.shape
        graph, rules = sharded.graph, sharded.factors.rules
        for node, rule, picked in zip(graph.nodes, rules, sharded.choices, strict=True):
            if any(value.name in ran for value in node.outputs):
                self.counts.update({choice_key(node.op, rule, choice) for choice in picked})
                self.counts.update(special_keys(node.op, rule, picked, sharded.mesh))
        for child in program.module.children():
            if isinstance(child, Reshard):
                self.counts.update(step_keys(child.forward_steps, "forward", sizes))
                self.counts.update(step_keys(child.gradient_steps, "backward", sizes))
        for item in graph.parameters():
            pair = sharded.inputs[item.value.name]
            for word in storage_keys(pair.forward, pair.gradient, sizes):
                self.counts["storage", word] += 1

    def prefer(self, subject: Subject, mesh: Mesh, universe: frozenset[Key]) -> Prefer:
        """Choices that reach something new, or may lead to it on the axes that follow."""
        graph, rules = subject.traced.graph, subject.factors.rules
        left = frozenset(self.missing(universe))
        leading = {
            (key[1], key[2], letter)
            for key in left
            if key[0] in ("special pair", "special uneven")
            for letter in key[3].split()
        }

        def wanted(index: int, picked: Choices) -> bool:
            if not left:
                return False
            op, rule, unit = graph.nodes[index].op, rules[index], picked[-1].unit
            part = Mesh(mesh.axes[: len(picked)])
            keys = [choice_key(op, rule, picked[-1]), *special_keys(op, rule, picked, part)]
            if not left.isdisjoint(keys):
                return True
            last = len(picked) == len(mesh.axes)
            return not last and unit is not None and (op, text(rule), unit.letter) in leading

        return wanted

    def missing(self, universe: Iterable[Key]) -> list[Key]:
        """What `universe` has and no plan has reached."""
        return sorted(key for key in universe if key not in self.counts)

    def table(self, universe: set[Key]) -> str:
        """Reached of all, and how often, by kind; reshard steps and storage one by one."""
        lines = [f"{'reached':<34}{'of':>8}{'times':>10}{'least':>8}"]
        for kind in dict.fromkeys(key[0] for key in sorted(universe)):
            keys = [key for key in universe if key[0] == kind]
            seen = [self.counts[key] for key in keys]
            reached = sum(count > 0 for count in seen)
            lines.append(f"{kind:<26}{reached:>8}{len(keys):>8}{sum(seen):>10}{min(seen):>8}")
        for key in sorted(universe):
            if key[0] in ("step", "storage"):
                lines.append(f"  {' '.join(key[1:]):<48}{self.counts[key]:>8}")
        return "\n".join(lines)


def choices_universe(subject: Subject, meshes: tuple[Mesh, ...]) -> set[Key]:
    """All choices and special lowerings that some op of the model has on some mesh."""
    found: set[Key] = set()
    graph, factors = subject.traced.graph, subject.factors
    needed = _needed(subject)
    for index, node in enumerate(graph.nodes):
        if index not in needed:
            continue
        rule = factors.rules[index]
        allowed = options(node, rule, factors.units[index], graph.spec)
        for mesh in meshes:
            for picked in product(allowed, repeat=min(2, len(mesh.shape))):
                part = Mesh(mesh.axes[: len(picked)])
                if fits(picked, part.shape):
                    found.update(choice_key(node.op, rule, choice) for choice in picked)
                    found.update(special_keys(node.op, rule, picked, part))
    return found


def _needed(subject: Subject) -> set[int]:
    """Indices of the nodes that loss and buffers depend on."""
    graph = subject.traced.graph
    wanted = {out.value for out in graph.outputs if out.kind == "buffer"} | {subject.traced.loss}
    found = set()
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if any(value.name in wanted for value in node.outputs):
            found.add(index)
            wanted.update(node.operands)
    return found


@cache
def steps_universe() -> frozenset[Key]:
    """Kinds of steps and successions that some transition on three axes of two ranks takes."""
    found: set[Key] = set()
    shape, sizes = (8, 4), (2, 2, 2)
    basis: tuple[Placement, ...] = (
        REPLICATE, PARTIAL, Shard(0, 1, 8), Shard(0, 1, 2), Shard(0, 2, 4), Shard(1, 1, 4),
    )  # fmt: skip
    states = [state for state in product(basis, repeat=3) if not legal(state, shape, sizes)]
    for source, target in product(states, states):
        steps = plan_steps(source, target)
        for step in steps:
            found.add((step.kind, "any"))
            found.update((step.kind, flavour) for flavour in _flavours(step, sizes))
        found.update((a.kind, b.kind) for a, b in pairwise(steps))
    kinds = {key[0] for key in found}
    found |= {(kind, "uneven") for kind in kinds & MOVES}
    ways = ("forward", "backward")
    return frozenset(
        ("succession" if word in kinds else "step", way, kind, word)
        for way in ways
        for kind, word in found
    )


STORAGE: set[Key] = {
    ("storage", word)
    for word in (
        "whole", "split", "strided", "uneven", "several axes", "two factors of a dim",
        "gradient partial",
    )
}  # fmt: skip
"""Every way a parameter can be held."""
