"""Sizes of a model that a row states in words, or leaves to a default of its software."""

from __future__ import annotations

import re

from autopar.cost_models.published.known import Unpriceable
from autopar.cost_models.published.rows import Row


def inner_features(row: Row, gated: bool) -> int:
    """Inner features of a dense perceptron, 0 for the default of four times the hidden size.

    Megatron takes two thirds of that where it is gated, down to a multiple of 64 (its arguments
    ``--swiglu`` without ``--ffn-hidden-size``).
    """
    stated: int | None = row.get("model", "ffn_hidden")
    if stated is None and gated and "megatron" in (row.get("plan", "framework") or "").lower():
        hidden: int = row.get("model", "hidden")
        return 8 * hidden // 3 // 64 * 64
    return stated or 0


def stage_layers(row: Row, layers: int, pp: int, chunks: int) -> tuple[int, ...]:
    """Blocks of every stage, in order of the model.

    Raises:
        Unpriceable: If what the row says of them does not give `layers`.
    """
    stages = pp * chunks
    stated = re.search(r"layers per stage \[([\d, ]+)\]", row.notes)
    outer = stated is not None or "embedding layers count" in (row.get("plan", "schedule") or "")
    if stated is not None:
        counts = [int(text) for text in stated[1].split(",")]
    elif "uneven_pipeline" in row.id and stages > 2:
        # --decoder-first-pipeline-num-layers 2, and last, in the functional test of that name.
        counts = [2, *_even(layers - 4, stages - 2), 2]
    elif outer:
        counts = _even(layers + 2, stages)
    else:
        counts = _even(layers, stages)
    if outer:  # embedding and head were counted as layers
        counts[0] -= 1
        counts[-1] -= 1
    if len(counts) != stages or sum(counts) != layers or min(counts) < 0:
        raise Unpriceable(f"{layers} layers in stages of {counts}, {stages} stages")
    return tuple(counts)


def _even(layers: int, stages: int) -> list[int]:
    """As many layers for every stage as can be, the rest on the first ones."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]
