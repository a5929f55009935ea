"""Constants that are the same for all devices and stacks: what they are and where they are from.

None of them is moved by the fit. Those whose source begins with ``fitted on`` were chosen after
looking at published rows, and are counted as fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.cost_models import compute, software
from autopar.cost_models.published import price


@dataclass(frozen=True, slots=True, kw_only=True)
class Global:
    """A constant that no fit moves.

    Attributes:
        value: Its value.
        low: Smallest plausible value.
        high: Largest plausible value.
        source: Where it is from.
    """

    value: float
    low: float
    high: float
    source: str

    @property
    def fitted(self) -> bool:
        """Whether published rows decided it."""
        return self.source.startswith("fitted on")


GLOBALS: Mapping[str, Global] = {
    "ATTENTION_BACKWARD": Global(
        value=compute.ATTENTION_BACKWARD, low=0.7, high=1.0, source="2307.08691, figures 4 and 6"
    ),
    "SHORT_KEYS": Global(
        value=compute.SHORT_KEYS, low=50, high=600,
        source="prior: rates of 2307.08691, figure 4, at 512 keys against 16384",
    ),
    "BATCHED_SHARE": Global(
        value=compute.BATCHED_SHARE, low=0.3, high=0.9,
        source="fitted on published rows without fused attention, by the study before this model",
    ),
    "SOFTMAX_TIME": Global(
        value=compute.SOFTMAX_TIME, low=1.0, high=2.5,
        source="prior: 2205.14135, figure 2, bytes and time of unfused attention on an A100-40",
    ),
    "ODD_HEAD": Global(
        value=compute.ODD_HEAD, low=1.0, high=1.5, source="prior: half-filled tiles of 64 features"
    ),
    "UNALIGNED_MATMUL": Global(
        value=compute.UNALIGNED_MATMUL, low=1.5, high=4.0,
        source="prior between a kernel of the older generation and what was measured on Hopper; "
        "the heads of vtrain-single, 50257 columns wide, agree with 2.5",
    ),
    "CAST_BYTES": Global(
        value=compute.CAST_BYTES, low=1.0, high=3.0,
        source="arithmetic: 3 bytes an element, each cast operand used by two products",
    ),
    "DYNAMIC_CAST_BYTES": Global(
        value=compute.DYNAMIC_CAST_BYTES, low=1.0, high=3.5,
        source="arithmetic: 2 bytes read, 1 written in either layout, for two products",
    ),
    "RACE": Global(
        value=compute.RACE, low=2.0, high=20.0,
        source="fitted on vtrain-single, whose steps a simulator composed (SOURCES.md); of rows "
        "that count only Sailor's small models depend on it (15 % with 3, 20 % with 6)",
    ),
    "COLLECTIVE_LAUNCHES": Global(
        value=compute.COLLECTIVE_LAUNCHES, low=1.0, high=8.0,
        source="fitted on vtrain-single, whose steps a simulator composed (SOURCES.md)",
    ),
    "SLOWDOWN": Global(
        value=software.SLOWDOWN, low=0.05, high=0.7,
        source="prior: 16 to 24 channels of NCCL on 108 or 132 multiprocessors",
    ),
    "HIDDEN_TENSOR": Global(
        value=software.HIDDEN_TENSOR, low=0.2, high=0.8,
        source="fitted on four pairs of torchtitan rows with and without asynchronous collectives",
    ),
    "STEP_S": Global(
        value=software.STEP_S, low=1e-3, high=50e-3, source="prior: optimizer loop, logging, data"
    ),
    "UPDATE_BYTES": Global(
        value=software.UPDATE_BYTES, low=26, high=40,
        source="arithmetic on what Adam reads and writes",
    ),
    "RING_FORWARD_BYTES": Global(
        value=price.RING_FORWARD_BYTES, low=10, high=60,
        source="arithmetic on torch's _SDPAMerger in float32: four ops, each an own kernel",
    ),
    "RING_BACKWARD_BYTES": Global(
        value=price.RING_BACKWARD_BYTES, low=10, high=80,
        source="arithmetic on its backward: three sums of 10, keys and values joined for a message",
    ),
    "IMBALANCE": Global(
        value=price.IMBALANCE, low=0.0, high=1.0,
        source="prior: capacity factor of 2101.03961, section 2.2, at which few tokens are dropped",
    ),
    "BROADCAST_S": Global(
        value=price.BROADCAST_S, low=1e-4, high=5e-3,
        source="fitted on the InternEvo rows whose optimizer is split over all ranks",
    ),
}  # fmt: skip
"""By name; every value is that of the module where it is used."""
