"""Hashes of what predictions depend on beside the plan: the cluster and the cost model."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Software
from autopar.plan.fingerprint import hash_of

COST_MODEL_VERSION = 5
"""Grows with every change of the cost model's code that changes what it predicts."""
_MODULES = (
    "allocator", "buckets", "collectives", "compute", "evaluate", "flops", "kernels", "layout",
    "messages", "optimizer", "pricing", "sharing", "simulate", "software", "spans", "static",
    "topology", "walk", "work",
)  # fmt: skip
"""Modules whose constants decide predictions."""


def cluster_hash(cluster: ClusterSpec) -> str:
    """Hash of a cluster: its devices, with all their figures, and how they are joined.

    Prices and where figures come from do not count, nor by which alias a device is called.
    """
    groups = [
        (group.nodes, group.devices_per_node, _plain(group.hardware)) for group in cluster.groups
    ]
    return hash_of([groups, _plain(cluster.tiers)])


def cost_model_hash(cluster: ClusterSpec, software: Software) -> str:
    """Hash of the cost model's constants, of the software's, and of the devices of a cluster."""
    devices = [_plain(group.hardware) for group in cluster.groups]
    return hash_of([COST_MODEL_VERSION, sorted(_constants()), _plain(software), devices])


def _constants() -> Iterator[tuple[str, str, Any]]:
    """Constants of modules: numbers, text, and what is made of them."""
    for module in _MODULES:
        found = sys.modules.get(f"autopar.cost_models.{module}")
        for name, value in vars(found).items() if found is not None else ():
            if name.isupper() and not callable(value) and isinstance(value, _DATA):
                yield module, name, repr(_plain(value))


_DATA = (int, float, str, tuple, frozenset, Mapping)


def _plain(value: Any) -> Any:
    """A value as JSON data; sources of figures are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _plain(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if item.name not in ("source", "sources")
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted(map(str, value))
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return type(value).__name__
