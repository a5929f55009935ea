"""What rows may say: families whose details are known, sizes that models have, networks."""

from __future__ import annotations

import re
from collections.abc import Callable
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


_MOST = {
    "layers": 4096, "hidden": 10**6, "heads": 10**5, "vocab": 10**7, "ffn_hidden": 10**7,
    "experts": 10**5,
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
