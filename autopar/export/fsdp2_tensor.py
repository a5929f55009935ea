"""Tensor parallelism of the fsdp2 script: what modules `parallelize_module` gets, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.export.common import Work, whole_bytes
from autopar.export.splits import Split, folded, group_of


def styles_of(work: Work) -> tuple[dict[str, str], bool]:
    """Module pattern to style, and whether the vocabulary is split.

    What belongs together (the matrices of an attention, of a feed-forward part) is split as a
    whole or not at all.
    """
    splits = work.splits
    groups: dict[str, list[Split]] = {}
    for split in splits:
        groups.setdefault(group_of(split), []).append(split)
    styles: dict[str, str] = {}
    whole: list[Split] = []
    for members in groups.values():
        kinds = {split.kind for split in members}
        vocabulary = kinds <= {"embedding", "head"}
        if not all(split.plain for split in members) or (
            not vocabulary and kinds != {"column", "row"}
        ):
            whole += members
            continue
        styles |= {split.module: _STYLES[split.kind] for split in members}
    if whole:
        inside = any(split.cut.copies > 1 for split in whole)
        work.lose(
            "splits of " + ", ".join(split.module for split in whole[:6]),
            "whole on every tensor rank: DTensor divides dims into equal consecutive parts"
            + (", not factors inside of them (a fused query, key and value)" if inside else ""),
            extra_bytes=whole_bytes(whole),
        )
    vocabulary = any(s.module in styles and s.kind in ("embedding", "head") for s in splits)
    return styles, vocabulary


_STYLES = {
    "embedding": "RowwiseParallel(input_layouts=Replicate())",
    "head": "ColwiseParallel(use_local_output=False)",
    "column": "ColwiseParallel()",
    "row": "RowwiseParallel()",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """Sequence parallelism between tensor-parallel modules.

    Attributes:
        styles: All styles, those of norms added.
        places: The first layer, the module after the last one, modules that gather their input.
    """

    styles: dict[str, str]
    places: tuple[str, str, tuple[str, ...]]


def sequence_of(work: Work, styles: Mapping[str, str]) -> Sequence | None:
    """How activations between tensor-parallel modules are split, if the plan does and one can."""
    layers = work.layers
    if not work.facts.sequence:
        return None
    columns = [name for name, style in styles.items() if style == _STYLES["column"]]
    parents = {name.rpartition(".")[0] for name in columns}
    groups = {group_of(split) for split in work.splits if split.module in styles}
    inner = folded(layers.path(0)) if layers.count else ""
    good = layers.count and {"attention", "ffn"} <= groups and inner not in parents
    if not good:
        work.lose(
            "activations between tensor-parallel modules are split along the sequence",
            "whole on every rank: the script splits them where attention and feed-forward part are "
            "modules of their own, and tensor-parallel",
        )
        return None
    found = dict(styles)
    for name, style in styles.items():
        if style == _STYLES["row"]:
            found[name] = "RowwiseParallel(output_layouts=Shard(1))"
    tail = list(dict.fromkeys(name.rpartition(".")[0] for name in layers.tail))
    last = tail[0] if tail and _vector(work, tail[0]) else layers.path(layers.count - 1)
    for module in layers.modules:
        path = f"{inner}.{module}"
        if _vector(work, f"{layers.path(0)}.{module}") and not _under(path, parents):
            found[path] = "SequenceParallel(use_local_output=True)"
    if last in tail:
        found[last] = "SequenceParallel(use_local_output=True)"
    return Sequence(styles=found, places=(layers.path(0), last, tuple(sorted(parents))))


def _under(path: str, parents: set[str]) -> bool:
    return any(path.startswith(f"{parent}.") for parent in parents)


def _vector(work: Work, module: str) -> bool:
    """Whether a module has nothing but vectors, as norms have."""
    own = [item for item in work.plan.parameters if item.fqn.rpartition(".")[0] == module]
    return bool(own) and all(len(item.shape) == 1 for item in own)


def summed(work: Work, styles: Mapping[str, str]) -> tuple[str, ...]:
    """Modules that work on one rank's heads with whole parameters: norms of queries and keys."""
    layers = work.layers
    if not layers.count:
        return ()
    inner = folded(layers.path(0))
    parents = {
        name.rpartition(".")[0] for name, style in styles.items() if style == _STYLES["column"]
    } - {inner}
    widths = {
        item.shape[0]
        for item in work.plan.parameters
        if len(item.shape) == 1 and item.fqn in layers.tail
    }
    found = []
    for module in layers.modules:
        path, own = f"{inner}.{module}", f"{layers.path(0)}.{module}"
        if path in styles or not _under(path, parents) or not _vector(work, own):
            continue
        sizes = {p.shape[0] for p in work.plan.parameters if p.fqn.rpartition(".")[0] == own}
        if not sizes & widths:
            found.append(path)
    return tuple(found)
