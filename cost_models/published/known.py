"""What a row may say of a model: families whose details are known, and sizes that models have."""

from __future__ import annotations

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
