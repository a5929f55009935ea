"""Plans of a Llama-like and of a GPT-like model, written by hand: nothing is traced."""

from __future__ import annotations

from typing import Any

from autopar.plan.parts import PipelinePlan, ZeroPlan
from autopar.plan.plan import ParameterPlan, Plan
from autopar.plan.strategies import prime_factors

WIDTH, HEADS, KV, HIDDEN, VOCAB = 32, 4, 2, 96, 64
MODEL = ("heads", "kv_heads", "group", "ffn", "vocab", "experts")


def llama_weights(layers: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name to shape and to the factors that tensor parallelism splits, word by word."""
    size = WIDTH // HEADS
    group = HEADS // KV
    kv = f"kv_heads@0:{group * size}x{KV}"
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "tokens.weight": ((VOCAB, WIDTH), (f"vocab@0:1x{VOCAB}",))
    }
    for place in range(layers):
        name = f"layers.{place}"
        found[f"{name}.attention_norm.weight"] = ((WIDTH,), ())
        inner = f"group@0:{size}x{group}"
        found[f"{name}.attention.q.weight"] = ((WIDTH, WIDTH), (kv, inner))
        for key in ("k", "v"):
            shape = (KV * size, WIDTH)
            found[f"{name}.attention.{key}.weight"] = (shape, (f"kv_heads@0:{size}x{KV}", "whole"))
        found[f"{name}.attention.o.weight"] = (
            (WIDTH, WIDTH), (kv.replace("@0", "@1"), inner.replace("@0", "@1")),
        )  # fmt: skip
        found[f"{name}.mlp_norm.weight"] = ((WIDTH,), ())
        for key in ("gate", "up"):
            found[f"{name}.mlp.{key}.weight"] = ((HIDDEN, WIDTH), (f"ffn@0:1x{HIDDEN}",))
        found[f"{name}.mlp.down.weight"] = ((WIDTH, HIDDEN), (f"ffn@1:1x{HIDDEN}",))
    found["norm.weight"] = ((WIDTH,), ())
    found["head.weight"] = ((VOCAB, WIDTH), (f"vocab@0:1x{VOCAB}",))
    return found


def gpt_weights(layers: int) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """As `llama_weights`: query, key and value are one matrix, the embedding is the output."""
    size = WIDTH // HEADS
    heads = f"heads@0:{size}x{HEADS}"
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "tokens.weight": ((VOCAB, WIDTH), (f"vocab@0:1x{VOCAB}",)),
        "positions.weight": ((16, WIDTH), ()),
    }
    for place in range(layers):
        name = f"blocks.{place}"
        found |= {
            f"{name}.norm1.weight": ((WIDTH,), ()),
            f"{name}.qkv.weight": ((3 * WIDTH, WIDTH), (heads,)),
            f"{name}.qkv.bias": ((3 * WIDTH,), (heads,)),
            f"{name}.out.weight": ((WIDTH, WIDTH), (heads.replace("@0", "@1"),)),
            f"{name}.out.bias": ((WIDTH,), ()),
            f"{name}.up.weight": ((HIDDEN, WIDTH), (f"ffn@0:1x{HIDDEN}",)),
            f"{name}.up.bias": ((HIDDEN,), (f"ffn@0:1x{HIDDEN}",)),
            f"{name}.down.weight": ((WIDTH, HIDDEN), (f"ffn@1:1x{HIDDEN}",)),
            f"{name}.down.bias": ((WIDTH,), ()),
        }
    found["norm.weight"] = ((WIDTH,), ())
    return found


def plan_of(
    mesh: dict[str, int],
    *,
    layers: int = 4,
    gpt: bool = False,
    sequence: bool = False,
    pipeline: dict[str, Any] | None = None,
    stages: tuple[int, ...] = (),
    zero: int = 0,
    zero_axes: tuple[str, ...] = ("dp",),
    batch: int = 32,
    dtype: str = "float32",
    order: dict[str, tuple[str, ...]] | None = None,
    **fields: Any,
) -> Plan:
    """A plan over axes pp, dp, cp and tp.

    Args:
        mesh: Axis to size, outermost first.
        layers: Number of layers.
        gpt: Whether it is the GPT-like model.
        sequence: Whether tensor ranks split the sequence as well.
        pipeline: Fields of the pipeline; cuts follow from `stages`.
        stages: Layers of every stage, even by default.
        zero: ZeRO stage.
        zero_axes: Axes of ZeRO.
        batch: Global batch size, in samples of 16 tokens.
        dtype: Dtype of parameters.
        order: What axes split, beside the defaults.
        fields: Other fields of the plan.
    """
    defaults = {
        "dp": ("batch",), "cp": ("seq",), "tp": (*MODEL, "seq") if sequence else MODEL
    }  # fmt: skip
    known = defaults | (order or {})
    parts = {"axis": "pp", **(pipeline or {})}
    ranks = mesh.get("pp", 1) * parts.get("chunks", 1)
    counts = stages or tuple(layers // ranks for _ in range(ranks))
    path, first = ("blocks", "norm1") if gpt else ("layers", "attention_norm")
    cuts, notes, start = [], [], 0
    for number, count in enumerate(counts):
        end = start + count
        module = f"{path}.{start}.{first}" if start < layers else "norm"
        module = module if number else "tokens"
        before = f"{path}.{end - 1}" if end and number + 1 < len(counts) else "head"
        if len(counts) > 1:
            notes.append(f"stage {number}: {module} to {before}, 9 ops, 9 parameters of 9 elements")
        if number:
            cuts.append(f"{module}/aten.layer_norm.default#0")
        start = end
    return Plan(
        mesh=tuple(mesh.items()),
        strategy="megatron_sp" if sequence else "megatron",
        order=tuple((axis, known[axis]) for axis in mesh if axis != "pp"),
        parameters=_parameters(mesh, gpt_weights(layers) if gpt else llama_weights(layers), dtype),
        pipeline=PipelinePlan(**{**parts, "cuts": tuple(cuts)}),
        zero=ZeroPlan(stage=zero, axes=zero_axes if zero else ()),
        inputs=(("args[0]", f"int64[{batch}, 16]"), ("args[1]", f"int64[{batch}, 16]")),
        notes=tuple(notes),
        **fields,
    )


def _parameters(
    mesh: dict[str, int],
    weights: dict[str, tuple[tuple[int, ...], tuple[str, ...]]],
    dtype: str,
) -> tuple[ParameterPlan, ...]:
    found = []
    for fqn, (shape, words) in weights.items():
        placement: list[str] = []
        for axis, size in mesh.items():
            if axis == "pp":
                continue
            parts = prime_factors(size) or [1]
            if axis != "tp" or not words or size == 1:
                placement += ["whole"] * len(parts)
            elif len(words) == 1:
                placement += [words[0]] * len(parts)
            else:
                placement += (list(words) + ["whole"] * len(parts))[: len(parts)]
        found.append(ParameterPlan(fqn=fqn, shape=shape, dtype=dtype, placement=tuple(placement)))
    return tuple(found)
