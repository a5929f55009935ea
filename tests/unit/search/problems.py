"""Small random search problems of several models, clusters and memories, for oracles."""

from __future__ import annotations

import copy
import functools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.cost_models.cluster import ClusterSpec
from autopar.cost_models.evaluate import Prediction, Software
from autopar.presets.config import DecoderConfig
from autopar.presets.encoders import T5, EncoderConfig
from autopar.presets.registry import build_decoder
from autopar.presets.resnet import ResNet, ResNetConfig
from autopar.search.asked import OPTIONS
from autopar.search.exhaustive import candidates
from autopar.search.problem import Candidate, Problem
from autopar.search.space import Point
from autopar.trace import Traced, trace

PLENTY = 2**60
FIELDS = ("pipeline", "tensor", "role", "microbatches", "zero", "schedule", "data_outside")
UNEQUAL = ("1x2xA100+1x2xV100", "1x1xH100+1x3xA100", "1x1xA10G+1x1xA100", "1x2xA100+1x4xT4")
EQUAL = (
    "1x1xA100", "1x2xA100", "1x3xA100", "1x4xA100", "2x2xA100", "1x5xA100", "1x6xH100", "3x2xH100",
    "2x1xV100", "4x1xT4", "2x3xL4", "2xcpu", "3xcpu", "4xcpu", "6xcpu",
)  # fmt: skip


class Perceptron(nn.Module):
    """Blocks without attention: a batch and features, nothing else."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.ups = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.ups, self.downs, strict=True):
            x = x + down(torch.relu(up(norm(x))))
        return (x - target).square().mean()


@functools.cache
def traced(family: str, layers: int, size: int, batch: int) -> Traced:
    """A model whose sizes grow with `size`, on the meta device."""
    width, seq = (64, 256, 1024)[size], (32, 128, 512)[size]
    args: tuple[Any, ...]
    if family in ("gpt", "llama"):
        more: Mapping[str, Any] = {"fused_qkv": True}
        if family == "llama":
            more = {
                "ffn": 3 * width, "kv_heads": 2, "positions": "rope", "norm": "rms", "gated": True,
                "bias": False, "tied": False,
            }  # fmt: skip
        config = DecoderConfig(layers=layers, hidden=width, heads=4, vocab=8 * width, **more)
        model, args, _ = build_decoder(config, batch=batch, seq=seq)
        return trace(model, args, {}, None)
    with torch.device("meta"):
        if family == "mlp":
            x = torch.empty(batch, 2 * width)
            model, args = Perceptron(layers, 2 * width), (x, x)
        elif family == "conv":
            sizes = (1, 1, 1, 1) if layers < 4 else (2, 1, 1, 1)
            image = (32, 64, 128)[size]
            model = ResNet(ResNetConfig(layers=sizes, base=16, classes=16, image=image))
            labels = torch.empty(batch, dtype=torch.int64)
            args = (torch.empty(batch, 3, image, image), labels)
        else:
            assert family == "t5"
            model = T5(
                EncoderConfig(
                    layers=max(1, layers // 2), hidden=width, heads=4, ffn=4 * width,
                    vocab=8 * width,
                )
            )  # fmt: skip
            tokens = torch.empty(batch, seq, dtype=torch.int64)
            args = (tokens, tokens, tokens)
    return trace(model, args, {}, None)


class Remembered(Problem):
    """A problem whose predictions outlive a change of the memory."""

    def predict(self, candidate: Candidate) -> Prediction:
        if candidate not in self.seen:
            self.seen[candidate] = super().predict(candidate)
        return self.seen[candidate]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: dict[Candidate, Prediction] = {}
        super().__init__(*args, **kwargs)

    def with_memory(self, memory_bytes: int) -> Remembered:
        """The same problem on devices with other memory; nothing found is remembered."""
        found = copy.copy(self)
        found.memory_bytes = memory_bytes
        found._known = replace(self._known, outcomes={}, evaluated=0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A problem and all its plans.

    Attributes:
        name: What it is, in words.
        problem: The problem, with plenty of memory.
        plans: All plans of 1F1B with the bytes that they need; others depend on the memory.
    """

    name: str
    problem: Remembered
    plans: Mapping[Point, tuple[Candidate, ...]]

    def needs(self) -> list[int]:
        """Bytes of a device that each plan needs, least first."""
        found = []
        for mine in self.plans.values():
            outcomes = [self.problem.outcome(candidate) for candidate in mine]
            found += [item.over_bytes + PLENTY for item in outcomes if item is not None]
        return sorted(found)

    def fastest(self, point: Point, memory_bytes: int) -> float:
        """Seconds of the fastest plan of a point of 1F1B that fits."""
        outcomes = [self.problem.outcome(candidate) for candidate in self.plans[point]]
        room = memory_bytes - PLENTY
        return min(
            (item.step_s for item in outcomes if item is not None and item.over_bytes <= room),
            default=math.inf,
        )


