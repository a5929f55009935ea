"""What a fit may move: constants of devices and stacks, with priors and plausible ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost_models.hardware import load_device
from autopar.cost_models.published.jobs import Job
from autopar.cost_models.software import Constant, prior_of, stack

Target = tuple[str, str]
"""``(device or stack, constant)``."""

DEVICE_PRIORS: Mapping[str, Constant] = {
    "matmul_share": Constant(
        prior=0.8, spread=0.1, low=0.4, high=0.98,
        meaning="share of the dense peak that a large, aligned matmul reaches",
    ),
    "matmul_size": Constant(
        prior=160.0, spread=0.25, low=40.0, high=900.0,
        meaning="elements of a side at which filling and draining cost as much as computing, on a "
        "device with 100 flops per byte of bandwidth; more where a byte is dearer",
    ),
    "attention_share": Constant(
        prior=0.5, spread=0.3, low=0.15, high=0.85,
        meaning="share of the dense peak of fused causal attention with heads of 128",
    ),
    "memory_share": Constant(
        prior=0.82, spread=0.1, low=0.5, high=0.95,
        meaning="share of the bandwidth that streaming kernels reach",
    ),
    "link_share": Constant(
        prior=0.76, spread=0.07, low=0.4, high=0.98,
        meaning="share of the link's bandwidth that large collectives reach",
    ),
    "network_share": Constant(
        # All-reduces over nodes by nccl-tests: 86 (called too little) and 96 of 100 GB/s with A100
        # (NVIDIA/nccl-tests issues 175 and 119), and 46 to 48 of 50 GB/s a card as NVIDIA expects
        # with H100 (issue 290).
        prior=0.92, spread=0.06, low=0.4, high=0.98,
        meaning="share of the network's bandwidth that large collectives reach",
    ),
    "misaligned_matmul": Constant(
        prior=1.2, spread=0.1, low=1.0, high=2.0,
        meaning="time factor of a matmul with a side that is no multiple of 64",
    ),
    "misaligned_head": Constant(
        prior=6.0, spread=0.7, low=1.0, high=16.0,
        meaning="time factor of products of heads whose size is no multiple of 8",
    ),
    "low_precision_share": Constant(
        prior=0.8, spread=0.15, low=0.5, high=1.0,
        meaning="share of twice the 16-bit rate that fp8 matmuls reach",
    ),
    "launch_s": Constant(
        prior=25e-6, spread=0.3, low=2e-6, high=60e-6,
        meaning="time of the host per kernel: Python, dispatch, launch",
    ),
}  # fmt: skip
_OWN_PRIORS: Mapping[Target, tuple[float, float]] = {
    # The power limit keeps an H100 from its peak, and FlashAttention-2 was written for Ampere.
    ("H100-SXM", "matmul_share"): (0.7, 0.1),
    # Nine tenths of that at 500 W instead of 700 W.
    ("H100-SXM-96", "matmul_share"): (0.63, 0.05),
    # From 720 toy rows (vtrain-single) before they were found to be a simulator's (SOURCES.md): no
    # measured row of an A100 is decided by its host.
    ("A100-80-SXM", "launch_s"): (37e-6, 0.05),
    # The best of many shapes as measured with torch 2.6 (stas00/ml-engineering, "Maximum Achievable
    # Matmul FLOPS"): 271 and 829 Tflop/s, the latter at 900 W.
    ("A100-80-SXM", "matmul_share"): (0.87, 0.1),
    ("GH200", "matmul_share"): (0.84, 0.1),
    ("H100-SXM", "attention_share"): (0.4, 0.3),
}
SAME_DEVICE: Mapping[str, tuple[str, ...]] = {
    "A100-80-SXM": ("A800-80-SXM",),
    "H100-SXM": ("H800-SXM", "H200-SXM"),
}
"""Devices that share every constant with another: the same chip behind other links or memory."""
SAME_CHIP: Mapping[str, tuple[str, ...]] = {
    "A100-80-SXM": ("A100-40-SXM",),
    "H100-SXM": ("H100-SXM-96", "GH200"),
}
"""Devices that share with another what is not in `OWN`: the same chip with other memory."""
OWN: Mapping[str, tuple[str, ...]] = {
    "A100-40-SXM": ("memory_share",),
    "H100-SXM-96": ("matmul_share",),
    "GH200": ("matmul_share", "memory_share", "launch_s"),
}
"""What a device does not share with others of its chip: another memory, another power limit, a host
of another kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number that the fit moves.

    Attributes:
        targets: The constants that take its value.
        constant: Its prior and range; `matmul_size` is scaled to the device.
        families: Families of rows that depend on it.
    """

    targets: tuple[Target, ...]
    constant: Constant
    families: int

    @property
    def name(self) -> str:
        """Its first target, dotted."""
        return ".".join(self.targets[0])


def _device_constant(device: str, name: str) -> Constant:
    constant = DEVICE_PRIORS[name]
    prior, spread = _OWN_PRIORS.get((device, name), (constant.prior, constant.spread))
    scale = 1.0
    if name == "matmul_size":
        found = load_device(device)
        scale = found.peak("bf16") / found.memory_bytes_per_s / 100
    return Constant(
        prior=prior * scale, spread=spread, low=constant.low * scale, high=constant.high * scale,
        meaning=constant.meaning,
    )  # fmt: skip


def parameters(jobs: Sequence[Job], families: Sequence[str]) -> tuple[Parameter, ...]:
    """What can be fitted on `jobs`: constants with at least two families behind them.

    Args:
        jobs: The jobs.
        families: The family of each.
    """
    behind: dict[str, set[str]] = {}
    for job, family in zip(jobs, families, strict=True):
        behind.setdefault(job.hardware.device, set()).add(family)
        behind.setdefault(job.stack.name, set()).add(family)
    aliases = {other: device for device, others in SAME_DEVICE.items() for other in others}
    chips = {other: device for device, others in SAME_CHIP.items() for other in others}
    leaders = dict.fromkeys(aliases.get(job.hardware.device, job.hardware.device) for job in jobs)
    found = []
    for device in sorted(leaders):
        same = SAME_DEVICE.get(device, ())
        for name in DEVICE_PRIORS:
            if device in chips and name not in OWN[device]:
                continue
            others = (item for item in SAME_CHIP.get(device, ()) if name not in OWN[item])
            members = (device, *same, *others)
            count = len(set().union(*(behind.get(member, set()) for member in members)))
            found.append(
                Parameter(
                    targets=tuple((member, name) for member in members),
                    constant=_device_constant(device, name),
                    families=count,
                )
            )
    for name in sorted({job.stack.name for job in jobs}):
        for constant in stack(name).fitted:
            if constant != "reserved_factor":
                found.append(
                    Parameter(
                        targets=((name, constant),), constant=prior_of(name, constant),
                        families=len(behind[name]),
                    )
                )  # fmt: skip
    return tuple(item for item in found if item.families >= 2)


def expand(found: Sequence[Parameter], logs: Sequence[float]) -> dict[Target, float]:
    """The constants that parameters with these logarithms stand for."""
    return {
        target: math.exp(value)
        for item, value in zip(found, logs, strict=True)
        for target in item.targets
    }
