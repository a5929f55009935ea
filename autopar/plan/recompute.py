"""What backward computes again: patterns over op keys, and the policies that make them.

A pattern is what `fnmatch` reads; ``layers.*.mlp/*`` stands for the ops of all those modules. One
that begins with ``!`` takes ops out again; the last pattern that matches an op decides.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import translate
from functools import lru_cache

from autopar.errors import PlanError, meant
from autopar.graph.blocks import find_blocks
from autopar.graph.ir import Graph, Node
from autopar.graph.views import VIEWS
from autopar.plan.cost import is_matmul
from autopar.plan.extras import POLICIES
from autopar.plan.keys import op_keys

_NORMS = frozenset(
    ("layer_norm", "rms_norm", "_fused_rms_norm", "group_norm", "native_layer_norm", "softmax",
     "_softmax", "log_softmax", "_log_softmax", "dropout", "native_dropout", "mean", "var",
     "linalg_vector_norm", "sum")
)  # fmt: skip
_ATTENTION = ("scaled_dot_product",)
_SUMS = frozenset(("add", "sub"))


def resolve_recompute(
    graph: Graph, patterns: Sequence[str], *, where: str = "constraints['recompute']"
) -> frozenset[str]:
    """Names of the nodes that backward computes again.

    Args:
        graph: The graph.
        patterns: Patterns over op keys, or names of policies.
        where: Name of the patterns, for errors.

    Raises:
        PlanError: If a pattern matches no op.
    """
    keys = op_keys(graph)
    chosen = _match(keys, recompute_patterns(graph, patterns, where=where), where)
    return frozenset(
        node.name for node, key in zip(graph.nodes, keys, strict=True) if key in chosen
    )


def recompute_patterns(
    graph: Graph, patterns: Sequence[str], *, where: str = "constraints['recompute']"
) -> tuple[str, ...]:
    """`patterns` with names of policies replaced by the patterns they stand for on `graph`.

    ``full`` keeps only what enters each repeated block (each top-level module where none repeats).
    ``selective`` computes again what is large and cheap: attention scores, softmax, dropout, norms
    and activation functions (arXiv 2205.05198), but no residual sums, which would chain layers.

    ``none`` adds nothing.

    Args:
        graph: The graph.
        patterns: Patterns over op keys, or names of policies.
        where: Name of the patterns, for errors.

    Raises:
        PlanError: If a pattern matches no op.
    """
    found: list[str] = []
    for pattern in patterns:
        if pattern == "full":
            found += _fold(graph, _full(graph))
        elif pattern == "selective":
            found += _fold(graph, _selective(graph))
        elif pattern == "none":
            continue
        else:
            found.append(pattern)
    assert not set(found) & set(POLICIES)
    _match(op_keys(graph), found, where)
    return tuple(found)


def policy_nodes(graph: Graph, policy: str) -> frozenset[str]:
    """Names of the nodes for which a policy of `recompute_patterns` stands.

    Args:
        graph: The graph.
        policy: One of `autopar.plan.extras.POLICIES`.
    """
    if policy == "none":
        return frozenset()
    chosen = _full(graph) if policy == "full" else _selective(graph)
    return frozenset(graph.nodes[index].name for index in chosen)


def node_patterns(graph: Graph, names: Collection[str]) -> tuple[str, ...]:
    """Patterns over op keys that stand for exactly the nodes of these names."""
    return tuple(_fold(graph, {i for i, node in enumerate(graph.nodes) if node.name in names}))


def _usual(keys: Sequence[str]) -> Iterator[str]:
    """Patterns over op keys that people are likely to mean: of all ops of a module, and keys."""
    paths = {key.partition("/")[0] for key in keys}
    yield from sorted(f"{path}/*" for path in paths)
    outer = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "."}
    yield from sorted(f"{path}.*" for path in outer)
    yield from keys


def _match(keys: Sequence[str], patterns: Sequence[str], where: str) -> set[str]:
    chosen: set[str] = set()
    for position, pattern in enumerate(patterns):
        drop = pattern.startswith("!")
        match = re.compile(translate(pattern.removeprefix("!"))).match
        hits = {key for key in keys if match(key)}
        if not hits:
            raise PlanError(
                f"recompute pattern {pattern!r} matches no op",
                expected="a pattern over op keys such as " + repr(keys[len(keys) // 2])
                if keys
                else None,
                fix=meant(pattern, (*POLICIES, *_usual(keys))),
                where=f"{where}[{position}]",
            )
        chosen = chosen - hits if drop else chosen | hits
    return chosen


def _full(graph: Graph) -> set[int]:
    """Everything in the blocks but what leaves them."""
    groups = [set(indexes) for block in find_blocks(graph) for indexes in block.nodes]
    if not groups:
        tops: dict[str, set[int]] = {}
        for index, node in enumerate(graph.nodes):
            if node.module:
                tops.setdefault(node.module.partition(".")[0], set()).add(index)
        groups = list(tops.values())
    group_of = {index: number for number, group in enumerate(groups) for index in group}
    users: dict[str, set[int]] = {}
    for index, node in enumerate(graph.nodes):
        for name in node.operands:
            users.setdefault(name, set()).add(group_of.get(index, -1))
    for output in graph.outputs:
        users.setdefault(output.value or "", set()).add(-1)
    return {
        index
        for index, number in group_of.items()
        if all(users.get(value.name, set()) <= {number} for value in graph.nodes[index].outputs)
    }


def _base(node: Node) -> str:
    return node.op.split(".")[1]


def _selective(graph: Graph) -> set[int]:
    """Attention scores and what is cheap to make."""
    trained = {item.value.name for item in graph.parameters()}
    depth: dict[str, int] = {}
    heights: list[int] = []
    for node in graph.nodes:
        height = max((depth.get(name, 0) for name in node.operands), default=0)
        height += is_matmul(node)
        heights.append(height)
        depth.update((value.name, height) for value in node.outputs)
    chosen = set()
    ends = {output.value for output in graph.outputs}
    for index, node in enumerate(graph.nodes):
        if not any(value.spec.requires_grad for value in node.outputs):
            continue
        if any(value.name in ends for value in node.outputs):
            continue
        activations = [n for n in node.operands if n not in trained and graph.spec(n).requires_grad]
        if _cheap(graph, node, activations, depth):
            chosen.add(index)
    return chosen


def _cheap(graph: Graph, node: Node, activations: list[str], depth: dict[str, int]) -> bool:
    """Whether `selective` computes `node` again."""
    name = _base(node)
    if not activations:
        return False
    if is_matmul(node):
        # A product of activations alone is an attention score, or what is weighted with it.
        return name.startswith(_ATTENTION) or (
            not name.startswith("conv") and len(activations) == len(node.operands) > 1
        )
    if name in _NORMS:
        return True
    if node.op in VIEWS:
        return False
    if name in _SUMS and len({depth.get(item, 0) for item in activations}) > 1:
        return False  # a residual sum
    # Pointwise: as large as its largest operand.
    size = max(graph.spec(item).numel for item in activations)
    return len(node.outputs) == 1 and node.outputs[0].spec.numel >= size and _pointwise(name)


def _pointwise(name: str) -> bool:
    return name in _POINTWISE


_POINTWISE = frozenset(
    (
        "relu", "relu6", "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "hardswish",
        "hardsigmoid", "hardtanh", "sigmoid", "tanh", "softplus", "exp", "log", "erf", "pow",
        "sqrt", "rsqrt", "square", "abs", "neg", "add", "sub", "mul", "div", "where",
        "masked_fill", "clamp", "to", "prelu", "glu", "log_sigmoid", "alpha_dropout",
    )
)  # fmt: skip


def _fold(graph: Graph, chosen: set[int]) -> list[str]:
    """Patterns that match exactly the ops `chosen`, numbers in paths folded where they can be."""
    keys = op_keys(graph)
    wanted = {keys[index] for index in chosen}
    found: list[str] = []
    covered: set[str] = set()
    for key in (keys[index] for index in sorted(chosen)):
        if key in covered:
            continue
        for pattern in _candidates(key):
            hits = _hits(keys, pattern)
            if hits <= wanted:
                break
        found.append(pattern)
        covered |= hits
    return _needed(found, keys)


@lru_cache(maxsize=1024)
def _hits(keys: tuple[str, ...], pattern: str) -> frozenset[str]:
    """Op keys that a pattern matches; layers alike ask for the same ones."""
    match = re.compile(translate(pattern)).match
    return frozenset(key for key in keys if match(key))


def _candidates(key: str) -> Iterable[str]:
    """Patterns for `key`, the widest first, `key` itself (escaped) last."""
    module, _, call = key.partition("/")
    parts = module.split(".")
    folded = ".".join("*" if part.isdigit() else part for part in parts)
    for depth in range(len(parts), 0, -1):
        if parts[depth - 1].isdigit():
            prefix = ".".join("*" if part.isdigit() else part for part in parts[:depth])
            yield prefix + "*/*"
    yield folded + "/*"
    yield f"{folded}/{call.partition('#')[0]}#*"
    yield f"{folded}/{call}"
    yield module + "/*"
    yield re.sub(r"([*?[])", r"[\1]", key)


def _needed(patterns: list[str], keys: tuple[str, ...]) -> list[str]:
    """`patterns` without those whose ops others match already."""
    hits = {pattern: _hits(keys, pattern) for pattern in patterns}
    kept = list(dict.fromkeys(patterns))
    for pattern in list(kept):
        others = frozenset[str]().union(*(hits[other] for other in kept if other != pattern))
        if hits[pattern] <= others:
            kept.remove(pattern)
    return kept
