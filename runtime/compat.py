"""Names that differ between torch 2.11 and 2.14, each found by a probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def _first(*names: str) -> Callable[..., Any]:
    for name in names:
        function: Callable[..., Any] | None = getattr(dist, name, None)
        if function is not None:
            return function
    raise ImportError(f"torch.distributed has none of {', '.join(names)}")


# The *_single names are new in 2.13, where the older ones warn.
all_gather_single = _first("all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = _first("reduce_scatter_single", "reduce_scatter_tensor")
all_to_all_single = _first("all_to_all_single")
