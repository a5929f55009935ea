"""Seconds of messages between pipeline ranks."""

from __future__ import annotations

from collections import Counter

from autopar.cost_models.collectives import price
from autopar.cost_models.pricing import Prices
from autopar.cost_models.spans import Span, axis_groups, send_spans, spans
from autopar.cost_models.stages import StageModel
from autopar.plan.plan import Plan
from autopar.schedules.actions import Schedule


class Messages:
    """Seconds of messages between stages."""

    def __init__(
        self, plan: Plan, schedule: Schedule, models: tuple[StageModel, ...], prices: Prices
    ) -> None:
        self.places, self.wires = schedule.stage_ranks, Wires(prices, plan.pipeline.axis)
        self.sizes: Counter[tuple[int, int, str]] = Counter()
        for model in models:
            for item in model.messages:
                if item.source == model.index:
                    self.sizes[item.source, item.target, "SEND_F"] += item.size_bytes
                    if item.gradient:
                        self.sizes[item.target, item.source, "SEND_B"] += item.size_bytes

    def seconds(self) -> dict[tuple[int, int, str], float]:
        """Seconds of all messages: by sending stage, receiving stage and kind of the send."""
        return {
            key: self.wires.seconds(self.places[key[0]], self.places[key[1]], size)
            for key, size in self.sizes.items()
        }


class Wires:
    """Seconds between pipeline ranks, for all pipelines of a mesh at the same time.

    Args:
        prices: Prices on the mesh.
        axis: The pipeline's axis.
    """

    def __init__(self, prices: Prices, axis: str) -> None:
        self.prices, self.axis = prices, axis
        self.pairs: dict[tuple[int, int], tuple[Span, ...]] = {}
        self.near: tuple[tuple[Span, ...], ...] | None = (
            None  # of neighbours, when one is asked for
        )

    def seconds(self, source: int, target: int, size_bytes: int) -> float:
        """Seconds of a message of one pipeline rank to another."""
        pair = (source, target)
        if pair not in self.pairs:
            self.pairs[pair] = self._spans(*pair)
        found = (price("send", size_bytes, span).seconds for span in self.pairs[pair])
        return max(found, default=0.0)

    def _spans(self, source: int, target: int) -> tuple[Span, ...]:
        """What the messages of all pipelines cross, sent at the same time."""
        if source == target:
            return ()
        cluster, mesh = self.prices.cluster, self.prices.mesh
        size = mesh.axis_size(self.axis)
        if abs(source - target) in (1, size - 1):
            if self.near is None:
                self.near = send_spans(cluster, mesh, self.axis, around=size > 2)
            return self.near[min(source, target) if abs(source - target) == 1 else size - 1]
        groups = axis_groups(mesh, (self.axis,))
        return spans(cluster, [(group[source], group[target]) for group in groups])