def small(seed: int, most: int = 160) -> Small | None:
    """A random problem of at most so many plans of 1F1B; None if the draw has none."""
    rng = random.Random(seed)
    family = rng.choice(("gpt", "llama", "mlp", "conv", "t5"))
    layers, size, batch = rng.choice((2, 3, 4)), rng.randrange(3), rng.choice((1, 2, 4, 6, 8))
    if family in ("mlp", "conv"):  # of one sample nothing can be told from the batch
        batch = max(batch, 2)
    text = rng.choice(UNEQUAL if rng.random() < 0.25 else EQUAL)
    cluster = ClusterSpec.parse(text)
    figures = {}
    for figure, factors in (
        ("link.gb_per_s_per_direction", (0.05, 0.5, 1)),
        ("node.nic_gbit_per_s", (0.05, 0.5, 1)),
        ("efficiency.launch_us", (0.1, 1, 5)),
    ):
        if rng.random() < 0.5:
            figures[figure] = rng.choice(factors) * {"l": 100, "n": 400, "e": 6}[figure[0]]
    cluster = cluster.with_figures(figures, source="made up") if figures else cluster
    found = traced(family, layers, size, batch)
    software = Software.of(cluster.hardware(0), rng.choice(("adamw", "sgd")))
    if rng.random() < 0.5:
        speed = replace(software.speed, overlap=rng.choice((0.0, 0.3, 1.0)))
        software = replace(software, speed=speed)
    options = ("full", "none") if rng.random() < 0.7 else OPTIONS
    problem = Remembered(
        found.graph, found.loss, cluster, software=software, options=options, memory_bytes=PLENTY
    )
    if not _narrow(problem, rng, most):
        return None
    plans = {
        point: tuple(candidates(problem, point))
        for point in problem.space.points()
        if point.schedule == "1f1b"
    }
    name = f"{seed}: {family} {layers} layers, size {size}, batch {batch}, {text}, {options}"
    return Small(name=name, problem=problem, plans=plans)


def _narrow(problem: Problem, rng: random.Random, most: int) -> bool:
    """Leave values out until there are few plans; whether any is left."""
    while True:
        points = list(problem.space.points())
        if not points:
            return False
        left = most
        for point in points:
            if point.schedule != "1f1b":
                left -= 3
                continue
            for _ in candidates(problem, point):
                left -= 1
                if left < 0:
                    break
        if left >= 0:
            return True
        values = {name: sorted({getattr(p, name) for p in points}) for name in FIELDS}
        name = rng.choice([name for name in FIELDS if len(values[name]) > 1] or ["pipeline"])
        if len(values[name]) == 1:
            return False
        gone = rng.choice(values[name])
        allowed = dict(problem.space.allowed)
        allowed[name] = tuple(value for value in values[name] if value != gone)
        problem.space = replace(problem.space, allowed=allowed)
