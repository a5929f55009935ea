"""How tensor parallelism splits each matrix: by columns or rows, in one piece or in several.

A linear layer split over its outputs is *column* parallel, one split over its inputs *row*
parallel (Megatron-LM, arXiv 1909.08053, section 3). Engines split a dim into equal consecutive
parts; a factor inside a dim (the heads of a fused query, key and value) lies otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autopar.export.facts import Facts, word_axes
from autopar.export.layers import Layers
from autopar.plan.plan import ParameterPlan

Kind = Literal["column", "row", "embedding", "head", "other"]
_WORD = re.compile(r"(\w+(?:\.\w+)*)@(\d+):(\d+)x(\d+)")
ATTENTION = frozenset({"heads", "kv_heads", "group"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one tensor lies over the tensor axes.

    Attributes:
        dim: The dim that is split.
        factor: The factor that is split first.
        ways: Ranks among which it is divided.
        copies: Consecutive pieces of the dim that are divided one by one; 1 for the whole dim.
        even: Whether all parts have one size and each is one run of rows.
    """

    dim: int
    factor: str
    ways: int
    copies: int
    even: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How the matrices of one name are split, in all layers.

    Attributes:
        module: Path of the module, numbers as ``*``.
        kind: Column or row parallel; the input embedding or the output head, split over the
            vocabulary; ``other`` for what none of these describes.
        cut: How the weight lies.
        parameters: The weights and biases.
    """

    module: str
    kind: Kind
    cut: Cut
    parameters: tuple[ParameterPlan, ...]

    @property
    def plain(self) -> bool:
        """Whether it is what any engine with tensor parallelism does."""
        return self.kind != "other" and self.cut.even and self.cut.copies == 1


def cut_of(item: ParameterPlan, facts: Facts, axes: Iterable[str]) -> Cut | None:
    """How a parameter lies over `axes` together; None if it is whole there."""
    wanted = set(axes)
    words = [
        (word, size)
        for word, (axis, size) in zip(item.placement, word_axes(facts.plan), strict=True)
        if axis in wanted and size > 1
    ]
    found = [(_WORD.fullmatch(word), size) for word, size in words]
    split = [(match, size) for match, size in found if match is not None]
    if not split:
        return None
    first = split[0][0]
    dim, stride, size = int(first[2]), int(first[3]), int(first[4])
    ways, even = 1, len(split) == len(words)
    here, left = (stride, size), size
    for match, parts in split:
        place = (int(match[3]), int(match[4]))
        if place != here:
            # The next factor must lie right inside of one that is used up.
            even &= left == 1 and place[0] * place[1] == here[0]
            here, left = place, place[1]
        even &= int(match[2]) == dim and left % parts == 0
        left, ways = max(1, left // parts), ways * parts
    copies = item.shape[dim] // (stride * size) if dim < len(item.shape) else 1
    return Cut(dim=dim, factor=first[1], ways=ways, copies=copies, even=even)


def splits_of(facts: Facts, layers: Layers) -> tuple[Split, ...]:
    """How tensor axes split matrices, in order of parameters; whole ones are left out."""
    modules: dict[str, list[ParameterPlan]] = {}
    for item in facts.plan.parameters:
        modules.setdefault(folded(item.fqn.rpartition(".")[0]), []).append(item)
    found = []
    for module, items in modules.items():
        weight = max(items, key=lambda item: len(item.shape))
        cut = cut_of(weight, facts, facts.tensor)
        if cut is None:
            continue
        whole = [item for item in items if len(item.shape) == 1]
        bias = any(cut_of(item, facts, facts.tensor) is not None for item in whole)
        kind = _kind(weight, cut, layers, bias if whole else None)
        found.append(Split(module=module, kind=kind, cut=cut, parameters=tuple(items)))
    return tuple(found)


def _kind(weight: ParameterPlan, cut: Cut, layers: Layers, bias_split: bool | None) -> Kind:
    base = cut.factor.partition(".")[0]
    if len(weight.shape) != 2:
        return "other"
    if base == "vocab" and cut.dim == 0:
        return "embedding" if layers.before(weight.fqn) else "head"
    if base not in ATTENTION and base != "ffn":
        return "other"
    if bias_split is not None and bias_split != (cut.dim == 0):
        return "other"  # the weight is kept as (inputs, outputs), as GPT-2's convolutions are
    return "column" if cut.dim == 0 else "row"


def group_of(split: Split) -> str:
    """What must be split together: the attention of a block, or its feed-forward part."""
    base = split.cut.factor.partition(".")[0]
    if split.kind in ("embedding", "head"):
        return split.module
    return "attention" if base in ATTENTION else base


def folded(path: str) -> str:
    """A module path with numbers as ``*``."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
