"""What rows may say: families whose details are known, sizes that models have, networks."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

FAMILIES = frozenset(
    (
        "gpt", "gpt-mcore", "gpt-megatron-ds", "gpt-neo", "gpt-oss", "gpt2", "gpt3", "chatglm3",
        "internlm", "llama1", "llama2", "llama3", "mixtral", "mpt", "nemotron", "opt",
        "qwen1.5-moe", "qwen3-moe",
    )
)  # fmt: skip
"""Families whose details are known; any other is a decoder of its sizes."""


class Unpriceable(Exception):  # noqa: N818 - a verdict on a row, not a failure
    """Why a row cannot be priced; the text is for the list of skipped rows."""


def check_sizes(get: Callable[[str], Any]) -> None:
    """Refuse sizes that no model has."""
    for key, most in _MOST.items():
        value = get(key)
        least = key in ("layers", "hidden", "heads")
        if value is not None and not least <= value <= most:
            raise Unpriceable(f"model.{key} is not between {int(least)} and {most:,}")
    if get("head_dim") is None and get("hidden") % get("heads"):
        raise Unpriceable(
            "model.heads does not divide model.hidden, and model.head_dim is not stated"
        )
    if get("kv_heads") and get("heads") % get("kv_heads"):
        raise Unpriceable("model.kv_heads does not divide model.heads")
    if get("experts") and not 0 < (get("topk") or 2) <= get("experts"):
        raise Unpriceable("model.topk is not between 1 and model.experts")


def check_degrees(model: Callable[[str], Any], plan: Mapping[str, Any]) -> None:
    """Refuse ranks that a model cannot be split over.

    Args:
        model: Fields of the model by name.
        plan: Fields of the plan, degrees of parallelism as numbers.
    """
    ranks = plan["dp"] * plan["tp"] * plan["pp"] * plan["cp"]
    if ranks > _RANKS:
        raise Unpriceable(f"plan.dp x tp x pp x cp is over {_RANKS:,}")
    experts, ep = model("experts") or 0, plan["ep"] or 1
    wholes = (
        ("tp", plan["tp"], "model.heads", model("heads")),
        ("cp", plan["cp"], "model.seq_len", model("seq_len") or plan["cp"]),
        ("ep", ep, "model.experts", experts),
    )  # fmt: skip
    for name, degree, field, size in wholes:
        if degree > 1 and (not size or size % degree):
            raise Unpriceable(f"plan.{name} {degree} does not divide {field} {size}")
    if plan["pp"] * (plan["vp"] or 1) > model("layers") + 2:  # ends may be stages of their own
        raise Unpriceable("plan.pp x vp is more than model.layers and both ends")
    if plan["micro_batch"] and plan["micro_batch"] > _SAMPLES:
        raise Unpriceable(f"plan.micro_batch is over {_SAMPLES:,}")


_RANKS, _SAMPLES = 10**6, 10**6
"""Ranks of a job, and samples of a microbatch, beyond any that was published."""


_MOST = {
    "layers": 4096, "hidden": 10**6, "heads": 10**5, "vocab": 10**7, "ffn_hidden": 10**7,
    "experts": 10**5, "kv_heads": 10**5, "head_dim": 10**5, "seq_len": 10**8,
    "moe_ffn_hidden": 10**7,
}  # fmt: skip


def network_gbit(text: str, per_node: int) -> float | None:
    """Gbit/s of a node in one direction, from the words of a row."""
    match = re.search(r"(\d+) x (?:\w+ )*?(\d+) ?Gb", text)
    if match:
        return float(match[1]) * float(match[2])
    match = re.search(r"(\d+) (?:\S+ )?links per node \((\d+) Gbps each", text)
    if match:
        return float(match[1]) * float(match[2])
    match = re.search(r"(\d+) Gbps(?: RoCE)? per node", text)
    if match:
        return float(match[1])
    match = re.search(r"(\d+) Gb/s RDMA per GPU", text)
    if match:
        return float(match[1]) * per_node
    match = re.search(r"InfiniBand (\d+) Gb/s", text)
    if match:  # per card, one card per device
        return float(match[1]) * per_node
    match = re.search(r"(\d+) Gbps", text)
    return float(match[1]) if match else None
