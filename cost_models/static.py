"""What a stage holds at all times: parameters, gradients, optimizer state.

With P bytes of parameters, as much of gradients and N data-parallel ranks, ZeRO (arXiv 1910.02054,
section 5) leaves

    stage   parameters   gradients   optimizer state of S bytes per parameter
    0       P            P           S P
    1       P            P           S P / N
    2       P            P / N       S P / N
    3       P / N        P / N       S P / N

and padding of buckets to equal shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.cost_models.buckets import Bucket, LocalParameter
from autopar.cost_models.optimizer import OptimizerMemory
from autopar.graph.ir import ITEM_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Static:
    """What a stage holds at all times.

    Attributes:
        parameters: Bytes of parameters.
        gradients: Bytes of gradients.
        parameter_padding: Bytes between and behind parameters in buckets.
        gradient_padding: Bytes between and behind gradients in buckets.
        optimizer: Bytes of optimizer state, step counters left out.
        counters: Bytes of step counters.
        updated: Bytes of all that is updated.
        update: Bytes of temporaries of an update.
    """

    parameters: int
    gradients: int
    parameter_padding: int
    gradient_padding: int
    optimizer: int
    counters: int
    updated: int
    update: int

    @property
    def version(self) -> int:
        """Bytes of another version of the parameters."""
        return self.parameters + self.parameter_padding


class KnownStatic:
    """Static memory of stages, looked at once for all that share parameters and buckets.

    Args:
        optimizer: What is kept.
        positions: Place of the rank in the group of a bucket.
    """

    def __init__(
        self,
        optimizer: OptimizerMemory,
        positions: Callable[[Bucket], int] = lambda bucket: 0,
    ) -> None:
        self.optimizer, self.positions = optimizer, positions
        # What is keyed by identity is kept, so that no other object gets its place.
        self._known: dict[tuple[int, int], tuple[object, object, Static]] = {}

    def of(self, parameters: Sequence[LocalParameter], buckets: Sequence[Bucket]) -> Static:
        """See `static_memory`."""
        key = (id(parameters), id(buckets))
        if key not in self._known:
            found = static_memory(parameters, buckets, self.optimizer, positions=self.positions)
            self._known[key] = (parameters, buckets, found)
        return self._known[key][2]


def static_memory(
    parameters: Iterable[LocalParameter],
    buckets: Sequence[Bucket],
    optimizer: OptimizerMemory,
    *,
    positions: Callable[[Bucket], int] = lambda bucket: 0,
    gradient_bytes: int | None = None,
) -> Static:
    """Parameters, gradients and optimizer state of a stage on a rank.

    Args:
        parameters: All parameters of the stage.
        buckets: Of those that lie in buckets.
        optimizer: What it keeps.
        positions: Place of the rank in the group of a bucket.
        gradient_bytes: Bytes of an element of a gradient; those of the parameter when None.
    """
    found = Counter[str]()
    held = {item.name for bucket in buckets for item in bucket.members}
    pieces: dict[str, int] = {}
    parameters = tuple(parameters)
    for bucket in buckets:
        item_bytes = ITEM_BYTES[bucket.dtype]
        width = gradient_bytes or item_bytes
        whole = sum(item.numel for item in bucket.members)
        if bucket.zero:
            mine = bucket.cuts(positions(bucket))
        else:
            mine = [(item, item.numel) for item in bucket.members]
        part = sum(numel for _, numel in mine)
        kept = part if bucket.zero >= 2 else whole
        length = bucket.numel // (bucket.group if bucket.zero >= 2 else 1)
        found["gradients"] += kept * width
        found["gradient_padding"] += (length - kept) * width
        kept = part if bucket.zero == 3 else whole
        length = bucket.numel // (bucket.group if bucket.zero == 3 else 1)
        found["parameters"] += kept * item_bytes
        if bucket.zero:
            found["parameter_padding"] += (length - kept) * item_bytes
        for item, numel in mine:
            pieces[item.name] = numel * item_bytes
            _count_state(found, numel, bucket.dtype, optimizer)
    for item in parameters:
        if item.name in held:
            continue
        found["parameters"] += item.size_bytes
        if item.trainable and item.made_by:
            found["gradients"] += item.numel * (gradient_bytes or ITEM_BYTES[item.dtype])
            _count_state(found, item.numel, item.dtype, optimizer)
            pieces[item.name] = item.size_bytes
    return Static(
        parameters=found["parameters"],
        gradients=found["gradients"],
        parameter_padding=found["parameter_padding"],
        gradient_padding=found["gradient_padding"],
        optimizer=found["optimizer"],
        counters=found["counters"],
        updated=sum(pieces.values()),
        update=optimizer.update_bytes(
            [pieces[item.name] for item in parameters if item.name in pieces]
        ),
    )


def _count_state(found: Counter[str], numel: int, dtype: str, optimizer: OptimizerMemory) -> None:
    found["optimizer"] += optimizer.state_bytes(numel, dtype)
    found["counters"] += optimizer.counter_bytes
