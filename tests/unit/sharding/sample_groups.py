"""All samples, in groups small enough to name in a test id."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from tests.unit.sharding import samples_model, samples_pointwise, samples_tensor
from tests.unit.sharding.samples import Sample

GROUPS: dict[str, Callable[[], list[Sample]]] = {
    "unary": samples_pointwise.unary,
    "binary": samples_pointwise.binary,
    "ternary": samples_pointwise.ternary,
    "creation": samples_pointwise.creation,
    "random": samples_pointwise.random,
    "views": samples_tensor.views,
    "joins": samples_tensor.joins,
    "layout": samples_tensor.layout,
    "reductions": samples_tensor.reductions,
    "indexing": samples_tensor.indexing,
    "tables": samples_tensor.tables,
    "contractions": samples_model.contractions,
    "distances": samples_model.distances,
    "attention": samples_model.attention,
    "norms": samples_model.norms,
    "convolutions": samples_model.convolutions,
    "pools": samples_model.pools,
    "losses": samples_model.losses,
    "recurrent": samples_model.recurrent,
}


@cache
def group(name: str) -> tuple[Sample, ...]:
    return tuple(GROUPS[name]())
